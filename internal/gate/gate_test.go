package gate

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
	var g Gate
	require.False(t, g.Refuses())
	require.True(t, g.Enter())
	g.Leave()
	released := 0
	release := func(context.Context) error {
		released++
		return nil
	}
	require.NoError(t, g.Close(t.Context(), release))
	require.NoError(t, g.Close(t.Context(), release))
	require.NoError(t, g.Close(context.Background(), release))
	assert.Equal(t, 1, released)
	assert.True(t, g.Refuses())
	assert.Zero(t, g.Refuse())
	for range 3 {
		assert.False(t, g.Enter())
	}
	assert.Zero(t, g.Refuse(), "calls that were refused do not count")
	assert.True(t, g.Refuses())
}

// After its context has ended Close still releases, if it has to wait for nothing.
func TestCloseWithAContextThatHasEnded(t *testing.T) {
	t.Parallel()
	ended, end := context.WithCancelCause(t.Context())
	cause := errors.New("no time")
	end(cause)
	var g Gate
	require.True(t, g.Enter())
	require.ErrorIs(t, g.Close(ended, never(t)), cause)
	require.False(t, g.Enter(), "it is shut all the same")
	g.Leave()
	require.ErrorIs(t, g.Close(ended, func(ctx context.Context) error { return ctx.Err() }), context.Canceled)
	released := 0
	require.NoError(t, g.Close(ended, func(context.Context) error { released++; return nil }))
	require.NoError(t, g.Close(ended, never(t)))
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
				var g Gate
				require.True(t, g.Enter())
				require.True(t, g.Enter())
				var released atomic.Bool
				closed := make(chan error, 1)
				go func() { closed <- g.Close(ctx, func(context.Context) error { released.Store(true); return nil }) }()
				for left := 2; left > 0; left-- {
					synctest.Wait()
					require.False(t, released.Load())
					require.Empty(t, closed)
					require.False(t, g.Enter())
					require.Equal(t, left, g.Refuse())
					g.Leave()
				}
				require.NoError(t, <-closed)
				require.True(t, released.Load())
			})
		})
	}
}

// A call that closes what it uses waits for itself, until the context ends. Refuse shows
// it why without waiting.
func TestCloseInACallback(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		require.True(t, g.Enter())
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		require.Equal(t, context.DeadlineExceeded, g.Close(ctx, never(t)))
		require.Equal(t, time.Hour, time.Since(start))
		require.Equal(t, 1, g.Refuse())
		g.Leave()
		require.NoError(t, g.Close(t.Context(), succeed))
	})
}

func TestCloseInARelease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		require.NoError(t, g.Close(t.Context(), func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			err := g.Close(ctx, never(t))
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.EqualError(t, err, "another Close is in progress: context deadline exceeded")
			return nil
		}))
		require.NoError(t, g.Close(t.Context(), never(t)))
	})
}

func TestAReleaseThatFails(t *testing.T) {
	t.Parallel()
	for _, ctx := range []context.Context{context.Background(), t.Context()} {
		var g Gate
		require.Equal(t, errRelease, g.Close(ctx, func(context.Context) error { return errRelease }))
		require.False(t, g.Enter())
		released := 0
		require.NoError(t, g.Close(ctx, func(context.Context) error { released++; return nil }))
		require.NoError(t, g.Close(ctx, never(t)))
		require.Equal(t, 1, released)
	}
}

func TestAReleaseThatPanics(t *testing.T) {
	t.Parallel()
	var g Gate
	require.PanicsWithValue(t, "boom", func() {
		_ = g.Close(context.Background(), func(context.Context) error { panic("boom") })
	})
	released := 0
	require.NoError(t, g.Close(t.Context(), func(context.Context) error { released++; return nil }))
	require.Equal(t, 1, released, "the first has released nothing")
}

// One of those that wait goes on after a failure, with its own release; the rest when that
// has worked.
func TestOthersReleaseAfterAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		release, outcome := make(chan error), make(chan error)
		for i := range 4 {
			go func() {
				release <- g.Close(t.Context(), func(context.Context) error { return <-outcome })
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
			var g Gate
			returns := make(chan error)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			start := time.Now()
			err := g.Close(ctx, func(context.Context) error { return <-returns })
			require.ErrorIs(t, err, ErrStuck)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, time.Minute+patience, time.Since(start))
			require.False(t, g.Enter())

			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			start = time.Now()
			err = g.Close(ctx, never(t))
			require.ErrorContains(t, err, "another Close is in progress")
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotErrorIs(t, err, ErrStuck)
			require.Equal(t, time.Minute, time.Since(start))

			again := make(chan error, 1)
			var released atomic.Bool
			go func() {
				again <- g.Close(context.Background(), func(context.Context) error { released.Store(true); return nil })
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
		var g Gate
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.Equal(t, errRelease, g.Close(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(patience - 1)
			return errRelease
		}))
		require.NoError(t, g.Close(t.Context(), succeed))
	})
}

// Goroutines use something, and others close it meanwhile, all at the same time: none uses
// it during a release or later, one releases at a time, and after failures until it works.
// The race detector sees the calls and the releases touch it.
func TestClosesAtTheSameTime(t *testing.T) {
	t.Parallel()
	for round := range 60 {
		var g Gate
		var thing int    // read by calls, written by releases
		var released int // guarded as thing is
		failures := round % 4
		ctx := context.Background()
		if round%2 == 1 {
			ctx = t.Context()
		}
		var users, closers sync.WaitGroup
		var entered atomic.Int64
		for range 4 {
			users.Go(func() {
				for g.Enter() {
					if thing != 0 {
						t.Error("used after a release")
					}
					entered.Add(1)
					if round%3 > 0 {
						runtime.Gosched() // with a call in progress
					}
					g.Leave()
					runtime.Gosched()
				}
			})
		}
		for entered.Load() == 0 {
			runtime.Gosched()
		}
		for range 4 {
			closers.Go(func() {
				for g.Close(ctx, func(context.Context) error {
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
		require.False(t, g.Enter())
	}
}

// Calls end at the very moment at which they are refused, by two goroutines: each counts
// those that are in progress, and Close waits for the last one.
func TestCallsEndWhileTheyAreRefused(t *testing.T) {
	t.Parallel()
	const calls = 10_000 // take long enough to end for others to come meanwhile
	for round := range 100 {
		var g Gate
		for range calls {
			g.Enter()
		}
		var all sync.WaitGroup
		refuse := func(when func() bool) {
			all.Go(func() {
				for i := 0; !when(); i++ {
					if i%1000 == 999 {
						runtime.Gosched()
					}
				}
				if n := g.Refuse(); n < 1 || n > calls {
					t.Errorf("%d calls are in progress, not 1 to %d", n, calls)
				}
			})
		}
		refuse(func() bool { return g.state.Load() <= int64(calls-100*round) })
		refuse(g.Refuses)
		all.Go(func() {
			for range calls - 1 {
				g.Leave()
			}
		})
		all.Wait()
		require.Equal(t, 1, g.Refuse())
		var left atomic.Bool
		all.Go(func() {
			left.Store(true)
			g.Leave()
		})
		require.NoError(t, g.Close(context.Background(), func(context.Context) error {
			assert.True(t, left.Load())
			return nil
		}))
		all.Wait()
	}
}

func BenchmarkEnterLeave(b *testing.B) {
	var g Gate
	b.Run("alone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if g.Enter() {
				g.Leave()
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(p *testing.PB) {
			for p.Next() {
				if g.Enter() {
					g.Leave()
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
		var g Gate
		if err := g.Close(ctx, succeed); err != nil {
			b.Fatal(err)
		}
	}
}
