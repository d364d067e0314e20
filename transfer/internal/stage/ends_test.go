package stage

import (
	"bytes"
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// Whichever call of copies fails, or ends their context, afterwards the stage shares its
// workers among none, its memory is free and as much as before, and copies are right.
func TestCopiesThatEndLeaveTheStageAsItWas(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	sizes := []int{maxSlotUp - 5, maxSlotDown, 100_000, 3*mib + 1}
	var srcs, backs [][]byte
	var mems []cudart.DevPtr
	for i, n := range sizes {
		srcs, backs, mems = append(srcs, random(n, uint64(i))), append(backs, make([]byte, n)), append(mems, device(t, s.dev, n))
	}
	pinned := s.Bytes()
	copies := func(ctx context.Context) (failed bool) {
		for _, uploads := range []bool{true, false} {
			var all sync.WaitGroup
			var bad atomic.Bool
			for i := range sizes {
				all.Go(func() {
					var err error
					if uploads {
						_, err = upload(ctx, s, mems[i], srcs[i])
					} else {
						_, err = download(ctx, s, backs[i], mems[i])
					}
					if err != nil {
						bad.Store(true)
					}
				})
			}
			all.Wait()
			failed = failed || bad.Load()
		}
		return failed
	}
	asItWas := func(what string, k int64) {
		for s.slots[toDevice].taken.Load() || s.slots[toHost].taken.Load() { // by a call that was left
			runtime.Gosched()
		}
		require.Zero(t, s.active[toDevice].Load(), "%s %d", what, k)
		require.Zero(t, s.active[toHost].Load(), "%s %d", what, k)
		require.Equal(t, pinned, s.Bytes(), "%s %d", what, k)
		// Errors of earlier calls may come to the next copy on a link, not to those after it.
		for range 20 {
			if !copies(t.Context()) {
				break
			}
		}
		for i, src := range srcs {
			require.True(t, bytes.Equal(src, backs[i]), "%s %d: %d bytes", what, k, len(src))
			clear(backs[i])
		}
	}
	require.False(t, copies(t.Context()))
	for what, ends := range map[string]func(k int64) (failed, over bool){
		"call that fails": func(k int64) (failed, over bool) {
			at := sim.TotalCalls() + int(k)
			sim.FailCall(at, cudart.ErrUnknown)
			failed = copies(context.Background())
			over = sim.TotalCalls() < at
			sim.ResetFaults()
			return failed, over
		},
		"call that ends the context": func(k int64) (failed, over bool) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var calls atomic.Int64
			sim.OnCall(func(string, int) {
				if calls.Add(1) == k {
					cancel()
				}
			})
			defer sim.OnCall(nil)
			return copies(ctx), calls.Load() < k
		},
	} {
		met := 0
		for k := int64(1); k < 24; k++ {
			failed, over := ends(k)
			if failed {
				met++
			}
			asItWas(what, k)
			if over {
				break
			}
		}
		assert.Greater(t, met, 5, what)
	}
}
