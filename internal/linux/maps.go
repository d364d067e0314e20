package linux

import (
	"bufio"
	"bytes"
	"io"
	"io/fs"
	"os"
)

// Maps looks up single mappings of this process without reading them all.
//
// From Linux 6.11 on each lookup is a system call (PROCMAP_QUERY), a microsecond
// with any number of mappings. Before, /proc/thread-self/maps is read up to the
// address, 0.6 µs a mapping, and lookups in ascending order read it once.
//
// A Maps is for one goroutine and for a short time: what it has read is not read
// again, so mappings that change meanwhile may be reported as they were.
type Maps struct {
	fsys  fs.FS
	file  fs.File
	query func(addr uintptr) (m Mapping, ok bool, err error) // nil without PROCMAP_QUERY

	// Of the file being read: no mapping before last ends above queried.
	lines   *bufio.Scanner // nil before the first lookup
	line    int            // number of the line that was read last
	queried uintptr
	last    Mapping // the zero Mapping before the first line
	end     bool    // no line follows last
}

// OpenMaps opens the maps of this process. Close it. Where /proc has no maps the
// error wraps fs.ErrNotExist.
func OpenMaps(fsys fs.FS) (*Maps, error) {
	file, err := fsys.Open(mapsName)
	if err != nil {
		return nil, inFile(mapsName, err)
	}
	m := &Maps{fsys: fsys, file: file}
	if f, ok := file.(*os.File); ok {
		m.query = procmapQuery(f)
	}
	return m, nil
}

// Close closes the file.
func (m *Maps) Close() error { return inFile(mapsName, m.file.Close()) }

// Find returns the mapping that contains addr, or else the next one above it; ok is
// false where there is none.
func (m *Maps) Find(addr uintptr) (found Mapping, ok bool, err error) {
	if m.query != nil {
		if found, ok, err = m.query(addr); err == nil {
			return found, ok, nil
		}
		m.query = nil // the file itself answers everything
	}
	if m.lines == nil || addr < m.queried {
		if err := m.rewind(); err != nil {
			return Mapping{}, false, err
		}
	}
	m.queried = addr
	for m.last.End <= addr && !m.end {
		if err := m.next(addr); err != nil {
			return Mapping{}, false, inFile(mapsName, err)
		}
	}
	return m.last, m.last.End > addr, nil
}

// Within returns the mappings that overlap [start, end), ascending.
func (m *Maps) Within(start, end uintptr) ([]Mapping, error) {
	var all []Mapping
	for start < end {
		next, ok, err := m.Find(start)
		if err != nil {
			return nil, err
		}
		if !ok || next.Start >= end {
			break
		}
		all = append(all, next)
		start = next.End
	}
	return all, nil
}

// rewind makes the first line the next one.
func (m *Maps) rewind() error {
	if m.lines != nil {
		file, err := m.fsys.Open(mapsName)
		if err != nil {
			return inFile(mapsName, err)
		}
		m.file.Close() // it was only read
		m.file = file
	}
	m.lines = scanLines(m.file)
	m.line, m.last, m.end = 0, Mapping{}, false
	return nil
}

// next reads the next line. Of one that ends at or below addr it takes the addresses
// alone.
func (m *Maps) next(addr uintptr) error {
	if !m.lines.Scan() {
		m.end = true
		return m.lines.Err()
	}
	m.line++
	start, end, _, ok := cutRange(m.lines.Bytes())
	switch {
	case !ok:
	case end <= addr:
		m.last = Mapping{Start: start, End: end}
	default:
		m.last, ok = parseMapping(m.lines.Text())
	}
	if !ok {
		return &SyntaxError{Line: m.line, Text: m.lines.Text(), Want: wantMapping}
	}
	return nil
}

// maxLine is beyond the longest line of maps, which holds a path and its escapes.
const maxLine = 1 << 20

// scanLines reads line by line. Unlike bufio.ScanLines it leaves a carriage return
// at the end of a line, where a path may have one.
func scanLines(r io.Reader) *bufio.Scanner {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	lines.Split(func(data []byte, atEOF bool) (advance int, line []byte, err error) {
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			return i + 1, data[:i], nil
		}
		if atEOF && len(data) > 0 {
			return len(data), data, nil
		}
		return 0, nil, nil
	})
	return lines
}
