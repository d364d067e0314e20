package transfer

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// TestEveryCallCanBlock makes the first call of each CUDA function in each operation
// block. If it returns, the operation works. If it does not, the operation ends some
// time after its context; then the call returns, and all works and can be released.
// Not parallel: it counts goroutines and what is pinned.
func TestEveryCallCanBlock(t *testing.T) {
	benches := newBenches(t)
	before, pinned := runtime.NumGoroutine(), hostmem.ReadStats().ReservedBytes
	var cells []cell
	for _, name := range slices.Sorted(maps.Keys(operations)) {
		operation := operations[name]
		b := benches(t, 13000)
		calls := b.calls(func() {
			_, err := operation(t.Context(), b)
			require.NoError(t, err, name)
		})
		b.close(name)
		for _, fn := range slices.Sorted(maps.Keys(calls)) {
			for _, returns := range []bool{true, false} {
				for _, late := range []bool{false, true} { // which makes a difference for what it queues
					if late && fn != "cudaMemcpyAsync" && fn != "cudaMemcpyBatchAsync" {
						continue
					}
					dims := []string{name, fmt.Sprintf("%s, returns: %t, late: %t", fn, returns, late)}
					cells = append(cells, cell{dims, func(t *testing.T) { benches(t, 13000).blocked(t, operation, fn, returns, late) }})
				}
			}
		}
	}
	atOnce(t, thin(cells))
	requireEnded(t, before)
	require.Equal(t, pinned, hostmem.ReadStats().ReservedBytes)
}

// blocked runs an operation with a call that blocks, and ends its context unless the call
// returns. Afterwards all works, and can be released.
func (b *bench) blocked(t *testing.T, operation func(context.Context, *bench) ([]byte, error), fn string, returns, late bool) {
	unblock := b.sim.Block(fn, cudasim.Fault{Late: late})
	defer unblock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got []byte
	var err error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		got, err = operation(ctx, b)
	}()
	blocked := make(chan error, 1)
	go func() { blocked <- b.sim.AwaitBlocked(t.Context(), fn, 1) }()
	select {
	case err := <-blocked:
		require.NoError(t, err)
	case <-ended: // it did without the call this time
	}
	if returns {
		unblock()
	} else {
		cancel()
	}
	<-ended
	switch {
	case returns:
		require.NoError(t, err)
		fallthrough
	case err == nil:
		if got != nil {
			require.True(t, bytes.Equal(b.bytes, got))
		}
	default:
		require.ErrorIs(t, err, context.Canceled)
	}
	unblock()
	b.sim.ResetFaults()
	b.close(t.Name())
}

// A copy of parts whose caller has gone while the kernel is loaded leaves the kernel to the Copier, which is not
// closed before CUDA returns.
func TestAKernelWhoseFirstCallerHasGone(t *testing.T) {
	t.Parallel()
	for _, fn := range []string{"cuModuleLoadDataEx", "cuModuleGetFunction"} {
		t.Run(fn, func(t *testing.T) {
			t.Parallel()
			b := newBenches(t)(t, 13000)
			unblock := b.sim.Block(fn, cudasim.Fault{})
			defer unblock()
			ctx, cancel := context.WithCancel(t.Context())
			got := make([]byte, benchBytes)
			copied := make(chan error, 1)
			go func() { copied <- b.c.DownloadAll(ctx, cutUp(got, b.mem, 0, 5000)) }()
			require.NoError(t, b.sim.AwaitBlocked(t.Context(), fn, 1))
			require.NoError(t, b.c.DownloadAll(t.Context(), cutUp(got, b.mem, 0, 5000)), "others do without it")
			require.True(t, bytes.Equal(b.bytes, got))
			cancel()
			require.ErrorIs(t, <-copied, context.Canceled)
			require.ErrorIs(t, b.c.Close(), stage.ErrHeld)
			unblock()
			(&fixture{TB: t, c: b.c}).closeSoon()
			require.Zero(t, b.sim.Outstanding().Modules)
			require.NoError(t, b.strm.Close())
			require.NoError(t, b.buf.Close())
			require.NoError(t, b.dev.Free(b.mem))
			require.NoError(t, b.rt.Close())
			testgpu.End(t, b.sim)
		})
	}
}
