//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"bytes"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestReadBeforeSynchronisingIsStale(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, d, s := l.pinned(mib), l.device(mib), l.stream()
	h[0], h[mib-1] = 1, 1
	l.Hold()
	l.ok("cudaMemsetAsync", d, 9, mib, s)
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, mib, d2h, s)
	assert.Equal(t, cudart.ErrNotReady, l.call("cudaStreamQuery", s))
	assert.Equal(t, cudart.ErrNotReady, l.call("cudaGetLastError"), "asking sets the thread's last error")
	assert.Equal(t, 2, l.Outstanding().PendingOps)
	assert.EqualValues(t, 1, h[0])
	assert.EqualValues(t, 1, h[mib-1])
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, bytes.Repeat([]byte{9}, mib), h)
	l.ok("cudaStreamQuery", s)
}

func TestNothingLandsBeforeItsTime(t *testing.T) {
	t.Parallel()
	locked(t)
	const took = 30 * time.Millisecond
	l := open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{
		Link: cudasim.Link{DeviceToHost: cudasim.Speed{Rate: 50, Latency: took}},
	}}})
	h, d, s := l.pinned(64), l.device(64), l.stream()
	h[0] = 1
	begin := time.Now()
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, s)
	if early := h[0]; time.Since(begin) < took {
		assert.EqualValues(t, 1, early)
	}
	l.ok("cudaStreamSynchronize", s)
	assert.EqualValues(t, 0, h[0])
	assert.GreaterOrEqual(t, time.Since(begin), took)
}

// What takes a share of a device's link makes each of its copies slower that it meets, whatever the memory, and
// those alone.
func TestLinkShare(t *testing.T) {
	t.Parallel()
	locked(t)
	speed := cudasim.Speed{Rate: 10}
	shares := []float64{0.5, 1, 0.25, 0, -1, 2, math.NaN(), 0.5}
	l := open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{
		Link:      cudasim.Link{HostToDevice: speed, DeviceToHost: speed, PageableHostToDevice: speed, OnDevice: speed},
		LinkShare: func(n int) float64 { return shares[n-1] },
	}}})
	const n = 1 << 20
	const alone = n / 10 * time.Nanosecond
	h, ordinary, d, s := l.pinned(n), make([]byte, n), l.device(n), l.stream()
	// The end of each is recorded 500 ns later.
	took := func(f func()) time.Duration { return elapsed(l, s, f) - 500*time.Nanosecond }
	for i, want := range []time.Duration{2 * alone, alone, 4 * alone, alone, alone, alone, alone} {
		got := took(func() {
			if i%2 == 0 {
				l.ok("cudaMemcpyAsync", d, addr(&h[0]), n, h2d, s)
			} else {
				l.ok("cudaMemcpyAsync", addr(&h[0]), d, n, d2h, s)
			}
		})
		assert.InEpsilon(t, want, got, 1e-3, "copy %d", i+1)
	}
	assert.InEpsilon(t, alone, took(func() { l.ok("cudaMemcpyAsync", d, d, n, d2d, s) }), 1e-3, "within the device")
	assert.InEpsilon(t, 2*alone, took(func() { l.ok("cudaMemcpyAsync", d, addr(&ordinary[0]), n, h2d, s) }), 1e-3, "not pinned")
}

// elapsed is the time between two events around f, by the virtual clock.
func elapsed(l *lib, s uintptr, f func()) time.Duration {
	begin, end := l.event(), l.event()
	l.ok("cudaEventRecord", begin, s)
	f()
	l.ok("cudaEventRecord", end, s)
	l.ok("cudaEventSynchronize", end)
	ms := get[float32](l, "cudaEventElapsedTime", begin, end)
	return time.Duration(float64(ms) * float64(time.Millisecond))
}

func TestEventTimesFollowTheLinkModel(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	const n = 16 * mib
	h, pageable, d, e, s := l.pinned(n), mapped(t, n), l.device(n), l.device(n), l.stream()
	copyAsync := func(dst, src uintptr, kind uintptr) func() {
		return func() { l.ok("cudaMemcpyAsync", dst, src, n, kind, s) }
	}
	tests := []struct {
		name string
		f    func()
		rate float64
	}{
		{"to device", copyAsync(d, addr(&h[0]), h2d), 54.8},
		{"to host", copyAsync(addr(&h[0]), d, d2h), 54.8},
		{"pageable to device", copyAsync(d, addr(&pageable[0]), h2d), 9.3},
		{"to pageable", copyAsync(addr(&pageable[0]), d, d2h), 17.8},
		{"on device", copyAsync(e, d, d2d), 1540},
	}
	for _, tt := range tests {
		took := elapsed(l, s, tt.f)
		assert.InEpsilon(t, tt.rate, float64(n)/float64(took), 0.02, tt.name)
	}
	assert.Equal(t, 500*time.Nanosecond, elapsed(l, s, func() {}))
}

func TestEnginesAreSharedByDirection(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{
		HostToDevice: cudasim.Speed{Rate: 1, Latency: time.Millisecond},
		DeviceToHost: cudasim.Speed{Rate: 1, Latency: time.Millisecond},
	}}}})
	h, there, d, back := l.pinned(8), l.pinned(8), l.device(8), l.device(8)
	a, b := l.stream(), l.stream()
	up := func(s uintptr) { l.ok("cudaMemcpyAsync", d, addr(&h[0]), 8, h2d, s) }
	down := func(s uintptr) { l.ok("cudaMemcpyAsync", addr(&there[0]), back, 8, d2h, s) } // at once with the other
	both := func(first, second func(uintptr)) time.Duration {
		return elapsed(l, a, func() {
			joined := l.event()
			l.ok("cudaStreamWaitEvent", b, joined, 0) // never recorded: no wait
			first(a)
			second(b)
			l.ok("cudaEventRecord", joined, b)
			l.ok("cudaStreamWaitEvent", a, joined, 0)
		})
	}
	assert.InDelta(t, 2*time.Millisecond, both(up, up), float64(50*time.Microsecond), "one engine")
	assert.InDelta(t, time.Millisecond, both(up, down), float64(50*time.Microsecond), "one each way")
}

// Events of a stream that waited for work which was done already are not earlier than
// that work, although the host has not seen its end.
func TestWaitForADoneEventMovesTheClock(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{OnDevice: cudasim.Speed{Rate: 1, Latency: time.Millisecond}}}}})
	d, a, b, joined := l.device(8), l.stream(), l.stream(), l.event()
	took := elapsed(l, a, func() {
		l.ok("cudaMemsetAsync", d, 1, 8, b)
		l.ok("cudaEventRecord", joined, b)
		require.Eventually(t, func() bool { return l.Outstanding().PendingOps == 0 }, 10*time.Second, 100*time.Microsecond)
		l.ok("cudaStreamWaitEvent", a, joined, 0)
	})
	assert.InDelta(t, time.Millisecond, took, float64(10*time.Microsecond))
}

func TestEventRules(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	s := l.stream()
	e, never := l.event(), l.event()
	untimed := get[uintptr](l, "cudaEventCreateWithFlags", 2)
	l.ok("cudaEventQuery", never)
	l.ok("cudaEventSynchronize", never)
	l.Hold()
	l.ok("cudaEventRecord", e, s)
	assert.Equal(t, cudart.ErrNotReady, l.call("cudaEventQuery", e))
	ms := new(float32)
	assert.Equal(t, cudart.ErrNotReady, l.call("cudaEventElapsedTime", addr(ms), e, e))
	l.Release()
	l.ok("cudaEventSynchronize", e)
	l.ok("cudaEventQuery", e)
	l.ok("cudaEventRecord", untimed, s)
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cudaEventElapsedTime", addr(ms), e, untimed))
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cudaEventElapsedTime", addr(ms), e, never))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaEventCreateWithFlags", addr(ms), 4), "interprocess has no timing")
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaEventCreateWithFlags", addr(ms), 8))
	l.ok("cudaEventDestroy", untimed)
}

func TestWaitEventOrdersStreams(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, d := l.pinned(64), l.device(64)
	a, b, e := l.stream(), l.stream(), l.event()
	// The one that waits is ready to run long before the one it waits for.
	for i := range 50 {
		l.ok("cudaMemsetAsync", d, 0, 64, a)
		l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, a)
		l.ok("cudaMemsetAsync", d, uintptr(i+1), 64, a)
		l.ok("cudaEventRecord", e, a)
		l.ok("cudaStreamWaitEvent", b, e, 0)
		l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, b)
		l.ok("cudaStreamSynchronize", b)
		require.EqualValues(t, i+1, h[0])
	}
}

func TestLegacyStreamIsInOrderWithBlockingOnes(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, d := l.pinned(64), l.device(64)
	blocking := get[uintptr](l, "cudaStreamCreateWithPriority", 0, ^uintptr(0)) // priority -1
	free := l.stream()
	assert.EqualValues(t, -1, second[int32](l, "cudaStreamGetPriority", blocking))
	assert.EqualValues(t, 0, second[uint32](l, "cudaStreamGetFlags", blocking))
	assert.EqualValues(t, 1, second[uint32](l, "cudaStreamGetFlags", free))
	for _, legacy := range []uintptr{0, 1} {
		l.Hold()
		l.ok("cudaMemsetAsync", d, 7, 64, blocking)
		l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, legacy)
		l.ok("cudaMemsetAsync", d, 8, 64, 2) // the thread's own stream is blocking too
		assert.Equal(t, cudart.ErrNotReady, l.call("cudaStreamQuery", legacy))
		l.ok("cudaStreamQuery", free)
		l.Release()
		l.ok("cudaStreamSynchronize", legacy)
		assert.EqualValues(t, 7, h[0])
		l.ok("cudaStreamSynchronize", 2)
		l.ok("cudaMemcpy", addr(&h[0]), d, 64, d2h)
		assert.EqualValues(t, 8, h[0])
	}
	l.ok("cudaStreamDestroy", blocking)
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cudaStreamDestroy", 0))
}

// A handle is of one stream only, unless handles are reused as by real drivers: then the
// unique number tells the streams apart, and work of the old one goes on.
func TestStreamHandlesAndNumbers(t *testing.T) {
	t.Parallel()
	locked(t)
	for _, reuse := range []bool{false, true} {
		l := open(t, cudasim.Config{ReuseHandles: reuse})
		h, d := l.pinned(64), l.device(64)
		first := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
		number := second[uint64](l, "cudaStreamGetId", first)
		assert.Equal(t, number, second[uint64](l, "cudaStreamGetId", first))
		l.Hold()
		l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, first)
		l.ok("cudaStreamDestroy", first)
		next := l.stream()
		assert.Equal(t, reuse, next == first)
		assert.NotEqual(t, number, second[uint64](l, "cudaStreamGetId", next))
		l.ok("cudaStreamQuery", next)
		assert.Equal(t, 1, l.Outstanding().PendingOps)
		l.Release()
		l.ok("cudaDeviceSynchronize")
	}
}

// second calls a function whose second argument is where its result goes.
func second[T any](l *lib, fn string, first uintptr) T {
	v := new(T)
	l.ok(fn, first, addr(v))
	return *v
}

func TestDestroyedStreamFinishesItsWork(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	h, d := l.pinned(64), l.device(64)
	s := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
	l.Hold()
	l.ok("cudaMemsetAsync", d, 5, 64, s)
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, s)
	l.ok("cudaStreamDestroy", s)
	assert.Equal(t, 0, l.Outstanding().Streams)
	assert.Equal(t, 2, l.Outstanding().PendingOps)
	l.Release()
	l.ok("cudaDeviceSynchronize")
	assert.EqualValues(t, 5, h[0])
	assert.Empty(t, l.Misuses())
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cudaStreamQuery", s))
	require.Len(t, l.Misuses(), 1)
	assert.Equal(t, "stale handle", l.Misuses()[0].Kind)
}

// Copies of pageable memory are done when the call returns.
func TestPageableCopiesAreStaged(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	d, s := l.device(64), l.stream()
	h := bytes.Repeat([]byte{3}, 64)
	l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
	clear(h)
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, s)
	assert.EqualValues(t, 3, h[63])
}

func TestHostFunctions(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	h, d, s := l.pinned(64), l.device(64), l.stream()
	var seen byte
	var inside atomic.Int32
	fn := purego.NewCallback(func(arg uintptr) {
		seen = h[arg]
		h[arg] = 77
		inside.Store(int32(l.raw("cudaStreamQuery", s)))
	})
	l.ok("cudaMemsetAsync", d, 6, 64, s)
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, s)
	l.ok("cudaLaunchHostFunc", s, fn, 63)
	l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
	l.ok("cudaStreamSynchronize", s)
	assert.EqualValues(t, 6, seen, "it runs after what was before it")
	assert.Equal(t, cudart.ErrNotPermitted, cudart.Code(inside.Load()))
	clear(h)
	l.ok("cudaMemcpy", addr(&h[0]), d, 64, d2h)
	assert.EqualValues(t, 77, h[63], "and before what was after it")
	require.Len(t, l.Misuses(), 1)
	assert.Equal(t, "call from host function", l.Misuses()[0].Kind)
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaLaunchHostFunc", s, 0, 0))
}
