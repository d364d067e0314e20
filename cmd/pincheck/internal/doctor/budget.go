package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// budgetChecks judge how much memory can be pinned.
var budgetChecks = []Check{
	{ID: "little_headroom", Suppresses: []string{"cgroup_below_host"}, Host: littleHeadroom},
	{ID: "memory_high", Suppresses: []string{"little_headroom"}, Host: memoryHigh},
	{ID: "hugetlb_unused", Host: hugetlbUnused},
	{ID: "strict_overcommit", Explains: []cudart.Code{cudart.ErrMemoryAllocation}, Host: strictOvercommit},
	{ID: "swapping", Host: swapping},
	{ID: "pinned_by_others", Host: pinnedByOthers},
	{ID: "limits_exceed_memory", Host: limitsExceedMemory},
	{ID: "cgroup_below_host", Host: cgroupBelowHost},
	{ID: "small_dev_shm", Host: smallDevShm},
	{ID: "memlock_rdma", Host: memlockRDMA},
}

// sharedHolds reports whether shared memory holds much of what is used: pools in /dev/shm outlive their programs.
func (f *Facts) sharedHolds() (evidence string, ok bool) {
	m := f.Host.Memory
	shared, known := m.Shared.Finite()
	return fmt.Sprintf("/proc/meminfo: Shmem is %s of %s", units.Bytes(shared), units.Bytes(m.Total)), known && m.Total > 0 && shared > m.Total/3
}

// headroom returns how much can be pinned, and the file that says so.
func (f *Facts) headroom() (left int, source string, ok bool) {
	if available := f.Host.Memory.Usable(); available > 0 {
		left, source, ok = available, "/proc/meminfo MemAvailable", true
	}
	if n, limited := f.Host.Cgroup.Headroom.Finite(); limited && (!ok || n < left) {
		left, source, ok = n, f.limitFile(), true
	}
	return left, source, ok
}

func (f *Facts) limitFile() string {
	g := f.Host.Cgroup
	if g.LimitFile == "" {
		return g.Path
	}
	return g.Path + "/" + g.LimitFile
}

// minHeadroom is what pincheck itself and small programs need.
const minHeadroom = 1 << 30

func littleHeadroom(f *Facts) []Finding {
	left, source, ok := f.headroom()
	if !ok || left >= minHeadroom {
		return nil
	}
	out := Finding{Summary: fmt.Sprintf("only %s can be pinned", units.Bytes(left)), Evidence: []string{source + ": " + units.Bytes(left)}}
	if limit, limited := f.Host.Cgroup.MemoryLimit.Finite(); limited && source == f.limitFile() {
		used, _ := f.Host.Cgroup.MemoryUsed.Finite()
		out.Evidence = []string{fmt.Sprintf("%s is %s; %s is used, including %s of page cache", source, units.Bytes(limit), units.Bytes(used), units.Bytes(f.Host.Cgroup.FileCache))}
	} else if _, texts := f.pinners(); len(texts) > 0 {
		out.Evidence = append(out.Evidence, texts...)
		out.because = "other_programs"
	} else if bytes, _, texts := f.sharedMemory(); bytes > f.Host.Memory.Total/3 {
		out.Evidence = append(out.Evidence, texts...)
		out.because = "shared"
	} else if seen, ok := f.sharedHolds(); ok {
		out.Evidence = append(out.Evidence, seen)
		out.because = "shared"
	}
	return finding(out)
}

// pinners returns how much memory the programs that use GPUs have pinned, as far as that
// shows, and the largest of them.
func (f *Facts) pinners() (pinned int, texts []string) {
	all := slices.Clone(f.Processes)
	slices.SortStableFunc(all, func(a, b Process) int { return cmp.Compare(b.Pinned, a.Pinned) })
	for _, p := range all {
		if p.Pinned <= 0 {
			break
		}
		pinned += p.Pinned
		if len(texts) < maxPinners {
			texts = append(texts, fmt.Sprintf("Process %d (%s) has pinned at least %s", p.PID, p.Name, units.Bytes(p.Pinned)))
		}
	}
	return pinned, texts
}

// maxPinners is how many programs a finding names.
const maxPinners = 3

// pinnedByOthers finds hosts of which more than half is pinned: a program that sizes its own
// pool by the host's memory does not find it. What shows are mappings, of which a part may
// not be resident: it cannot be more than what is in use.
func pinnedByOthers(f *Facts) []Finding {
	if f.Host.Memory.Available == 0 {
		return nil
	}
	m := f.Host.Memory
	pinned, texts := f.pinners()
	_, shared, more := f.sharedMemory()
	pinned, texts = pinned+shared, append(texts, more...)
	if pinned = min(pinned, m.Total-m.Usable()); pinned <= m.Total/2 {
		return nil
	}
	return summarized(fmt.Sprintf("programs have pinned %s of %s of memory", units.Bytes(pinned), units.Bytes(m.Total)),
		append(texts, fmt.Sprintf("/proc/meminfo: %s is available", units.Bytes(m.Available)))...)
}

// limitsExceedMemory sums the limits of the control groups in which programs use GPUs.
// Others do not pin, and what they use can be reclaimed or swapped out.
func limitsExceedMemory(f *Facts) []Finding {
	if f.Host.Memory.Total == 0 {
		return nil
	}
	total := f.Host.Memory.Total
	limits := map[string]int{}
	sum, free := 0, 0
	for _, p := range f.Processes {
		if _, known := limits[p.Cgroup]; known {
			continue
		}
		if p.Cgroup == "" {
			free++
			continue
		}
		if p.MemoryLimit <= 0 || p.MemoryLimit >= total {
			continue
		}
		limits[p.Cgroup] = p.MemoryLimit
		sum += p.MemoryLimit
	}
	if len(limits) < 2 || sum <= total {
		return nil
	}
	var evidence []string
	for _, group := range slices.Sorted(maps.Keys(limits)) {
		pinned := 0
		var names []string
		for _, p := range f.Processes {
			if p.Cgroup == group {
				pinned += p.Pinned
				names = append(names, fmt.Sprintf("%d (%s)", p.PID, p.Name))
			}
		}
		evidence = append(evidence, fmt.Sprintf("%s may use %s, and has pinned at least %s: process %s", group, units.Bytes(limits[group]), units.Bytes(pinned), strings.Join(names, ", ")))
	}
	if free > 0 {
		evidence = append(evidence, fmt.Sprintf("%s without a memory limit use GPUs too", units.Things(free, "program", "programs")))
	}
	return summarized(fmt.Sprintf("%d control groups with GPU programs may use %s together, and the host has %s", len(limits), units.Bytes(sum), units.Bytes(total)),
		evidence...)
}

func memoryHigh(f *Facts) []Finding {
	if f.Host.Cgroup.LimitFile != "memory.high" {
		return nil
	}
	g := f.Host.Cgroup
	limit, limited := g.MemoryLimit.Finite()
	used, known := g.MemoryUsed.Finite()
	if !limited || !known || limit == 0 || used-g.FileCache < limit/10*9 {
		return nil
	}
	return seen(fmt.Sprintf("%s is %s; %s is used and cannot be reclaimed", f.limitFile(), units.Bytes(limit), units.Bytes(used-g.FileCache)))
}

func hugetlbUnused(f *Facts) []Finding {
	m := f.Host.Memory
	free := 0
	for _, n := range f.Host.NUMA {
		for _, p := range n.Huge {
			free += p.Free * p.PageSize
		}
	}
	if pages, ok := m.HugeFree.Finite(); ok && free == 0 {
		free = pages * m.HugePageSize
	}
	if free < 4<<30 || m.Total == 0 || free < m.Total/10 {
		return nil
	}
	return finding(Finding{
		Severity: noteIf(m.Usable() > m.Total/4), // nothing is short
		Summary:  fmt.Sprintf("%s is reserved as huge pages and unused", units.Bytes(free)),
		Evidence: []string{"/proc/meminfo HugePages_Free, /sys/devices/system/node/node*/hugepages", fmt.Sprintf("%s of %s is available to other programs", units.Bytes(m.Available), units.Bytes(m.Total))},
	})
}

func strictOvercommit(f *Facts) []Finding {
	if f.Host.Memory.Overcommit == nil || *f.Host.Memory.Overcommit != 2 {
		return nil
	}
	limit, limited := f.Host.Memory.CommitLimit.Finite()
	committed, known := f.Host.Memory.Committed.Finite()
	if !limited || !known || limit-committed >= max(2<<30, limit/10) {
		return nil
	}
	return summarized(fmt.Sprintf("programs may allocate only %s more", units.Bytes(max(0, limit-committed))),
		fmt.Sprintf("vm.overcommit_memory is 2; /proc/meminfo: CommitLimit %s, Committed_AS %s", units.Bytes(limit), units.Bytes(committed)))
}

func swapping(f *Facts) []Finding {
	m := f.Host.Memory
	free, ok := m.SwapFree.Finite()
	if !ok || m.Swap == 0 || free > m.Swap/2 || m.Usable() > m.Total/10 || m.Available == 0 {
		return nil
	}
	return seen(fmt.Sprintf("%s of %s of swap is used; %s of %s of memory is available", units.Bytes(m.Swap-free), units.Bytes(m.Swap), units.Bytes(m.Available), units.Bytes(m.Total)))
}

func cgroupBelowHost(f *Facts) []Finding {
	left, limited := f.Host.Cgroup.Headroom.Finite()
	if !limited || f.Host.Memory.Available == 0 || left >= f.Host.Memory.Available/2 {
		return nil
	}
	return summarized(fmt.Sprintf("this container may use %s more, but /proc/meminfo shows %s as available", units.Bytes(left), units.Bytes(f.Host.Memory.Available)),
		fmt.Sprintf("%s leaves %s", f.limitFile(), units.Bytes(left)), "/proc/meminfo shows the memory of the host")
}

// plentyOfMemlock is enough for the queues of RDMA, though not for its buffers.
const plentyOfMemlock = 1 << 30

func memlockRDMA(f *Facts) []Finding {
	if f.Host.InfiniBand == 0 {
		return nil
	}
	limit, finite := f.Host.MemLock.Finite()
	if !finite || limit >= plentyOfMemlock {
		return nil
	}
	return summarized(fmt.Sprintf("RLIMIT_MEMLOCK is %s, which limits RDMA but not CUDA", units.Bytes(limit)),
		fmt.Sprintf("/proc/self/limits: Max locked memory is %d", limit), units.Things(f.Host.InfiniBand, "RDMA device", "RDMA devices")+" in /sys/class/infiniband")
}

// Docker makes a /dev/shm of smallShared. A loader for each of manyCPUs passes its batches through it.
const (
	smallShared = 64 << 20
	manyCPUs    = 8
)

func smallDevShm(f *Facts) []Finding {
	if f.Host.Virt.Container == "" || f.Host.CPU.Usable() < manyCPUs {
		return nil
	}
	for _, m := range f.Host.Mounts {
		if size, known := m.Size.Finite(); m.Point == "/dev/shm" && known && size <= smallShared {
			return summarized(fmt.Sprintf("/dev/shm has %s, beside %s CPUs", units.Bytes(size), units.Number(f.Host.CPU.Usable(), 2)),
				fmt.Sprintf("/proc/self/mountinfo: /dev/shm is a tmpfs of %s", units.Bytes(size)))
		}
	}
	return nil
}
