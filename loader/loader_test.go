package loader

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

func TestBatchesHoldTheirSamples(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	const n = 103
	fields := []int{100, 1, 257}
	for _, o := range []Options{
		{BatchSize: 10},
		{BatchSize: 10, DropLast: true},
		{BatchSize: 10, Shuffle: true, Seed: 3},
		{BatchSize: 10, Shuffle: true, Unordered: true, Workers: 20},
		{BatchSize: 1, Workers: 3},
		{BatchSize: 103, Workers: 3},
		{BatchSize: 1000, Workers: 200},
		{BatchSize: 7, Workers: 1, Prefetch: 1},
	} {
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			l := newLoaderFor(t, dev, numbered(n, fields...), o)
			var orders [][]int
			for range 3 {
				batches := epochOf(t, l, s, fields...)
				whole := n / o.BatchSize
				for i, b := range batches {
					if i < whole && !o.Unordered {
						require.Len(t, b, o.BatchSize)
					}
					require.LessOrEqual(t, len(b), o.BatchSize)
				}
				order := slices.Concat(batches...)
				orders = append(orders, order)
				want := n
				if o.DropLast {
					want = whole * o.BatchSize
				}
				require.Len(t, order, want)
				sorted := slices.Sorted(slices.Values(order))
				require.Equal(t, want, len(slices.Compact(sorted)), "no sample comes twice")
				if !o.Shuffle && !o.Unordered {
					require.IsIncreasing(t, order)
				}
			}
			if o.Shuffle {
				require.NotEqual(t, orders[0], orders[1], "epochs differ")
			}
			st := l.Stats()
			assert.Equal(t, 3*len(orders[0]), st.Samples)
			assert.Equal(t, st.Samples*(100+1+257), st.Bytes)
		})
	}
}

func TestPermutations(t *testing.T) {
	t.Parallel()
	for n := range 300 {
		if n == 0 {
			continue
		}
		for seed := range uint64(3) {
			p := newPermutation(n, seed, 0)
			seen := make([]bool, n)
			for i := range n {
				at := p.at(i)
				require.False(t, seen[at], "%d of %d", i, n)
				seen[at] = true
			}
		}
	}
}

// What is filled ahead is 64 MiB, in 3 batches at least and 256 at the most, beside what
// the workers are at.
func TestBatchesAheadByDefault(t *testing.T) {
	t.Parallel()
	const kib = 1 << 10
	for _, test := range []struct{ samples, bytes, batch, workers, want int }{
		{1 << 20, 4 * kib, 4, 1, 256},
		{1 << 20, 4 * kib, 64, 8, 256},
		{1 << 20, 4 * kib, 128, 8, 128},
		{1 << 20, 4 * kib, 256, 8, 64},
		{1 << 20, 4 * kib, 4096, 8, 4},
		{1 << 20, 4 * kib, 16384, 8, 3},
		{1 << 20, 4 * kib, 1, 8, 8 + 256},
		{100, 4 * kib, 4, 8, 26},
	} {
		o, _, err := Options{BatchSize: test.batch, Workers: test.workers}.resolve(numbered(test.samples, test.bytes), 0)
		require.NoError(t, err)
		require.Equal(t, test.want, o.Prefetch, "%+v", test)
	}
}

func TestCopySamples(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 64, 100, 4096, 70_000} {
		from := make([]byte, 20*size)
		for i := range from {
			from[i] = byte(i ^ i>>8)
		}
		for _, indices := range [][]int{{}, {3}, {3, 4, 5, 0, 19, 19, 2}} {
			for _, skip := range []int{0, 1} {
				want, to := []byte{}, make([]byte, skip+len(indices)*size)
				for _, i := range indices {
					want = append(want, from[i*size:(i+1)*size]...)
				}
				require.NoError(t, CopySamples(to[skip:], from, size, indices))
				require.True(t, bytes.Equal(want, to[skip:]), "%d samples of %d bytes", len(indices), size)
			}
		}
		assert.ErrorContains(t, CopySamples(make([]byte, size), from, size, []int{20}), "sample 20 of 20")
		assert.ErrorContains(t, CopySamples(make([]byte, size), from[:size:2*size], size, []int{1}), "sample 1 of 1")
		assert.ErrorContains(t, CopySamples(make([]byte, size), from, size, []int{-1}), "sample -1 of 20")
		assert.ErrorContains(t, CopySamples(make([]byte, size), from, size, []int{0, 1}), "copy 2 samples")
		assert.ErrorContains(t, CopySamples(make([]byte, size), from, 0, nil), "of 0 bytes")
	}
}
