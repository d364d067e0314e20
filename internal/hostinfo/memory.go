package hostinfo

import (
	"math"
	"strconv"
	"strings"
)

// Memory is the host's memory, whatever a control group leaves of it.
type Memory struct {
	Total     int `json:"total_bytes,omitempty"`
	Available int `json:"available_bytes,omitempty"` // shows the host's, even in a container
	// HugePageSize is the default size of a hugetlb page.
	HugePageSize int   `json:"hugetlb_page_bytes,omitempty"`
	HugeTotal    Limit `json:"hugetlb_total_pages"`
	HugeFree     Limit `json:"hugetlb_free_pages"`
	THP          THP   `json:"transparent_huge_pages"`
	Overcommit   *int  `json:"overcommit_memory"` // vm.overcommit_memory: 0, 1 or 2
	Swap         int   `json:"swap_total_bytes,omitempty"`
}

// THP is how the kernel gives out transparent huge pages.
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
	Distances []int      `json:"distances,omitempty"` // to every node, 10 is itself
	Huge      []HugePool `json:"hugetlb,omitempty"`
}

// HugePool is a node's hugetlb pages of one size.
type HugePool struct {
	PageSize int `json:"page_bytes"`
	Total    int `json:"total_pages"`
	Free     int `json:"free_pages"`
}

func readMemory(f files) Memory {
	info := parseColons(f.text("proc/meminfo"))
	m := Memory{
		Total:        parseKiB(info["MemTotal"]),
		Available:    parseKiB(info["MemAvailable"]),
		Swap:         parseKiB(info["SwapTotal"]),
		HugePageSize: parseKiB(info["Hugepagesize"]),
		HugeTotal:    parseLimit(info["HugePages_Total"]),
		HugeFree:     parseLimit(info["HugePages_Free"]),
	}
	if n, ok := f.number("proc/sys/vm/overcommit_memory"); ok {
		m.Overcommit = &n
	}
	const dir = "sys/kernel/mm/transparent_hugepage/"
	m.THP = THP{
		Enabled: chosen(f.line(dir + "enabled")),
		Defrag:  chosen(f.line(dir + "defrag")),
		Shmem:   chosen(f.line(dir + "shmem_enabled")),
	}
	if n, ok := f.number(dir + "hpage_pmd_size"); ok && n > 0 {
		m.THP.PageSize = n
	}
	return m
}

// parseKiB reads "24682416 kB" as bytes, 0 for anything else.
func parseKiB(s string) int {
	number, ok := strings.CutSuffix(s, " kB")
	if !ok {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(number))
	if err != nil || n < 0 || n > math.MaxInt/1024 {
		return 0
	}
	return n * 1024
}

// chosen is the word in brackets of "always [madvise] never".
func chosen(s string) string {
	_, rest, ok := strings.Cut(s, "[")
	if !ok {
		return ""
	}
	word, _, ok := strings.Cut(rest, "]")
	if !ok {
		return ""
	}
	return word
}

func readNUMA(f files) []NUMANode {
	const dir = "sys/devices/system/node"
	var out []NUMANode
	for _, name := range f.names(dir) {
		id, ok := numbered(name, "node")
		if !ok {
			continue
		}
		base := dir + "/" + name
		n := NUMANode{ID: id, CPUs: f.line(base + "/cpulist")}
		n.Total, n.Free = parseNodeMemory(f.text(base + "/meminfo"))
		for d := range strings.FieldsSeq(f.line(base + "/distance")) {
			v, err := strconv.Atoi(d)
			if err != nil {
				n.Distances = nil
				break
			}
			n.Distances = append(n.Distances, v)
		}
		n.Huge = readHugePools(f, base+"/hugepages")
		out = append(out, n)
	}
	return out
}

// parseNodeMemory reads a node's meminfo: "Node 0 MemTotal: 24682416 kB".
func parseNodeMemory(text string) (total, free int) {
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch {
		case strings.HasSuffix(name, " MemTotal"):
			total = parseKiB(strings.TrimSpace(value))
		case strings.HasSuffix(name, " MemFree"):
			free = parseKiB(strings.TrimSpace(value))
		}
	}
	return total, free
}

// readHugePools reads hugepages-2048kB and its siblings. Sizes with no page
// reserved are left out.
func readHugePools(f files, dir string) []HugePool {
	var out []HugePool
	for _, name := range f.names(dir) {
		rest, ok := strings.CutPrefix(name, "hugepages-")
		if !ok {
			continue
		}
		kib, ok := strings.CutSuffix(rest, "kB")
		if !ok {
			continue
		}
		size := parseKiB(kib + " kB")
		total, ok := f.number(dir + "/" + name + "/nr_hugepages")
		if size == 0 || !ok || total <= 0 {
			continue
		}
		free, _ := f.number(dir + "/" + name + "/free_hugepages")
		out = append(out, HugePool{PageSize: size, Total: total, Free: free})
	}
	return out
}
