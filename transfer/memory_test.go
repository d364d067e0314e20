package transfer

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// sizes around everything that makes a difference: the last is more than the ring of
// a machine with few cores.
var sizes = []int{0, 1, 63, 4096, stage.MaxSmall - 1, stage.MaxSmall, stage.MaxSmall + 1, 256*kib + 1, 512 * kib, 512*kib + 1, mib, mib + 1, 9*mib + 13}

func TestMemoryArrives(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 3})
	for _, n := range append(slices.Clone(sizes), stage.MaxNonTemporal, stage.MaxNonTemporal+1) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			const skip = 5
			want := bytesOf(uint64(n), n+2*skip)
			dst := r.device(n + 2*skip)
			r.fill(dst, make([]byte, n+2*skip))
			require.NoError(t, r.c.Upload(t.Context(), dst+skip, want[skip:skip+n]))
			there := r.onDevice(dst, n+2*skip)
			require.True(t, bytes.Equal(want[skip:skip+n], there[skip:skip+n]), "bytes on the device")
			require.Equal(t, make([]byte, skip), there[:skip], "before them")
			require.Equal(t, make([]byte, skip), there[skip+n:], "after them")

			back := make([]byte, n+2*skip)
			require.NoError(t, r.c.Download(t.Context(), back[skip:skip+n], dst+skip))
			require.True(t, bytes.Equal(there, back), "bytes back, and those around them")
		})
	}
}

// Memory that was just allocated is filled by all cores, also where a part of it is resident.
func TestDownloadsIntoFreshMemory(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 3})
	const n = minFresh + 3*mib + 13
	want := bytesOf(5, n)
	src := r.device(n)
	r.fill(src, want)
	for _, touched := range []int{0, n / 4, n} {
		mem, release, err := hostos.MapHuge(n + 5)
		require.NoError(t, err)
		dst := mem[5:]
		clear(mem[:5+touched])
		require.Equal(t, touched < n, fresh(dst))
		require.NoError(t, r.c.Download(t.Context(), dst, src))
		require.True(t, bytes.Equal(want, dst), "%d bytes were resident", touched)
		require.Equal(t, make([]byte, 5), mem[:5])
		require.False(t, fresh(dst))
		require.NoError(t, release())
	}
}
