package transfer

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
)

// TestEveryCallCanBlock makes the first call of each CUDA function in each operation
// block. If it returns, the operation works. If it does not, the operation ends some
// time after its context; then the call returns, and all works and can be released.
// Not parallel: it counts goroutines and what is pinned.
func TestEveryCallCanBlock(t *testing.T) {
	benches := newBenches(t)
	before, pinned := runtime.NumGoroutine(), hostmem.ReadStats().ReservedBytes
	var group sync.WaitGroup
	room := make(chan struct{}, 12) // most of the time they wait
	for name, operation := range operations {
		b := benches(13000)
		calls := b.calls(func() {
			_, err := operation(t.Context(), b)
			assert.NoError(t, err, name)
		})
		b.close(name)
		for _, fn := range slices.Sorted(maps.Keys(calls)) {
			for _, returns := range []bool{true, false} {
				for _, late := range []bool{false, true} { // which makes a difference for what it queues
					if late && fn != "cudaMemcpyAsync" && fn != "cudaMemcpyBatchAsync" {
						continue
					}
					room <- struct{}{}
					group.Go(func() {
						defer func() { <-room }()
						what := fmt.Sprintf("%s: %s blocks, returns: %t, late: %t", name, fn, returns, late)
						b := benches(13000)
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
						patience, stop := context.WithTimeout(t.Context(), time.Minute)
						defer stop()
						blocked := make(chan error, 1)
						go func() { blocked <- b.sim.AwaitBlocked(patience, fn, 1) }()
						select {
						case err := <-blocked:
							assert.NoError(t, err, what)
						case <-ended: // it did without the call this time
						}
						if returns {
							unblock()
						} else {
							cancel()
						}
						select {
						case <-ended:
						case <-patience.Done():
							t.Errorf("%s: the operation does not end", what)
							return
						}
						switch {
						case returns:
							assert.NoError(t, err, what)
							fallthrough
						case err == nil:
							if got != nil {
								assert.True(t, bytes.Equal(b.bytes, got), what)
							}
						default:
							assert.ErrorIs(t, err, context.Canceled, what)
						}
						unblock()
						b.sim.ResetFaults()
						b.close(what)
					})
				}
			}
		}
	}
	group.Wait()
	requireEnded(t, before)
	assert.Equal(t, pinned, hostmem.ReadStats().ReservedBytes)
}
