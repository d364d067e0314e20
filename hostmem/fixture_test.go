//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
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
	gib = 1 << 30
)

var (
	fill          = hostmemtest.Fill
	filled        = hostmemtest.Filled
	eventually    = hostmemtest.Eventually
	residentBytes = hostmemtest.ResidentBytes
	emulated      = hostmemtest.Emulated
)

// A fixture is a device and a stream to test buffers with.
type fixture struct {
	*hostmemtest.Fixture
	sys *hostmemtest.System // the host's calls, once they are watched
}

// newFixture has the GPU that PINNED_TEST_GPU requests, newSimFixture always a simulated one.
func newFixture(tb testing.TB) *fixture {
	tb.Helper()
	return &fixture{Fixture: hostmemtest.New(tb)}
}

func newSimFixture(tb testing.TB, cfg cudasim.Config) *fixture {
	tb.Helper()
	return &fixture{Fixture: hostmemtest.NewSim(tb, cfg)}
}

// on is a fixture with another device.
func (g *fixture) on(dev *cudart.Device) *fixture { return &fixture{Fixture: g.Fixture.On(dev)} }

// watch lets the fixture use system calls that are counted and can be replaced.
func (g *fixture) watch() *hostmemtest.System {
	g.sys = hostmemtest.NewSystem()
	return g.sys
}

// Context is the test's, with the system calls that are watched.
func (g *fixture) Context() context.Context {
	if g.sys == nil {
		return g.TB.Context()
	}
	return g.sys.Context(g.TB)
}

// alloc makes a buffer that is closed at the end.
func (g *fixture) alloc(n int, o Options) *Buffer {
	g.Helper()
	b, err := Alloc(g.Context(), g.Dev, n, o)
	require.NoError(g, err)
	g.Cleanup(func() { assert.NoError(g, b.Close()) })
	return b
}

// withAttribute has a device with one attribute changed.
func withAttribute(tb testing.TB, a cudart.Attr, value int) *fixture {
	return newSimFixture(tb, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{a: value}}}})
}
