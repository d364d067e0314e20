package linux

import (
	"fmt"
	"io"
	"io/fs"
	"math"
	"slices"
	"strings"
)

// SMaps sums the mappings that overlap a range of addresses, in bytes.
//
// The kernel counts by mapping, and merges neighbours of the same kind into one:
// compare Start and End with what was mapped to see whether other memory is among
// it.
type SMaps struct {
	Start, End    uintptr // of the mappings, from the first to the last
	Maps          int     // how many they are
	Size          int
	Rss           int      // resident
	AnonHugePages int      // of Rss, in transparent huge pages
	Hugetlb       int      // resident in pages of the hugetlb pool, which Rss leaves out
	Locked        int      // of Rss, by mlock
	PageSize      int      // KernelPageSize of the first mapping
	Flags         []string // VmFlags of the first mapping: "dc" no fork, "dd" no dump, "hg" huge pages
	Name          string   // of the first mapping, as Mapping.Name
}

// HasFlag reports whether flag is among the VmFlags.
func (s SMaps) HasFlag(flag string) bool { return slices.Contains(s.Flags, flag) }

// ReadSMaps reads the kernel's account of [start, start+n) in this process. A range
// with nothing mapped gives an SMaps with Maps 0.
func ReadSMaps(fsys fs.FS, start uintptr, n int) (SMaps, error) {
	return readSMaps(fsys, "proc/thread-self/smaps", start, n)
}

// ReadSMapsRollup reads the sums of all mappings of this process. The kernel has them
// since Linux 4.14.
func ReadSMapsRollup(fsys fs.FS) (SMaps, error) {
	return readSMaps(fsys, "proc/thread-self/smaps_rollup", 0, math.MaxInt)
}

func readSMaps(fsys fs.FS, name string, start uintptr, n int) (SMaps, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return SMaps{}, inFile(name, err)
	}
	defer f.Close()
	s, err := ParseSMaps(f, start, n)
	return s, inFile(name, err)
}

// ParseSMaps parses /proc/PID/smaps up to the end of the range, as ReadSMaps does.
func ParseSMaps(r io.Reader, start uintptr, n int) (SMaps, error) {
	var s SMaps
	inside, number := false, 0
	lines := scanLines(r)
	for lines.Scan() {
		number++
		if low, high, _, ok := cutRange(lines.Bytes()); ok {
			if low >= start+uintptr(n) {
				break
			}
			if inside = high > start; !inside {
				continue
			}
			m, ok := parseMapping(lines.Text())
			if !ok {
				return SMaps{}, &SyntaxError{Line: number, Text: lines.Text(), Want: wantMapping}
			}
			s.add(m)
			continue
		}
		if inside && !s.count(lines.Text()) {
			return SMaps{}, &SyntaxError{Line: number, Text: lines.Text(), Want: `"Name: number kB"`}
		}
	}
	return s, lines.Err()
}

// ReadProcessSMaps calls each with every mapping of a process and its account, in the
// order of their addresses (/proc/PID/smaps). It reads what another process has mapped
// only with the permission to trace it: fs.ErrPermission otherwise. Kernel threads and
// processes that have ended have no mappings. If the process ends meanwhile, there may
// be too few and no error.
func ReadProcessSMaps(fsys fs.FS, pid int, each func(Mapping, SMaps)) error {
	name := fmt.Sprintf("proc/%d/smaps", pid)
	f, err := fsys.Open(name)
	if err != nil {
		return inFile(name, err)
	}
	defer f.Close()
	return inFile(name, ParseEverySMaps(f, each))
}

// ParseEverySMaps parses /proc/PID/smaps as ReadProcessSMaps does.
func ParseEverySMaps(r io.Reader, each func(Mapping, SMaps)) error {
	var (
		m      Mapping
		s      SMaps
		number int
	)
	lines := scanLines(r)
	for lines.Scan() {
		number++
		if _, _, _, ok := cutRange(lines.Bytes()); !ok {
			if s.Maps == 0 || !s.count(lines.Text()) {
				return &SyntaxError{Line: number, Text: lines.Text(), Want: `"Name: number kB"`}
			}
			continue
		}
		if s.Maps > 0 {
			each(m, s)
		}
		var ok bool
		if m, ok = parseMapping(lines.Text()); !ok {
			return &SyntaxError{Line: number, Text: lines.Text(), Want: wantMapping}
		}
		s = SMaps{}
		s.add(m)
	}
	if s.Maps > 0 && lines.Err() == nil {
		each(m, s)
	}
	return lines.Err()
}

func (s *SMaps) add(m Mapping) {
	if s.Maps == 0 {
		s.Start, s.Name = m.Start, m.Name
	}
	s.End = m.End
	s.Maps++
}

// count adds up "Rss:   4 kB" and the like; "VmFlags: rd wr mr" is the first
// mapping's.
func (s *SMaps) count(line string) (ok bool) {
	name, value, ok := strings.Cut(line, ":")
	var to *int
	switch name {
	case "VmFlags":
		if s.Maps == 1 {
			s.Flags = strings.Fields(value)
		}
		return ok
	case "KernelPageSize":
		if s.Maps > 1 {
			return ok
		}
		to = &s.PageSize
	case "Size":
		to = &s.Size
	case "Rss":
		to = &s.Rss
	case "AnonHugePages":
		to = &s.AnonHugePages
	case "Locked":
		to = &s.Locked
	case "Private_Hugetlb", "Shared_Hugetlb":
		to = &s.Hugetlb
	default:
		return ok
	}
	n, ok := parseSize(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 1<<10)
	*to = sumSizes(*to, n)
	return ok
}
