// Package capture stores what pincheck's doctor reads of a host in a small archive, so that
// it can be diagnosed elsewhere: docs/capture.md describes it.
//
// An archive is a tar file, compressed by gzip, with three texts: README.txt, host.txt with
// the files that were read, in the form of package hosttest, and facts.json with what CUDA
// and NVML returned and what was measured. Reading one creates no file: paths and links in
// host.txt are names in a file system that exists in memory alone, and lead nowhere else.
package capture

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing/fstest"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hosttext"
	"github.com/gopinned/pinned/internal/units"
)

// Archive is what was read of a host.
type Archive struct {
	// Host are the files that were read, and Environ the variables that matter, as in
	// os.Environ.
	Host    fstest.MapFS
	Environ []string
	// Facts is the JSON of doctor.Facts without the host: what CUDA and NVML returned,
	// and what was measured. Empty for none.
	Facts json.RawMessage
}

// The names in an archive. environFile is in host.txt.
const (
	readmeFile  = "README.txt"
	hostFile    = "host.txt"
	factsFile   = "facts.json"
	environFile = "environ"
)

// The limits of what [Read] takes. Real archives have some 100 KB and 1,000 files.
const (
	maxCompressed = 16 << 20
	maxBytes      = 64 << 20 // decompressed
	maxMembers    = 8
	maxEntries    = 20_000 // of host.txt
	maxPath       = 1024   // bytes
	maxLinks      = 40     // one after the other
)

const readme = `What pincheck read on a host (pincheck capture). Diagnose it anywhere:

    pincheck --from FILE

host.txt has the files of /proc, /sys, /dev and /etc that were read, as far as they
matter, and facts.json what CUDA and NVML returned and what was measured. Both are text:
look at them before you pass them on.
`

// Write writes the archive.
func Write(w io.Writer, a *Archive) error {
	host := make(fstest.MapFS, len(a.Host)+1)
	for name, file := range a.Host {
		host[name] = file
	}
	host[environFile] = &fstest.MapFile{Mode: 0o444, Data: []byte(strings.Join(a.Environ, "\n") + "\n")}
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	for _, member := range []struct {
		name string
		data []byte
	}{
		{readmeFile, []byte(readme)},
		{hostFile, []byte(hosttext.Format("", host))},
		{factsFile, a.Facts},
	} {
		if len(member.data) == 0 {
			continue
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: member.name, Mode: 0o644, Size: int64(len(member.data)), ModTime: time.Unix(0, 0)}
		if err := archive.WriteHeader(header); err != nil {
			return fmt.Errorf("capture: write: %w", err)
		}
		if _, err := archive.Write(member.data); err != nil {
			return fmt.Errorf("capture: write: %w", err)
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("capture: write: %w", err)
	}
	if err := compressed.Close(); err != nil {
		return fmt.Errorf("capture: write: %w", err)
	}
	return nil
}

// Read reads an archive, which may be hostile: what is not of the form that Write writes,
// and what is larger than any host, is an error.
func Read(r io.Reader) (*Archive, error) {
	members, err := readMembers(r)
	if err != nil {
		return nil, fmt.Errorf("capture: read: %w", err)
	}
	a := &Archive{}
	if facts := members[factsFile]; facts != nil {
		if !json.Valid(facts) {
			return nil, fmt.Errorf("capture: read: %s is no JSON", factsFile)
		}
		var all any
		d := json.NewDecoder(bytes.NewReader(facts))
		d.UseNumber()
		if err := d.Decode(&all); err != nil {
			return nil, fmt.Errorf("capture: read: %s: %w", factsFile, err)
		}
		if a.Facts, err = json.MarshalIndent(plain(all), "", "  "); err != nil {
			return nil, fmt.Errorf("capture: read: %s: %w", factsFile, err)
		}
	}
	text, ok := members[hostFile]
	if !ok {
		return nil, fmt.Errorf("capture: read: there is no %s: not an archive of pincheck capture", hostFile)
	}
	if a.Host, err = ParseHost(controls.ReplaceAllString(string(text), "?")); err != nil {
		return nil, fmt.Errorf("capture: read: %s: %w", hostFile, err)
	}
	a.Environ = a.takeEnviron()
	return a, nil
}

// controls are characters that would command the terminal which shows them.
var controls = regexp.MustCompile(`[\x00-\x08\x0b-\x1f\x7f\x{80}-\x{9f}]`)

// plain replaces such characters in the texts of a JSON value.
func plain(value any) any {
	switch v := value.(type) {
	case string:
		return controls.ReplaceAllString(v, "?")
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	case map[string]any:
		for name, field := range v {
			v[name] = plain(field)
		}
	}
	return value
}

// ParseHost parses host.txt.
func ParseHost(text string) (fstest.MapFS, error) {
	host, err := hosttext.Parse(text)
	if err != nil {
		return nil, err
	}
	if len(host) > maxEntries {
		return nil, fmt.Errorf("%d files: more than %d", len(host), maxEntries)
	}
	for name, file := range host {
		link := file.Mode&fs.ModeSymlink != 0
		switch {
		case len(name) > maxPath || link && len(file.Data) > maxPath:
			return nil, fmt.Errorf("a path of %d bytes: longer than %d", max(len(name), len(file.Data)), maxPath)
		case link && !ends(host, name):
			return nil, fmt.Errorf("%.100s: links in a circle", name)
		}
	}
	return host, nil
}

// ends reports whether a link leads somewhere after at most maxLinks of them, as in the
// kernel: MapFS follows links without end.
func ends(host fstest.MapFS, name string) bool {
	for range maxLinks {
		next := follow(host, name)
		if next == "" {
			return true
		}
		name = next
	}
	return false
}

// follow replaces the first link in a path by its target. It returns "" for a path without
// one, and for one that leaves the host.
func follow(host fstest.MapFS, name string) string {
	for end := 0; end < len(name); end++ {
		if end+1 < len(name) && name[end+1] != '/' {
			continue
		}
		link, rest := name[:end+1], name[end+1:]
		if file := host[link]; file != nil && file.Mode&fs.ModeSymlink != 0 {
			if next := path.Join(path.Dir(link), string(file.Data)) + rest; fs.ValidPath(next) {
				return next
			}
			return ""
		}
	}
	return ""
}

// takeEnviron takes the variables out of the files.
func (a *Archive) takeEnviron() []string {
	file := a.Host[environFile]
	delete(a.Host, environFile)
	if file == nil {
		return nil
	}
	return slices.DeleteFunc(strings.Split(string(file.Data), "\n"), func(s string) bool { return !strings.Contains(s, "=") })
}

func readMembers(r io.Reader) (map[string][]byte, error) {
	packed := &io.LimitedReader{R: r, N: maxCompressed + 1}
	unpacked, err := gzip.NewReader(packed)
	if err != nil {
		return nil, fmt.Errorf("not an archive of pincheck capture: %w", err)
	}
	limited := &io.LimitedReader{R: unpacked, N: maxBytes + 1}
	archive := tar.NewReader(limited)
	members := map[string][]byte{}
	for {
		header, err := archive.Next()
		switch {
		case packed.N <= 0:
			return nil, fmt.Errorf("more than %s", units.ExactBytes(maxCompressed))
		case limited.N <= 0:
			return nil, fmt.Errorf("more than %s, decompressed", units.ExactBytes(maxBytes))
		case errors.Is(err, io.EOF):
			return members, nil
		case err != nil:
			return nil, fmt.Errorf("not a tar file: %w", err)
		case header.Typeflag != tar.TypeReg:
			return nil, fmt.Errorf("%.100q is no file: archives have neither links nor directories", header.Name)
		case header.Name != readmeFile && header.Name != hostFile && header.Name != factsFile:
			return nil, fmt.Errorf("%.100q is in no archive of pincheck", header.Name)
		case members[header.Name] != nil || len(members) == maxMembers:
			return nil, fmt.Errorf("%s comes twice", header.Name)
		}
		var b bytes.Buffer
		if _, err := io.Copy(&b, archive); err != nil {
			if limited.N <= 0 {
				err = fmt.Errorf("more than %s, decompressed", units.ExactBytes(maxBytes))
			}
			return nil, fmt.Errorf("%s: %w", header.Name, err)
		}
		members[header.Name] = append([]byte{}, b.Bytes()...)
	}
}

// Environ returns the variables with which a host reads the same again.
func Environ(host *hostinfo.Host) []string {
	var environ []string
	for name, value := range host.Env {
		environ = append(environ, name+"="+value)
	}
	if host.Virt.Container != "" { // which a variable may have told
		environ = append(environ, "container="+host.Virt.Container)
	}
	slices.Sort(environ)
	return environ
}
