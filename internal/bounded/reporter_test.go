package bounded

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// failures collects what a Reporter's fail is called with.
type failures struct {
	at   []int
	errs []error
}

func (f *failures) fail(at int, err error) {
	f.at, f.errs = append(f.at, at), append(f.errs, err)
}

// Numbers ascend, those that come during a call are one, and the last one is reported.
func TestReporterCoalesces(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var got []int
		next := make(chan struct{})
		var f failures
		r := NewReporter(100, func(done, total int) {
			assert.Equal(t, 100, total)
			got = append(got, done)
			<-next
		}, f.fail, nil)
		synctest.Wait()
		assert.Empty(t, got, "nothing is done")
		for _, done := range []int{10, 20, 30, 30, 5} {
			r.Set(done)
			synctest.Wait()
		}
		assert.Equal(t, []int{10}, got)
		next <- struct{}{}
		synctest.Wait()
		assert.Equal(t, []int{10, 30}, got)
		r.Set(100)
		go close(next)
		assert.True(t, r.Finish())
		assert.Equal(t, []int{10, 30, 100}, got)
		assert.Empty(t, f.errs)
		r.Set(200) // by a callback that comes late
		synctest.Wait()
		assert.Equal(t, []int{10, 30, 100}, got)
	})
}

// Goroutines that report at the same time do not undo each other's numbers.
func TestReporterTakesTheLargestNumber(t *testing.T) {
	t.Parallel()
	for range 100 {
		last := 0
		r := NewReporter(8, func(done, _ int) {
			assert.Greater(t, done, last)
			last = done
		}, nil, nil)
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() { r.Set(i + 1) })
		}
		all.Wait()
		require.True(t, r.Finish())
		require.Equal(t, 8, last)
	}
}

// Finish waits for a callback without a bound, unless the work has ended: then for
// CallbackGrace. No call begins any more.
func TestReporterAbandonsACallbackThatBlocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		block, stopped := make(chan struct{}), make(chan struct{})
		calls := 0
		var f failures
		r := NewReporter(100, func(int, int) { calls++; <-block }, f.fail, stopped)
		r.Set(1)
		synctest.Wait()
		r.Set(2)
		start := time.Now()
		time.AfterFunc(time.Hour, func() { close(stopped) })
		assert.False(t, r.Finish())
		assert.Equal(t, time.Hour+CallbackGrace, time.Since(start))
		close(block)
		synctest.Wait()
		assert.Equal(t, 1, calls)
		assert.Empty(t, f.errs)
	})
}

// A callback that heeds the end of the work is waited for.
func TestReporterWaitsForACallbackThatEndsSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stopped := make(chan struct{})
		returned := false
		r := NewReporter(100, func(int, int) {
			<-stopped
			time.Sleep(CallbackGrace - 1)
			returned = true
		}, nil, stopped)
		r.Set(1)
		synctest.Wait()
		close(stopped)
		assert.True(t, r.Finish())
		assert.True(t, returned)
	})
}

// A callback that panics or ends its goroutine is an error, and not called again.
func TestReporterOfACallbackThatFails(t *testing.T) {
	t.Parallel()
	for want, end := range map[string]func(){
		"progress: panic: boom":          func() { panic("boom") },
		"progress: " + ErrExited.Error(): runtime.Goexit,
	} {
		synctest.Test(t, func(t *testing.T) {
			var f failures
			calls := 0
			r := NewReporter(100, func(int, int) { calls++; end() }, f.fail, nil)
			r.Set(7)
			synctest.Wait()
			r.Set(100)
			assert.True(t, r.Finish())
			assert.Equal(t, 1, calls)
			assert.Equal(t, []int{7}, f.at)
			require.Len(t, f.errs, 1)
			assert.ErrorContains(t, f.errs[0], want)
		})
	}
}

func TestGuardReturnsPanicsAsErrors(t *testing.T) {
	t.Parallel()
	assert.NoError(t, Guard(func() error { return nil }))
	assert.Equal(t, errWork, Guard(func() error { return errWork }))
	var none *int
	for want, f := range map[string]func() error{
		"panic: boom\ngoroutine ": func() error { panic("boom") },
		"nil pointer":             func() error { return errors.New(string(rune(*none))) },
	} {
		assert.ErrorContains(t, Guard(f), want)
	}
}

// Work without a callback needs no Reporter, and no check for one.
func TestReporterWithoutACallback(t *testing.T) {
	t.Parallel()
	r := NewReporter(100, nil, nil, nil)
	r.Set(100)
	assert.True(t, r.Finish())
}
