package pages

import (
	"context"
	"io/fs"
	"os"
	"sync"

	"github.com/gopinned/pinned/internal/linux"
)

// System has the facts about a host that mapping needs, which NewSystem has read once, and
// the system calls. It does not change, and serves any number of goroutines.
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

// Host returns this host, read once.
var Host = sync.OnceValue(func() *System { return NewSystem(os.DirFS("/")) })

type systemKey struct{}

// With returns a context for tests, with which hostmem maps memory by s and not by this
// host.
func (s *System) With(ctx context.Context) context.Context {
	return context.WithValue(ctx, systemKey{}, s)
}

// SystemOf returns the System that ctx has, or this host.
func SystemOf(ctx context.Context) *System {
	if s, ok := ctx.Value(systemKey{}).(*System); ok {
		return s
	}
	return Host()
}

// NewSystem reads a host's /sys below files, which is os.DirFS("/") outside
// tests. A file that is missing leaves its field empty.
func NewSystem(files fs.FS) *System {
	// What cannot be read is unknown, and stays the zero value.
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
	case thp.PageSize < s.Page: // Linux before 4.10 does not report it
		s.HugePage = 2 << 20
	default:
		s.HugePage = thp.PageSize
	}
	return s
}

// freeHuge returns the free pages of a hugetlb pool: on one node, or, with a
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
