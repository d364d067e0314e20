package linux

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
)

// A CPUList is the numbers that a list such as "0-3,8" names, ascending and each
// once. The kernel writes lists of CPUs and of NUMA nodes in this form.
type CPUList []int

// maxCPU exceeds the limits of a Linux kernel, 8192 CPUs and 1024 nodes. It keeps a malformed list
// from becoming a huge one.
const maxCPU = 1 << 16

// ReadCPUList reads a file that holds a list, such as
// "sys/devices/system/cpu/online".
func ReadCPUList(fsys fs.FS, name string) (CPUList, error) { return read(fsys, name, ParseCPUList) }

// ParseCPUList parses a list. An empty one is empty, not malformed: a node without
// CPUs has it.
func ParseCPUList(text string) (CPUList, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	var list CPUList
	for field := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(field, "-")
		if !isRange {
			high = low
		}
		first, errFirst := strconv.ParseUint(low, 10, 31)
		last, errLast := strconv.ParseUint(high, 10, 31)
		if errFirst != nil || errLast != nil || first > last || last >= maxCPU || len(list) >= maxCPU {
			return nil, &SyntaxError{Line: 1, Text: text, Want: "a list of CPUs or nodes, such as 0-3,8"}
		}
		for n := first; n <= last; n++ {
			list = append(list, int(n))
		}
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

// String returns the list as the kernel writes it.
func (l CPUList) String() string {
	var b strings.Builder
	for i := 0; i < len(l); {
		end := i + 1
		for end < len(l) && l[end] == l[end-1]+1 {
			end++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(l[i]))
		if end > i+1 {
			fmt.Fprintf(&b, "-%d", l[end-1])
		}
		i = end
	}
	return b.String()
}
