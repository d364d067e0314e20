//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"errors"
	"os"
	"testing"
	"testing/fstest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/linux"
)

// The calls themselves, on this host's nodes.
func TestBindingToARealNode(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	if len(sys.Nodes) == 0 {
		sys.Nodes = []int{0}
	}
	r := mustMap(t, 5*mib, Options{System: sys})
	err := sys.Calls.Bind(r.base, r.mapped, sys.Nodes[len(sys.Nodes)-1])
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skipf("mbind is not to be had here: %v", err)
	}
	require.NoError(t, err)
	require.NoError(t, touch(r.base, 2*mib, sys.Page))
	at, err := r.where(100)
	require.NoError(t, err)
	assert.Len(t, at, 1)
	found := at[sys.Nodes[len(sys.Nodes)-1]]
	assert.True(t, found >= 38 && found <= 42, "two of five MiB are resident, and %d of 100 samples", found)
	assert.ErrorIs(t, sys.Calls.Bind(r.base, r.mapped, 1000), unix.EINVAL)
}

func TestPagesResideOnTheNode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		o     Options
		bind  error
		where func(nodes []int32) error
		bound int // -1: Bind not called
		notes []string
	}{
		{name: "not requested", bound: -1},
		{name: "as asked", o: Options{Node: 1, NodeSet: true}, bound: 1},
		{name: "no such node", o: Options{Node: 7, NodeSet: true}, bound: -1,
			notes: []string{"numa: node 7 has no memory (nodes [0 1] have), not bound"}},
		{name: "refused", o: Options{Node: 1, NodeSet: true}, bound: 1, bind: unix.EPERM,
			notes: []string{"numa: binding to node 1 failed (operation not permitted), pages come from any node"}},
		{name: "a full node", o: Options{Node: 1, NodeSet: true}, bound: 1,
			where: func(nodes []int32) error {
				for i := range nodes {
					nodes[i] = int32(i % 2)
				}
				nodes[1] = -int32(unix.ENOENT)
				return nil
			},
			notes: []string{"numa: pages reside on other nodes than 1 (of 64 examined, by node: map[0:32])"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			sys := twoNodes()
			bound := -1
			sys.Calls.Bind = func(_ unsafe.Pointer, n, node int) error {
				bound = node
				assert.Equal(t, 4*mib, n)
				return tc.bind
			}
			sys.Calls.Where = func(pages []unsafe.Pointer, nodes []int32) error {
				assert.Len(t, pages, samples)
				for i := range nodes {
					nodes[i] = 1
				}
				if tc.where != nil {
					return tc.where(nodes)
				}
				return nil
			}
			sys.Calls.Advise = func(unsafe.Pointer, int, Advice) error { return nil }
			tc.o.System, tc.o.NoHuge = sys, true
			r := mustPopulate(t, 4*mib, tc.o)
			assert.Equal(t, tc.bound, bound)
			assert.Equal(t, tc.notes, r.Notes())
			var notes []string // all of these are about the node
			for _, text := range r.Misplaced() {
				notes = append(notes, "numa: "+text)
			}
			assert.Equal(t, tc.notes, notes)
		})
	}
}

func TestOneNodeIsNothingToChoose(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	sys.Nodes = []int{0}
	sys.Calls.Bind = func(unsafe.Pointer, int, int) error {
		assert.Fail(t, "bound")
		return nil
	}
	r := mustPopulate(t, 4096, Options{System: sys, NodeSet: true})
	assert.Empty(t, r.Notes())
}

// Whether this host's pool has pages or not, the region is there and says what it got.
func TestHugetlbOrANote(t *testing.T) {
	sys := hostSystem()
	l := newLedger(sys)
	free := sys.freeHuge(2*mib, -1)
	r, err := mapPopulated(t.Context(), 3*mib+1, Options{System: sys, Hugetlb: []int{2 * mib}, Align: 8 * mib}, Populate{})
	require.NoError(t, err)
	assert.Zero(t, uintptr(r.base)%(8*mib))
	if r.plan.page == 2*mib {
		t.Logf("the pool had %d pages", free)
		assert.Equal(t, 4*mib, r.Mapped())
		assert.Empty(t, r.Notes())
		u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(r.base), r.Mapped())
		require.NoError(t, err)
		assert.Equal(t, 4*mib, u.Hugetlb)
	} else {
		t.Logf("fell back: %v", r.Notes())
		assert.Equal(t, 3*mib+4096, r.Mapped())
		require.NotEmpty(t, r.Notes())
		assert.Regexp(t, `^hugetlb: \d+ of 2 pages of 2 MiB free .*: other pages were taken$`, r.Notes()[0])
	}
	requireUsable(t, r, 3*mib+1)
	require.NoError(t, r.Unmap())
	l.requireKernelAgrees(t)
}

func TestHugetlbOnANodeWithoutFreePages(t *testing.T) {
	t.Parallel()
	sys := twoNodes()
	sys.files = fstest.MapFS{
		"sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages":   file("8\n"),
		"sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages": file("1\n"),
	}
	sys.Calls.Bind = func(unsafe.Pointer, int, int) error { return nil }
	r := mustMap(t, 4*mib, Options{System: sys, Hugetlb: []int{2 * mib}, NodeSet: true, Node: 1})
	assert.Equal(t, sys.Page, r.plan.page)
	assert.Equal(t, "hugetlb: 1 of 2 pages of 2 MiB free on node 1: other pages were taken", r.Notes()[0])
}
