package hostinfo

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Memory is the host's memory (/proc/meminfo), without regard to control groups.
type Memory struct {
	Total     int `json:"total_bytes,omitempty"`
	Available int `json:"available_bytes,omitempty"` // of the host, also in a container
	HugePages
	Overcommit *int  `json:"overcommit_memory"` // vm.overcommit_memory: 0, 1 or 2
	Swap       int   `json:"swap_total_bytes,omitempty"`
	SwapFree   Limit `json:"swap_free_bytes,omitzero"`
	// CommitLimit and Committed bind allocations where Overcommit is 2.
	CommitLimit Limit `json:"commit_limit_bytes,omitzero"`
	Committed   Limit `json:"committed_bytes,omitzero"`
	// Unowned is memory that is neither free nor counted for any use: drivers have
	// some, and memory that was leaked is here.
	Unowned Limit `json:"unowned_bytes,omitzero"`
	// ZFSCache is the cache of ZFS (ARC), of which ZFSFree is given back under pressure: MemAvailable
	// counts neither.
	ZFSCache int `json:"zfs_cache_bytes,omitempty"`
	ZFSFree  int `json:"zfs_reclaimable_bytes,omitempty"`
	Placed
	// MaxMappings is vm.max_map_count: the mappings that a process may have.
	MaxMappings Limit `json:"max_map_count,omitzero"`
	// Free is how fragmented the free memory is; empty if the kernel does not show it.
	Free []FreeZone `json:"free_zones,omitempty"`
	// Stalls are counts since boot (/proc/vmstat); nil if the kernel does not show them.
	Stalls *Stalls `json:"stalls,omitempty"`
}

// HugePages are pages of hugetlb, whose default size HugePageSize is, and the setting of transparent ones.
type HugePages struct {
	HugePageSize int   `json:"hugetlb_page_bytes,omitempty"`
	HugeTotal    Limit `json:"hugetlb_total_pages"`
	HugeFree     Limit `json:"hugetlb_free_pages"`
	THP          THP   `json:"transparent_huge_pages"`
}

// Placed is memory that is kept for one use. Pages cannot be pinned where they are movable or of CMA: the kernel moves
// them elsewhere first, and fails if there is no room.
type Placed struct {
	Movable int `json:"movable_bytes,omitempty"` // of zones Movable
	CMA     int `json:"cma_bytes,omitempty"`     // of contiguous allocators, and scratch of kexec handover
	// Shared is memory of tmpfs and of shared mappings: pools in /dev/shm.
	Shared Limit `json:"shared_bytes,omitzero"`
	// Balloon is the driver by which the host of a virtual machine takes memory back; empty if none shows.
	Balloon string `json:"balloon_driver,omitempty"`
}

// balloons are directories that balloon drivers have something in while they drive a device.
var balloons = []struct{ dir, prefix, name string }{
	{"sys/bus/virtio/drivers/virtio_balloon", "virtio", "virtio_balloon"},
	{"sys/bus/vmbus/drivers/hv_balloon", "", "hv_balloon"},
	{"sys/module/vmw_balloon", "", "vmw_balloon"},
	{"sys/devices/system/xen_memory/xen_memory0", "", "xen_balloon"},
}

// readPlaced takes the size of a page from all managed pages, which are the memory.
func readPlaced(f files, info linux.Meminfo) (p Placed) {
	p.CMA, p.Shared = max(info["CmaTotal"], info["CmaFree"]), pagesOf(info, "Shmem")
	for _, b := range balloons {
		if p.Balloon == "" && slices.ContainsFunc(f.names(b.dir), func(name string) bool { return strings.HasPrefix(name, b.prefix) }) {
			p.Balloon = b.name
		}
	}
	all, movable := 0, 0
	zone := ""
	for line := range strings.Lines(f.text("proc/zoneinfo")) {
		fields := strings.Fields(line) // "Node 0, zone Normal", "managed 1234"
		switch {
		case len(fields) == 4 && fields[0] == "Node":
			zone = fields[3]
		case len(fields) == 2 && fields[0] == "managed":
			n, err := strconv.Atoi(fields[1])
			if err != nil || n < 0 || n > math.MaxInt>>13 {
				return p
			}
			if all += n; zone == "Movable" {
				movable += n
			}
		}
	}
	if all > 0 {
		p.Movable = int(float64(info["MemTotal"]) * float64(movable) / float64(all))
	}
	return p
}

// FreeZone is the free memory of a zone of a node, in pages.
type FreeZone struct {
	Node int    `json:"node"`
	Zone string `json:"zone"`
	// Pages are all free pages, and Huge those of them in contiguous blocks of at least
	// 512 pages: 2 MiB where a page has 4 KiB.
	Pages int `json:"free_pages"`
	Huge  int `json:"free_pages_in_huge_blocks"`
}

// hugeOrder is that of a huge page of 2 MiB in pages of 4 KiB.
const hugeOrder = 9

// Stalls count how often the kernel had to make room for huge pages.
type Stalls struct {
	Compact      int `json:"compact_stall"`      // a process waited for compaction
	CompactFail  int `json:"compact_fail"`       // and it was in vain
	HugeFaults   int `json:"thp_fault_alloc"`    // page faults that got a huge page
	HugeFallback int `json:"thp_fault_fallback"` // and that did not, for want of one
}

// THP is the kernel's configuration of transparent huge pages.
type THP struct {
	Enabled  string `json:"enabled,omitempty"` // always, madvise or never
	Defrag   string `json:"defrag,omitempty"`  // always, defer, defer+madvise, madvise or never
	Shmem    string `json:"shmem_enabled,omitempty"`
	PageSize int    `json:"page_bytes,omitempty"`
}

// NUMANode is one memory node.
type NUMANode struct {
	ID        int        `json:"id"`
	CPUs      string     `json:"cpus,omitempty"` // 0-31,64-95
	Total     int        `json:"total_bytes,omitempty"`
	Free      int        `json:"free_bytes,omitempty"`
	Distances []int      `json:"distances,omitempty"` // to every node; 10 is to itself
	Huge      []HugePool `json:"hugetlb,omitempty"`
}

// HugePool is a node's hugetlb pages of one size.
type HugePool struct {
	PageSize int `json:"page_bytes"`
	Total    int `json:"total_pages"`
	Free     int `json:"free_pages"`
}

func readMemory(f files) Memory {
	info, _ := linux.ReadMeminfo(f.fsys)
	thp, _ := linux.ReadTransparentHugePages(f.fsys)
	m := Memory{
		Total:     info["MemTotal"],
		Available: info["MemAvailable"],
		Swap:      info["SwapTotal"],
		HugePages: HugePages{
			HugePageSize: info["Hugepagesize"], HugeTotal: pagesOf(info, "HugePages_Total"), HugeFree: pagesOf(info, "HugePages_Free"),
			THP: THP{Enabled: thp.Enabled, Defrag: thp.Defrag, Shmem: thp.Shmem, PageSize: thp.PageSize},
		},
	}
	if n, err := linux.ReadInt(f.fsys, "proc/sys/vm/overcommit_memory"); err == nil {
		m.Overcommit = &n
	}
	m.SwapFree, m.CommitLimit, m.Committed = pagesOf(info, "SwapFree"), pagesOf(info, "CommitLimit"), pagesOf(info, "Committed_AS")
	m.ZFSCache, m.ZFSFree = readARC(f)
	m.Placed = readPlaced(f, info)
	m.Unowned = unowned(info, m.ZFSCache)
	if n, err := linux.ReadInt(f.fsys, "proc/sys/vm/max_map_count"); err == nil && n >= 0 {
		m.MaxMappings = limitOf(n)
	}
	zones, _ := linux.ReadBuddyinfo(f.fsys)
	for _, z := range zones {
		m.Free = append(m.Free, FreeZone{Node: int(z.Node), Zone: z.Zone, Pages: z.Pages(0), Huge: z.Pages(hugeOrder)})
	}
	if stat, err := linux.ReadVMStat(f.fsys); err == nil {
		m.Stalls = &Stalls{Compact: stat["compact_stall"], CompactFail: stat["compact_fail"],
			HugeFaults: stat["thp_fault_alloc"], HugeFallback: stat["thp_fault_fallback"]}
	}
	return m
}

// counted are the fields of meminfo that each name a use of memory, without those that are
// parts of others. Kernels that lack one have not that use.
var counted = []string{"MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "Slab", "KernelStack",
	"PageTables", "SecPageTables", "Percpu", "VmallocUsed", "Hugetlb", "Unaccepted", "Balloon"}

// readARC reads the size of the cache of ZFS, and what of it is above its minimum.
func readARC(f files) (size, above int) {
	least := 0
	for line := range strings.Lines(f.text("proc/spl/kstat/zfs/arcstats")) {
		fields := strings.Fields(line) // name type data
		if len(fields) != 3 {
			continue
		}
		n, err := strconv.Atoi(fields[2])
		switch {
		case err != nil || n < 0:
		case fields[0] == "size":
			size = n
		case fields[0] == "c_min":
			least = n
		}
	}
	return size, max(0, size-least)
}

// Usable returns what programs can have: MemAvailable, and caches that it does not count. 0 is
// unknown.
func (m Memory) Usable() int {
	if m.Available == 0 {
		return 0
	}
	return min(m.Available+m.ZFSFree, max(m.Total, m.Available))
}

// unowned returns the memory that no field of meminfo counts, and that is not cache either. Kernels
// before 5.0 do not say enough.
func unowned(info linux.Meminfo, cache int) Limit {
	for _, name := range []string{"MemTotal", "MemFree", "AnonPages", "Slab", "Percpu"} {
		if _, ok := info[name]; !ok {
			return Limit{}
		}
	}
	left := max(0, info["MemTotal"]-cache)
	for _, name := range counted {
		left -= min(left, info[name])
	}
	if _, ok := info["Hugetlb"]; !ok {
		left -= min(left, info["HugePages_Total"]*info["Hugepagesize"])
	}
	return limitOf(left)
}

// pagesOf returns a field of meminfo. 0 is a number, absent is unknown.
func pagesOf(info linux.Meminfo, name string) Limit {
	n, ok := info[name]
	if !ok {
		return Limit{}
	}
	return limitOf(n)
}

func readNUMA(f files) []NUMANode {
	nodes, _ := linux.ReadNUMANodes(f.fsys)
	var out []NUMANode
	for _, node := range nodes {
		cpus, _ := node.CPUs(f.fsys)
		info, _ := node.Meminfo(f.fsys)
		distances, _ := node.Distances(f.fsys)
		out = append(out, NUMANode{
			ID:        int(node),
			CPUs:      cpus.String(),
			Total:     info["MemTotal"],
			Free:      info["MemFree"],
			Distances: distances,
			Huge:      readHugePools(f, node),
		})
	}
	return out
}

// readHugePools returns a node's pools, without sizes of which no page is reserved.
func readHugePools(f files, node linux.NUMANode) []HugePool {
	sizes, _ := node.HugetlbSizes(f.fsys)
	var out []HugePool
	for _, size := range sizes {
		pool, err := node.HugetlbPool(f.fsys, size)
		if err != nil || pool.Total == 0 {
			continue
		}
		out = append(out, HugePool{PageSize: size, Total: pool.Total, Free: pool.Free})
	}
	return out
}
