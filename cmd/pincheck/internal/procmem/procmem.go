// Package procmem reads what the kernel reports about the host memory of a running
// process that uses CUDA: how much it pins, as far as that shows, and whether its
// allocator rounds up to powers of two.
//
// # What shows, and what does not
//
// Memory of cudaHostAlloc is a shared anonymous mapping, which /proc/PID/smaps lists as
// "/dev/zero (deleted)" and counts as shared memory. Shared memory of other software
// looks alike, so that in a process without the CUDA driver it is not counted.
// Memory of cudaHostRegister looks as it did before: the driver takes its pages by a
// reference, which no file of /proc counts (VmLck and VmPin stay 0). Memory of mlock is
// in VmLck, memory pinned for RDMA in VmPin.
package procmem

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"path"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Process is the host memory of a process. Sizes are in bytes.
type Process struct {
	PID    int    `json:"pid"`
	Name   string `json:"name"`
	Driver bool   `json:"cuda_driver"` // the CUDA driver is in use
	// Frameworks whose libraries are mapped, the most specific first.
	Frameworks []Framework `json:"frameworks"`
	// Environ has the variables that shape pinned memory, as the process was started.
	// It is nil if they could not be read.
	Environ map[string]string `json:"environ"`

	Resident      int `json:"resident_bytes"`
	HostAllocated int `json:"host_allocated_bytes"` // looks like cudaHostAlloc's
	Buffers       int `json:"buffers_bytes"`        // pinned by this module, by the name of the mapping
	Locked        int `json:"locked_bytes"`         // by mlock
	PinnedByKey   int `json:"pinned_vm_bytes"`      // VmPin: for RDMA
	Hugetlb       int `json:"hugetlb_bytes"`
	// Private is other anonymous memory in mappings of a MiB and more: what of it is
	// registered by cudaHostRegister does not show.
	Private int `json:"private_bytes"`
	// Blocks are the mappings of more than 2 MiB that allocators of pinned memory seem to
	// have made, the largest first.
	Blocks []Block `json:"blocks"`
}

// A Block is a mapping that seems to be one allocation of pinned memory.
type Block struct {
	Size     int  `json:"size_bytes"`
	Resident int  `json:"resident_bytes"`
	Rounded  bool `json:"power_of_two"` // the size is a power of two
}

// smallBlock is the size of what the driver allocates for small requests together. It is
// a power of two for no fault of the caller's.
const smallBlock = 2 << 20

// largePrivate is from where on anonymous mappings may be pinned buffers: smaller ones
// are stacks and heaps.
const largePrivate = 1 << 20

// The names of mappings of pinned memory: of this module's, and of cudaHostAlloc's where a CUDA driver is in use.
const (
	bufferMapping    = "[anon:pinned]"
	hostAllocMapping = "/dev/zero (deleted)"
)

// mallocHeader is the page that glibc's malloc maps beside large memory.
const mallocHeader = 4096

// variables are those that shape the pinned memory of a framework.
var variables = []string{"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "DS_PIN_MEMORY_BACKEND"}

// Read reads what the /proc below root reports about a process. Errors name the process
// and say what to do: one that does not exist or has ended (fs.ErrNotExist), one that may
// not be read (fs.ErrPermission), a thread of the kernel (errors.ErrUnsupported).
func Read(root fs.FS, pid int) (*Process, error) {
	p, err := readProcess(root, pid)
	if err != nil {
		return nil, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	return p, nil
}

func readProcess(root fs.FS, pid int) (*Process, error) {
	if pid <= 0 {
		return nil, errors.New("process ids are positive")
	}
	before, err := alive(root, pid)
	if err != nil {
		return nil, err
	}
	p := &Process{PID: pid, Name: before["Name"], Frameworks: []Framework{}, Blocks: []Block{}}
	var maps []mapped
	err = linux.ReadProcessSMaps(root, pid, func(m linux.Mapping, s linux.SMaps) { maps = append(maps, mapped{m, s}) })
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, errPermission(err)
	case err != nil && !ended(root, pid):
		return nil, err
	case ended(root, pid):
		return nil, fmt.Errorf("it ended while it was read: %w", fs.ErrNotExist)
	case len(maps) == 0:
		return nil, fmt.Errorf("it is a thread of the kernel, which has no memory of its own: %w", errors.ErrUnsupported)
	}
	p.Locked, _ = before.Size("VmLck")
	p.PinnedByKey, _ = before.Size("VmPin")
	p.readEnviron(root)
	p.count(maps)
	return p, nil
}

func errPermission(err error) error {
	return fmt.Errorf("%w (run as the user of the process, or as root; in a container with the capability SYS_PTRACE)", err)
}

// readEnviron takes the variables that shape pinned memory, if they can be read.
func (p *Process) readEnviron(root fs.FS) {
	environ, err := linux.ReadProcessEnviron(root, p.PID)
	if err != nil {
		return
	}
	p.Environ = map[string]string{}
	for _, entry := range environ {
		if name, value, _ := strings.Cut(entry, "="); slices.Contains(variables, name) {
			p.Environ[name] = value
		}
	}
}

// alive returns the status of a process that has not ended.
func alive(root fs.FS, pid int) (linux.ProcessStatus, error) {
	status, err := linux.ReadProcessStatus(root, pid)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := fs.Stat(root, "proc/self"); err != nil {
			return nil, fmt.Errorf("this system has no /proc: %w", errors.ErrUnsupported)
		}
		return nil, fmt.Errorf("there is no such process, or /proc hides it from this user: %w", fs.ErrNotExist)
	case err != nil:
		return nil, err
	case status.Ended():
		return nil, fmt.Errorf("it has ended, and its parent %s has not asked for its exit status yet: %w", status["PPid"], fs.ErrNotExist)
	}
	return status, nil
}

func ended(root fs.FS, pid int) bool {
	status, err := linux.ReadProcessStatus(root, pid)
	return err != nil || status.Ended()
}

// mapped is a mapping and its account.
type mapped struct {
	linux.Mapping
	account linux.SMaps
}

func (m mapped) size() int { return int(m.End - m.Start) }

func (m mapped) anonymous() bool { return !m.File && !m.Shared && !strings.HasPrefix(m.Name, "[") }

// count adds up the mappings.
func (p *Process) count(maps []mapped) {
	for _, m := range maps {
		name := strings.TrimSuffix(m.Name, " (deleted)")
		if strings.HasPrefix(name, "/dev/nvidia") || strings.HasPrefix(path.Base(name), "libcuda.so") {
			p.Driver = true
		}
		for _, f := range frameworks {
			if f.maps(name) && !slices.ContainsFunc(p.Frameworks, func(g Framework) bool { return g.Name == f.Name }) {
				f.Set = f.set != nil && f.set(p)
				p.Frameworks = append(p.Frameworks, f.Framework)
			}
		}
	}
	slices.SortStableFunc(p.Frameworks, func(a, b Framework) int { return cmp.Compare(rank(a), rank(b)) })
	registers := strings.Contains(p.settings(), "pinned_use_cuda_host_register:True")
	for _, m := range maps {
		resident := m.account.Rss + m.account.Hugetlb
		p.Resident += resident
		p.Hugetlb += m.account.Hugetlb
		switch {
		case m.Name == bufferMapping:
			p.Buffers += resident
		case p.Driver && m.Shared && m.Name == hostAllocMapping:
			p.HostAllocated += resident
			if m.size() > smallBlock {
				p.Blocks = append(p.Blocks, Block{m.size(), resident, powerOfTwo(m.size())})
			}
		case m.anonymous() && m.size() >= largePrivate:
			p.Private += resident
			// PyTorch's memory of this setting is malloc's.
			if n := m.size() - mallocHeader; registers && n > smallBlock && powerOfTwo(n) {
				p.Blocks = append(p.Blocks, Block{n, resident, true})
			}
		}
	}
	slices.SortStableFunc(p.Blocks, func(a, b Block) int { return cmp.Compare(b.Size, a.Size) })
}

func powerOfTwo(n int) bool { return n > 0 && bits.OnesCount(uint(n)) == 1 }

// Pinned returns at least how much memory seems to be pinned, and at most.
func (p *Process) Pinned() (smallest, limit int) {
	smallest = p.HostAllocated + p.Buffers + max(p.Locked, p.PinnedByKey)
	limit = smallest
	if p.Driver {
		limit = min(smallest+p.Private, max(p.Resident, smallest))
	}
	return smallest, limit
}

// Rounded returns the bytes of the blocks whose size is a power of two, how many they
// are, and whether that looks like rounding. It is a guess: what was asked for does not
// show outside the process.
func (p *Process) Rounded() (bytes, blocks int, likely bool) {
	total := 0
	for _, b := range p.Blocks {
		total += b.Size
		if b.Rounded {
			bytes += b.Size
			blocks++
		}
	}
	// Programs ask for powers of two themselves, now and then.
	needed := 4
	if slices.ContainsFunc(p.Frameworks, func(f Framework) bool { return f.Rounds }) {
		needed = 1
	}
	return bytes, blocks, blocks >= needed && bytes >= total/10*9
}

// settings returns PyTorch's settings of its allocators.
func (p *Process) settings() string {
	return cmp.Or(p.Environ["PYTORCH_ALLOC_CONF"], p.Environ["PYTORCH_CUDA_ALLOC_CONF"])
}
