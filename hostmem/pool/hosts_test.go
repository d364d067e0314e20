//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// A pool works alike on every kind of host: leases are right, memory is reused, and
// Close releases all of it.
func TestPoolsOnEveryHost(t *testing.T) {
	t.Parallel()
	for name, cfg := range cudasim.Hosts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cfg)
			p := g.pool(Options{IdleTime: -1})
			for round := range 3 {
				var leases []Lease
				for i, n := range []int{100, 64 * kib, 2*mib + 1, 5 * mib} {
					l := get(t, p, n)
					src := g.Device(n)
					want := hostmemtest.Filled(n, byte(i+1))
					g.Upload(src, want)
					queueCopy(t, l, g.Stream, src, n)
					g.Synchronize()
					require.True(t, bytes.Equal(want, l.Bytes()))
					leases = append(leases, l)
				}
				for _, l := range leases {
					require.NoError(t, l.Release())
				}
				st := p.Stats()
				assert.Equal(t, 4*(round+1), st.Hits+st.Misses)
				if round > 0 {
					require.Equal(t, 4, st.Misses, "memory is reused")
				}
			}
			balanced(t, p)
			require.NoError(t, p.Close())
			o := g.Sim.Outstanding()
			require.Zero(t, o.HostAllocs+o.Registrations)
		})
	}
}

// With an alignment that cudaHostAlloc does not give, the pool counts what is really
// reserved.
func TestPoolOfAlignedHostAllocatedMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.ConfidentialComputing())
	p := g.pool(Options{IdleTime: -1, Buffer: hostmem.Options{Align: 32 * mib}})
	var leases []Lease
	for range 3 {
		l := get(t, p, 3*mib)
		require.Zero(t, uintptr(l.Pointer())%(32*mib))
		leases = append(leases, l)
	}
	require.Equal(t, g.Sim.Outstanding().HostBytes, p.Stats().ReservedBytes)
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	require.NoError(t, p.Close())
	require.Zero(t, g.Sim.Outstanding().HostAllocs)
}

// Where a host bounds all pinned memory, as WSL does, idle memory is unmapped.
func TestAPoolOnWSLUnmapsWhatIsIdle(t *testing.T) {
	t.Parallel()
	host := cudasim.WSL()
	host.MaxPinned = 8 * mib
	g := newSimFixture(t, host)
	p := g.pool(Options{IdleTime: -1})
	require.NoError(t, get(t, p, 6*mib).Release())
	l := get(t, p, 7*mib)
	fill(l.Bytes(), 1)
	require.Equal(t, 7*mib, p.Stats().ReservedBytes)
	require.NoError(t, l.Release())
}
