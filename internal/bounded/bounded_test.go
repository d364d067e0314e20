package bounded

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var errWork = errors.New("work")

func work() (int, error) { return 1, errWork }

func TestDoReturnsTheOutcome(t *testing.T) {
	t.Parallel()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, ctx := range map[string]context.Context{"ctx cannot end": context.Background(), "ctx can end": t.Context(), "ctx has ended": ended} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, err := Do(ctx, Call[int]{Run: work})
			assert.Equal(t, 1, n)
			assert.Equal(t, errWork, err)
		})
	}
}

func TestDoRunsOnTheCallersGoroutineIfCtxCannotEnd(t *testing.T) {
	t.Parallel()
	before := runtime.NumGoroutine()
	_, _ = Do(context.Background(), Call[int]{Run: func() (int, error) {
		assert.LessOrEqual(t, runtime.NumGoroutine(), before+runtime.GOMAXPROCS(0)*8) // none of thousands
		return 0, nil
	}})
	returned := make(chan bool)
	go func() {
		defer close(returned)
		_, _ = Do(context.Background(), Call[int]{Run: func() (int, error) { runtime.Goexit(); return 0, nil }})
		returned <- true
	}()
	assert.False(t, <-returned)
}

func TestDoAbandonsACallThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ grace, want time.Duration }{
		"default":  {0, Grace},
		"callback": {CallbackGrace, CallbackGrace},
		"none":     {NoGrace, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				cause := errors.New("cause")
				ctx, cancel := context.WithCancelCause(t.Context())
				var stopped error
				late, blocked := make(chan int, 1), make(chan struct{})
				time.AfterFunc(time.Minute, func() { cancel(cause) })
				start := time.Now()
				n, err := Do(ctx, Call[int]{
					Run:   func() (int, error) { <-blocked; return 7, nil },
					Stop:  func(cause error) { stopped = cause },
					Late:  func(n int, err error) { assert.NoError(t, err); late <- n },
					Grace: tc.grace,
				})
				assert.Zero(t, n)
				for _, want := range []error{ErrStuck, cause, context.Canceled} {
					require.ErrorIs(t, err, want)
				}
				assert.Equal(t, cause, stopped)
				assert.Equal(t, time.Minute+tc.want, time.Since(start))
				synctest.Wait()
				assert.Empty(t, late)
				close(blocked)
				assert.Equal(t, 7, <-late)
			})
		})
	}
}

// A call that was abandoned and then ends its goroutine has no outcome.
func TestNothingIsLateAfterGoexit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		blocked, late := make(chan struct{}), 0
		_, err := Do(ctx, Call[int]{
			Run:  func() (int, error) { <-blocked; runtime.Goexit(); return 7, nil },
			Late: func(int, error) { late++ },
		})
		require.ErrorIs(t, err, ErrStuck)
		close(blocked)
		synctest.Wait()
		require.Zero(t, late)
	})
}

func TestDoWaitsForACallThatHeedsItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := Do(ctx, Call[int]{Run: func() (int, error) {
			<-ctx.Done()
			time.Sleep(Grace - 1)
			return 0, errWork
		}, Late: func(int, error) { t.Error("its caller has not left") }})
		require.Equal(t, errWork, err)
	})
}

func TestDoAbandonsOnlyWhenAllowed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var may atomic.Bool
		blocked := make(chan struct{})
		defer close(blocked)
		time.AfterFunc(10*time.Second, func() { may.Store(true) })
		start := time.Now()
		_, err := Do(ctx, Call[int]{Run: func() (int, error) { <-blocked; return 0, nil }, Abandon: may.Load})
		require.ErrorIs(t, err, ErrStuck)
		assert.InDelta(t, 10*time.Second, time.Since(start), float64(time.Millisecond))
	})
}

// A call that ends its goroutine, as testing.T.FailNow does, ends that of its caller.
func TestDoPassesOnGoexit(t *testing.T) {
	t.Parallel()
	returned := make(chan bool)
	go func() {
		defer close(returned)
		_, _ = Do(t.Context(), Call[int]{Run: func() (int, error) { runtime.Goexit(); return 0, nil }})
		returned <- true
	}()
	assert.False(t, <-returned)
}

// A panic of the call is one of its caller, who may recover from it.
func TestDoPassesOnPanics(t *testing.T) {
	t.Parallel()
	for name, ctx := range map[string]context.Context{"ctx cannot end": context.Background(), "ctx can end": t.Context()} {
		assert.PanicsWithValue(t, "no", func() {
			_, _ = Do(ctx, Call[int]{Run: func() (int, error) { panic("no") }, Late: func(int, error) { t.Error("it is not late") }})
		}, name)
	}
}

func TestEnded(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	require.EqualError(t, Ended(ctx), "context canceled: cause")
	require.ErrorIs(t, Ended(ctx), cause)
	require.ErrorIs(t, Ended(ctx), context.Canceled)
	plain, cancelPlain := context.WithCancel(t.Context())
	cancelPlain()
	require.Equal(t, context.Canceled, Ended(plain))
}

func TestGroupBoundsItsCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var g Group
		for range MaxInside {
			require.NoError(t, g.Begin(context.Background()))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		err := g.Begin(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, ErrStuck)
		assert.Equal(t, time.Minute, time.Since(start))
		entered := make(chan error)
		go func() { entered <- g.Begin(t.Context()) }()
		synctest.Wait()
		g.End()
		require.NoError(t, <-entered)
		for range MaxInside {
			g.End()
		}
	})
}

func TestGroupBeginsInAFreeSlotAlthoughCtxHasEnded(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var g Group
	for range 100 {
		require.NoError(t, g.Begin(ctx))
		g.End()
	}
}

// A call has its slot from its beginning to its end, whoever still waits for it.
func TestCallsHaveTheSlotOfTheirGroup(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(ctx context.Context, g *Group, f func() error) error{
		"Inside": func(ctx context.Context, g *Group, f func() error) error { return g.Inside(ctx, f) },
		"Do": func(ctx context.Context, g *Group, f func() error) error {
			_, err := Do(ctx, Call[int]{Group: g, Run: func() (int, error) { return 0, f() }, Grace: NoGrace})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var g Group
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				blocked := make(chan struct{})
				for range MaxInside {
					go func() { _ = call(ctx, &g, func() error { <-blocked; return nil }) }()
				}
				synctest.Wait()
				err := call(ctx, &g, func() error { t.Error("there is no slot"); return nil })
				for _, want := range []error{ErrStuck, context.DeadlineExceeded} {
					require.ErrorIs(t, err, want)
				}
				require.False(t, g.TryBegin(), "the calls have not returned")
				close(blocked)
				synctest.Wait()
				for range 2 * MaxInside {
					require.Equal(t, errWork, call(context.Background(), &g, func() error { return errWork }))
				}
				require.PanicsWithValue(t, "no", func() { _ = call(t.Context(), &g, func() error { panic("no") }) })
				require.Empty(t, g.slots)
			})
		})
	}
}

// A looper has a Relay whose calls block while they are told to.
type looper struct {
	relay *Relay
	gate  chan chan struct{} // takes what the next call waits for
	ended atomic.Int32
	idle  atomic.Bool
}

func newLooper() *looper {
	l := &looper{gate: make(chan chan struct{})}
	l.relay = NewRelay(func(u *Runner) {
		defer l.ended.Add(1)
		for {
			select {
			case c := <-l.gate:
				if !u.Call(func() { <-c }) {
					return
				}
			case <-time.After(time.Second):
				if u.Stop(l.idle.Load) {
					return
				}
			}
		}
	})
	return l
}

func TestRelayGoesOnWithoutACallThatBlocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLooper()
		l.relay.Start()
		l.relay.Start()
		quick, blocked := make(chan struct{}), make(chan struct{})
		close(quick)
		for range 100 {
			l.gate <- quick
		}
		start := time.Now()
		l.gate <- blocked
		l.gate <- quick
		assert.Equal(t, Takeover, time.Since(start))
		synctest.Wait()
		require.Zero(t, l.ended.Load(), "it is inside its call")
		close(blocked)
		synctest.Wait()
		require.EqualValues(t, 1, l.ended.Load(), "the one that was replaced")
		l.gate <- quick
		l.idle.Store(true)
		time.Sleep(2 * time.Second)
		require.EqualValues(t, 2, l.ended.Load())
		l.idle.Store(false)
		l.relay.Start()
		l.gate <- quick
		l.idle.Store(true)
		time.Sleep(2 * time.Second)
		require.EqualValues(t, 3, l.ended.Load())
	})
}

// So many goroutines may be stuck at a time, and no more. The loop goes on when one of them
// is not any longer.
func TestRelayBoundsItsGoroutines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLooper()
		l.relay.Start()
		var all []chan struct{}
		for range MaxInside + 1 {
			c := make(chan struct{})
			all = append(all, c)
			l.gate <- c
		}
		time.Sleep(time.Hour)
		select {
		case l.gate <- all[0]:
			t.Error("another goroutine has taken over")
		default:
		}
		close(all[0])
		last := make(chan struct{})
		l.gate <- last
		for _, c := range append(all[1:], last) {
			close(c)
		}
		l.idle.Store(true)
		time.Sleep(time.Minute)
		require.EqualValues(t, MaxInside+2, l.ended.Load())
	})
}

// BenchmarkDo is a call on another goroutine, of a Run that takes no time and of one that takes 10 µs.
func BenchmarkDo(b *testing.B) {
	for _, took := range []time.Duration{0, 10 * time.Microsecond} {
		for _, short := range []bool{false, true} {
			b.Run(fmt.Sprintf("took=%v/short=%t", took, short), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					_, _ = Do(b.Context(), Call[int]{Short: short, Run: func() (int, error) {
						for began := time.Now(); time.Since(began) < took; {
						}
						return 0, nil
					}})
				}
			})
		}
	}
}
