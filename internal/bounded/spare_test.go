package bounded

import (
	"bytes"
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// withProcs sets GOMAXPROCS for a test, which must not be parallel. The test begins without a spare: one of
// a test before it may poll once more.
func withProcs(t *testing.T, n int) {
	waitForSpares(t)
	before := runtime.GOMAXPROCS(n)
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
}

// waitForSpares waits until no goroutine of Go is left.
func waitForSpares(t *testing.T) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		all := stacks[:runtime.Stack(stacks, true)]
		if !bytes.Contains(all, []byte("bounded.(*spare).work")) {
			return
		}
		require.True(t, time.Now().Before(deadline), "a spare is left:\n%s", all)
	}
}

// claim makes calls until a spare takes one. On a busy host each may have ended before the next call.
func claim(t *testing.T, f func()) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		ready := make(chan struct{})
		started.Store(int64(time.Since(loaded))) // as after another call
		if !Go(func() { close(ready) }) {
			<-ready
		}
		for range 1000 {
			if pass(f) {
				return
			}
			runtime.Gosched()
		}
		require.True(t, time.Now().Before(deadline), "no spare polls")
	}
}

func TestSpareMakesTheNextCall(t *testing.T) {
	withProcs(t, minProcs)
	for range 20 {
		done := make(chan struct{})
		claim(t, func() { close(done) })
		<-done
	}
}

func TestThereIsNoSpareOnFewProcessors(t *testing.T) {
	withProcs(t, minProcs-1)
	for range 20 {
		done := make(chan struct{})
		require.False(t, Go(func() { close(done) }))
		<-done
	}
}

// A spare that has no call ends, and leaves no goroutine.
func TestSpareEnds(t *testing.T) {
	withProcs(t, minProcs)
	claim(t, func() {})
	waitForSpares(t)
	assert.Nil(t, polling.Load())
}

// A call that does not return occupies its goroutine, and no other call waits for it.
func TestSpareThatIsStuckMakesNoOtherCall(t *testing.T) {
	withProcs(t, minProcs)
	blocked := make(chan struct{})
	defer close(blocked)
	claim(t, func() { <-blocked })
	for range 10 {
		done := make(chan struct{})
		claim(t, func() { close(done) })
		<-done
	}
}

// What Do promises of a call is so of a short one that a spare makes.
func TestDoOfAShortCall(t *testing.T) {
	withProcs(t, minProcs)
	short := func(t *testing.T, ctx context.Context, c Call[int]) (int, error) {
		t.Helper()
		c.Short = true
		done := make(chan struct{})
		claim(t, func() { close(done) })
		<-done // a spare polls, mostly
		return Do(ctx, c)
	}
	for range 5 {
		n, err := short(t, t.Context(), Call[int]{Run: work})
		assert.Equal(t, 1, n)
		assert.Equal(t, errWork, err)

		n, err = short(t, t.Context(), Call[int]{Run: func() (int, error) { time.Sleep(time.Millisecond); return 2, nil }})
		assert.Equal(t, 2, n, "the caller polls no more")
		assert.NoError(t, err)

		assert.PanicsWithValue(t, "no", func() {
			_, _ = short(t, t.Context(), Call[int]{Run: func() (int, error) { panic("no") }})
		})
		returned := make(chan bool)
		go func() {
			defer close(returned)
			_, _ = short(t, t.Context(), Call[int]{Run: func() (int, error) { runtime.Goexit(); return 0, nil }})
			returned <- true
		}()
		assert.False(t, <-returned)

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		blocked, late := make(chan struct{}), make(chan int, 1)
		_, err = short(t, ctx, Call[int]{
			Run:   func() (int, error) { <-blocked; return 7, nil },
			Late:  func(n int, err error) { assert.NoError(t, err); late <- n },
			Grace: NoGrace,
		})
		cancel()
		require.ErrorIs(t, err, ErrStuck)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Empty(t, late)
		close(blocked)
		assert.Equal(t, 7, <-late)
	}
}

// Calls of many goroutines at once are all made, once each.
func TestManyShortCalls(t *testing.T) {
	for _, procs := range []int{1, minProcs, 16} {
		withProcs(t, procs)
		const callers, calls = 8, 500
		sums := make(chan int)
		for range callers {
			go func() {
				sum := 0
				for i := range calls {
					n, err := Do(t.Context(), Call[int]{Short: true, Run: func() (int, error) { return i, nil }})
					assert.NoError(t, err)
					sum += n
				}
				sums <- sum
			}()
		}
		for range callers {
			require.Equal(t, calls*(calls-1)/2, <-sums)
		}
	}
}
