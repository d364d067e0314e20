//go:build linux && !android && (amd64 || arm64) && !race

package pool

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// Not parallel: AllocsPerRun counts what others allocate, too.
func TestPoolHitDoesNotAllocate(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	for _, n := range poolSizes {
		cycle := func() {
			l, err := p.Get(t.Context(), n)
			if err == nil {
				err = l.Release()
			}
			require.NoError(t, err)
		}
		cycle()
		assert.Zero(t, testing.AllocsPerRun(1000, cycle), "%d bytes", n)
	}
}

// minAllocs is how often f allocates when nothing else does just then: the
// simulated GPU works on goroutines of its own.
func minAllocs(t *testing.T, s *cudart.Stream, f func() error) uint64 {
	minimum := ^uint64(0)
	for range 200 {
		require.NoError(t, s.Synchronize(t.Context()))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := f()
		runtime.ReadMemStats(&after)
		require.NoError(t, err)
		minimum = min(minimum, after.Mallocs-before.Mallocs)
	}
	return minimum
}

// The simulated calls allocate; what the pool makes of them must not.
func TestStreamReleaseDoesNotAllocate(t *testing.T) {
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1})
	e, err := g.Dev.NewEvent()
	require.NoError(t, err)
	defer func() { assert.NoError(t, e.Close()) }()
	calls := minAllocs(t, g.Stream, func() error {
		_, err := raw.QueryEvent(e)
		if err == nil {
			err = g.Stream.Record(e)
		}
		return err
	})
	require.NoError(t, get(t, p, mib).Release(g.Stream))
	assert.LessOrEqual(t, minAllocs(t, g.Stream, func() error {
		l, err := p.Get(t.Context(), mib)
		if err == nil {
			err = l.Release(g.Stream)
		}
		return err
	}), calls)
	assert.Equal(t, 1, p.Stats().Misses)
}
