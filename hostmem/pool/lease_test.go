//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestReleasedLeasesReachNothing(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	dst := g.Device(mib)
	old := get(t, p, mib)
	copyOfIt := old
	require.NoError(t, old.Release())
	next := get(t, p, mib) // the same block
	for _, l := range []Lease{old, copyOfIt} {
		assert.Nil(t, l.Bytes())
		assert.Nil(t, l.Pointer())
		assert.ErrorIs(t, l.CopyToDevice(g.Stream, dst, 0, 1), errReleased)
		assert.ErrorIs(t, l.CopyFromDevice(g.Stream, dst, 0, 1), errReleased)
		err := l.Release()
		assert.ErrorIs(t, err, errReleased)
		assert.ErrorContains(t, err, "pool: release: lease of 1048576 bytes from \"pool\" of device 0")
		assert.ErrorIs(t, l.Release(g.Stream), errReleased)
	}
	assert.NotNil(t, next.Bytes(), "an old handle does not end the new lease")
	require.NoError(t, next.Release())

	var none Lease
	assert.ErrorIs(t, none.Release(), errNoLease)
	assert.ErrorIs(t, none.CopyToDevice(g.Stream, dst, 0, 1), errNoLease)
	assert.Nil(t, none.Bytes())
	assert.Nil(t, none.Pointer())
	assert.Equal(t, "no lease", none.String())
}

func TestLeaseChecksItsCopies(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	dst := g.Device(mib)
	l := get(t, p, 1000) // of a block of 1024
	for _, c := range []struct{ off, n int }{{-1, 1}, {0, 1001}, {1000, 1}, {1, -1}, {1 << 62, 1 << 62}} {
		assert.Error(t, l.CopyToDevice(g.Stream, dst, c.off, c.n), "%+v", c)
		assert.Error(t, l.CopyFromDevice(g.Stream, dst, c.off, c.n), "%+v", c)
	}
	assert.ErrorIs(t, l.CopyToDevice(nil, dst, 0, 1), errNilStream)
	assert.ErrorIs(t, l.Release(g.Stream, nil), errNilStream)
	assert.ErrorIs(t, l.Release(nil), errNilStream)
	assert.NotNil(t, l.Bytes(), "a Release that was refused leaves the lease as it is")
	fill(l.Bytes(), 1)
	require.NoError(t, l.CopyToDevice(g.Stream, dst, 100, 900))
	require.NoError(t, l.CopyFromDevice(g.Stream, dst, 0, 100))
	g.Synchronize()
	assert.Equal(t, l.Bytes()[100:200], l.Bytes()[:100])
	require.NoError(t, l.Release())
}

// Of many Releases of one lease one counts, and copies that race with it are
// either refused or waited for.
func TestReleaseCountsOnce(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	dst := g.Device(kib)
	for range 50 {
		l := get(t, p, kib)
		var released, copied atomic.Int32
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				if err := l.CopyToDevice(g.Stream, dst, 0, kib); err == nil {
					copied.Add(1)
				} else {
					assert.ErrorIs(t, err, errReleased)
				}
				if err := l.Release(); err == nil {
					released.Add(1)
				} else {
					assert.ErrorIs(t, err, errReleased)
				}
			})
		}
		group.Wait()
		assert.Equal(t, int32(1), released.Load())
		assert.Positive(t, copied.Load())
	}
	assert.Zero(t, p.Stats().Leases)
}
