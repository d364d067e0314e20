package bounded

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestForEachDoesEachItemOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ to, size, threads int }{
		{1, 10, 1}, {100, 10, 1}, {100, 10, 4}, {1003, 10, 16}, {30, 10, 64}, {0, 10, 4},
	} {
		var mu sync.Mutex
		seen := make([]int, c.to)
		at, most := 0, 0
		err := ForEach(t.Context(), c.to, c.size, c.threads, func(_ context.Context, off, n int) error {
			mu.Lock()
			at++
			most = max(most, at)
			for i := off; i < off+n; i++ {
				seen[i]++
			}
			assert.True(t, (off+n)%c.size == 0 || off+n == c.to, "items end at multiples of their size: %d", off+n)
			mu.Unlock()
			mu.Lock()
			at--
			mu.Unlock()
			return nil
		})
		require.NoError(t, err)
		for i, n := range seen {
			require.Equal(t, 1, n, "%+v: byte %d", c, i)
		}
		assert.LessOrEqual(t, most, c.threads)
	}
}

func TestForEachStopsAtTheFirstError(t *testing.T) {
	t.Parallel()
	bad := errors.New("bad")
	done := 0
	err := ForEach(t.Context(), 1000, 1, 1, func(_ context.Context, off, _ int) error {
		done++
		if off == 3 {
			return bad
		}
		return nil
	})
	require.ErrorIs(t, err, bad)
	assert.Equal(t, 4, done)
}

// A panic in a worker is an error, so that the memory is released and counted as such.
func TestAPanicInAWorkerIsAnError(t *testing.T) {
	t.Parallel()
	for _, threads := range []int{1, 3} {
		err := ForEach(t.Context(), 100, 1, threads, func(_ context.Context, off, _ int) error {
			if off == 7 {
				panic("the worker's")
			}
			return nil
		})
		require.ErrorContains(t, err, "panic: the worker's")
		require.ErrorContains(t, err, "TestAPanicInAWorkerIsAnError", "with the stack")
	}
}
