// Package hosttest reads captured and made-up hosts from files, so that tests can read
// hosts other than their own. Package hosttext has the format.
package hosttest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing/fstest"

	"github.com/gopinned/pinned/internal/hosttext"
)

// Load reads the captured host in a file: see [LoadCase].
func Load(file string) (fstest.MapFS, error) {
	c, err := LoadCase(file)
	if err != nil {
		return nil, err
	}
	return c.Host, nil
}

// Case is a captured or made-up host with what is known of it beside its files. These
// entries of a file are about the host, and none of its files:
//
//	base        another file, without .txtar, in the same directory: this one adds to it
//	absent      paths that the base has and this host does not, with all below, one a line
//	environ     NAME=value, one a line; one without = is not set, though the base sets it
//	facts.json  doctor.Facts: what CUDA and NVML returned, and what was measured. It is
//	            merged into that of the base: objects by name, lists by place; null removes
//	expect      the ids of the findings, one a line
//	thread.json the public thread that the host was composed from, and what has to be found
type Case struct {
	Host    fstest.MapFS
	Environ []string
	Facts   json.RawMessage // empty for none
	Expect  []string
	Graded  bool // it has an entry expect, which may be empty
	Thread  json.RawMessage
}

// maxBases is the largest number of bases in a chain.
const maxBases = 4

// LoadCase reads the host in a file.
func LoadCase(file string) (*Case, error) {
	c, err := loadCase(file, maxBases)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}

func loadCase(file string, bases int) (*Case, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	host, err := hosttext.Parse(string(text))
	if err != nil {
		return nil, err
	}
	take := func(name string) (text string, ok bool) {
		if entry := host[name]; entry != nil {
			text, ok = string(entry.Data), true
			delete(host, name)
		}
		return text, ok
	}
	lines := func(name string) []string {
		text, _ := take(name)
		return strings.FieldsFunc(text, func(c rune) bool { return c == '\n' })
	}
	c := &Case{Host: fstest.MapFS{}}
	if name := lines("base"); len(name) == 1 && bases > 0 {
		if c, err = loadCase(filepath.Join(filepath.Dir(file), filepath.Base(name[0])+".txtar"), bases-1); err != nil {
			return nil, fmt.Errorf("base: %w", err)
		}
	} else if len(name) > 0 {
		return nil, errors.New("base: want one name, and few bases on one another")
	}
	for _, gone := range lines("absent") {
		if !c.remove(gone) {
			return nil, fmt.Errorf("absent: the base has no %s", gone)
		}
	}
	for _, entry := range lines("environ") {
		c.setEnviron(entry)
	}
	if text, ok := take("facts.json"); ok {
		if c.Facts, err = merge(c.Facts, []byte(text)); err != nil {
			return nil, fmt.Errorf("facts.json: %w", err)
		}
	}
	thread, _ := take("thread.json")
	c.Thread = json.RawMessage(thread)
	_, c.Graded = host["expect"]
	c.Expect = lines("expect")
	maps.Copy(c.Host, host)
	return c, nil
}

// remove removes a file, or a directory, and reports whether the host had it.
func (c *Case) remove(gone string) bool {
	n := len(c.Host)
	maps.DeleteFunc(c.Host, func(name string, _ *fstest.MapFile) bool { return name == gone || strings.HasPrefix(name, gone+"/") })
	return len(c.Host) < n
}

// setEnviron sets a variable, or unsets it if the entry has no "=".
func (c *Case) setEnviron(entry string) {
	name, _, set := strings.Cut(entry, "=")
	c.Environ = slices.DeleteFunc(c.Environ, func(old string) bool { return strings.HasPrefix(old, name+"=") })
	if set {
		c.Environ = append(c.Environ, entry)
	}
}

// merge changes a JSON text by another one.
func merge(base, change []byte) (json.RawMessage, error) {
	var old, by any
	if len(base) > 0 {
		if err := json.Unmarshal(base, &old); err != nil {
			return nil, err
		}
	}
	if err := json.Unmarshal(change, &by); err != nil {
		return nil, err
	}
	return json.Marshal(merged(old, by))
}

func merged(old, by any) any {
	switch by := by.(type) {
	case map[string]any:
		out, ok := old.(map[string]any)
		if !ok {
			out = map[string]any{}
		}
		for name, value := range by {
			if value == nil {
				delete(out, name)
			} else {
				out[name] = merged(out[name], value)
			}
		}
		return out
	case []any:
		out, _ := old.([]any)
		if len(by) == 0 {
			return by
		}
		for i, value := range by {
			if i < len(out) {
				out[i] = merged(out[i], value)
			} else {
				out = append(out, merged(nil, value))
			}
		}
		return out
	}
	return by
}
