package verify

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestStaleRead(t *testing.T) {
	r, err := StaleRead(t.Context(), testgpu.Device(t))
	require.NoError(t, err)
	t.Log(r)
	assert.True(t, r.Shown(), "%v", r)
	assert.Zero(t, r.BadAfter)
	assert.Equal(t, staleSamples, r.SampledBytes)
}

// TestStaleReadBeforeTheCopyRuns holds the copy back until the wait for it begins.
func TestStaleReadBeforeTheCopyRuns(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Config{})
	var mu sync.Mutex // the hook is called from several threads
	copies, held := 0, false
	sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case fn == "cudaMemcpyAsync":
			if copies++; copies == 3 { // behind the poison and the upload
				sim.Hold()
				held = true
			}
		case held:
			held = false
			sim.Release()
		}
	})
	r, err := staleRead(t.Context(), dev, mib)
	require.NoError(t, err)
	assert.Equal(t, StaleResult{SizeBytes: mib, SampledBytes: staleSamples, StaleBefore: staleSamples}, r)
}
