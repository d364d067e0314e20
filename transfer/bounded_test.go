package transfer

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Of thousands of callers on a GPU that hangs, few are inside CUDA, where each has a thread.
func TestCallersOnAHungGPUAreBounded(t *testing.T) {
	t.Parallel()
	const callers, size = 2000, mib
	for name, fn := range map[string]string{"queued": "cudaMemcpyAsync", "pinned": "cudaMemcpyAsync", "query": "cudaPointerGetAttributes"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim, rt := testgpu.Sim(t, cudasim.Config{})
			dev, err := rt.Device(0)
			require.NoError(t, err)
			r := fixtureOn(t, dev, Options{})
			to, src, call, most := r.device(size), bytesOf(1, size), Call{}, bounded.MaxInside
			switch name {
			case "queued":
				call.Stream, src = r.stream(), src[:100]
				most += 2 // uploads that get no lease at once take the small slot, or the link of the small ring: one goroutine each
			case "pinned":
				buf, err := hostmem.Alloc(t.Context(), dev, size, hostmem.Options{})
				require.NoError(t, err)
				defer func() { require.NoError(t, buf.Close()) }()
				src = buf.Bytes()
			}
			unblock := sim.Block(fn, cudasim.Fault{Times: -1})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			returned := make(chan error, callers)
			for range callers {
				go func() { returned <- r.c.With(call).Upload(ctx, to, src) }()
			}
			require.NoError(t, sim.AwaitBlocked(t.Context(), fn, bounded.MaxInside))
			time.Sleep(50 * time.Millisecond) // for more calls, if there were any: the test holds without
			inside := sim.Blocked()
			assert.Len(t, inside, 1)
			assert.LessOrEqual(t, inside[fn], most)
			cancel()
			for range callers {
				require.ErrorIs(t, <-returned, context.Canceled)
			}
			unblock()
			r.closeSoon()
		})
	}
}
