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

// A rig is a device and a stream to test buffers with.
type rig struct {
	*hostmemtest.Rig
	sys *hostmemtest.System // the host's calls, once they are watched
}

// newRig has the GPU that PINNED_TEST_GPU requests, newSimRig always a simulated one.
func newRig(tb testing.TB) *rig {
	tb.Helper()
	return &rig{Rig: hostmemtest.New(tb)}
}

func newSimRig(tb testing.TB, cfg cudasim.Config) *rig {
	tb.Helper()
	return &rig{Rig: hostmemtest.NewSim(tb, cfg)}
}

// on is a rig with another device.
func (g *rig) on(dev *cudart.Device) *rig { return &rig{Rig: g.Rig.On(dev)} }

// watch lets the rig use system calls that are counted and can be replaced.
func (g *rig) watch() *hostmemtest.System {
	g.sys = hostmemtest.NewSystem()
	return g.sys
}

// Context is the test's, with the system calls that are watched.
func (g *rig) Context() context.Context {
	if g.sys == nil {
		return g.TB.Context()
	}
	return g.sys.Context(g.TB)
}

// alloc makes a buffer that is closed at the end.
func (g *rig) alloc(n int, o Options) *Buffer {
	g.Helper()
	b, err := Alloc(g.Context(), g.Dev, n, o)
	require.NoError(g, err)
	g.Cleanup(func() { assert.NoError(g, b.Close()) })
	return b
}

// withAttribute has a device with one attribute changed.
func withAttribute(tb testing.TB, a cudart.Attr, value int) *rig {
	return newSimRig(tb, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{a: value}}}})
}
