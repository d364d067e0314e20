// Package smaps reads the kernel's own account of a process's memory, for tests
// that prove what a mapping keeps.
package smaps

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Usage is what the mappings that overlap a range come to, in bytes.
//
// The kernel counts by mapping, and merges neighbours of the same kind into one:
// compare Start and End with what was mapped to know that nobody else is in it.
type Usage struct {
	Start, End uintptr // of the mappings, from the first to the last
	Maps       int     // how many they are
	Size       int
	Rss        int
	AnonHuge   int      // of Rss, in transparent huge pages
	Hugetlb    int      // in pages of the hugetlb pool, which Rss does not count
	PageSize   int      // KernelPageSize of the first mapping
	Flags      []string // VmFlags of the first mapping: "dc" no fork, "dd" no dump, "hg" huge pages
	Name       string   // of the first mapping: "[anon:pinned]", a file, or nothing
}

// Has tells whether flag is among the VmFlags.
func (u Usage) Has(flag string) bool { return slices.Contains(u.Flags, flag) }

// Of reads the account of [addr, addr+n) in this process. A range with nothing
// mapped gives a Usage with Maps 0.
func Of(addr uintptr, n int) (Usage, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return Usage{}, fmt.Errorf("smaps: %w", err)
	}
	defer f.Close()
	return Read(f, addr, n)
}

// Read is Of for a captured smaps.
func Read(r io.Reader, addr uintptr, n int) (Usage, error) {
	var u Usage
	inside := false
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if start, end, name, ok := header(lines.Text()); ok {
			inside = start < addr+uintptr(n) && end > addr
			if inside {
				u.enter(start, end, name)
			}
			continue
		}
		if !inside {
			continue
		}
		if err := u.count(lines.Text()); err != nil {
			return Usage{}, err
		}
	}
	if err := lines.Err(); err != nil {
		return Usage{}, fmt.Errorf("smaps: %w", err)
	}
	return u, nil
}

// header reads "7f0000000000-7f0000001000 rw-p 00000000 00:00 0    [anon:pinned]".
func header(line string) (start, end uintptr, name string, ok bool) {
	span, rest, _ := strings.Cut(line, " ")
	low, high, found := strings.Cut(span, "-")
	a, errA := strconv.ParseUint(low, 16, strconv.IntSize)
	b, errB := strconv.ParseUint(high, 16, strconv.IntSize)
	if !found || errA != nil || errB != nil {
		return 0, 0, "", false
	}
	// Permissions, offset, device and inode come before the name.
	fields := strings.Fields(rest)
	if len(fields) > 4 {
		name = strings.Join(fields[4:], " ")
	}
	return uintptr(a), uintptr(b), name, true
}

func (u *Usage) enter(start, end uintptr, name string) {
	if u.Maps == 0 {
		u.Start, u.Name = start, name
	}
	u.End = end
	u.Maps++
}

// count reads "Rss:   4 kB" and "VmFlags: rd wr mr mw me ac sd".
func (u *Usage) count(line string) error {
	key, value, ok := strings.Cut(line, ":")
	if !ok {
		return nil
	}
	if key == "VmFlags" {
		if u.Maps == 1 {
			u.Flags = strings.Fields(value)
		}
		return nil
	}
	to := map[string]*int{
		"Size": &u.Size, "Rss": &u.Rss, "AnonHugePages": &u.AnonHuge,
		"Private_Hugetlb": &u.Hugetlb, "Shared_Hugetlb": &u.Hugetlb, "KernelPageSize": &u.PageSize,
	}[key]
	if to == nil || key == "KernelPageSize" && u.PageSize > 0 {
		return nil
	}
	kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
	if err != nil {
		return fmt.Errorf("smaps: line %q: %w", line, err)
	}
	*to += kib << 10
	return nil
}
