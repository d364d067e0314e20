package doctor

import (
	"fmt"

	"github.com/gopinned/pinned/internal/units"
)

// budgetChecks judge how much memory can be pinned.
var budgetChecks = []Check{
	{ID: "little_headroom", Title: "little memory can be pinned", Severity: Warning, Implies: []string{"cgroup_below_host"}, Host: littleHeadroom},
	{ID: "memory_high", Title: "memory.high slows the container down", Severity: Warning, Implies: []string{"little_headroom"}, Host: memoryHigh},
	{ID: "hugetlb_unused", Title: "reserved huge pages are unused", Severity: Warning, Host: hugetlbUnused},
	{ID: "strict_overcommit", Title: "the kernel promises no more memory", Severity: Warning, Host: strictOvercommit},
	{ID: "swapping", Title: "the host swaps", Severity: Warning, Host: swapping},
	{ID: "cgroup_below_host", Title: "the container has much less memory than the host shows", Severity: Note, Host: cgroupBelowHost},
	{ID: "memlock_rdma", Title: "RLIMIT_MEMLOCK limits RDMA", Severity: Note, Host: memlockRDMA},
}

// headroom returns how much can be pinned, and the file that says so.
func (f *Facts) headroom() (left int, source string, ok bool) {
	if f.Host == nil {
		return 0, "", false
	}
	if available := f.Host.Memory.Available; available > 0 {
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

// leastHeadroom is what pincheck itself and small programs need.
const leastHeadroom = 1 << 30

func littleHeadroom(f *Facts) []Finding {
	left, source, ok := f.headroom()
	if !ok || left >= leastHeadroom {
		return nil
	}
	out := Finding{
		Summary:  fmt.Sprintf("only %s can be pinned", units.Bytes(left)),
		Evidence: []string{source},
		Cost:     "pinned memory cannot be reclaimed: beyond that the kernel ends a process of the container or the host",
		Remedy:   "free memory, or raise the container's limit (docker run --memory, resources.limits.memory in Kubernetes, --mem of Slurm)",
	}
	if limit, limited := f.Host.Cgroup.MemoryLimit.Finite(); limited && source == f.limitFile() {
		used, _ := f.Host.Cgroup.MemoryUsed.Finite()
		out.Evidence = []string{fmt.Sprintf("%s is %s, %s are used, of them %s page cache", source, units.Bytes(limit), units.Bytes(used), units.Bytes(f.Host.Cgroup.FileCache))}
	}
	return finding(out)
}

func memoryHigh(f *Facts) []Finding {
	if f.Host == nil || f.Host.Cgroup.LimitFile != "memory.high" {
		return nil
	}
	g := f.Host.Cgroup
	limit, limited := g.MemoryLimit.Finite()
	used, known := g.MemoryUsed.Finite()
	if !limited || !known || limit == 0 || used-g.FileCache < limit/10*9 {
		return nil
	}
	return finding(Finding{
		Summary:  "the container is at memory.high, beyond which the kernel slows it down",
		Evidence: []string{fmt.Sprintf("%s is %s, and %s that cannot be reclaimed are used", f.limitFile(), units.Bytes(limit), units.Bytes(used-g.FileCache))},
		Cause:    "pinned memory cannot be reclaimed, so that the kernel makes every allocation wait in vain",
		Cost:     "all programs of the container crawl, and none is ended",
		Remedy:   "raise memory.high, or set it to max and leave the limit to memory.max (systemd: MemoryHigh=infinity)",
	})
}

func hugetlbUnused(f *Facts) []Finding {
	if f.Host == nil {
		return nil
	}
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
		Summary:  fmt.Sprintf("%s are reserved as huge pages, and unused", units.Bytes(free)),
		Evidence: []string{"/proc/meminfo HugePages_Free, /sys/devices/system/node/node*/hugepages", fmt.Sprintf("%s of %s are available to other programs", units.Bytes(m.Available), units.Bytes(m.Total))},
		Cause:    "hugepages= on the kernel's command line, or vm.nr_hugepages",
		Cost:     "other programs cannot use that memory, and those that size pinned pools by MemTotal are ended for want of it",
		Remedy:   "sudo sysctl vm.nr_hugepages=0, or use them (hostmem.Options.HugeTLB, mmap with MAP_HUGETLB)",
	})
}

func strictOvercommit(f *Facts) []Finding {
	if f.Host == nil || f.Host.Memory.Overcommit == nil || *f.Host.Memory.Overcommit != 2 {
		return nil
	}
	limit, limited := f.Host.Memory.CommitLimit.Finite()
	committed, known := f.Host.Memory.Committed.Finite()
	if !limited || !known || limit-committed >= max(2<<30, limit/10) {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("programs may ask for %s more only", units.Bytes(max(0, limit-committed))),
		Evidence: []string{fmt.Sprintf("vm.overcommit_memory is 2; /proc/meminfo: CommitLimit %s, Committed_AS %s", units.Bytes(limit), units.Bytes(committed))},
		Cause:    "with strict accounting the kernel counts what programs reserve, and CUDA reserves far more address space than it uses",
		Cost:     "allocations fail with out of memory while memory is free",
		Remedy:   "sudo sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio",
	})
}

func swapping(f *Facts) []Finding {
	if f.Host == nil {
		return nil
	}
	m := f.Host.Memory
	free, ok := m.SwapFree.Finite()
	if !ok || m.Swap == 0 || free > m.Swap/2 || m.Available > m.Total/10 || m.Available == 0 {
		return nil
	}
	return finding(Finding{
		Summary:  "the host is short of memory and swaps",
		Evidence: []string{fmt.Sprintf("%s of %s swap are used, %s of %s memory are available", units.Bytes(m.Swap-free), units.Bytes(m.Swap), units.Bytes(m.Available), units.Bytes(m.Total))},
		Cause:    "pinned memory cannot be swapped out, so that all others have to go",
		Cost:     "programs wait for the disk, and pinning waits for pages to be written out",
		Remedy:   "end what is not needed, or pin less",
	})
}

func cgroupBelowHost(f *Facts) []Finding {
	if f.Host == nil {
		return nil
	}
	left, limited := f.Host.Cgroup.Headroom.Finite()
	if !limited || f.Host.Memory.Available == 0 || left >= f.Host.Memory.Available/2 {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("this container may use %s more, and /proc/meminfo shows %s as available", units.Bytes(left), units.Bytes(f.Host.Memory.Available)),
		Evidence: []string{f.limitFile(), "/proc/meminfo is the host's, also in a container"},
		Cost:     "programs that size their pinned memory by the host's are ended by the kernel, without a message",
		Remedy:   "give such programs a fixed size, below the container's limit",
	})
}

// plentyOfMemlock is enough for the queues of RDMA, though not for its buffers.
const plentyOfMemlock = 1 << 30

func memlockRDMA(f *Facts) []Finding {
	if f.Host == nil || f.Host.InfiniBand == 0 {
		return nil
	}
	limit, finite := f.Host.MemLock.Finite()
	if !finite || limit >= plentyOfMemlock {
		return nil
	}
	return finding(Finding{
		Summary:  fmt.Sprintf("RLIMIT_MEMLOCK is %s: it does not limit CUDA, but RDMA", units.Bytes(limit)),
		Evidence: []string{"/proc/self/limits Max locked memory", units.Things(f.Host.InfiniBand, "RDMA device", "RDMA devices") + " in /sys/class/infiniband"},
		Cost:     "registering buffers with ibv_reg_mr and mlock fail beyond it",
		Remedy:   "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or docker run --ulimit memlock=-1",
	})
}
