package linux

import (
	"io/fs"
	"strings"
)

// Meminfo is the fields of a meminfo file by name. Sizes are in bytes, though the
// file has kB; HugePages_Total and its like are numbers of pages. Which fields
// there are depends on the kernel: MemAvailable came with Linux 3.14.
type Meminfo map[string]int

// ReadMeminfo reads /proc/meminfo. It describes the host, also in a container.
func ReadMeminfo(fsys fs.FS) (Meminfo, error) { return read(fsys, "proc/meminfo", ParseMeminfo) }

// ParseMeminfo parses /proc/meminfo, or a NUMA node's meminfo, whose lines start
// with "Node 0 ".
func ParseMeminfo(text string) (Meminfo, error) {
	return parseFields[Meminfo](text, `"Name: number kB"`, func(line string) (name string, n int, ok bool) {
		name, value, _ := strings.Cut(line, ":")
		if node, ok := strings.CutPrefix(name, "Node "); ok {
			_, name, _ = strings.Cut(node, " ")
		}
		digits, isSize := strings.CutSuffix(strings.TrimSpace(value), " kB")
		unit := uint64(1)
		if isSize {
			unit = 1 << 10
		}
		n, ok = parseSize(digits, unit)
		return name, n, ok
	})
}

// FileCache returns the page cache of files that the kernel counts as reclaimable.
// Shared memory and tmpfs are not among it: the kernel can only swap them out.
func (m Meminfo) FileCache() int { return sumSizes(m["Active(file)"], m["Inactive(file)"]) }
