package hostmem

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// A mapping is a line of /proc/self/maps: addresses that the kernel treats
// alike.
type mapping struct {
	start, end          uintptr // [start, end)
	read, write, shared bool
	file                bool   // has a file or shared memory behind it
	name                string // "/path", "[anon:name]", or empty
}

func (m mapping) String() string {
	name := m.name
	switch {
	case name == "" && m.file:
		name = "a file"
	case name == "":
		name = "anonymous memory"
	}
	return fmt.Sprintf("%s at %#x-%#x", name, m.start, m.end)
}

var errMapsLine = errors.New("not a line of /proc/self/maps")

// parseMapping takes a line apart:
// "7f0000000000-7f0000001000 rw-p 00000000 fe:00 1234    /path".
func parseMapping(line string) (mapping, error) {
	bad := func() (mapping, error) { return mapping{}, fmt.Errorf("%w: %q", errMapsLine, line) }
	span, rest, _ := strings.Cut(line, " ")
	perms, rest, _ := strings.Cut(rest, " ")
	_, rest, _ = strings.Cut(rest, " ") // offset
	_, rest, ok := strings.Cut(rest, " ")
	inode, name, _ := strings.Cut(rest, " ")
	low, high, dash := strings.Cut(span, "-")
	start, errStart := strconv.ParseUint(low, 16, strconv.IntSize)
	end, errEnd := strconv.ParseUint(high, 16, strconv.IntSize)
	node, errNode := strconv.ParseUint(inode, 10, 64)
	if !ok || !dash || errStart != nil || errEnd != nil || errNode != nil || start >= end || len(perms) != 4 {
		return bad()
	}
	return mapping{
		start: uintptr(start), end: uintptr(end),
		read: perms[0] == 'r', write: perms[1] == 'w', shared: perms[3] == 's',
		file: node != 0,
		name: strings.TrimLeft(name, " "),
	}, nil
}

// parseMappings reads a whole /proc/self/maps, which the kernel sorts by
// address.
func parseMappings(r io.Reader) ([]mapping, error) {
	var all []mapping
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // paths may be long
	for lines.Scan() {
		m, err := parseMapping(lines.Text())
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, lines.Err()
}

// mapsFile is read by way of the thread: user-mode emulators make up a
// /proc/self/maps of their own, which misses lines while other threads map
// memory.
const mapsFile = "/proc/thread-self/maps"

// readMappings tells what is mapped in this process.
func readMappings() ([]mapping, error) {
	f, err := os.Open(mapsFile)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("see what is mapped: %w", err)
	}
	defer f.Close()
	all, err := parseMappings(f)
	if err != nil {
		return nil, fmt.Errorf("see what is mapped: %s: %w", mapsFile, err)
	}
	return all, nil
}

// within returns those that overlap [start, end).
func within(all []mapping, start, end uintptr) []mapping {
	from := slices.IndexFunc(all, func(m mapping) bool { return m.end > start })
	if from < 0 {
		return nil
	}
	to := from
	for to < len(all) && all[to].start < end {
		to++
	}
	return all[from:to]
}

// access tells how [start, end) can be registered: for reading only or for
// both, or why it cannot.
//
// The rules are what the driver does (R580, CUDA 13.0). Holes and memory that
// cannot be read are invalid to it. Memory that cannot be written has to be
// registered read-only, and that works where the mapping is shared. Of a
// private one the driver would want pages of its own to write to: with a
// file's it was seen to hang for good, so that none is let through, nor any
// range of which one is a part.
func access(all []mapping, start, end uintptr) (readOnly bool, err error) {
	at := start
	var private *mapping
	maps := within(all, start, end)
	for i, m := range maps {
		if m.start > at {
			break
		}
		at = min(m.end, end)
		if !m.read {
			return false, fmt.Errorf("%v cannot be read (mprotect)", m)
		}
		readOnly = readOnly || !m.write
		if !m.shared && (private == nil || !m.write) {
			private = &maps[i]
		}
	}
	if at < end {
		return false, fmt.Errorf("nothing is mapped at %#x, %d bytes from its begin", at, at-start)
	}
	if readOnly && private != nil {
		return false, fmt.Errorf("%v is mapped privately, and not all of the range can be written: the driver hangs on that; map it shared, or writable", *private)
	}
	return readOnly, nil
}

// writesThrough returns a mapping of the range that is shared, writable and a
// file's, if there is one. Memory that only looks like a file does not count.
func writesThrough(all []mapping, start, end uintptr) (mapping, bool) {
	for _, m := range within(all, start, end) {
		onDisk := m.file && !strings.HasPrefix(m.name, "/memfd:") && !strings.HasPrefix(m.name, "/dev/")
		if m.shared && m.write && onDisk {
			return m, true
		}
	}
	return mapping{}, false
}
