package lifetime

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/bounded"
)

var errRelease = errors.New("cannot be released")

// never is a release that must not be called.
func never(t *testing.T) func(context.Context) error {
	return func(context.Context) error {
		t.Error("released")
		return nil
	}
}

func succeed(context.Context) error { return nil }

func TestCloseTwice(t *testing.T) {
	t.Parallel()
	var l Lifetime
	require.False(t, l.Sealed())
	require.True(t, l.Begin())
	l.End()
	released := 0
	release := func(context.Context) error {
		released++
		return nil
	}
	require.NoError(t, l.Close(t.Context(), release))
	require.NoError(t, l.Close(t.Context(), release))
	require.NoError(t, l.Close(context.Background(), release))
	assert.Equal(t, 1, released)
	assert.True(t, l.Sealed())
	assert.Zero(t, l.Seal())
	for range 3 {
		assert.False(t, l.Begin())
	}
	assert.Zero(t, l.Seal(), "calls that were refused do not count")
	assert.True(t, l.Sealed())
}

// After its context has ended Close still releases, if it has to wait for nothing.
func TestCloseWithAContextThatHasEnded(t *testing.T) {
	t.Parallel()
	ended, end := context.WithCancelCause(t.Context())
	cause := errors.New("no time")
	end(cause)
	var l Lifetime
	require.True(t, l.Begin())
	require.ErrorIs(t, l.Close(ended, never(t)), cause)
	require.False(t, l.Begin(), "it is shut all the same")
	l.End()
	require.ErrorIs(t, l.Close(ended, func(ctx context.Context) error { return ctx.Err() }), context.Canceled)
	released := 0
	require.NoError(t, l.Close(ended, func(context.Context) error { released++; return nil }))
	require.NoError(t, l.Close(ended, never(t)))
	assert.Equal(t, 1, released)
}

func TestCloseWaitsForCalls(t *testing.T) {
	t.Parallel()
	for name, can := range map[string]bool{"ctx can end": true, "ctx cannot end": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx := context.Background()
				if can {
					ctx = t.Context()
				}
				var l Lifetime
				require.True(t, l.Begin())
				require.True(t, l.Begin())
				var released atomic.Bool
				closed := make(chan error, 1)
				go func() { closed <- l.Close(ctx, func(context.Context) error { released.Store(true); return nil }) }()
				for left := 2; left > 0; left-- {
					synctest.Wait()
					require.False(t, released.Load())
					require.Empty(t, closed)
					require.False(t, l.Begin())
					require.Equal(t, left, l.Seal())
					l.End()
				}
				require.NoError(t, <-closed)
				require.True(t, released.Load())
			})
		})
	}
}

// Wait waits also for what is counted after calls are refused.
func TestWaitCoversHolds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l Lifetime
		l.Seal()
		for range 2 {
			l.Hold()
			l.Hold()
			require.Equal(t, 2, l.Calls())
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			require.ErrorIs(t, l.Wait(ctx), context.DeadlineExceeded)
			waited := make(chan error, 1)
			go func() { waited <- l.Wait(t.Context()) }()
			l.End()
			synctest.Wait()
			require.Empty(t, waited)
			l.End()
			require.NoError(t, <-waited)
			require.NoError(t, l.Wait(ctx), "nothing is held")
		}
	})
}

// A call that closes what it uses waits for itself, until the context ends. Seal shows
// it why without waiting.
func TestCloseInACallback(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l Lifetime
		require.True(t, l.Begin())
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		require.Equal(t, context.DeadlineExceeded, l.Close(ctx, never(t)))
		require.Equal(t, time.Hour, time.Since(start))
		require.Equal(t, 1, l.Seal())
		l.End()
		require.NoError(t, l.Close(t.Context(), succeed))
	})
}

func TestCloseInARelease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l Lifetime
		require.NoError(t, l.Close(t.Context(), func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			err := l.Close(ctx, never(t))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.EqualError(t, err, "another Close is in progress: context deadline exceeded")
			return nil
		}))
		require.NoError(t, l.Close(t.Context(), never(t)))
	})
}

func TestAReleaseThatFails(t *testing.T) {
	t.Parallel()
	for _, ctx := range []context.Context{context.Background(), t.Context()} {
		var l Lifetime
		require.Equal(t, errRelease, l.Close(ctx, func(context.Context) error { return errRelease }))
		require.False(t, l.Begin())
		released := 0
		require.NoError(t, l.Close(ctx, func(context.Context) error { released++; return nil }))
		require.NoError(t, l.Close(ctx, never(t)))
		require.Equal(t, 1, released)
	}
}

func TestAReleaseThatPanics(t *testing.T) {
	t.Parallel()
	var l Lifetime
	require.PanicsWithValue(t, "boom", func() {
		_ = l.Close(context.Background(), func(context.Context) error { panic("boom") })
	})
	released := 0
	require.NoError(t, l.Close(t.Context(), func(context.Context) error { released++; return nil }))
	require.Equal(t, 1, released, "the first has released nothing")
}

// One of those that wait goes on after a failure, with its own release; the rest when that
// has worked.
func TestOthersReleaseAfterAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l Lifetime
		release, outcome := make(chan error), make(chan error)
		for i := range 4 {
			go func() {
				release <- l.Close(t.Context(), func(context.Context) error { return <-outcome })
			}()
			if i == 0 {
				synctest.Wait() // the others come while it releases
			}
		}
		synctest.Wait()
		outcome <- errRelease
		require.Equal(t, errRelease, <-release)
		synctest.Wait()
		require.Empty(t, release)
		outcome <- nil
		for range 3 {
			require.NoError(t, <-release)
		}
	})
}

// A release that does not return keeps no Close longer than its context; the one that has
// called it for a moment, in which most releases return. When it does return, that counts.
func TestAReleaseThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	for _, outcome := range []error{nil, errRelease} {
		synctest.Test(t, func(t *testing.T) {
			var l Lifetime
			returns := make(chan error)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			start := time.Now()
			err := l.Close(ctx, func(context.Context) error { return <-returns })
			require.ErrorIs(t, err, bounded.ErrStuck)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, time.Minute+bounded.Grace, time.Since(start))
			require.False(t, l.Begin())

			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			start = time.Now()
			err = l.Close(ctx, never(t))
			require.ErrorContains(t, err, "another Close is in progress")
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotErrorIs(t, err, bounded.ErrStuck)
			require.Equal(t, time.Minute, time.Since(start))

			again := make(chan error, 1)
			var released atomic.Bool
			go func() {
				again <- l.Close(context.Background(), func(context.Context) error { released.Store(true); return nil })
			}()
			synctest.Wait()
			require.Empty(t, again, "a Close whose context cannot end waits")
			returns <- outcome
			require.NoError(t, <-again)
			require.Equal(t, outcome != nil, released.Load())
		})
	}
}

// A release that heeds its context, if late, has its own error returned.
func TestAReleaseThatEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l Lifetime
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.Equal(t, errRelease, l.Close(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(bounded.Grace - 1)
			return errRelease
		}))
		require.NoError(t, l.Close(t.Context(), succeed))
	})
}

// Goroutines use something, and others close it meanwhile, all at the same time: none uses
// it during a release or later, one releases at a time, and after failures until it works.
// The race detector sees the calls and the releases touch it.
func TestClosesAtTheSameTime(t *testing.T) {
	t.Parallel()
	for round := range 60 {
		var l Lifetime
		var thing int    // read by calls, written by releases
		var released int // guarded as thing is
		failures := round % 4
		ctx := context.Background()
		if round%2 == 1 {
			ctx = t.Context()
		}
		var users, closers sync.WaitGroup
		var begun atomic.Int64
		for range 4 {
			users.Go(func() {
				for l.Begin() {
					if thing != 0 {
						t.Error("used after a release")
					}
					begun.Add(1)
					if round%3 > 0 {
						runtime.Gosched() // with a call in progress
					}
					l.End()
					runtime.Gosched()
				}
			})
		}
		for begun.Load() == 0 {
			runtime.Gosched()
		}
		for range 4 {
			closers.Go(func() {
				for l.Close(ctx, func(context.Context) error {
					if thing++; thing <= failures {
						return errRelease
					}
					released++
					return nil
				}) != nil {
				}
				if thing != failures+1 || released != 1 {
					t.Errorf("%d releases, of which %d have worked", thing, released)
				}
			})
		}
		closers.Wait()
		users.Wait()
		require.False(t, l.Begin())
	}
}

// Calls end at the very moment at which they are refused, by two goroutines: each counts
// those that are in progress, and Close waits for the last one.
func TestCallsEndWhileTheyAreRefused(t *testing.T) {
	t.Parallel()
	const calls = 10_000 // take long enough to end for others to come meanwhile
	for round := range 100 {
		var l Lifetime
		for range calls {
			l.Begin()
		}
		var all sync.WaitGroup
		refuse := func(when func() bool) {
			all.Go(func() {
				for i := 0; !when(); i++ {
					if i%1000 == 999 {
						runtime.Gosched()
					}
				}
				if n := l.Seal(); n < 1 || n > calls {
					t.Errorf("%d calls are in progress, not 1 to %d", n, calls)
				}
			})
		}
		refuse(func() bool { return l.users.Calls() <= calls-100*round })
		refuse(l.Sealed)
		all.Go(func() {
			for range calls - 1 {
				l.End()
			}
		})
		all.Wait()
		require.Equal(t, 1, l.Seal())
		var left atomic.Bool
		all.Go(func() {
			left.Store(true)
			l.End()
		})
		require.NoError(t, l.Close(context.Background(), func(context.Context) error {
			assert.True(t, left.Load())
			return nil
		}))
		all.Wait()
	}
}

func BenchmarkBeginEnd(b *testing.B) {
	var l Lifetime
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if l.Begin() {
				l.End()
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(p *testing.PB) {
			for p.Next() {
				if l.Begin() {
					l.End()
				}
			}
		})
	})
}

// What closing costs beside the release.
func BenchmarkClose(b *testing.B) {
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		var l Lifetime
		if err := l.Close(ctx, succeed); err != nil {
			b.Fatal(err)
		}
	}
}
