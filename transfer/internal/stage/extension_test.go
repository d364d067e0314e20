package stage

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// newExtended has a ring of eight units and an extension of four.
func newExtended(t *testing.T) *bench {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	b := &bench{T: t, sim: sim, dev: dev, mem: device(t, dev, mib)}
	b.ring, err = newRing(t.Context(), dev, ringSize{unit: benchUnit, ring: 8 * benchUnit, extension: 4 * benchUnit, maxChunk: 4 * benchUnit})
	require.NoError(t, err)
	return b
}

func (b *bench) extended() bool {
	b.ring.mu.Lock()
	defer b.ring.mu.Unlock()
	return b.ring.extension.open
}

func (b *bench) eventually(what string, is func() bool) {
	b.Helper()
	require.Eventually(b, is, 20*time.Second, time.Millisecond, what)
}

// Copies of one direction have the ring alone, however long they wait. Once both
// directions wait they have more, until neither does.
func TestExtensionIsForBothDirections(t *testing.T) {
	defer func(a, b time.Duration) { extensionIdle, extensionTimeout = a, b }(extensionIdle, extensionTimeout)
	extensionIdle, extensionTimeout = 20*time.Millisecond, time.Minute // on a busy machine it takes long
	b := newExtended(t)
	r := b.ring
	wake := make(chan struct{}, 1)
	ups := b.taken(1, toDevice)
	require.Len(t, ups, 8)
	w := r.wait(wake, request{n: benchUnit, dir: toDevice})
	require.Nil(t, w.stop())
	require.False(t, b.extended(), "one direction")
	for _, x := range ups[4:] {
		x.release()
	}
	downs := b.taken(1, toHost)
	require.Len(t, downs, 4)
	w = r.wait(wake, request{n: benchUnit, dir: toHost})
	b.eventually("the extension is mapped", b.extended)
	b.eventually("who waits gets it", w.poll)
	downs = append(downs, w.stop())
	downs = append(downs, b.taken(1, toHost)...)
	require.Len(t, downs, 6, "half of all")
	ups = append(ups[:4], b.taken(1, toDevice)...)
	require.Len(t, ups, 6)
	require.EqualValues(t, 4*benchUnit, r.extension.pinned.Load())
	all := append(ups, downs...)
	for i, x := range all {
		require.Len(t, x.mem, benchUnit)
		for j := range x.mem {
			x.mem[j] = byte(i)
		}
	}
	for i, x := range all {
		for _, v := range x.mem {
			if v != byte(i) {
				t.Fatalf("extent %d was overwritten", i)
			}
		}
		x.release()
	}
	alone := b.taken(4, toDevice)
	require.Len(t, alone, 2, "one direction alone has what it had")
	for _, x := range alone {
		x.release()
	}
	b.eventually("the extension is unmapped", func() bool { return r.extension.pinned.Load() == 0 })
	require.NoError(t, r.close(t.Context()))
}

// While another asks what the GPU is done with there may be memory, and no extension is needed.
func TestNoExtensionBeforeTheGPUIsPolled(t *testing.T) {
	t.Parallel()
	b := newExtended(t)
	r := b.ring
	ups := b.taken(1, toDevice)
	r.mu.Lock()
	r.polling = true
	r.mu.Unlock()
	w := r.wait(make(chan struct{}, 1), request{n: benchUnit, dir: toHost})
	require.False(t, w.poll())
	r.mu.Lock()
	require.True(t, r.extension.wanted.IsZero(), "nobody has wanted it")
	r.polling = false
	r.mu.Unlock()
	b.eventually("it is mapped when that was in vain", func() bool { return w.poll() && b.extended() })
	for _, x := range append(ups, w.stop()) {
		x.release()
	}
	require.NoError(t, r.close(t.Context()))
}

// An extension that is not needed is unmapped, and one that cannot be had is done without.
func TestExtensionIsMappedAndUnmapped(t *testing.T) {
	defer func(a, b, c time.Duration) { extensionIdle, extensionRetry, extensionTimeout = a, b, c }(extensionIdle, extensionRetry, extensionTimeout)
	extensionIdle, extensionRetry, extensionTimeout = 10*time.Millisecond, 10*time.Millisecond, time.Minute
	b := newExtended(t)
	defer func() { assert.NoError(t, b.ring.close(context.Background())) }()
	r := b.ring
	wake := make(chan struct{}, 1)
	both := func() (w *waiter, done func()) {
		up, down := r.try(request{n: 4 * benchUnit, dir: toDevice}), r.try(request{n: 4 * benchUnit, dir: toHost})
		require.NotNil(t, up)
		require.NotNil(t, down)
		w = r.wait(wake, request{n: 4 * benchUnit, dir: toDevice})
		return w, func() {
			if x := w.stop(); x != nil {
				x.release()
			}
			up.release()
			down.release()
		}
	}
	b.sim.Fail("cudaHostRegister", cudasim.Fault{Times: -1, Code: cudart.ErrMemoryAllocation})
	b.sim.Fail("cudaHostAlloc", cudasim.Fault{Times: -1, Code: cudart.ErrMemoryAllocation})
	_, done := both()
	b.eventually("mapping has failed", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return !r.extension.failed.IsZero()
	})
	require.False(t, b.extended())
	done()
	b.sim.ResetFaults()
	time.Sleep(extensionRetry)
	b.sim.Fail("cudaHostUnregister", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	_, done = both()
	b.eventually("the extension is mapped", func() bool { return r.extension.pinned.Load() != 0 }) // but perhaps idle since
	done()
	b.eventually("unmapping has failed, more than once", func() bool { return b.sim.Calls("cudaHostUnregister") >= 2 })
	require.NotZero(t, r.extension.pinned.Load())
	_, done = both()
	require.Nil(t, r.try(request{n: benchUnit, dir: toHost}), "what may be unregistered is not used")
	done()
	b.sim.ResetFaults()
	b.eventually("it is unmapped", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.extension.over == nil // its goroutine has ended: the next wait begins another
	})
	require.Zero(t, r.extension.pinned.Load())
	require.Equal(t, 1, b.sim.Outstanding().Registrations)
	w, done := both()
	b.eventually("the extension is mapped again", func() bool { w.poll(); return b.extended() }) // or it may be idle before it is seen
	done()
}

// Close waits for an extension that is being mapped, as long as its context allows.
func TestCloseWhileTheExtensionIsMapped(t *testing.T) {
	defer func(d time.Duration) { extensionTimeout = d }(extensionTimeout)
	extensionTimeout = time.Minute // no end of it by itself
	b := newExtended(t)
	r := b.ring
	unblock := b.sim.Block("cudaHostRegister", cudasim.Fault{Times: 1})
	defer unblock()
	up, down := r.try(request{n: 4 * benchUnit, dir: toDevice}), r.try(request{n: 4 * benchUnit, dir: toHost})
	w := r.wait(make(chan struct{}, 1), request{n: 4 * benchUnit, dir: toDevice})
	require.NoError(t, b.sim.AwaitBlocked(t.Context(), "cudaHostRegister", 1))
	require.Nil(t, w.stop())
	up.release()
	down.release()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, r.close(ctx), context.DeadlineExceeded)
	unblock()
	require.NoError(t, r.close(t.Context()))
	require.Zero(t, b.sim.Outstanding().Registrations)
	require.Zero(t, r.extension.pinned.Load())
}

// A limit of the process is for the memory that is needed: the extension waits for it for a
// moment only, and copies go on.
func TestCopiesGoOnWithoutMemoryForTheExtension(t *testing.T) {
	b := newExtended(t)
	defer func() { assert.NoError(t, b.ring.close(context.Background())) }()
	require.NoError(t, hostmem.SetLimits(hostmem.Limits{MaxBytes: hostmem.ReadStats().PinnedBytes + 3*benchUnit}))
	defer func() { require.NoError(t, hostmem.SetLimits(hostmem.Limits{})) }()
	r := b.ring
	up, down := r.try(request{n: 4 * benchUnit, dir: toDevice}), r.try(request{n: 4 * benchUnit, dir: toHost})
	w := r.wait(make(chan struct{}, 1), request{n: 4 * benchUnit, dir: toDevice})
	b.eventually("it has been tried", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return !r.extension.failed.IsZero()
	})
	other, err := hostmem.Alloc(t.Context(), b.dev, benchUnit, hostmem.Options{})
	require.NoError(t, err)
	require.NoError(t, other.Close())
	require.Nil(t, w.stop())
	up.release()
	down.release()
	require.False(t, b.extended())
}
