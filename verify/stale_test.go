package verify

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestStaleRead(t *testing.T) {
	var dev *cudart.Device
	if testgpu.Real() {
		dev = testgpu.Device(t)
	} else {
		var sim *cudasim.Sim
		sim, dev = simulated(t, cudasim.Config{})
		holdDownload(sim)
	}
	r, err := StaleRead(t.Context(), dev)
	require.NoError(t, err)
	t.Log(r)
	assert.True(t, r.Shown(), "%v", r)
	assert.Zero(t, r.BadAfter)
	assert.Equal(t, staleSamples, r.SampledBytes)
}

// holdDownload holds the download of a stale read until the wait for it begins,
// so that however late this goroutine runs, it reads before the copy.
func holdDownload(sim *cudasim.Sim) {
	var mu sync.Mutex // the hook is called from several threads
	copies, held := 0, false
	sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case fn == "cudaMemcpyAsync":
			if copies++; copies == 3 { // after the poison and the upload
				sim.Hold()
				held = true
			}
		case held:
			held = false
			sim.Release()
		}
	})
}

// Bytes that are still wrong after synchronizing are counted, and are the report's error.
func TestStaleReadCountsWhatIsWrongAfterwards(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	tr := newTrip(t, dev, nil, pathPinned, mib, 1)
	tr.sink = lazy(tr.sink, 0, 0) // the download does nothing
	r, err := tr.staleRead(t.Context(), mib)
	require.NoError(t, err)
	assert.Equal(t, StaleResult{SizeBytes: mib, SampledBytes: staleSamples, StaleBefore: staleSamples, BadAfter: mib}, r)
	report := Report{Cases: 1, Stale: &r}
	require.ErrorIs(t, report.Err(), ErrMismatch)
	require.NoError(t, tr.release(t.Context()))
}

func TestStaleReadOfAnEndedContext(t *testing.T) {
	t.Parallel()
	_, dev := simulated(t, cudasim.Config{})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(assert.AnError)
	_, err := StaleRead(ctx, dev)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, assert.AnError)
}

func TestStaleReadBeforeTheCopyRuns(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Config{})
	holdDownload(sim)
	r, err := staleRead(t.Context(), dev, mib)
	require.NoError(t, err)
	assert.Equal(t, StaleResult{SizeBytes: mib, SampledBytes: staleSamples, StaleBefore: staleSamples}, r)
}
