package hostinfo

import (
	"fmt"
	"strconv"
	"strings"
)

// maxCPU is above what any Linux kernel can be built for (NR_CPUS is at most
// 8192), and keeps a damaged list from becoming a huge one.
const maxCPU = 1 << 16

// ParseCPUList reads the kernel's list form, such as "0-3,8,10-11", which
// names CPUs and NUMA nodes alike. An empty list is empty, not an error.
func ParseCPUList(s string) ([]int, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return nil, nil
	}
	var out []int
	for part := range strings.SplitSeq(s, ",") {
		lowText, highText, isRange := strings.Cut(part, "-")
		low, err := parseCPU(lowText)
		if err != nil {
			return nil, fmt.Errorf("list %q: %w", s, err)
		}
		high := low
		if isRange {
			if high, err = parseCPU(highText); err != nil {
				return nil, fmt.Errorf("list %q: %w", s, err)
			}
		}
		if high < low {
			return nil, fmt.Errorf("list %q: range %q runs backwards", s, part)
		}
		if len(out)+high-low >= maxCPU {
			return nil, fmt.Errorf("list %q: more than %d entries", s, maxCPU)
		}
		for n := low; n <= high; n++ {
			out = append(out, n)
		}
	}
	return out, nil
}

func parseCPU(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number", s)
	}
	if n >= maxCPU {
		return 0, fmt.Errorf("%d is beyond %d", n, maxCPU-1)
	}
	return int(n), nil
}

// countCPUs is how many a list names, 0 for one that cannot be read.
func countCPUs(s string) int {
	list, err := ParseCPUList(s)
	if err != nil {
		return 0
	}
	return len(list)
}
