package hostinfo

import "github.com/gopinned/pinned/internal/linux"

// Memory is the host's memory (/proc/meminfo), without regard to control groups.
type Memory struct {
	Total     int `json:"total_bytes,omitempty"`
	Available int `json:"available_bytes,omitempty"` // of the host, also in a container
	// HugePageSize is the default size of a hugetlb page.
	HugePageSize int   `json:"hugetlb_page_bytes,omitempty"`
	HugeTotal    Limit `json:"hugetlb_total_pages"`
	HugeFree     Limit `json:"hugetlb_free_pages"`
	THP          THP   `json:"transparent_huge_pages"`
	Overcommit   *int  `json:"overcommit_memory"` // vm.overcommit_memory: 0, 1 or 2
	Swap         int   `json:"swap_total_bytes,omitempty"`
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
		Total:        info["MemTotal"],
		Available:    info["MemAvailable"],
		Swap:         info["SwapTotal"],
		HugePageSize: info["Hugepagesize"],
		HugeTotal:    pagesOf(info, "HugePages_Total"),
		HugeFree:     pagesOf(info, "HugePages_Free"),
		THP:          THP{Enabled: thp.Enabled, Defrag: thp.Defrag, Shmem: thp.Shmem, PageSize: thp.PageSize},
	}
	if n, err := linux.ReadInt(f.fsys, "proc/sys/vm/overcommit_memory"); err == nil {
		m.Overcommit = &n
	}
	return m
}

// pagesOf returns a number of pages in meminfo. 0 is a number, absent is unknown.
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
