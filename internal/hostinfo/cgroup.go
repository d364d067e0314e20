package hostinfo

import "github.com/gopinned/pinned/internal/linux"

// Cgroup describes what the process's control groups allow it.
type Cgroup struct {
	// Version is 2, 1, or 0 if no memory controller was found.
	Version int `json:"version,omitempty"`
	// Path is the directory of the group with the least headroom.
	Path string `json:"path,omitempty"`
	// MemoryLimit is the tighter of memory.max and memory.high (version 2), or
	// memory.limit_in_bytes (1), of that group.
	MemoryLimit Limit `json:"memory_limit_bytes"`
	// MemoryUsed is charged to that group, page cache included.
	MemoryUsed Limit `json:"memory_used_bytes"`
	// FileCache is the page cache in MemoryUsed, which the kernel would drop first.
	FileCache int `json:"file_cache_bytes,omitempty"`
	// Headroom is MemoryLimit less (MemoryUsed less FileCache): the bytes that can
	// be pinned before the kernel throttles or kills.
	Headroom Limit `json:"headroom_bytes"`
	// CPUQuota is in CPUs: 2.5 is two and a half. 0 means no quota, or unknown.
	CPUQuota float64 `json:"cpu_quota,omitempty"`
}

func readCgroup(f files) Cgroup {
	g := Cgroup{CPUQuota: readCPUQuota(f)}
	groups, _ := linux.ReadCgroupMemory(f.fsys)
	m, ok := linux.Tightest(groups, 0)
	if !ok {
		return g
	}
	limit, _ := m.Limit()
	g.Version, g.Path = m.Version, "/"+m.Dir
	g.MemoryLimit = limitOf(limit)
	g.MemoryUsed = limitOf(m.Current)
	g.FileCache = m.FileCache(0)
	g.Headroom = limitOf(m.Headroom(0).Available)
	return g
}

// readCPUQuota returns the smallest quota of the process's groups.
func readCPUQuota(f files) float64 {
	var least float64
	groups, _ := linux.ReadCgroups(f.fsys, "cpu")
	for _, g := range groups {
		if quota, err := g.CPUQuota(f.fsys); err == nil && quota > 0 && (least == 0 || quota < least) {
			least = quota
		}
	}
	return least
}
