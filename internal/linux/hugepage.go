package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// TransparentHugePages are the kernel's settings for huge pages that it uses
// unasked, or on madvise.
type TransparentHugePages struct {
	Enabled  string // always, madvise or never
	Defrag   string // always, defer, defer+madvise, madvise or never; empty where the kernel does not report it
	Shmem    string // the same for shared memory; empty before Linux 4.8
	PageSize int    // 2 MiB on most hosts; 0 before Linux 4.10
}

const thpDir = "sys/kernel/mm/transparent_hugepage"

// ReadTransparentHugePages reads /sys/kernel/mm/transparent_hugepage. Where the
// kernel has no transparent huge pages the error wraps fs.ErrNotExist.
func ReadTransparentHugePages(fsys fs.FS) (TransparentHugePages, error) {
	enabled, err := read(fsys, thpDir+"/enabled", ParseChoice)
	if err != nil {
		return TransparentHugePages{}, err
	}
	defrag, errDefrag := optional(fsys, thpDir+"/defrag", ParseChoice)
	shmem, errShmem := optional(fsys, thpDir+"/shmem_enabled", ParseChoice)
	size, errSize := optional(fsys, thpDir+"/hpage_pmd_size", parsePageSize)
	if err := errors.Join(errDefrag, errShmem, errSize); err != nil {
		return TransparentHugePages{}, err
	}
	return TransparentHugePages{Enabled: enabled, Defrag: defrag, Shmem: shmem, PageSize: size}, nil
}

func parsePageSize(text string) (int, error) {
	n, err := parseInt(text)
	if err != nil || n <= 0 || n&(n-1) != 0 {
		return 0, &SyntaxError{Line: 1, Text: strings.TrimSpace(text), Want: "a page size"}
	}
	return n, nil
}

// A HugetlbPool is the reserve of huge pages of one size, on the host or on a NUMA
// node.
type HugetlbPool struct {
	PageSize int // bytes
	Total    int // pages
	Free     int // pages that no mapping has
	// Reserved is the number of free pages that are promised to mappings already. The
	// kernel counts them for the host only, they are 0 for a node.
	Reserved int
}

// Available returns the pages that a new mapping can have.
func (p HugetlbPool) Available() int { return max(0, p.Free-p.Reserved) }

// ReadHugetlbPool reads the host's pool of pages of this size in bytes. Where the
// host supports no such pages the error wraps fs.ErrNotExist.
func ReadHugetlbPool(fsys fs.FS, pageSize int) (HugetlbPool, error) {
	return readHugetlbPool(fsys, "sys/kernel/mm/hugepages", pageSize)
}

// HugetlbPool reads the node's pool of pages of this size in bytes. Where the host
// supports no such pages the error wraps fs.ErrNotExist.
func (n NUMANode) HugetlbPool(fsys fs.FS, pageSize int) (HugetlbPool, error) {
	return readHugetlbPool(fsys, n.file("hugepages"), pageSize)
}

func readHugetlbPool(fsys fs.FS, dir string, pageSize int) (HugetlbPool, error) {
	dir = path.Join(dir, fmt.Sprintf("hugepages-%dkB", pageSize>>10))
	total, errTotal := ReadInt(fsys, dir+"/nr_hugepages")
	free, errFree := ReadInt(fsys, dir+"/free_hugepages")
	reserved, errReserved := optional(fsys, dir+"/resv_hugepages", parseInt)
	if err := errors.Join(errTotal, errFree, errReserved); err != nil {
		return HugetlbPool{}, err
	}
	return HugetlbPool{PageSize: pageSize, Total: total, Free: free, Reserved: reserved}, nil
}

// HugetlbSizes lists the page sizes, in bytes and ascending, of which the node can
// have a pool.
func (n NUMANode) HugetlbSizes(fsys fs.FS) ([]int, error) {
	dir := n.file("hugepages")
	entries, err := fs.ReadDir(fsys, dir)
	if err != nil {
		return nil, inFile(dir, err)
	}
	var sizes []int
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), "hugepages-")
		digits, isSize := strings.CutSuffix(rest, "kB")
		if kib, err := strconv.ParseUint(digits, 10, 31); ok && isSize && err == nil {
			sizes = append(sizes, int(kib)<<10)
		}
	}
	slices.Sort(sizes)
	return sizes, nil
}
