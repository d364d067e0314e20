//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/testgpu"
)

// requireAccount skips where the kernel's figures are not about this process: user-mode emulation
// takes advice without following it.
func requireAccount(t testing.TB) {
	t.Helper()
	if emulated(t) {
		t.Skip("/proc/self/smaps and madvise are not about this process here (user-mode emulation?)")
	}
}

// By the kernel's own figures a buffer takes at most a page more than was requested. Not parallel,
// like all tests that read it.
func TestABufferTakesAtMostAPageMoreThanRequested(t *testing.T) {
	requireAccount(t)
	g := newFixture(t)
	type wanted struct {
		n, align int
		huge     HugePages
	}
	var list []wanted
	for i, n := range []int{1, 2, 4095, 4096, 4097, 64 * kib, 64*kib + 1, mib - 1, 2*mib - 1, 2 * mib, 2*mib + 1, 3*mib + 5, 17*mib + 4097, 64*mib + 1} {
		for _, align := range hostmemtest.OneOf([]int{0, 1, 4096, 64 * kib, 2 * mib, gib}, i) {
			for _, huge := range []HugePages{0, HugePagesNever} {
				list = append(list, wanted{n, align, huge})
			}
		}
	}
	if testgpu.Real() || hostmemtest.Soak() {
		list = append(list, wanted{gib + 1, 0, 0}, wanted{gib + 1, gib, 0}, wanted{gib + 1, 0, HugePagesNever})
	}
	if testgpu.Real() {
		list = append(list, wanted{4*gib + 1, 0, 0})
	}
	page := os.Getpagesize()
	for _, w := range list {
		t.Run(fmt.Sprintf("%d aligned to %d huge %d", w.n, w.align, w.huge), func(t *testing.T) {
			b, err := Alloc(t.Context(), g.Dev, w.n, Options{Align: w.align, HugePages: w.huge})
			require.NoError(t, err)
			reserved := b.Info().Reserved
			addr := uintptr(b.Pointer())
			t.Cleanup(func() { assert.NoError(t, b.Close()) })
			assert.Equal(t, (w.n+page-1)/page*page, reserved)
			assert.Zero(t, addr%uintptr(max(w.align, page)), "%#x is not aligned to %d", addr, w.align)
			if w.align == 0 && w.huge == 0 && w.n >= 2*mib {
				assert.Zero(t, addr%(2*mib), "%#x is not where a huge page can be", addr)
			}

			u, err := linux.ReadSMaps(os.DirFS("/"), addr, w.n)
			require.NoError(t, err)
			assert.True(t, u.HasFlag("dc") && u.HasFlag("dd"), "flags %v: forks or core dumps would have it", u.Flags)
			if w.huge == HugePagesNever {
				assert.Zero(t, u.AnonHugePages, "huge pages where none should be")
			}

			require.NoError(t, b.Close())
			assert.Equal(t, reserved, b.Info().Reserved, "what it had")
			left, err := linux.ReadSMaps(os.DirFS("/"), addr, w.n)
			require.NoError(t, err)
			// The Go runtime may have the addresses by now; its memory is not reserved out of dumps.
			assert.False(t, left.HasFlag("dd"), "still mapped after Close: %+v", left)

			// The kernel counts neighbours of the same kind as one, such as what other tests lost
			// on purpose: what they have is there after Close too.
			around, err := linux.ReadSMaps(os.DirFS("/"), u.Start, int(u.End-u.Start))
			require.NoError(t, err)
			if u.Start == addr && u.End == addr+uintptr(reserved) {
				around = linux.SMaps{}
			}
			assert.Equal(t, reserved, u.Size-around.Size)
			assert.Equal(t, reserved, u.Rss-around.Rss, "resident")
			assert.Less(t, u.Rss-around.Rss-w.n, page, "reserved beyond what was requested")
		})
	}
}

// Chunks are registrations, not mappings: they take nothing more.
func TestChunksTakeNothingMore(t *testing.T) {
	requireAccount(t)
	g := newFixture(t)
	b := g.alloc(9*mib+1, Options{Chunk: 2 * mib})
	assert.Len(t, slices.Collect(b.Spans(0, b.Len())), 5)
	u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(b.Pointer()), b.Len())
	require.NoError(t, err)
	assert.Equal(t, 9*mib+os.Getpagesize(), u.Rss)
	assert.Equal(t, u.Rss, b.Info().Reserved)
	assert.Equal(t, 1, u.Maps)
}

// A reserve that has no pages is a note, and costs nothing but speed.
func TestHugeTLBUsesItsPagesOrFallsBack(t *testing.T) {
	requireAccount(t)
	g := newFixture(t)
	for _, huge := range []HugePages{HugeTLB, HugeTLB1G} {
		b := g.alloc(3*mib+1, Options{HugePages: huge})
		u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(b.Pointer()), b.Len())
		require.NoError(t, err)
		assert.Equal(t, b.Info().Reserved, u.Rss+u.Hugetlb)
		if u.Hugetlb == 0 {
			assert.Equal(t, 3*mib+os.Getpagesize(), b.Info().Reserved)
			require.NotEmpty(t, b.Info().Notes)
			assert.Contains(t, b.Info().Notes[0], "other pages were taken")
		} else {
			assert.Zero(t, b.Info().Reserved%u.PageSize)
			assert.Less(t, b.Info().Reserved-b.Len(), u.PageSize)
		}
		require.NoError(t, b.Close())
	}
}

// Forks of the process are slow, and its core dumps large, if they include pinned memory.
func TestForksAndDumpsHaveTheMemoryOnRequest(t *testing.T) {
	requireAccount(t)
	g := newFixture(t)
	p := g.Device(3 * mib)
	for _, tc := range []struct {
		o                  Options
		keepsOut, skipDump bool
	}{
		{Options{}, true, true},
		{Options{Fork: true}, false, true},
		{Options{Dump: true}, true, false},
		{Options{Fork: true, Dump: true}, false, false},
	} {
		t.Run(fmt.Sprintf("fork=%v dump=%v", tc.o.Fork, tc.o.Dump), func(t *testing.T) {
			b, err := Alloc(t.Context(), g.Dev, 3*mib, tc.o)
			require.NoError(t, err)
			defer func() { assert.NoError(t, b.Close()) }()
			u, err := linux.ReadSMaps(os.DirFS("/"), uintptr(b.Pointer()), b.Len())
			require.NoError(t, err)
			assert.Equal(t, tc.keepsOut, u.HasFlag("dc"), "reserved out of forks: %v", u.Flags)
			assert.Equal(t, tc.skipDump, u.HasFlag("dd"), "reserved out of dumps: %v", u.Flags)

			// A child that comes and goes takes nothing away, neither before nor between copies.
			fill(b.Bytes(), 9)
			require.NoError(t, exec.Command("true").Run())
			require.NoError(t, b.CopyToDevice(g.Stream, p, 0, b.Len()))
			require.NoError(t, exec.Command("true").Run())
			g.Synchronize()
			assert.True(t, bytes.Equal(filled(3*mib, 9), g.Download(p, 3*mib)))
		})
	}
}
