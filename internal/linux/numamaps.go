package linux

import (
	"cmp"
	"io/fs"
	"slices"
	"strconv"
	"strings"
)

// A NUMAMapping is a line of /proc/PID/numa_maps: where the pages of a mapping lie.
type NUMAMapping struct {
	Start uintptr
	// Pages are those that are resident, by the node on which they lie, in pages of the
	// size that the mapping has. There are none of memory that a driver maps by itself.
	Pages map[NUMANode]int
}

// ReadNUMAMaps reads the mappings of this process, in the order of their addresses. It
// needs no permission, unlike the calls that ask for single pages. The kernel looks at all
// resident pages for it. Kernels without NUMA have no such file.
func ReadNUMAMaps(fsys fs.FS) ([]NUMAMapping, error) {
	return read(fsys, "proc/self/numa_maps", ParseNUMAMaps)
}

// ParseNUMAMaps parses /proc/PID/numa_maps: "7f12d4000000 bind:1 anon=512 dirty=512 N1=512
// kernelpagesize_kB=4".
func ParseNUMAMaps(text string) ([]NUMAMapping, error) {
	return parseLines(text, "an address, a policy, and pages by node", func(line string) (m NUMAMapping, ok bool) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			return m, false
		}
		start, err := strconv.ParseUint(fields[0], 16, strconv.IntSize)
		if err != nil {
			return m, false
		}
		m.Start = uintptr(start)
		for _, field := range fields[2:] {
			name, value, _ := strings.Cut(field, "=")
			digits, isNode := strings.CutPrefix(name, "N")
			node, err := strconv.ParseUint(digits, 10, 16)
			if !isNode || err != nil {
				continue // anon=, file=, huge, and what later kernels add
			}
			pages, err := parseInt(value)
			if err != nil || pages < 0 {
				return m, false
			}
			if m.Pages == nil {
				m.Pages = map[NUMANode]int{}
			}
			m.Pages[NUMANode(node)] = pages
		}
		return m, true
	})
}

// NUMAMappingOf returns the mapping that contains an address. The caller must know that the address
// is mapped, because the file has no ends. ok is false for an address before all mappings.
func NUMAMappingOf(maps []NUMAMapping, addr uintptr) (m NUMAMapping, ok bool) {
	i, exact := slices.BinarySearchFunc(maps, addr, func(m NUMAMapping, addr uintptr) int { return cmp.Compare(m.Start, addr) })
	if !exact {
		i--
	}
	if i < 0 {
		return NUMAMapping{}, false
	}
	return maps[i], true
}
