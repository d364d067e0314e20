package poll

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestUntil(t *testing.T) {
	t.Parallel()
	calls := 0
	done := func(n int) func() bool {
		calls = 0
		return func() bool { calls++; return calls >= n }
	}
	assert.True(t, Poller{Polls: 1}.Until(done(1)), "at once")
	assert.Equal(t, 1, calls)
	assert.True(t, Memory(time.Hour, nil).Until(done(100)))
	assert.Equal(t, 100, calls)
	assert.True(t, Poller{Polls: 1}.Until(done(2)), "at the end of the time")
	assert.False(t, Poller{Polls: 1}.Until(done(3)))
	assert.Equal(t, 2, calls)

	began := time.Now()
	assert.False(t, Poller{For: 2 * time.Millisecond, Polls: 3, Hints: 5}.Until(func() bool { return false }))
	assert.GreaterOrEqual(t, time.Since(began), 2*time.Millisecond)

	looks := 0
	more := func() bool { looks++; return looks < 3 }
	assert.False(t, Poller{For: time.Hour, Polls: 4, More: more}.Until(done(1000)), "More ends it")
	assert.Equal(t, 3, looks)
	assert.Equal(t, 12, calls)
}

// Polling allocates nothing, also with functions that use the caller's variables.
func TestUntilAllocatesNothing(t *testing.T) {
	var n atomic.Int32
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		n.Store(0)
		Memory(time.Hour, func() bool { return n.Load() < 100 }).Until(func() bool { return n.Add(1) > 50 })
	}))
}

func TestLimit(t *testing.T) {
	t.Parallel()
	var l Limit
	var begun atomic.Int32
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if l.TryBegin(3) {
				assert.LessOrEqual(t, begun.Add(1), int32(3))
				begun.Add(-1)
				l.Add(-1)
			}
		})
	}
	all.Wait()
	assert.Zero(t, l.Load())
	for range 3 {
		assert.True(t, l.TryBegin(3))
	}
	assert.False(t, l.TryBegin(3))
	assert.EqualValues(t, 3, l.Load())
}
