package bench

import (
	"context"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestLatencyOfAKnownLink(t *testing.T) {
	t.Parallel()
	sizes := []int{1, 4 << 10, 64 << 10}
	_, env := simulated(t, 1, sizes...)
	b := run(t, Latency(), env)
	for _, n := range sizes {
		for _, direction := range bothDirections {
			find := func(method string) *result.Series {
				s := b.Find(seriesLatency, result.Label{Key: result.Method, Value: method}, result.Label{Key: result.Direction, Value: direction}, result.Label{Key: result.Size, Value: strconv.Itoa(n)})
				require.NotNil(t, s, "%s %s %d", method, direction, n)
				assert.True(t, s.Verified)
				return s
			}
			want := 8e-6 + float64(n)/25e9
			assert.InDelta(t, want, find(byDevice).Median, want/50, "%s %d", direction, n)
			for _, method := range []string{awaited, awaitedBlocked} {
				s := find(method)
				assert.GreaterOrEqual(t, len(s.Samples), minLatencies)
				assert.Greater(t, s.Min, want, "the caller waits for the device, which takes its time")
				assert.GreaterOrEqual(t, s.P99, s.Median)
			}
			find(issued)
		}
	}
	text := strings.Join(b.Answers, "\n")
	assert.Contains(t, text, "A copy of 1 B takes ")
	assert.Contains(t, text, "Up to 4 KiB the size hardly matters to the GPU.")
	assert.InDelta(t, 8.01e-6, b.Figures[0].Rows[0].Cells[4].Value, 1e-8)
}

func TestLatencyInterrupted(t *testing.T) {
	t.Parallel()
	for _, at := range []int{1, 2, 50, 500} {
		sim, env := simulated(t, 1, 64)
		ctx, cancel := context.WithCancel(t.Context())
		sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: at, After: cancel})
		b, err := measure.Run(ctx, Latency(), env, nil)
		require.ErrorIs(t, err, context.Canceled)
		assert.Empty(t, b.Errors)
		cancel()
	}
}
