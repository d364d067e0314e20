//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"fmt"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// An operation is a way in which a region comes to be.
type operation struct {
	n        int
	o        Options
	populate Populate
}

// sweepOperations are such that each call is made.
func sweepOperations() map[string]operation {
	one := Populate{Threads: 1}
	return map[string]operation{
		"small":            {5000, Options{}, one},
		"small, aligned":   {5000, Options{Align: mib}, one},
		"huge pages":       {5*mib + 1, Options{}, one},
		"huge, unaligned":  {5*mib + 1, Options{Align: 4096}, one},
		"base pages":       {5*mib + 1, Options{NoHuge: true}, one},
		"several threads":  {17*mib + 1, Options{}, Populate{Threads: 3, Item: 2 * mib}},
		"hugetlb":          {3 * mib, Options{Hugetlb: []int{gib, 2 * mib}}, one},
		"on a node":        {3 * mib, Options{NodeSet: true}, one},
		"aligned to a GiB": {3*mib + 1, Options{Align: gib}, one},
	}
}

// Every call fails at every position with every errno that may be seen there.
// Either the region works in full or nothing is left.
func TestEveryCallFailsAtEveryPosition(t *testing.T) {
	errnos := []unix.Errno{unix.ENOMEM, unix.EAGAIN, unix.EINVAL, unix.EPERM, unix.ENOSYS, unix.EFAULT}
	if !soak() {
		errnos = errnos[:1] // the others make no difference to our side
	}
	var faults, failed, survived atomic.Int32
	for name, op := range sweepOperations() {
		for _, errno := range errnos {
			t.Run(fmt.Sprintf("%s/%s", name, unix.ErrnoName(errno)), func(t *testing.T) {
				for nth := int32(1); ; nth++ {
					sys := twoNodes()
					l := newLedger(sys)
					var calls atomic.Int32
					var fault string
					sys.Calls = sys.Calls.Before(func(call string) error {
						if calls.Add(1) == nth {
							fault = call
							return errno
						}
						return nil
					})
					op.o.System = sys
					r, err := mapPopulated(t.Context(), op.n, op.o, op.populate)
					if err == nil {
						survived.Add(1)
						requireUsable(t, r, op.n)
						// The fault may only now be met, by Unmap.
						if err = r.Unmap(); err != nil {
							require.NoError(t, r.Unmap())
						}
					} else {
						failed.Add(1)
						require.ErrorIs(t, err, errno, "call %d, %s", nth, fault)
						require.NotContains(t, err.Error(), "pages: ", "the package that was called puts its own name before it")
					}
					l.requireKernelAgrees(t)
					if fault == "" {
						return // more positions than calls
					}
					faults.Add(1)

					// The next try works.
					op.o.System = hostSystem()
					r, err = mapPopulated(t.Context(), op.n, op.o, op.populate)
					require.NoError(t, err)
					require.NoError(t, r.Unmap())
				}
			})
		}
	}
	t.Logf("%d faults: %d failed Map, %d left a region that works", faults.Load(), failed.Load(), survived.Load())
	assert.Greater(t, faults.Load(), int32(40*len(errnos)))
}

// A kind of call that never works: what is not essential is a note.
func TestACallThatNeverWorks(t *testing.T) {
	for _, tc := range []struct {
		call  string
		fatal bool
		note  string
	}{
		{"Map", true, ""},
		{"Map hugetlb", false, "hugetlb: 0 of 2 pages of 2 MiB free (map 3145729 bytes aligned to 2097152: function not implemented): other pages were taken"},
		{"Advise huge", false, "madvise huge failed (function not implemented): 4 KiB pages, slower to pin"},
		{"Advise dontfork", false, "madvise dontfork failed (function not implemented): forks of this process are slow while the region is pinned"},
		{"Advise dontdump", false, "madvise dontdump failed (function not implemented): core dumps hold the region"},
		{"Advise populate", false, ""},
		{"Name", false, ""},
		{"Bind", false, "numa: binding to node 1 failed (function not implemented), pages come from any node"},
		{"Where", false, "numa: the nodes of the pages are unknown: node of 64 pages: function not implemented"},
	} {
		t.Run(tc.call, func(t *testing.T) {
			sys := twoNodes()
			sys.THP, sys.HugePage = "madvise", 2*mib
			sys.Calls = sys.Calls.Before(func(call string) error {
				if call == tc.call {
					return unix.ENOSYS
				}
				return nil
			})
			if tc.call != "Bind" {
				sys.Calls.Bind = func(unsafe.Pointer, int, int) error { return nil }
			}
			l := newLedger(sys)
			o := Options{System: sys, NodeSet: true, Node: 1}
			if tc.call == "Map hugetlb" {
				sys.Nodes = []int{0}
				o.Hugetlb = []int{2 * mib}
			}
			r, err := mapPopulated(t.Context(), 3*mib+1, o, Populate{})
			if tc.fatal {
				require.ErrorIs(t, err, unix.ENOSYS)
				l.requireKernelAgrees(t)
				return
			}
			require.NoError(t, err)
			requireUsable(t, r, 3*mib+1)
			if tc.note != "" {
				assert.Contains(t, r.Notes(), tc.note)
			}
			require.NoError(t, r.Unmap())
			l.requireKernelAgrees(t)
		})
	}
}

// Rolling back can fail too: then the error says what stays mapped.
func TestErrorsNameMemoryThatStaysMapped(t *testing.T) {
	sys := hostSystem()
	l := newLedger(sys)
	refuse := true
	var left unsafe.Pointer
	real := sys.Calls.Map
	sys.Calls.Map = func(n, hugetlb int) (unsafe.Pointer, error) {
		p, err := real(n, hugetlb)
		left = p
		return p, err
	}
	sys.Calls = sys.Calls.Before(func(call string) error {
		if refuse && call == "Unmap" {
			return unix.ENOMEM
		}
		return nil
	})
	_, err := Map(t.Context(), 4096, Options{System: sys, Align: mib})
	require.ErrorIs(t, err, unix.ENOMEM)
	assert.ErrorContains(t, err, "stay mapped")
	assert.Equal(t, mib, l.bytes())
	refuse = false
	require.NoError(t, sys.Calls.Unmap(left, mib))
	l.requireKernelAgrees(t)
}

func requireUsable(t *testing.T, r *Region, n int) {
	t.Helper()
	b := r.Bytes()
	require.Len(t, b, n)
	for i := 0; i < n; i += 4096 {
		b[i] = byte(i >> 12)
	}
	b[n-1] = 77
	for i := 0; i < n-1; i += 4096 {
		require.Equal(t, byte(i>>12), b[i])
	}
	require.Equal(t, byte(77), b[n-1])
}
