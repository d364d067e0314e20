//go:build linux && !android && (amd64 || arm64)

package pages

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/internal/linux"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// The kernel's own account: a region keeps its bytes rounded up to a page, and is
// resident to the last of them.
func TestRegionsReserveTheirSizeRoundedUpToAPage(t *testing.T) {
	requireAccount(t)
	sys := hostSystem()
	type wanted struct {
		n, align int
		noHuge   bool
	}
	var list []wanted
	for _, n := range []int{1, 2, 4095, 4096, 4097, 64 * kib, 64*kib + 1, mib, 2*mib - 1, 2 * mib, 2*mib + 1, 3*mib + 5, 4 * mib, 16*mib + 4097, 64*mib + 1} {
		for i, align := range []int{0, 1, 4096, 64 * kib, 2 * mib, gib} {
			for _, noHuge := range []bool{false, true} {
				if i == 0 || n == 3*mib+5 || soak() {
					list = append(list, wanted{n, align, noHuge})
				}
			}
		}
	}
	if soak() {
		list = append(list, wanted{gib + 1, gib, false}, wanted{129*mib + 1, 0, true})
	}
	for _, w := range list {
		t.Run(fmt.Sprintf("%d aligned to %d base pages %t", w.n, w.align, w.noHuge), func(t *testing.T) {
			o := Options{System: sys, Align: w.align, NoHuge: w.noHuge}
			r := mustPopulate(t, w.n, o)
			kept := roundUp(w.n, sys.Page)
			assert.Len(t, r.Bytes(), w.n)
			assert.Equal(t, w.n, r.Len())
			assert.Equal(t, kept, r.Mapped())
			assert.Equal(t, sys.Page, r.plan.page)
			align := max(w.align, sys.Page)
			if w.align == 0 && !w.noHuge && sys.HugePage > 0 && w.n >= sys.HugePage {
				align = sys.HugePage
			}
			addr := uintptr(r.base)
			assert.Zero(t, addr%uintptr(align), "%#x is not aligned to %d", addr, align)

			u, err := linux.ReadSMaps(os.DirFS("/"), addr, kept)
			require.NoError(t, err)
			assert.Equal(t, addr, u.Start)
			assert.Equal(t, addr+uintptr(kept), u.End)
			assert.Equal(t, kept, u.Size)
			assert.Equal(t, kept, u.Rss, "resident")
			assert.Less(t, u.Rss-w.n, sys.Page, "kept beyond what was asked")
			assert.True(t, u.HasFlag("dc") && u.HasFlag("dd"), "flags %v: forks or core dumps would have it", u.Flags)
			if w.noHuge || w.n < 2*mib {
				assert.Zero(t, u.AnonHugePages, "a huge page where none should be")
			}

			// Advice goes to the whole mapping; what huge pages there are lie within.
			assert.Equal(t, u.HasFlag("hg"), !w.noHuge && sys.THP != "" && sys.THP != "never" && w.n >= sys.HugePage)
			r.Bytes()[0], r.Bytes()[w.n-1] = 1, 2

			require.NoError(t, r.Unmap())
			u, err = linux.ReadSMaps(os.DirFS("/"), addr, kept)
			require.NoError(t, err)
			assert.False(t, u.HasFlag("dd"), "still mapped after Unmap: %+v", u)
		})
	}
}

func TestHugePagesFillARegion(t *testing.T) {
	requireAccount(t)
	sys := hostSystem()
	if sys.THP == "never" || sys.THP == "" {
		t.Skip("transparent huge pages are switched off on this host")
	}
	n := 8*sys.HugePage + sys.Page + 1
	r := mustPopulate(t, n, Options{System: sys})
	u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(r.base), r.Mapped())
	require.NoError(t, err)
	assert.Equal(t, r.Mapped(), u.Rss)
	// A host short of memory in one piece says so.
	assert.True(t, u.AnonHugePages == 8*sys.HugePage || len(r.Notes()) > 0, "%d bytes of huge pages and no note: %+v", u.AnonHugePages, u)
}

func TestMapRefuses(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	for _, tc := range []struct {
		name string
		n    int
		o    Options
		want error
	}{
		{"nothing", 0, Options{}, errSize},
		{"less than nothing", -1, Options{}, errSize},
		{"more than there are addresses", 1<<63 - 1, Options{}, errSize},
		{"an alignment that is no power of two", 1, Options{Align: 3 * kib}, errAlign},
		{"a negative alignment", 1, Options{Align: -4096}, errAlign},
		{"an alignment beyond the addresses", 1, Options{Align: 1 << 62}, unix.ENOMEM},
		{"more than there is", 1 << 50, Options{}, unix.ENOMEM},
		{"hugetlb of nothing", 0, Options{Hugetlb: []int{2 * mib}}, errSize},
		{"not admitted", 1, Options{Admit: func(n int) error { return fmt.Errorf("map %d bytes: %w", 1, unix.EDQUOT) }}, unix.EDQUOT},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.o.System = sys
			_, err := Map(t.Context(), tc.n, tc.o)
			require.ErrorIs(t, err, tc.want)
			assert.Contains(t, err.Error(), fmt.Sprintf("map %d bytes", tc.n))
		})
	}
}

func TestUnmapTwiceAndUseAfter(t *testing.T) {
	t.Parallel()
	r, err := Map(t.Context(), 5000, Options{System: hostSystem()})
	require.NoError(t, err)
	require.NoError(t, r.Unmap())
	require.NoError(t, r.Unmap())
	assert.Nil(t, r.Bytes())
	assert.Equal(t, 5000, r.Len())
	assert.ErrorIs(t, r.Populate(t.Context(), Populate{}), errUnmapped)
	assert.Zero(t, r.InUse())
}

func TestUnmapMayBeTriedAgain(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	l := newLedger(sys)
	var refuse bool
	sys.Calls = sys.Calls.Before(func(call string) error {
		if refuse && call == "Unmap" {
			return unix.ENOMEM
		}
		return nil
	})
	r := mustMap(t, 3*mib, Options{System: sys})
	refuse = true
	require.ErrorIs(t, r.Unmap(), unix.ENOMEM)
	assert.Equal(t, r.Mapped(), l.bytes())
	assert.Nil(t, r.Bytes())
	refuse = false
	require.NoError(t, r.Unmap())
	l.requireNothingLeft(t)
}

// Everything at once on one region, for the race detector.
func TestARegionServesManyGoroutines(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	l := newLedger(sys)
	r, err := Map(t.Context(), 16*mib+1, Options{System: sys})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			err := r.Populate(t.Context(), Populate{Threads: 2})
			if err != nil {
				assert.ErrorIs(t, err, errUnmapped)
			}
			r.InUse()
			r.Notes()
			r.Mapped()
		})
	}
	for range 4 {
		wg.Go(func() { assert.NoError(t, r.Unmap()) })
	}
	wg.Wait()
	l.requireNothingLeft(t)
}

func TestMappingFromManyGoroutines(t *testing.T) {
	t.Parallel()
	sys := hostSystem()
	l := newLedger(sys)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for j := range 20 {
				n := 1 + (i*20+j)*5003
				r, err := mapPopulated(t.Context(), n, Options{System: sys}, Populate{})
				if !assert.NoError(t, err) {
					return
				}
				for k := 0; k < n; k += 4096 {
					r.Bytes()[k] = byte(i)
				}
				assert.Equal(t, byte(i), r.Bytes()[0])
				assert.NoError(t, r.Unmap())
			}
		})
	}
	wg.Wait()
	l.requireNothingLeft(t)
}

func TestForkAndDumpOnRequest(t *testing.T) {
	requireAccount(t)
	r := mustPopulate(t, 5*mib, Options{System: hostSystem(), Fork: true, Dump: true})
	u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(r.base), r.Mapped())
	require.NoError(t, err)
	assert.False(t, u.HasFlag("dc") || u.HasFlag("dd"), "flags %v", u.Flags)
}

func TestTheKernelShowsTheNameWhereItCan(t *testing.T) {
	requireAccount(t)
	sys := hostSystem()
	r := mustMap(t, 64*kib, Options{System: sys})
	err := sys.Calls.Name(r.base, r.mapped, "pinned")
	u, smapsErr := linux.ReadSMaps(os.DirFS("/"), uintptr(r.base), r.Mapped())
	require.NoError(t, smapsErr)
	if err == nil {
		assert.Equal(t, "[anon:pinned]", u.Name)
	} else {
		assert.ErrorIs(t, err, unix.EINVAL, "kernels without names say so")
		assert.Empty(t, u.Name)
	}
}

func TestTouchTurnsAMissingPageIntoAnError(t *testing.T) {
	// A page past the end of a file is like a hugetlb page that the pool does not have: SIGBUS.
	fd, err := unix.MemfdCreate("short", 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, 4096))
	mem, err := unix.Mmap(fd, 0, 4*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Munmap(mem)) }()
	p := unsafe.Pointer(unsafe.SliceData(mem))
	assert.NoError(t, touch(p, 4096, 4096))
	err = touch(p, 4*4096, 4096)
	require.ErrorIs(t, err, ErrFault)
	if !emulated(t) { // which does not report the address
		assert.ErrorContains(t, err, fmt.Sprintf("%#x", uintptr(p)+4096))
	}
}

func TestAdviceFollowsTheHostsMode(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		thp    string
		n      int
		noHuge bool
		want   []Advice
		notes  int
	}{
		{"madvise", 4 * mib, false, []Advice{AdviseHuge}, 0},
		{"always", 4 * mib, false, []Advice{AdviseHuge}, 0},
		{"never", 4 * mib, false, nil, 1},
		{"never", 4 * kib, false, nil, 0},
		{"madvise", 4 * kib, false, nil, 0},
		{"always", 4 * kib, false, []Advice{AdviseNoHuge}, 0},
		{"always", 4 * mib, true, []Advice{AdviseNoHuge}, 0},
		{"madvise", 4 * mib, true, nil, 0},
	} {
		t.Run(fmt.Sprintf("%s %d base pages %t", tc.thp, tc.n, tc.noHuge), func(t *testing.T) {
			t.Parallel()
			sys := hostSystem()
			sys.THP, sys.HugePage = tc.thp, 2*mib
			var got []Advice
			sys.Calls.Advise = func(_ unsafe.Pointer, n int, a Advice) error {
				assert.Equal(t, tc.n, n)
				got = append(got, a)
				return nil
			}
			r := mustMap(t, tc.n, Options{System: sys, NoHuge: tc.noHuge, Fork: true, Dump: true})
			assert.Equal(t, tc.want, got)
			assert.Len(t, r.Notes(), tc.notes)
		})
	}
}
