package bounded

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// calls is work for Callers.
type calls struct {
	*Callers
	mu       sync.Mutex
	todo     []func() error
	outcomes []error
}

func newCalls(max int) *calls {
	c := &calls{}
	c.Callers = NewCallers(max, func() (func() error, func(error)) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.todo) == 0 {
			return nil, nil
		}
		call := c.todo[0]
		c.todo = c.todo[1:]
		return call, func(err error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.outcomes = append(c.outcomes, err)
		}
	})
	return c
}

func (c *calls) add(list ...func() error) {
	c.mu.Lock()
	c.todo = append(c.todo, list...)
	c.mu.Unlock()
	c.Start(len(list))
}

func TestCallersMakeCallsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const maximum, n = 3, 10
		c := newCalls(maximum)
		var inside, highest atomic.Int32
		release := make(chan struct{})
		for range n {
			c.add(func() error {
				highest.Store(max(highest.Load(), inside.Add(1)))
				defer inside.Add(-1)
				<-release
				return errWork
			})
		}
		synctest.Wait()
		assert.EqualValues(t, maximum, inside.Load())
		close(release)
		synctest.Wait()
		assert.Len(t, c.outcomes, n)
		assert.NotContains(t, c.outcomes, nil)
		assert.EqualValues(t, maximum, highest.Load())
		c.Stop()
		c.Wait(context.Background())
	})
}

// A call that is added after the only caller has found none, and before it has ended, is
// made.
func TestCallersMissNoCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		made := 0
		var c *Callers
		added := false
		c = NewCallers(1, func() (func() error, func(error)) {
			switch {
			case !added:
				added = true
				c.Start(1)
				return nil, nil
			case made == 0:
				return func() error { made++; return nil }, func(error) {}
			}
			return nil, nil
		})
		c.Start(1)
		synctest.Wait()
		assert.Equal(t, 1, made)
		c.Stop()
		c.Wait(context.Background())
	})
}

func TestCallersWhoseCallsFail(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCalls(1)
		c.add(func() error { runtime.Goexit(); return nil }, func() error { panic("boom") }, func() error { return errWork }, func() error { return nil })
		synctest.Wait()
		require.Len(t, c.outcomes, 4)
		assert.Equal(t, ErrExited, c.outcomes[0])
		assert.ErrorContains(t, c.outcomes[1], "panic: boom")
		assert.Equal(t, []error{errWork, nil}, c.outcomes[2:])
		c.Stop()
		c.Wait(context.Background())
	})
}

// After Stop no call begins, and Wait waits for those that run: CallbackGrace after the
// end of its context.
func TestCallersStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCalls(2)
		release := make(chan struct{})
		for range 5 {
			c.add(func() error { <-release; return nil })
		}
		synctest.Wait()
		c.Stop()
		c.Start(1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		c.Wait(ctx)
		assert.Equal(t, time.Minute+CallbackGrace, time.Since(start))
		time.AfterFunc(time.Hour, func() { close(release) })
		c.Wait(context.Background())
		assert.Len(t, c.outcomes, 2)
		assert.Len(t, c.todo, 3)
		idle := newCalls(1)
		idle.Stop()
		idle.Wait(context.Background())
	})
}
