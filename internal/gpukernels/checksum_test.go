//go:build linux && !android && (amd64 || arm64)

package gpukernels_test

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/testgpu"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func newChecksums(tb testing.TB, dev *cudart.Device) *gpukernels.Checksums {
	tb.Helper()
	c, err := gpukernels.NewChecksums(tb.Context(), dev)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return c
}

// spansOf puts spans into device memory.
func spansOf(tb testing.TB, dev *cudart.Device, spans []gpukernels.Span) cudart.DevPtr {
	tb.Helper()
	return testgpu.ToDevice(tb, dev, spans)
}

func TestChecksums(t *testing.T) {
	t.Parallel()
	require.EqualValues(t, gpukernels.SpanBytes, unsafe.Sizeof(gpukernels.Span{}))
	dev, s := gpu(t)
	c := newChecksums(t, dev)
	const size = 3<<20 + 77
	mem := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(mem)
	p := testgpu.ToDevice(t, dev, mem)
	var spans []gpukernels.Span
	var want []uint32
	add := func(at, n int) {
		spans = append(spans, gpukernels.Span{Address: p + cudart.DevPtr(at), Size: uint64(n)})
		want = append(want, crc32.Checksum(mem[at:at+n], castagnoli))
	}
	for _, n := range []int{0, 1, 3, 4, 15, 16, 17, 31, 4095, 4096, 4097, 5*4096 - 1, 6 * 4096, 100_000} {
		for at := range 17 {
			add(at, n)
		}
	}
	add(0, size)
	add(0, 1<<20)
	add(1<<20, 1<<20)
	add(size-5, 5)
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		at := random.IntN(size)
		add(at, random.IntN(min(20_000, size-at+1)))
	}
	sums := testgpu.Malloc(t, dev, 4*len(spans))
	require.NoError(t, c.CRC32C(s, spansOf(t, dev, spans), len(spans), sums))
	got := testgpu.CopyToHost[uint32](t, s, sums, len(spans))
	for i := range spans {
		require.Equal(t, want[i], got[i], "%d bytes at %d", spans[i].Size, spans[i].Address-p)
	}
	require.NoError(t, c.CRC32C(s, 0, 0, 0))
	require.ErrorIs(t, c.CRC32C(s, 0, -1, 0), cudart.ErrInvalidValue)
	var none *gpukernels.Checksums
	require.ErrorContains(t, none.CRC32C(s, 0, 1, 0), "nil or zero")
}

func BenchmarkChecksums(b *testing.B) {
	dev, s := realGPU(b, "a simulated one has no times of its own")
	c := newChecksums(b, dev)
	const all = 4 << 30
	p := testgpu.Malloc(b, dev, all)
	random := make([]byte, 64<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(random)
	for at := 0; at < all; at += len(random) {
		testgpu.CopyToDevice(b, dev, p+cudart.DevPtr(at), random)
	}
	begin, err := dev.NewEvent()
	require.NoError(b, err)
	end, err := dev.NewEvent()
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, begin.Close()); require.NoError(b, end.Close()) })
	for _, size := range []struct {
		name    string
		n, span int
	}{{"1MiB", 1 << 20, 1 << 20}, {"16MiB", 16 << 20, 1 << 20}, {"64MiB", 64 << 20, 1 << 20}, {"256MiB", 256 << 20, 1 << 20}, {"1GiB", 1 << 30, 1 << 20}, {"4GiB", all, 1 << 20}, {"64MiBOf4KiB", 64 << 20, 4 << 10}, {"64MiBOf64KiB", 64 << 20, 64 << 10}} {
		b.Run(size.name, func(b *testing.B) {
			var spans []gpukernels.Span
			for at := 0; at < size.n; at += size.span {
				spans = append(spans, gpukernels.Span{Address: p + cudart.DevPtr(at), Size: uint64(size.span)})
			}
			list := spansOf(b, dev, spans)
			sums := testgpu.Malloc(b, dev, 4*len(spans))
			require.NoError(b, c.CRC32C(s, list, len(spans), sums))
			require.NoError(b, s.Record(begin))
			for range b.N {
				require.NoError(b, c.CRC32C(s, list, len(spans), sums))
			}
			require.NoError(b, s.Record(end))
			require.NoError(b, s.Synchronize(b.Context()))
			took, err := end.Since(begin)
			require.NoError(b, err)
			b.ReportMetric(float64(b.N)*float64(size.n)/1e9/took.Seconds(), "GB/s")
			b.ReportMetric(float64(took.Microseconds())/float64(b.N), "µs/launch")
		})
	}
}
