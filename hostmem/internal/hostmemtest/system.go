//go:build linux && !android && (amd64 || arm64)

package hostmemtest

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// A System is this host with a count of the bytes that are mapped. Tests may replace
// its calls.
type System struct {
	*pages.System
	Mapped atomic.Int64
}

// NewSystem reads this host.
func NewSystem() *System {
	s := &System{System: pages.NewSystem(os.DirFS("/"))}
	real := s.Calls
	s.Calls.Map = func(n, hugetlb int) (unsafe.Pointer, error) {
		p, err := real.Map(n, hugetlb)
		if err == nil {
			s.Mapped.Add(int64(n))
		}
		return p, err
	}
	s.Calls.MapFile = func(f *os.File, off int64, n int, write bool) (unsafe.Pointer, error) {
		p, err := real.MapFile(f, off, n, write)
		if err == nil {
			s.Mapped.Add(int64(n))
		}
		return p, err
	}
	s.Calls.Unmap = func(p unsafe.Pointer, n int) error {
		err := real.Unmap(p, n)
		if err == nil {
			s.Mapped.Add(-int64(n))
		}
		return err
	}
	return s
}

// Context returns the test's context with this host, with which hostmem maps memory.
func (s *System) Context(tb testing.TB) context.Context { return s.With(tb.Context()) }

// Unpopulated lets pages become resident when they are touched: for tests that map
// much and touch little.
func (s *System) Unpopulated() {
	advise := s.Calls.Advise
	s.Calls.Advise = func(p unsafe.Pointer, n int, a pages.Advice) error {
		if a == pages.AdvisePopulate {
			return nil
		}
		return advise(p, n, a)
	}
}

// Plenty makes the pool of hugetlb pages one of plenty, of ordinary memory that is aligned
// as such pages are: there is none where tests run.
func (s *System) Plenty() {
	plain, unmap := s.Calls.Map, s.Calls.Unmap
	s.Calls.Map = func(n, hugetlb int) (unsafe.Pointer, error) {
		if hugetlb == 0 {
			return plain(n, 0)
		}
		p, err := plain(n+hugetlb, 0)
		if err != nil {
			return nil, err
		}
		skip := int(-uintptr(p) & uintptr(hugetlb-1))
		if skip > 0 {
			err = unmap(p, skip)
		}
		return unsafe.Add(p, skip), errors.Join(err, unmap(unsafe.Add(p, skip+n), hugetlb-skip))
	}
}

// Emulated reports whether an emulator takes system calls without doing what they
// say, so that the kernel's figures are not about this process.
func Emulated(tb testing.TB) bool {
	tb.Helper()
	n := 4 * os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(tb, err)
	defer func() { assert.NoError(tb, unix.Munmap(mem)) }()
	require.NoError(tb, unix.Madvise(mem, unix.MADV_DONTDUMP))
	for i := 0; i < n/2; i += os.Getpagesize() {
		mem[i] = 1
	}
	u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(unsafe.Pointer(unsafe.SliceData(mem))), n)
	require.NoError(tb, err)
	return u.Rss != n/2 || !u.HasFlag("dd")
}
