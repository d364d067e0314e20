package linux

import (
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// A Mapping is a line of /proc/PID/maps: a range of addresses that the kernel treats
// alike.
type Mapping struct {
	Start, End  uintptr // [Start, End)
	Read, Write bool    // how the process may use it
	Shared      bool    // MAP_SHARED: writes reach the file, or other processes
	File        bool    // backed by a file or by shared memory, not anonymous
	// Name is a file's path, followed by " (deleted)" where the file was removed
	// since; "[heap]" and its like; "[anon:name]" as set by prctl; or empty.
	Name string
}

// String returns the mapping as messages name it: "/data/weights at
// 0x7f0000000000-0x7f0000001000".
func (m Mapping) String() string {
	name := m.Name
	switch {
	case name == "" && m.File:
		name = "a file"
	case name == "":
		name = "anonymous memory"
	}
	return fmt.Sprintf("%s at %#x-%#x", name, m.Start, m.End)
}

// mapsName is the maps of this process by way of the thread: user-mode emulators
// make up a /proc/self/maps of their own, which misses lines while other threads map
// memory.
const mapsName = "proc/thread-self/maps"

// ReadMaps reads all mappings of this process. [Maps] looks up a few of them for
// less.
func ReadMaps(fsys fs.FS) ([]Mapping, error) { return read(fsys, mapsName, ParseMaps) }

// ReadProcessMaps reads the mappings of a process, which needs the permission to trace it.
// It is cheap beside ReadProcessSMaps, for which the kernel visits every page.
func ReadProcessMaps(fsys fs.FS, pid int) ([]Mapping, error) {
	return read(fsys, fmt.Sprintf("proc/%d/maps", pid), ParseMaps)
}

// ParseMaps parses /proc/PID/maps, which the kernel sorts by address.
func ParseMaps(text string) ([]Mapping, error) { return parseLines(text, wantMapping, parseMapping) }

const wantMapping = "a mapping, as proc(5) describes it"

// parseMapping parses a line:
// "7f0000000000-7f0000001000 rw-p 00000000 fe:00 1234    /path".
func parseMapping(line string) (m Mapping, ok bool) {
	start, end, rest, ok := cutRange(line)
	if !ok {
		return Mapping{}, false
	}
	permissions, rest, _ := strings.Cut(rest, " ")
	_, rest, _ = strings.Cut(rest, " ") // offset
	_, rest, ok = strings.Cut(rest, " ")
	digits, name, _ := strings.Cut(rest, " ")
	inode, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil || len(permissions) != 4 {
		return Mapping{}, false
	}
	return Mapping{
		Start: start, End: end,
		Read: permissions[0] == 'r', Write: permissions[1] == 'w', Shared: permissions[3] == 's',
		File: inode != 0,
		// The kernel escapes newlines here, and not the backslash.
		Name: strings.ReplaceAll(strings.TrimLeft(name, " "), `\012`, "\n"),
	}, true
}

// cutRange cuts the addresses off a line of maps or smaps.
func cutRange[T string | []byte](line T) (start, end uintptr, rest T, ok bool) {
	start, rest, ok = cutHex(line, '-')
	if ok {
		end, rest, ok = cutHex(rest, ' ')
	}
	return start, end, rest, ok && start < end
}

// cutHex cuts a hexadecimal number and the separator after it off a line.
func cutHex[T string | []byte](line T, separator byte) (n uintptr, rest T, ok bool) {
	for i := range len(line) {
		c := line[i]
		switch {
		case c == separator:
			return n, line[i+1:], i > 0
		case n > math.MaxUint>>4:
			return 0, rest, false
		case '0' <= c && c <= '9':
			n = n<<4 | uintptr(c-'0')
		case 'a' <= c && c <= 'f':
			n = n<<4 | uintptr(c-'a'+10)
		default:
			return 0, rest, false
		}
	}
	return 0, rest, false
}

// A MappedFile is a file that is mapped into the process.
type MappedFile struct {
	Path    string
	Deleted bool // it was removed, or replaced by another, since it was mapped
}

// MappedFiles lists the files that are mapped, each once, in the order of their
// addresses. Shared memory looks like a file: a memfd is "/memfd:name", deleted.
func MappedFiles(maps []Mapping) []MappedFile {
	var files []MappedFile
	seen := map[MappedFile]bool{}
	for _, m := range maps {
		name, deleted := strings.CutSuffix(m.Name, " (deleted)")
		file := MappedFile{name, deleted}
		if !m.File || !strings.HasPrefix(name, "/") || seen[file] {
			continue
		}
		seen[file] = true
		files = append(files, file)
	}
	return files
}
