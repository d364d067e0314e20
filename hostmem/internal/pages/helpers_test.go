//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/fstest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// soak reports whether sweeps run in full.
func soak() bool { return os.Getenv("PINNED_SOAK") != "" }

// ledger stands between a System and its calls and knows what is mapped.
type ledger struct {
	mu     sync.Mutex
	mapped map[uintptr]int // bytes by address, trimmed as the kernel does it
	ever   []span          // all that Map returned
}

type span struct {
	base uintptr
	n    int
}

// newLedger puts a ledger under s's calls.
func newLedger(s *System) *ledger {
	l := &ledger{mapped: make(map[uintptr]int)}
	real := s.Calls
	s.Calls.Map = func(n, hugetlb int) (unsafe.Pointer, error) {
		p, err := real.Map(n, hugetlb)
		if err == nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.mapped[uintptr(p)] = n
			l.ever = append(l.ever, span{uintptr(p), n})
		}
		return p, err
	}
	s.Calls.Unmap = func(p unsafe.Pointer, n int) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		err := real.Unmap(p, n)
		if err == nil {
			l.remove(uintptr(p), n)
		}
		return err
	}
	return l
}

func (l *ledger) remove(from uintptr, n int) {
	to := from + uintptr(n)
	for base, size := range l.mapped {
		end := base + uintptr(size)
		if base >= to || end <= from {
			continue
		}
		delete(l.mapped, base)
		if base < from {
			l.mapped[base] = int(from - base)
		}
		if end > to {
			l.mapped[to] = int(end - to)
		}
	}
}

func (l *ledger) bytes() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, size := range l.mapped {
		n += size
	}
	return n
}

func (l *ledger) requireNothingLeft(t *testing.T) {
	t.Helper()
	require.Zero(t, l.bytes(), "bytes still mapped")
}

// requireKernelAgrees reads /proc/self/smaps too. Only for tests that do not run
// in parallel, for others may have been given the same addresses since. So may the
// Go runtime, but its memory is not kept out of core dumps.
func (l *ledger) requireKernelAgrees(t *testing.T) {
	t.Helper()
	l.requireNothingLeft(t)
	for _, s := range l.ever {
		u, err := linux.ReadSMaps(os.DirFS("/"), s.base, s.n)
		require.NoError(t, err)
		require.False(t, u.HasFlag("dd"), "%#x is still mapped: %+v", s.base, u)
	}
	l.ever = nil
}

func hostSystem() *System { return NewSystem(os.DirFS("/")) }

// twoNodes is this host, said to have NUMA nodes 0 and 1.
func twoNodes() *System {
	s := hostSystem()
	s.Nodes = []int{0, 1}
	s.files = fstest.MapFS{}
	return s
}

// requireAccount skips where the kernel's account is not about this process: user-mode
// emulation takes advice without following it, and reports other memory.
func requireAccount(t testing.TB) {
	t.Helper()
	if emulated(t) {
		t.Skip("/proc/self/smaps and madvise are not about this process here (user-mode emulation?)")
	}
}

func emulated(t testing.TB) bool {
	t.Helper()
	const n = 64 << 10
	calls := realCalls()
	p, err := calls.Map(n, 0)
	require.NoError(t, err)
	defer func() { assert.NoError(t, calls.Unmap(p, n)) }()
	require.NoError(t, calls.Advise(p, n, AdviseDontDump))
	require.NoError(t, touch(p, n/2, 4096))
	u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(p), n)
	require.NoError(t, err)
	return u.Rss != n/2 || !u.HasFlag("dd")
}

// mapPopulated maps a region and makes it resident, or leaves nothing mapped.
func mapPopulated(ctx context.Context, n int, o Options, p Populate) (*Region, error) {
	r, err := Map(ctx, n, o)
	if err != nil {
		return nil, err
	}
	if err := r.Populate(ctx, p); err != nil {
		return nil, errors.Join(err, r.Unmap())
	}
	return r, nil
}

func mustPopulate(t testing.TB, n int, o Options) *Region {
	t.Helper()
	r := mustMap(t, n, o)
	require.NoError(t, r.Populate(t.Context(), Populate{}))
	return r
}

func mustMap(t testing.TB, n int, o Options) *Region {
	t.Helper()
	r, err := Map(t.Context(), n, o)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, r.Unmap()) })
	return r
}
