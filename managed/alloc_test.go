//go:build linux && !android && (amd64 || arm64) && !race

package managed

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
)

// Not parallel: AllocsPerRun counts what others allocate, too.
func TestPoolHitDoesNotAllocate(t *testing.T) {
	g := newSimRig(t, cudasim.Config{}, Options{})
	p := g.pool(PoolOptions{})
	for _, n := range []int{4 * kib, 16 * mib} {
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
