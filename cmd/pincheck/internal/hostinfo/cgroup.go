package hostinfo

import (
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Cgroup describes what the process's control groups allow it.
type Cgroup struct {
	// Version is 2, 1, or 0 if no memory controller was found.
	Version int `json:"version,omitempty"`
	// Path is the directory of the group with the least headroom.
	Path string `json:"path,omitempty"`
	// MemoryLimit is the tighter of memory.max and memory.high (version 2), or
	// memory.limit_in_bytes (1), of that group.
	MemoryLimit Limit `json:"memory_limit_bytes"`
	// LimitFile is the file of MemoryLimit: memory.max, memory.high or
	// memory.limit_in_bytes. Empty without a limit.
	LimitFile string `json:"memory_limit_file,omitempty"`
	// MemoryUsed is charged to that group, page cache included.
	MemoryUsed Limit `json:"memory_used_bytes"`
	// FileCache is the page cache in MemoryUsed, which the kernel would drop first.
	FileCache int `json:"file_cache_bytes,omitempty"`
	// Headroom is MemoryLimit less (MemoryUsed less FileCache): the bytes that can
	// be pinned before the kernel throttles or kills.
	Headroom Limit `json:"headroom_bytes"`
	// CPUQuota is in CPUs: 2.5 is two and a half. 0 means no quota, or unknown.
	CPUQuota float64 `json:"cpu_quota,omitempty"`
	// Periods are the periods of the CPU quota in which the group ran, and Throttled those in which it used the quota
	// up and waited (cpu.stat), since the group was made.
	Periods   int `json:"cpu_periods,omitempty"`
	Throttled int `json:"cpu_periods_throttled,omitempty"`
	// Tasks are the processes and threads of the group that is nearest to its limit of them, and
	// TasksMax that limit (pids.max).
	Tasks    Limit `json:"tasks,omitzero"`
	TasksMax Limit `json:"tasks_max,omitzero"`
	// DevicesAllowed are the lines of devices.list (version 1): "c 195:* rw". Version 2
	// does not show which devices may be opened.
	DevicesAllowed []string `json:"devices_allowed,omitempty"`
}

func readCgroup(f files) Cgroup {
	g := Cgroup{DevicesAllowed: readDevicesAllowed(f)}
	g.CPUQuota, g.Periods, g.Throttled = readCPUQuota(f)
	g.Tasks, g.TasksMax = readTasks(f)
	groups, _ := linux.ReadCgroupMemory(f.fsys)
	m, ok := linux.Tightest(groups, 0)
	if !ok {
		return g
	}
	limit, file := m.Limit()
	g.LimitFile = file
	g.Version, g.Path = m.Version, "/"+m.Dir
	g.MemoryLimit = limitOf(limit)
	g.MemoryUsed = limitOf(m.Current)
	g.FileCache = m.FileCache(0)
	g.Headroom = limitOf(m.Headroom(0).Available)
	return g
}

// readCPUQuota returns the smallest quota of the process's groups, and how often it was used up.
func readCPUQuota(f files) (smallest float64, periods, throttled int) {
	groups, _ := linux.ReadCgroups(f.fsys, "cpu")
	for _, g := range groups {
		if quota, err := g.CPUQuota(f.fsys); err == nil && quota > 0 && (smallest == 0 || quota < smallest) {
			smallest = quota
			counts, _ := linux.ReadCounters(f.fsys, g.Dir+"/cpu.stat")
			periods, throttled = counts["nr_periods"], counts["nr_throttled"]
		}
	}
	return smallest, periods, throttled
}

// readTasks reads the group with the fewest tasks left. Where none has a limit both are unknown.
func readTasks(f files) (tasks, most Limit) {
	groups, _ := linux.ReadCgroups(f.fsys, "pids")
	for _, g := range groups {
		limit, errLimit := linux.ReadInt(f.fsys, g.Dir+"/pids.max")
		used, errUsed := linux.ReadInt(f.fsys, g.Dir+"/pids.current")
		if errLimit != nil || errUsed != nil || limit < 0 || used < 0 {
			continue
		}
		if !most.Known || limit-used < most.N-tasks.N {
			tasks, most = limitOf(used), limitOf(limit)
		}
	}
	return tasks, most
}

// readDevicesAllowed reads the list of the process's own group.
func readDevicesAllowed(f files) (lines []string) {
	groups, _ := linux.ReadCgroups(f.fsys, "devices")
	for _, g := range groups {
		if g.Version != 1 {
			continue
		}
		for line := range strings.Lines(f.text(g.Dir + "/devices.list")) {
			if line = strings.TrimSpace(line); line != "" && len(lines) < maxDevicesAllowed {
				lines = append(lines, line)
			}
		}
		break
	}
	return lines
}

// maxDevicesAllowed is more lines than container runtimes write.
const maxDevicesAllowed = 256
