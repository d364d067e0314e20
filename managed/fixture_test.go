package managed

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// A fixture is an allocator on a device, with a stream.
type fixture struct {
	*testing.T
	sim *cudasim.Sim // nil for a real GPU
	dev *cudart.Device
	s   *cudart.Stream
	a   *Allocator
}

// newFixture has the GPU that PINNED_TEST_GPU requests.
func newFixture(t *testing.T, o Options) *fixture {
	t.Helper()
	if !testgpu.Real() {
		return newSimFixture(t, cudasim.Config{}, o)
	}
	return (&fixture{T: t}).on(testgpu.Device(t), o)
}

func newSimFixture(t *testing.T, cfg cudasim.Config, o Options) *fixture {
	t.Helper()
	sim, rt := testgpu.Sim(t, cfg)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return (&fixture{T: t, sim: sim}).on(dev, o)
}

func (g *fixture) on(dev *cudart.Device, o Options) *fixture {
	g.Helper()
	concurrent, err := dev.Attribute(cudart.AttrConcurrentManagedAccess)
	require.NoError(g, err)
	o.AllowExclusive = o.AllowExclusive || concurrent == 0
	a, err := New(g.Context(), dev, o)
	require.NoError(g, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(g, err)
	g.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_ = s.Synchronize(ctx)
		assert.NoError(g, s.Close())
		assert.NoError(g, a.Close())
	})
	g.dev, g.s, g.a = dev, s, a
	return g
}

// needConcurrent skips a test that a GPU without concurrent access cannot run.
// advice is an advice with its location.
type advice struct {
	what cudart.Advice
	at   cudart.Location
}

func (a advice) unset() advice { return advice{a.what + 1, a.at} }

func (g *fixture) needConcurrent() {
	if !g.a.concurrent {
		g.Skipf("%v has no concurrent managed access", g.dev)
	}
}

// alloc allocates memory that is closed at the end.
func (g *fixture) alloc(n int) *Memory {
	g.Helper()
	m := g.mustAlloc(n)
	g.Cleanup(func() { assert.NoError(g, m.Close()) })
	return m
}

// mustAlloc allocates memory that the test closes.
func (g *fixture) mustAlloc(n int) *Memory {
	g.Helper()
	m, err := g.a.Alloc(g.Context(), n, AllocOptions{})
	require.NoError(g, err)
	return m
}

func (g *fixture) sync() {
	g.Helper()
	require.NoError(g, g.s.Synchronize(g.Context()))
}

// attributes are the advice for a part of memory, and the location of its last prefetch.
func (g *fixture) attributes(m *Memory, off, n int) (cudart.RangeAttributes, error) {
	return g.dev.RangeAttributes(m.Range(off, n).ptr(), n)
}

// at is where the bytes of a range lie, on the simulated GPU.
func (g *fixture) at(r Range) map[int]int {
	return g.sim.ManagedResidence(uintptr(r.ptr()), r.Len)
}

// small is a simulated device with that many bytes of memory.
func small(bytes int) cudasim.Config {
	return cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: bytes}}}
}

// exclusive is a simulated device without concurrent access.
func exclusive() cudasim.Config {
	return cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrConcurrentManagedAccess: 0}}}}
}

var versions = []cudart.Version{11080, 12040, 12080, 13000}

// Places of the simulated GPU.
const (
	onHost  = -1
	nowhere = -2
)

// noContext is a nil context.
var noContext context.Context
