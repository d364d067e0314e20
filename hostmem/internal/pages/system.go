package pages

import (
	"io/fs"
	"os"

	"github.com/gopinned/pinned/internal/linux"
)

// System is the host as far as mapping needs it: facts read once by NewSystem,
// and the calls to make. It is not changed afterwards and serves any number of
// goroutines.
type System struct {
	// Page is the size of a base page in bytes.
	Page int
	// HugePage is the size of a transparent huge page, 0 where there are none.
	HugePage int
	// THP and Defrag are the modes in use, "madvise" for instance, and empty
	// where the kernel has no transparent huge pages.
	THP, Defrag string
	// Kernel is the release, the zero Release where unknown.
	Kernel linux.Release
	// Nodes are the NUMA nodes that have memory, ascending.
	Nodes []int
	// Calls are the system calls.
	Calls Calls

	files fs.FS
}

// NewSystem reads a host's /sys below files, which is os.DirFS("/") outside
// tests. What is not there leaves its field empty.
func NewSystem(files fs.FS) *System {
	// What cannot be read is unknown, and its zero value the answer.
	thp, err := linux.ReadTransparentHugePages(files)
	kernel, _ := linux.ReadRelease(files)
	nodes, _ := linux.ReadMemoryNodes(files)
	s := &System{
		Page:   os.Getpagesize(),
		THP:    thp.Enabled,
		Defrag: thp.Defrag,
		Kernel: kernel,
		Calls:  realCalls(),
		files:  files,
	}
	for _, node := range nodes {
		s.Nodes = append(s.Nodes, int(node))
	}
	switch {
	case err != nil:
	case thp.PageSize < s.Page: // Linux before 4.10 does not say
		s.HugePage = 2 << 20
	default:
		s.HugePage = thp.PageSize
	}
	return s
}

// freeHuge counts the free pages of a hugetlb pool: on one node, or, with a
// negative node, on the host less those promised to mappings already. It is 0
// where there is no such pool.
func (s *System) freeHuge(size, node int) int {
	if node >= 0 {
		pool, _ := linux.NUMANode(node).HugetlbPool(s.files, size)
		return pool.Available()
	}
	pool, _ := linux.ReadHugetlbPool(s.files, size)
	return pool.Available()
}
