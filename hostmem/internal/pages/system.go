package pages

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
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
	// Kernel is the release, "6.18.44" for instance, empty where unknown.
	Kernel string
	// Nodes are the NUMA nodes that have memory, ascending.
	Nodes []int
	// Calls are the system calls.
	Calls Calls

	files fs.FS
}

const (
	thpFolder  = "sys/kernel/mm/transparent_hugepage"
	nodeFolder = "sys/devices/system/node"
)

// NewSystem reads a host's /sys below files, which is os.DirFS("/") outside
// tests. What is not there leaves its field empty.
func NewSystem(files fs.FS) *System {
	s := &System{
		Page:   os.Getpagesize(),
		THP:    chosen(readFile(files, thpFolder+"/enabled")),
		Defrag: chosen(readFile(files, thpFolder+"/defrag")),
		Kernel: strings.TrimSpace(readFile(files, "proc/sys/kernel/osrelease")),
		Nodes:  readNodes(files),
		Calls:  realCalls(),
		files:  files,
	}
	if s.THP == "" {
		return s
	}
	s.HugePage = 2 << 20
	if n, err := strconv.Atoi(strings.TrimSpace(readFile(files, thpFolder+"/hpage_pmd_size"))); err == nil && isPower(n) && n >= s.Page {
		s.HugePage = n
	}
	return s
}

// chosen takes the word in brackets out of "always [madvise] never".
func chosen(line string) string {
	_, rest, _ := strings.Cut(line, "[")
	word, _, ok := strings.Cut(rest, "]")
	if !ok {
		return ""
	}
	return word
}

// freeHuge counts the free pages of a hugetlb pool: on one node, or, with a
// negative node, on the host less those promised to mappings already.
func (s *System) freeHuge(size, node int) int {
	pool := fmt.Sprintf("hugepages/hugepages-%dkB", size>>10)
	if node >= 0 {
		return s.number(path.Join(nodeFolder, fmt.Sprintf("node%d", node), pool, "free_hugepages"))
	}
	pool = path.Join("sys/kernel/mm", pool)
	return max(0, s.number(pool+"/free_hugepages")-s.number(pool+"/resv_hugepages"))
}

func (s *System) number(name string) int {
	n, err := strconv.Atoi(strings.TrimSpace(readFile(s.files, name)))
	if err != nil {
		return 0
	}
	return n
}

func readFile(files fs.FS, name string) string {
	b, err := fs.ReadFile(files, name)
	if err != nil {
		return ""
	}
	return string(b)
}

func isPower(n int) bool { return n > 0 && n&(n-1) == 0 }
