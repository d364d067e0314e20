//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

var (
	fill          = hostmemtest.Fill
	eventually    = hostmemtest.Eventually
	residentBytes = hostmemtest.ResidentBytes
)

// A fixture is a device and a stream to test pools with.
type fixture struct{ *hostmemtest.Fixture }

// newFixture has the GPU that PINNED_TEST_GPU requests, newSimFixture always a simulated one.
func newFixture(tb testing.TB) *fixture {
	tb.Helper()
	return &fixture{hostmemtest.New(tb)}
}

func newSimFixture(tb testing.TB, cfg cudasim.Config) *fixture {
	tb.Helper()
	return &fixture{hostmemtest.NewSim(tb, cfg)}
}

// pool makes a pool that is closed at the end, and then must hold nothing. Its Gets do not
// search again without a reason, which would hide that something does not wake them.
func (g *fixture) pool(o Options) *Pool {
	g.Helper()
	p, err := New(g.Dev, o)
	require.NoError(g, err)
	p.core.retry = 0
	g.Cleanup(func() {
		assert.NoError(g, p.Close())
		requireEmpty(g, p)
	})
	return p
}

func requireEmpty(tb testing.TB, p *Pool) {
	tb.Helper()
	st := p.Stats()
	require.Zero(tb, [6]int{st.Leases, st.RequestedBytes, st.InUseBytes, st.PendingBytes, st.CachedBytes, st.ReservedBytes}, "%+v", st)
}

func get(tb testing.TB, p *Pool, n int) Lease {
	tb.Helper()
	l, err := p.Get(tb.Context(), n)
	require.NoError(tb, err)
	require.Len(tb, l.Bytes(), n)
	return l
}

// atRest waits until no goroutine of the pool moves memory.
func atRest(tb testing.TB, p *Pool) {
	tb.Helper()
	eventually(tb, "no goroutine moves memory", func() bool { return p.core.life.Calls() == 0 })
}

// balanced checks that every byte reserved is counted, when nothing uses the pool. Idle memory may be
// unmapped meanwhile: then it checks again.
func balanced(tb testing.TB, p *Pool) {
	tb.Helper()
	for {
		atRest(tb, p)
		st := p.Stats()
		reserved, wrong := reservedBy(p)
		slack := 0
		for i := range p.core.shards {
			assert.GreaterOrEqual(tb, p.core.shards[i].slack, 0)
			slack += p.core.shards[i].slack
		}
		if p.Stats() != st {
			continue
		}
		assert.Equal(tb, st.ReservedBytes, st.InUseBytes+st.PendingBytes+st.CachedBytes+st.SlackBytes, "%+v", st)
		assert.Zero(tb, wrong, "units that no slab has are free")
		assert.Equal(tb, st.ReservedBytes, reserved)
		assert.Equal(tb, st.PeakInUseBytes, st.InUseBytes+slack)
		assert.GreaterOrEqual(tb, st.PeakReservedBytes, st.ReservedBytes)
		return
	}
}

// reservedBy returns the bytes that the pool's parts have reserved, and the number of arenas whose taken units
// are not those of their slabs.
func reservedBy(p *Pool) (reserved, wrong int) {
	p.core.mu.Lock()
	defer p.core.mu.Unlock()
	for _, a := range p.core.arenas {
		reserved += a.buf.Info().Reserved
		used := bytes.Count(a.used, []byte{1})
		for s := range a.slabs {
			used -= len(s.run)
		}
		if used != 0 {
			wrong++
		}
	}
	for b := range p.core.large {
		reserved += b.Size
	}
	for _, buf := range p.core.unwanted {
		reserved += buf.Info().Reserved
	}
	return reserved, wrong
}

// queueCopy queues a copy of n bytes from device memory, which several streams may
// read at once, to the lease.
func queueCopy(tb testing.TB, l Lease, s *cudart.Stream, src cudart.DevPtr, n int) {
	tb.Helper()
	require.NoError(tb, l.CopyFromDevice(s, src, 0, n))
}
