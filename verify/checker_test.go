package verify

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A checker finds the bytes that differ, on each stream by itself, and what it writes is what Fill writes.
func TestACheckerFindsWhatDiffers(t *testing.T) {
	dev := testgpu.Device(t)
	c, err := NewChecker(t.Context(), dev)
	require.NoError(t, err)
	const n, at, seed = 100_000, 77, 42
	p := testgpu.Malloc(t, dev, n)
	var streams [2]*cudart.Stream
	for i := range streams {
		streams[i], err = dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
	}
	s, other := streams[0], streams[1]
	require.NoError(t, c.Fill(s, p, n, seed, at))
	want := make([]byte, n)
	Fill(want, seed, at)
	assert.Equal(t, want, testgpu.CopyToHost[byte](t, s, p, n))

	result := func(s *cudart.Stream) [2]int {
		bad, first, err := c.Result(t.Context(), s)
		require.NoError(t, err)
		return [2]int{bad, first}
	}
	assert.Equal(t, [2]int{0, -1}, result(s), "nothing was checked")
	require.NoError(t, c.Check(s, p, n, seed, at))
	assert.Equal(t, [2]int{0, -1}, result(s))
	require.NoError(t, s.Memset(p+1000, ^want[1000], 1))
	require.NoError(t, s.Memset(p+70_000, ^want[70_000], 1))
	require.NoError(t, s.Synchronize(t.Context()))
	require.NoError(t, c.Check(s, p, n, seed, at))
	require.NoError(t, c.Check(s, p+500, 1000, seed, at+500))
	require.NoError(t, c.Check(other, p+2000, 1000, seed, at+2000))
	assert.Equal(t, [2]int{0, -1}, result(other), "of its own checks alone")
	assert.Equal(t, [2]int{3, 500}, result(s), "the sum, and the least offset")
	assert.Equal(t, [2]int{0, -1}, result(s), "nothing since the last Result")
	require.NoError(t, c.Check(s, p, 1000, seed, at))
	assert.Equal(t, [2]int{0, -1}, result(s))

	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	assert.ErrorIs(t, c.Fill(s, p, 1, 0, 0), cudart.ErrClosed)
	_, _, err = c.Result(t.Context(), s)
	assert.ErrorIs(t, err, cudart.ErrClosed)
	for _, s := range streams {
		require.NoError(t, s.Close())
	}
}

func TestACheckerRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	c, err := NewChecker(t.Context(), dev)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	assert.ErrorIs(t, c.Fill(s, 1, -1, 0, 0), cudart.ErrInvalidValue)
	assert.ErrorIs(t, c.Check(s, 1, 1, 0, -1), cudart.ErrInvalidValue)
	assert.ErrorIs(t, c.Fill(s, 1, 2, 0, math.MaxInt-1), cudart.ErrInvalidValue, "there are no more positions")
	assert.ErrorIs(t, c.Check(s, 1, math.MaxInt, 0, 1), cudart.ErrInvalidValue)
	assert.ErrorContains(t, c.Check(nil, 1, 1, 0, 0), "the stream is nil")
	var none context.Context
	assert.ErrorContains(t, c.CloseContext(none), "the context is nil")
	require.NoError(t, c.Close())
	require.NoError(t, s.Close())
	for _, c := range []*Checker{nil, new(Checker)} {
		assert.ErrorIs(t, c.Fill(s, 1, 1, 0, 0), errNoChecker)
		_, _, err := c.Result(t.Context(), s)
		assert.ErrorIs(t, err, errNoChecker)
		assert.ErrorIs(t, c.Close(), errNoChecker)
	}
	_, err = NewChecker(t.Context(), nil)
	assert.ErrorContains(t, err, "the device is nil")
}
