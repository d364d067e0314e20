package stage

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// A caller may leave between two pieces of an upload: its memory is not read after that.
func TestACallerMayAbandonASmallUploadBetweenPieces(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	mem, src := device(t, s.dev, maxSlotUp), random(maxSlotUp, 1)
	before := bytes.Clone(src)
	calls := sim.Calls("cudaMemcpyAsync")
	unblock := sim.Block("cudaMemcpyAsync", cudasim.Fault{Nth: 2, Late: true})
	defer unblock()
	ctx, cancel := context.WithCancel(t.Context())
	remaining := make(chan error, 1)
	go func() {
		_, err := s.CopySmall(ctx, mem, src, false)
		remaining <- err
	}()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemcpyAsync", 1))
	cancel()
	require.ErrorIs(t, <-remaining, ErrUnderWay)
	clear(src) // it is the caller's again
	ok, err := s.CopySmall(t.Context(), mem, before[:100], false)
	require.NoError(t, err)
	require.False(t, ok, "the memory is in use")
	unblock()
	for !ok {
		ok, err = s.CopySmall(t.Context(), mem+cudart.DevPtr(2*slotPiece), before[2*slotPiece:][:100], false)
		require.NoError(t, err)
	}
	require.Equal(t, calls+3, sim.Calls("cudaMemcpyAsync"), "no piece after it, and the next upload")
	back := make([]byte, 2*slotPiece)
	_, err = download(t.Context(), s, back, mem)
	require.NoError(t, err)
	require.True(t, bytes.Equal(before[:2*slotPiece], back), "the pieces before it")
}

// The memory of a download that its caller has left is not written when the GPU is done.
func TestACallerMayAbandonASmallDownload(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	mem := device(t, s.dev, maxSlotDown)
	ok, err := s.CopySmall(t.Context(), mem, random(maxSlotDown, 1), false)
	require.NoError(t, err)
	require.True(t, ok)
	unblock := sim.Block("cudaStreamSynchronize", cudasim.Fault{Late: true})
	defer unblock()
	dst := make([]byte, maxSlotDown)
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := s.CopySmall(ctx, mem, dst, true)
		left <- err
	}()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaStreamSynchronize", 1))
	cancel()
	require.ErrorIs(t, <-left, ErrUnderWay)
	unblock()
	again := make([]byte, maxSlotDown)
	for ok = false; !ok; {
		ok, err = s.CopySmall(t.Context(), mem, again, true)
		require.NoError(t, err)
	}
	require.Equal(t, random(maxSlotDown, 1), again)
	require.Equal(t, make([]byte, maxSlotDown), dst, "it is the caller's")
}

// A slot whose copy the library could not report as done is used again when the library
// answers.
func TestASmallSlotIsUsedAgain(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	mem, src := device(t, s.dev, maxSlotUp), random(maxSlotUp, 1)
	for _, down := range []bool{false, true} {
		for _, fn := range []string{"cudaStreamSynchronize", "cudaStreamQuery", "cudaEventRecord", "cudaEventQuery", "cudaDeviceSynchronize"} {
			sim.Fail(fn, cudasim.Fault{Code: cudart.ErrUnknown, Times: -1})
		}
		ok, err := s.CopySmall(t.Context(), mem, src[:maxSlotDown], down)
		require.True(t, ok)
		require.ErrorIs(t, err, ErrUnderWay)
		ok, err = s.CopySmall(t.Context(), mem, src[:maxSlotDown], down)
		require.NoError(t, err)
		require.False(t, ok, "the GPU may be using it")
		sim.ResetFaults()
		for !ok {
			ok, err = s.CopySmall(t.Context(), mem, src[:maxSlotDown], down)
			require.NoError(t, err)
		}
	}
}
