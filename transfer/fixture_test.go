package transfer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A fixture is a copier on a device, with memory there.
type fixture struct {
	testing.TB
	dev *cudart.Device
	c   *Copier
}

func newFixture(t testing.TB, o Options) *fixture { return fixtureOn(t, testgpu.Device(t), o) }

func fixtureOn(t testing.TB, dev *cudart.Device, o Options) *fixture {
	t.Helper()
	c, err := NewCopier(t.Context(), dev, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return &fixture{TB: t, dev: dev, c: c}
}

// closeSoon closes the copier when calls have returned that copies were abandoned for.
func (r *fixture) closeSoon() {
	r.Helper()
	for err := r.c.Close(); err != nil; err = r.c.Close() {
		require.ErrorIs(r, err, stage.ErrHeld)
		runtime.Gosched()
	}
}

// device allocates n bytes on the device until the test ends.
func (r *fixture) device(n int) cudart.DevPtr {
	r.Helper()
	p, err := r.dev.Malloc(max(n, 1))
	require.NoError(r, err)
	r.Cleanup(func() { require.NoError(r, r.dev.Free(p)) })
	return p
}

// A cell is one combination of what a sweep goes through.
type cell struct {
	dims []string // values of its dimensions
	run  func(t *testing.T)
}

// soaks reports whether this is the long run, which PINNED_SOAK asks for.
func soaks() bool { return os.Getenv("PINNED_SOAK") != "" }

// thin returns cells that together have each value of each dimension, or all of them in the
// long run.
func thin(all []cell) (cells []cell) {
	if soaks() {
		return all
	}
	seen := make(map[string]bool)
	for _, c := range all {
		before := len(seen)
		for i, value := range c.dims {
			seen[fmt.Sprintf("%d: %s", i, value)] = true
		}
		if len(seen) > before {
			cells = append(cells, c)
		}
	}
	return cells
}

// atOnce runs cells that mostly wait: more of them at once than t.Parallel would, and fewer
// than there may be simulated GPUs.
func atOnce(t *testing.T, cells []cell) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range 12 {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(cells)); i = next.Add(1) - 1 {
				t.Run(strings.Join(cells[i].dims, "/"), cells[i].run)
			}
		})
	}
	all.Wait()
}

// bytesOf returns n bytes that differ from those of other seeds, and from each
// other.
func bytesOf(seed uint64, n int) []byte {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = src.Read(b)
	return b
}

// onDevice reads n bytes of the device by CUDA's own means.
func (r *fixture) onDevice(p cudart.DevPtr, n int) []byte {
	r.Helper()
	b := make([]byte, n)
	if n > 0 {
		require.NoError(r, r.dev.CopyToHost(unsafe.Pointer(&b[0]), p, n))
	}
	return b
}

// fill writes bytes to the device by CUDA's own means.
func (r *fixture) fill(p cudart.DevPtr, b []byte) {
	r.Helper()
	if len(b) > 0 {
		require.NoError(r, r.dev.CopyToDevice(p, unsafe.Pointer(&b[0]), len(b)))
		require.NoError(r, r.dev.Synchronize(context.Background())) // it returns before they are there
	}
}
