package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// A SyntaxError is a line that is not of the form that the kernel documents.
type SyntaxError struct {
	File string // "/proc/meminfo", empty for text that came from no file
	Line int    // counted from 1, 0 for a text that is no line of a file
	Text string // the line
	Want string // the documented form
}

func (e *SyntaxError) Error() string {
	where := ""
	switch {
	case e.File != "":
		where = fmt.Sprintf("%s:%d: ", e.File, e.Line)
	case e.Line > 0:
		where = fmt.Sprintf("line %d: ", e.Line)
	}
	return fmt.Sprintf("%s%.200q is not %s", where, e.Text, e.Want)
}

// read parses the file of this name below fsys.
func read[T any](fsys fs.FS, name string, parse func(text string) (T, error)) (value T, err error) {
	text, err := fs.ReadFile(fsys, name)
	if err == nil {
		value, err = parse(string(text))
	}
	return value, inFile(name, err)
}

// optional is read for a file that not every kernel has: where it is missing, the
// value is zero.
func optional[T any](fsys fs.FS, name string, parse func(text string) (T, error)) (T, error) {
	value, err := read(fsys, name, parse)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return value, err
}

// inFile makes err name the file by its absolute path.
func inFile(name string, err error) error {
	name = "/" + name
	if syntax := (*SyntaxError)(nil); errors.As(err, &syntax) {
		syntax.File = name
		return err
	}
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return &fs.PathError{Op: path.Op, Path: name, Err: path.Err}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// eachLine calls parse with each line, until it returns false: then the error quotes the
// line, and the form that is wanted.
func eachLine(text, want string, parse func(line string) (ok bool)) error {
	number := 0
	for line := range strings.Lines(text) {
		number++
		if line = strings.TrimSuffix(line, "\n"); !parse(line) {
			return &SyntaxError{Line: number, Text: line, Want: want}
		}
	}
	return nil
}

// parseLines returns what parse returns for each line. See eachLine.
func parseLines[T any](text, want string, parse func(line string) (value T, ok bool)) (all []T, err error) {
	err = eachLine(text, want, func(line string) bool {
		value, ok := parse(line)
		all = append(all, value)
		return ok
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// parseFields returns what parse returns for each line, by name. See eachLine.
func parseFields[M ~map[string]V, V any](text, want string, parse func(line string) (name string, value V, ok bool)) (M, error) {
	fields := make(M, strings.Count(text, "\n"))
	err := eachLine(text, want, func(line string) bool {
		name, value, ok := parse(line)
		fields[name] = value
		return ok && name != ""
	})
	if err != nil {
		return nil, err
	}
	return fields, nil
}

// ReadInt reads a file that holds one decimal number and nothing else, as most of
// /proc/sys and /sys do.
func ReadInt(fsys fs.FS, name string) (int, error) { return read(fsys, name, parseInt) }

func parseInt(text string) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		return 0, &SyntaxError{Line: 1, Text: strings.TrimSpace(text), Want: "a number"}
	}
	return n, nil
}

// parseSize reads a decimal number of units.
func parseSize(digits string, unit uint64) (bytes int, ok bool) {
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0, false
	}
	if n > math.MaxInt/unit {
		return math.MaxInt, true
	}
	return int(n * unit), true
}

// sumSizes adds sizes, math.MaxInt at most.
func sumSizes(a, b int) int {
	if a > math.MaxInt-b {
		return math.MaxInt
	}
	return a + b
}

// Counters are the fields of a file of "name number" lines, by name.
type Counters map[string]int

// ReadVMStat reads /proc/vmstat: the kernel's counts of what its memory management
// has done since boot, such as "compact_stall".
func ReadVMStat(fsys fs.FS) (Counters, error) { return read(fsys, "proc/vmstat", ParseCounters) }

// ReadCounters reads another file of "name number" lines, such as a PCI device's
// aer_dev_correctable.
func ReadCounters(fsys fs.FS, name string) (Counters, error) { return read(fsys, name, ParseCounters) }

// ParseCounters parses /proc/vmstat, a control group's memory.stat, or a PCI device's
// counts of errors.
func ParseCounters(text string) (Counters, error) {
	return parseFields[Counters](text, `"name number"`, func(line string) (name string, n int, ok bool) {
		name, digits, _ := strings.Cut(line, " ")
		n, ok = parseSize(digits, 1)
		return name, n, ok
	})
}

// ParseChoice parses a file that shows all settings and marks the chosen one, such
// as "always [madvise] never", and returns the chosen one.
func ParseChoice(text string) (string, error) {
	_, rest, _ := strings.Cut(text, "[")
	chosen, _, ok := strings.Cut(rest, "]")
	if !ok || chosen == "" || strings.ContainsAny(chosen, " \n") {
		first, _, _ := strings.Cut(text, "\n")
		return "", &SyntaxError{Line: 1, Text: first, Want: `a choice, such as "always [madvise] never"`}
	}
	return chosen, nil
}
