package budget

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// withLimit returns a budget with a limit and without a guard.
func withLimit(max int) *Budget {
	b := New(func(int) (linux.Headroom, error) { return linux.Headroom{}, errors.New("no figures here") })
	b.Set(max, DefaultShare)
	return b
}

func (b *Budget) waiting() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queue)
}

// mustReserve acquires n bytes, which the limit allows at once.
func (b *Budget) mustReserve(tb testing.TB, n int) *Reservation {
	tb.Helper()
	g, err := b.Acquire(tb.Context(), Request{Bytes: n})
	require.NoError(tb, err)
	return g
}

// eventually polls for what another goroutine is about to do.
func eventually(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			require.FailNow(tb, "did not happen", what)
		}
	}
}

func decided(g *Reservation) bool {
	select {
	case <-g.Done():
		return g.Err() == nil
	default:
		return false
	}
}

func TestRequestsAreServedInOrder(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	held := []*Reservation{b.mustReserve(t, 4), b.mustReserve(t, 6)}
	var all []*Reservation
	// Small requests after a large one must not overtake it.
	for i, n := range []int{10, 1, 7, 2, 10, 3} {
		all = append(all, b.Reserve(n))
		assert.Equal(t, i+1, b.waiting())
	}
	nothing := b.Reserve(0)
	assert.False(t, decided(nothing), "not even nothing is granted before those that wait")
	nothing.Release()
	held[0].Release()
	assert.Equal(t, 6, b.waiting(), "4 bytes are not enough for the first")
	held[1].Release()
	for i, want := range [][]bool{
		{true, false, false, false, false, false},
		{true, true, true, true, false, false}, // 1, 7 and 2 fit together
	} {
		for j, g := range all {
			assert.Equal(t, want[j], decided(g), "request %d, step %d", j, i)
		}
		if i == 0 {
			all[0].Release()
		}
	}
	for _, g := range all {
		g.Release()
		g.Release() // does nothing
	}
	assert.Zero(t, b.Used())
	assert.Zero(t, b.waiting())
}

func TestAWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	held := b.mustReserve(t, 8)
	cause := errors.New("cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { _, err := b.Acquire(ctx, Request{Bytes: 5}); first <- err }()
	eventually(t, "it waits", func() bool { return b.waiting() == 1 })
	go func() {
		g, err := b.Acquire(t.Context(), Request{Bytes: 2})
		if err == nil {
			defer g.Release()
		}
		second <- err
	}()
	eventually(t, "both wait", func() bool { return b.waiting() == 2 })
	cancel(cause)
	err := <-first
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, err, ErrLimit)
	require.ErrorContains(t, err, "wait for 5 bytes: 8 of 10 are pinned, 0 requests came before")
	require.NoError(t, <-second, "the next in the queue is served")
	held.Release()
	assert.Zero(t, b.Used())

	g, err := b.Acquire(ctx, Request{Bytes: 1})
	require.NoError(t, err, "what is to be had at once needs no wait")
	g.Release()
}

func TestRequestsBeyondTheLimitFail(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	_, err := b.Acquire(t.Context(), Request{Bytes: 11})
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorIs(t, err, ErrLimit)
	held := b.mustReserve(t, 10)
	waits := b.Reserve(9)
	assert.False(t, decided(waits))
	b.Set(8, DefaultShare)
	<-waits.Done()
	require.ErrorIs(t, waits.Err(), ErrTooLarge, "a limit that shrinks ends the waits that it makes futile")
	more := b.Reserve(1)
	assert.False(t, decided(more), "10 of 8 are used")
	b.Set(0, DefaultShare)
	assert.True(t, decided(more), "0 is no limit")
	more.Release()
	held.Release()
	assert.Zero(t, b.Used())
}

func TestALimitUnderManyGoroutines(t *testing.T) {
	t.Parallel()
	const most = 100
	b := withLimit(most)
	var used atomic.Int64
	var group sync.WaitGroup
	for i := range 16 {
		group.Go(func() {
			random := rand.New(rand.NewPCG(7, uint64(i)))
			use := func(g *Reservation) {
				assert.LessOrEqual(t, used.Add(int64(g.n)), int64(most))
				used.Add(-int64(g.n))
				g.Release()
			}
			for range 2000 {
				n := 1 + random.IntN(most)
				switch random.IntN(3) {
				case 0:
					ctx, cancel := context.WithCancel(t.Context())
					go cancel()
					if g, err := b.Acquire(ctx, Request{Bytes: n}); err == nil {
						use(g)
					} else {
						assert.ErrorIs(t, err, context.Canceled)
					}
				case 1:
					g := b.Reserve(n)
					if random.IntN(2) == 0 {
						<-g.Done()
						use(g)
					} else {
						g.Release() // whatever its state
					}
				default:
					g, err := b.Acquire(t.Context(), Request{Bytes: n})
					if assert.NoError(t, err) {
						use(g)
					}
				}
			}
		})
	}
	group.Wait()
	assert.Zero(t, b.Used())
	assert.Zero(t, b.waiting())
}

// A reservation that was waited for is claimed instead of a new one, once, and the rest of it
// returns.
func TestAReservationOfTheContext(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	g := b.Reserve(10)
	require.True(t, decided(g))
	got, err := b.Acquire(g.With(t.Context()), Request{Bytes: 7})
	require.NoError(t, err)
	assert.Same(t, g, got)
	assert.Equal(t, 7, b.Used())
	_, err = b.Acquire(g.With(t.Context()), Request{Bytes: 7})
	require.ErrorIs(t, err, ErrLimit, "one reservation is for one piece of memory")
	g.Withdraw()
	assert.Equal(t, 7, b.Used(), "it was used")
	g.Release()
	assert.Zero(t, b.Used())

	g = b.Reserve(5)
	_, err = b.Acquire(g.With(t.Context()), Request{Bytes: 6})
	require.ErrorIs(t, err, ErrLimit)
	g.Withdraw()
	assert.Zero(t, b.Used(), "no Acquire used it")

	other := withLimit(10)
	g = other.Reserve(10)
	fresh, err := b.Acquire(g.With(t.Context()), Request{Bytes: 3})
	require.NoError(t, err)
	assert.Equal(t, []int{3, 10}, []int{b.Used(), other.Used()}, "another budget's reservation")
	fresh.Release()
}

// Requests that wait have unused memory unmapped, of one owner after the other, and
// no more than they need.
func TestReclaimForRequestsThatWait(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	var calls atomic.Int32
	for range 3 {
		idle := b.mustReserve(t, 3)
		var once sync.Once
		stop := b.Reclaim(func(_ context.Context, need int) (freed int) {
			once.Do(func() {
				calls.Add(1)
				assert.Contains(t, []int{5, 2}, need)
				freed = idle.n
				idle.Release()
			})
			return freed
		})
		defer stop()
	}
	g, err := b.Acquire(t.Context(), Request{Bytes: 6})
	require.NoError(t, err)
	assert.Equal(t, int32(2), calls.Load(), "two of three were enough")
	assert.Equal(t, 9, b.Used())
	g.Release()
}

// The rest of a claimed reservation serves the next request at once.
func TestTheRestOfAReservationServesThoseThatWait(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	g := b.Reserve(10)
	waits := b.Reserve(3)
	require.False(t, decided(waits))
	got, err := b.Acquire(g.With(t.Context()), Request{Bytes: 7})
	require.NoError(t, err)
	require.True(t, decided(waits))
	waits.Release()
	got.Release()
	assert.Zero(t, b.Used())
}

// Memory that becomes idle while a request waits is reclaimed for it, when it tries again.
func TestReclaimTriesAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := withLimit(10)
		held := b.mustReserve(t, 10)
		idle := time.Now().Add(time.Second)
		defer b.Reclaim(func(context.Context, int) int {
			if time.Now().Before(idle) {
				return 0
			}
			held.Release()
			return 10
		})()
		b.mustReserve(t, 1).Release()
		assert.Equal(t, idle, time.Now())
		time.Sleep(reclaimEvery) // when its goroutine ends
	})
}

func TestReclaimEndsWithTheWaits(t *testing.T) {
	t.Parallel()
	b := withLimit(10)
	defer b.Reclaim(func(context.Context, int) int { return 0 })()
	running := func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.running
	}
	held := b.mustReserve(t, 10)
	waits := b.Reserve(1)
	assert.True(t, running())
	held.Release()
	assert.True(t, decided(waits))
	eventually(t, "no goroutine stays", func() bool { return !running() })
	waits.Release()
}
