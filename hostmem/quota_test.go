package hostmem

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func (q *quota) waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiters)
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

func TestQuotaServesInOrder(t *testing.T) {
	t.Parallel()
	q := newQuota(10)
	require.NoError(t, q.acquire(t.Context(), 10))
	var mu sync.Mutex
	var order []int
	var group sync.WaitGroup
	// Small requests behind a large one must not overtake it.
	for i, n := range []int{10, 1, 7, 2, 10, 3} {
		group.Go(func() {
			assert.NoError(t, q.acquire(t.Context(), n))
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
			q.release(n)
		})
		eventually(t, "the request waits", func() bool { return q.waiting() == i+1 })
	}
	assert.False(t, q.tryAcquire(0), "not even nothing may be taken before those who wait")
	q.release(4)
	assert.Equal(t, 6, q.waiting(), "4 bytes are not enough for the first")
	q.release(6)
	group.Wait()
	assert.ElementsMatch(t, []int{0, 1, 2, 3, 4, 5}, order)
	assert.Equal(t, 0, order[0])
	assert.Less(t, indexOf(order, 3), indexOf(order, 4))
	assert.Less(t, indexOf(order, 4), indexOf(order, 5))
	assert.Zero(t, q.used)
}

func indexOf(list []int, x int) int {
	for i, v := range list {
		if v == x {
			return i
		}
	}
	return -1
}

func TestQuotaGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	q := newQuota(10)
	require.NoError(t, q.acquire(t.Context(), 8))
	ctx, cancel := context.WithCancel(t.Context())
	results := make(chan error, 2)
	go func() { results <- q.acquire(ctx, 5) }()
	eventually(t, "it waits", func() bool { return q.waiting() == 1 })
	go func() { results <- q.acquire(t.Context(), 2) }()
	eventually(t, "both wait", func() bool { return q.waiting() == 2 })
	cancel()
	first, second := <-results, <-results
	if first == nil {
		first, second = second, first
	}
	assert.ErrorIs(t, first, context.Canceled)
	assert.ErrorContains(t, first, "8 of 10 are in use, 0 requests came before")
	assert.NoError(t, second, "whoever waited behind is served when the first gives up")
	assert.Equal(t, 10, q.used)
}

func TestQuotaRefusesWhatNeverFits(t *testing.T) {
	t.Parallel()
	q := newQuota(10)
	assert.ErrorIs(t, q.acquire(t.Context(), 11), ErrTooLarge)
	require.NoError(t, q.acquire(t.Context(), 10))
	result := make(chan error, 1)
	go func() { result <- q.acquire(t.Context(), 9) }()
	eventually(t, "it waits", func() bool { return q.waiting() == 1 })
	q.setMax(8)
	assert.ErrorIs(t, <-result, ErrTooLarge, "a limit that shrinks tells those who wait")
	assert.False(t, q.tryAcquire(1))
	q.setMax(0)
	assert.True(t, q.tryAcquire(1<<40), "0 is no limit")
}

func TestQuotaUnderManyGoroutines(t *testing.T) {
	t.Parallel()
	const most = 100
	q := newQuota(most)
	var used, failed atomic.Int64
	var group sync.WaitGroup
	for g := range 16 {
		group.Go(func() {
			random := rand.New(rand.NewPCG(7, uint64(g)))
			for range 2000 {
				n := 1 + random.IntN(most)
				ctx, cancel := context.WithCancel(t.Context())
				switch random.IntN(3) {
				case 0:
					go cancel()
				case 1:
					if !q.tryAcquire(n) {
						cancel()
						continue
					}
					used.Add(int64(n))
					assert.LessOrEqual(t, used.Load(), int64(most))
					used.Add(-int64(n))
					q.release(n)
				}
				if err := q.acquire(ctx, n); err == nil {
					assert.LessOrEqual(t, used.Add(int64(n)), int64(most))
					used.Add(-int64(n))
					q.release(n)
				} else if !errors.Is(err, context.Canceled) {
					failed.Add(1)
				}
				cancel()
			}
		})
	}
	group.Wait()
	assert.Zero(t, failed.Load())
	assert.Zero(t, q.used)
	assert.Zero(t, q.waiting())
}
