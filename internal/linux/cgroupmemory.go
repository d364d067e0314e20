package linux

import (
	"errors"
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// NoLimit is a limit that is not set.
const NoLimit = math.MaxInt

// CgroupMemory is the memory account of a control group. It holds what the group's
// processes and those of all groups within it use.
type CgroupMemory struct {
	Cgroup
	Current int // bytes in use, the page cache of files included
	Max     int // the kernel kills processes beyond it; NoLimit where there is none
	// High is the use beyond which the kernel makes the group reclaim memory, and
	// wait until it has. Pinned memory cannot be reclaimed, so beyond it everything
	// is slow for good: it limits as Max does. NoLimit where there is none; version
	// 1 has none.
	High int
	// ActiveFile and InactiveFile are the page cache of files, which the kernel
	// reclaims when memory runs short. Shared memory and tmpfs are not among it.
	// Pages of it that are pinned count nevertheless: pinning leaves them on the
	// kernel's lists, although they cannot be reclaimed.
	ActiveFile, InactiveFile int
}

// ReadCgroupMemory reads the memory accounts of the groups that this process is in:
// its own first, then those around it. Groups without an account are left out, as
// the root of version 2 is, and groups whose files this process may not read. Where
// the kernel has no control groups the error wraps fs.ErrNotExist.
func ReadCgroupMemory(fsys fs.FS) ([]CgroupMemory, error) {
	return readCgroupMemory(fsys, self)
}

// ReadProcessCgroupMemory is [ReadCgroupMemory] of another process. Of one whose groups lie
// outside of what is mounted here, as seen from a container, it returns those of the mount.
func ReadProcessCgroupMemory(fsys fs.FS, pid int) ([]CgroupMemory, error) {
	return readCgroupMemory(fsys, strconv.Itoa(pid))
}

func readCgroupMemory(fsys fs.FS, process string) ([]CgroupMemory, error) {
	groups, err := readCgroups(fsys, process, "memory")
	if err != nil {
		return nil, err
	}
	var accounts []CgroupMemory
	for _, g := range groups {
		m, err := g.Memory(fsys)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			continue
		}
		if err != nil {
			return nil, err
		}
		accounts = append(accounts, m)
	}
	return accounts, nil
}

// Memory reads the group's memory account. A group without one is an error that
// wraps fs.ErrNotExist.
func (c Cgroup) Memory(fsys fs.FS) (CgroupMemory, error) {
	current, limit, high, active, inactive := "memory.current", "memory.max", "memory.high", "active_file", "inactive_file"
	if c.Version == 1 {
		// The names without total_ leave out the groups within this one.
		current, limit, high, active, inactive = "memory.usage_in_bytes", "memory.limit_in_bytes", "", "total_active_file", "total_inactive_file"
	}
	m := CgroupMemory{Cgroup: c, High: NoLimit}
	var errCurrent, errMax, errHigh error
	m.Current, errCurrent = read(fsys, c.Dir+"/"+current, parseBytes)
	m.Max, errMax = readLimit(fsys, c.Dir+"/"+limit)
	if high != "" {
		m.High, errHigh = readLimit(fsys, c.Dir+"/"+high)
	}
	stat, errStat := optional(fsys, c.Dir+"/memory.stat", ParseCounters)
	m.ActiveFile, m.InactiveFile = stat[active], stat[inactive]
	if err := errors.Join(errCurrent, errMax, errHigh, errStat); err != nil {
		return CgroupMemory{}, err
	}
	return m, nil
}

func parseBytes(text string) (int, error) {
	n, ok := parseSize(strings.TrimSpace(text), 1)
	if !ok {
		return 0, &SyntaxError{Line: 1, Text: strings.TrimSpace(text), Want: "a number of bytes"}
	}
	return n, nil
}

// readLimit reads a limit. The roots of hierarchies have none of the files.
func readLimit(fsys fs.FS, name string) (int, error) {
	limit, err := read(fsys, name, parseLimit)
	if errors.Is(err, fs.ErrNotExist) {
		return NoLimit, nil
	}
	return limit, err
}

// parseLimit parses a number of bytes, or "max". Version 1 writes a number near
// 2^63 for no limit; which one depends on the page size and the kernel.
func parseLimit(text string) (int, error) {
	if strings.TrimSpace(text) == "max" {
		return NoLimit, nil
	}
	n, err := parseBytes(text)
	if uint64(n) >= 1<<62 {
		n = NoLimit
	}
	return n, err
}

// Limit returns the tighter of Max and High and the name of its file, or NoLimit.
func (m CgroupMemory) Limit() (bytes int, file string) {
	switch {
	case m.Max == NoLimit && m.High == NoLimit:
		return NoLimit, ""
	case m.High < m.Max:
		return m.High, "memory.high"
	case m.Version == 1:
		return m.Max, "memory.limit_in_bytes"
	}
	return m.Max, "memory.max"
}

// FileCache returns the bytes of Current that the kernel would reclaim first: the
// page cache, less pinnedFile bytes of it that are pinned.
func (m CgroupMemory) FileCache(pinnedFile int) int {
	return max(0, min(sumSizes(m.ActiveFile, m.InactiveFile), m.Current)-pinnedFile)
}

// Headroom returns what may still be pinned within the limit: the limit less what
// is in use and cannot be reclaimed.
//
// pinnedFile is the number of bytes of the page cache of files that the caller has pinned, by
// mapping files and registering the mappings. The kernel counts them as page cache
// and cannot reclaim them, so they reduce the headroom. Pages that were charged to
// another group, that of the process that read the file first, reduce it all the
// same: the kernel does not report whose they are. Shared memory and tmpfs must not be
// counted in.
func (m CgroupMemory) Headroom(pinnedFile int) Headroom {
	limit, file := m.Limit()
	if limit == NoLimit {
		return Headroom{Available: NoLimit, Total: NoLimit}
	}
	return Headroom{
		Available: max(0, limit-(m.Current-m.FileCache(pinnedFile))),
		Total:     limit,
		Source:    "/" + m.Dir + " " + file,
	}
}

// Tightest returns the group with the smallest headroom, which binds;
// the first of several, and the first of all where none has a limit. ok is false
// for no groups.
func Tightest(groups []CgroupMemory, pinnedFile int) (tightest CgroupMemory, ok bool) {
	for i, g := range groups {
		if i == 0 || g.Headroom(pinnedFile).Available < tightest.Headroom(pinnedFile).Available {
			tightest = g
		}
	}
	return tightest, len(groups) > 0
}
