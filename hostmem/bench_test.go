package hostmem

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

// testdata/baseline/pin.py measures the same, under the same names; pin.c has those of internal/benchmarks.

// benchSizes are what is pinned; the large ones only on a real host, whose GPU
// and memory are worth measuring.
func benchSizes() []int {
	if testgpu.Real() {
		return []int{64 << 10, 1 << 20, 1<<30 + 1, 4<<30 + 1}
	}
	return []int{64 << 10, 1 << 20, 64<<20 + 1}
}

func sizeName(n int) string {
	switch {
	case n > 1<<30:
		return fmt.Sprintf("%dGiB+1", n>>30)
	case n == 1<<30:
		return "1GiB"
	}
	return fmt.Sprintf("%dKiB", n>>10)
}

// BenchmarkPin is Alloc and BenchmarkUnpin is Close, each without the other.
func BenchmarkPin(b *testing.B) {
	rate := func(b *testing.B, n int) {
		b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
	}
	benchBuffers(b, func(b *testing.B, alloc func() *Buffer, n int) {
		for b.Loop() {
			buf := alloc()
			b.StopTimer()
			require.NoError(b, buf.Close())
			b.StartTimer()
		}
		rate(b, n)
	})
}

func BenchmarkUnpin(b *testing.B) {
	benchBuffers(b, func(b *testing.B, alloc func() *Buffer, _ int) {
		for b.Loop() {
			b.StopTimer()
			buf := alloc()
			b.StartTimer()
			require.NoError(b, buf.Close())
		}
	})
}

func benchBuffers(b *testing.B, run func(b *testing.B, alloc func() *Buffer, n int)) {
	dev := testgpu.Device(b)
	ctx := context.Background()
	if testgpu.Real() {
		// The memory of virtual machines can grow as it is first touched.
		warm, err := Alloc(ctx, dev, 24<<30, Options{})
		require.NoError(b, err)
		require.NoError(b, warm.Close())
	}
	for _, n := range benchSizes() {
		for _, o := range []Options{{}, {Chunk: 64 << 20}} {
			name := sizeName(n)
			if o.Chunk > 0 {
				if n < 4<<30 {
					continue
				}
				name += "/chunk=64MiB"
			}
			b.Run(name, func(b *testing.B) {
				run(b, func() *Buffer {
					buf, err := Alloc(ctx, dev, n, o)
					require.NoError(b, err)
					return buf
				}, n)
			})
		}
	}
}
