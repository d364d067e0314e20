//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestFail(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	v := new(int32)
	get := func() cudart.Code { return l.call("cudaGetDevice", addr(v)) }
	assert.Equal(t, cudart.Code(0), get())
	var after []string
	l.Fail("cudaGetDevice", cudasim.Fault{Nth: 2, Times: 2, Code: cudart.ErrLaunchTimeout, After: func() { after = append(after, "x") }})
	var got []cudart.Code
	for range 4 {
		got = append(got, get())
	}
	assert.Equal(t, []cudart.Code{0, cudart.ErrLaunchTimeout, cudart.ErrLaunchTimeout, 0}, got)
	assert.Equal(t, []string{"x", "x"}, after)
	assert.Equal(t, cudart.ErrLaunchTimeout, l.call("cudaGetLastError"))
	assert.Equal(t, 5, l.Calls("cudaGetDevice"))
	assert.Equal(t, 5, l.TotalCalls(), "without cudaGetLastError")

	l.Fail("cudaGetDevice", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	for range 5 {
		assert.Equal(t, cudart.ErrUnknown, get())
	}
	l.ResetFaults()
	assert.Equal(t, cudart.Code(0), get())

	l.call("cudaGetLastError") // clears it
	l.Fail("", cudasim.Fault{Nth: 2, Code: cudart.ErrUnknown})
	assert.Equal(t, cudart.Code(0), get())
	assert.Equal(t, cudart.Code(0), l.call("cudaGetLastError"), "it cannot fail, so it is not the second call")
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaDeviceSynchronize"))
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaGetLastError"))

	l.FailCall(l.TotalCalls()+2, cudart.ErrNotSupported)
	assert.Equal(t, cudart.Code(0), get())
	assert.Equal(t, cudart.ErrNotSupported, get())
	assert.Equal(t, cudart.Code(0), get())

	begin := time.Now()
	l.Fail("cudaGetDevice", cudasim.Fault{Stall: 20 * time.Millisecond})
	assert.Equal(t, cudart.Code(0), get())
	assert.GreaterOrEqual(t, time.Since(begin), 20*time.Millisecond)
}

// Query and record fail on the stream that the fault names, once, several times
// or always, and work on others.
func TestFailOnOneStream(t *testing.T) {
	t.Parallel()
	const code = cudart.ErrLaunchTimeout
	for name, tt := range map[string]struct {
		fault cudasim.Fault
		want  []cudart.Code
	}{
		"once":       {cudasim.Fault{}, []cudart.Code{code, 0, 0, 0}},
		"the second": {cudasim.Fault{Nth: 2}, []cudart.Code{0, code, 0, 0}},
		"twice":      {cudasim.Fault{Nth: 2, Times: 2}, []cudart.Code{0, code, code, 0}},
		"always":     {cudasim.Fault{Times: -1}, []cudart.Code{code, code, code, code}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := open(t, cudasim.Config{})
			a, b := l.stream(), l.stream()
			onA, onB := l.event(), l.event()
			l.ok("cudaEventRecord", onA, a)
			l.ok("cudaEventRecord", onB, b)
			l.ok("cudaDeviceSynchronize")
			for _, c := range []struct {
				fn             string
				suffers, other []uintptr
			}{
				{"cudaStreamQuery", []uintptr{a}, []uintptr{b}},
				{"cudaStreamSynchronize", []uintptr{a}, []uintptr{b}},
				{"cudaEventQuery", []uintptr{onA}, []uintptr{onB}},
				{"cudaEventSynchronize", []uintptr{onA}, []uintptr{onB}},
				{"cudaStreamWaitEvent", []uintptr{a, onB, 0}, []uintptr{b, onA, 0}},
				{"cudaEventRecord", []uintptr{onA, a}, []uintptr{onB, b}},
			} {
				tt.fault.Stream, tt.fault.Code = handle(a), code
				l.Fail(c.fn, tt.fault)
				for i, want := range tt.want {
					l.ok(c.fn, c.other...)
					assert.Equal(t, want, l.call(c.fn, c.suffers...), "%s, call %d", c.fn, i+1)
				}
				l.ResetFaults()
				l.ok(c.fn, c.suffers...)
				l.ok("cudaDeviceSynchronize")
			}
		})
	}
}

// An event belongs to the stream in which it was recorded last, also when that
// is destroyed.
func TestFailEventOfAStream(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	a, b := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0), l.stream()
	e, other := l.event(), l.event()
	l.Fail("cudaEventQuery", cudasim.Fault{Stream: handle(a), Times: -1, Code: cudart.ErrUnknown})
	l.ok("cudaEventQuery", e)
	l.ok("cudaEventRecord", e, a)
	l.ok("cudaStreamDestroy", a)
	l.ok("cudaDeviceSynchronize")
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaEventQuery", e))
	l.ok("cudaEventRecord", e, b)
	l.ok("cudaEventSynchronize", e)
	l.ok("cudaEventQuery", e)

	l.Fail("", cudasim.Fault{Event: cudart.EventHandle(e), Times: -1, Code: cudart.ErrUnknown})
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaEventQuery", e))
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaEventRecord", e, b))
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaStreamWaitEvent", b, e, 0))
	l.ok("cudaEventRecord", other, b)
	l.ok("cudaStreamSynchronize", b)
	l.ResetFaults()
}

func TestFailOnDefaultStreams(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	d, e := l.device(64), l.event()
	l.Fail("", cudasim.Fault{Stream: 1, Times: -1, Code: cudart.ErrUnknown})
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaMemsetAsync", d, 0, 64, 0))
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaMemsetAsync", d, 0, 64, 1))
	l.ok("cudaMemsetAsync", d, 0, 64, 2)
	l.ResetFaults()
	l.Fail("cudaEventSynchronize", cudasim.Fault{Stream: 2, Code: cudart.ErrUnknown})
	l.ok("cudaEventRecord", e, 0)
	l.ok("cudaEventSynchronize", e)
	l.ok("cudaEventRecord", e, 2)
	assert.Equal(t, cudart.ErrUnknown, l.call("cudaEventSynchronize", e))
	l.ok("cudaEventSynchronize", e)
}

// A call that does its work and yet returns an error, as cudaStreamDestroy and
// cudaHostUnregister may for earlier asynchronous work.
func TestFailLate(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	late := cudasim.Fault{Code: cudart.ErrIllegalAddress, Late: true}
	s, m := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0), mapped(t, 4096)
	l.ok("cudaHostRegister", addr(&m[0]), 4096, 0)

	l.Fail("cudaStreamQuery", late)
	l.Hold()
	l.ok("cudaLaunchHostFunc", s, purego.NewCallback(func(uintptr) {}), 0)
	assert.Equal(t, cudart.ErrNotReady, l.call("cudaStreamQuery", s), "its own error stays")
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	l.ok("cudaStreamQuery", s)

	l.Fail("cudaStreamDestroy", late)
	assert.Equal(t, cudart.ErrIllegalAddress, l.call("cudaStreamDestroy", s))
	assert.Equal(t, cudart.ErrIllegalAddress, l.call("cudaGetLastError"))
	assert.Zero(t, l.Outstanding().Streams)
	assert.Empty(t, l.Misuses())
	assert.Equal(t, cudart.ErrInvalidResourceHandle, l.call("cudaStreamDestroy", s))
	require.Len(t, l.Misuses(), 1)
	assert.Equal(t, "stale handle", l.Misuses()[0].Kind)

	l.Fail("cudaHostUnregister", late)
	assert.Equal(t, cudart.ErrIllegalAddress, l.call("cudaHostUnregister", addr(&m[0])))
	assert.Zero(t, l.Outstanding().Registrations)
	assert.Equal(t, cudart.ErrHostMemoryNotRegistered, l.call("cudaHostUnregister", addr(&m[0])))
}

// A fault that cannot happen is an error of the test, and no call suffers it.
func TestFailRefusesFaults(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		fn    string
		fault cudasim.Fault
		want  string
	}{
		"stream":    {"cudaMalloc", cudasim.Fault{Stream: 5, Code: 1}, `Fail("cudaMalloc"): Fault.Stream: the function takes no stream`},
		"event":     {"cudaStreamQuery", cudasim.Fault{Event: 5, Code: 1}, `Fail("cudaStreamQuery"): Fault.Event: the function takes no event`},
		"device":    {"cudaGetDevice", cudasim.Fault{Devices: []int{1}, Code: 1}, `Fail("cudaGetDevice"): Fault.Devices: the function needs no context`},
		"async":     {"cudaMemcpyAsync", cudasim.Fault{Async: true}, `Fail("cudaMemcpyAsync"): Fault.Async needs a Code`},
		"transient": {"", cudasim.Fault{Transient: true, Code: 1}, `Fail(""): Fault.Transient needs Async`},
	} {
		l := openDirty(t, cudasim.Config{})
		l.Fail(tt.fn, tt.fault)
		assert.ErrorContains(t, l.Check(), tt.want, name)
		get[int32](l, "cudaGetDevice")
	}
	l := openDirty(t, cudasim.Config{})
	l.Block("cudaNothing", cudasim.Fault{})()
	assert.ErrorContains(t, l.Check(), `Block("cudaNothing"): no such function`)
}

func TestFailUnknownFunction(t *testing.T) {
	t.Parallel()
	l := openDirty(t, cudasim.Config{Version: 11080})
	l.Fail("cudaMemAdvise_v2", cudasim.Fault{Code: 1})
	assert.ErrorContains(t, l.Check(), `Fail("cudaMemAdvise_v2"): no such function`)
	assert.ErrorContains(t, l.Close(), `no such function`)
}

// work is a small program that releases what it took, also when calls fail.
func work(l *lib) (failed bool) {
	p, s := new(uintptr), new(uintptr)
	if l.call("cudaMalloc", addr(p), 100) != cudart.Code(0) {
		return true
	}
	if l.call("cudaStreamCreateWithPriority", addr(s), 1, 0) == cudart.Code(0) {
		failed = l.call("cudaMemsetAsync", *p, 1, 100, *s) != cudart.Code(0) ||
			l.call("cudaStreamSynchronize", *s) != cudart.Code(0)
		for l.call("cudaStreamDestroy", *s) != cudart.Code(0) {
			failed = true
		}
	} else {
		failed = true
	}
	for l.call("cudaFree", *p) != cudart.Code(0) {
		failed = true
	}
	return failed
}

func TestEveryCallCanFail(t *testing.T) {
	t.Parallel()
	locked(t)
	first := open(t, cudasim.Config{})
	assert.False(t, work(first))
	require.Equal(t, 6, first.TotalCalls())
	for k := range first.TotalCalls() {
		l := open(t, cudasim.Config{})
		l.FailCall(k+1, cudart.ErrUnknown)
		assert.True(t, work(l), k)
		require.NoError(t, l.Check(), k)
		require.NoError(t, l.Close())
	}
}

func TestOnCall(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	var calls []string
	l.OnCall(func(fn string, n int) { calls = append(calls, fmt.Sprint(fn, " ", n)) })
	get[int32](l, "cudaGetDevice")
	get[int32](l, "cudaGetDevice")
	l.OnCall(nil)
	get[int32](l, "cudaGetDevice")
	assert.Equal(t, []string{"cudaGetDevice 1", "cudaGetDevice 2"}, calls)
}

func TestPanicInsideIsReported(t *testing.T) {
	t.Parallel()
	l := openDirty(t, cudasim.Config{})
	l.OnCall(func(string, int) { panic("oops") })
	get[int32](l, "cudaGetDevice")
	l.OnCall(nil)
	assert.ErrorContains(t, l.Close(), "panic in the OnCall function at cudaGetDevice: oops")
}

func TestLoseDevice(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, twoDevices)
	l.ok("cudaSetDevice", 1)
	h, d, s := l.pinned(64), get[uintptr](l, "cudaMalloc", 64), get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
	l.ok("cudaSetDevice", 0)
	assert.ErrorContains(t, l.LoseDevice(2), "there are 2 devices")
	l.Hold()
	l.ok("cudaSetDevice", 1)
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, s)
	waiting := make(chan struct{})
	l.OnCall(func(fn string, _ int) {
		if fn == "cudaStreamSynchronize" {
			close(waiting)
		}
	})
	result := make(chan cudart.Code, 1)
	go onFreshThread(func() {
		l.raw("cudaSetDevice", 1)
		result <- cudart.Code(int32(l.raw("cudaStreamSynchronize", s)))
	})
	<-waiting
	require.NoError(t, l.LoseDevice(1))
	assert.Equal(t, cudart.ErrLaunchFailure, <-result)
	for range 2 { // it stays
		assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaStreamQuery", s))
		assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaFree", d))
		assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaDeviceSynchronize"))
	}
	l.Release()
	l.ok("cudaSetDevice", 0)
	l.ok("cudaDeviceSynchronize")
	assert.Equal(t, 1, l.Outstanding().DeviceAllocs)
}

func TestAsyncFailure(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	h, d, s := l.pinned(64), get[uintptr](l, "cudaMalloc", 64), get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
	l.Fail("cudaMemcpyAsync", cudasim.Fault{Code: cudart.ErrIllegalAddress, Async: true})
	l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
	assert.Equal(t, cudart.ErrIllegalAddress, l.call("cudaStreamSynchronize", s))
	assert.Equal(t, cudart.ErrIllegalAddress, l.call("cudaMalloc", addr(new(uintptr)), 1))
	l.ok("cudaDeviceReset")
	assert.Empty(t, l.Contexts())
	m := mapped(t, 64)
	l.ok("cudaHostRegister", addr(&m[0]), 64, 0)
	l.ok("cudaHostUnregister", addr(&m[0]))
	l.ok("cudaHostRegister", addr(&h[0]), 64, 0) // for its cleanup: the reset dropped it
	assert.Equal(t, cudasim.Outstanding{Registrations: 1, RegisteredBytes: 64}, l.Outstanding())
}

// Each call that reports how work ended returns a transient error once, and then
// all is well.
func TestTransientAsyncFailure(t *testing.T) {
	t.Parallel()
	const code = cudart.ErrLaunchFailure
	for _, reporter := range []string{"cudaStreamQuery", "cudaStreamSynchronize", "cudaEventQuery", "cudaEventSynchronize", "cudaDeviceSynchronize"} {
		t.Run(reporter, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := open(t, cudasim.Config{})
			h, d, a, b := l.pinned(64), l.device(64), l.stream(), l.stream()
			before, after, elsewhere := l.event(), l.event(), l.event()
			l.Fail("cudaMemcpyAsync", cudasim.Fault{Stream: handle(a), Code: code, Async: true, Transient: true})
			h[0] = 1
			l.Hold()
			l.ok("cudaEventRecord", before, a)
			l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, a)
			l.ok("cudaEventRecord", after, a)
			l.ok("cudaEventRecord", elsewhere, b)
			assert.Equal(t, cudart.ErrNotReady, l.call("cudaStreamQuery", a))
			l.Release()
			l.ok("cudaFree", get[uintptr](l, "cudaMalloc", 1)) // waits, and reports nothing
			assert.EqualValues(t, 1, h[0], "the copy moved nothing")
			l.ok("cudaEventQuery", before)
			l.ok("cudaEventSynchronize", before)
			l.ok("cudaEventQuery", elsewhere)
			l.ok("cudaStreamSynchronize", b)

			args := map[string][]uintptr{"cudaStreamQuery": {a}, "cudaStreamSynchronize": {a}, "cudaEventQuery": {after}, "cudaEventSynchronize": {after}}[reporter]
			assert.Equal(t, code, l.call(reporter, args...))
			l.ok(reporter, args...)
			l.ok("cudaDeviceSynchronize")
			l.ok("cudaStreamQuery", a)
			l.ok("cudaEventQuery", after)
			l.ok("cudaMemcpyAsync", addr(&h[0]), d, 64, d2h, a)
			l.ok("cudaStreamSynchronize", a)
			assert.Zero(t, h[0])
		})
	}
}

// Of several operations that fail, the first is reported.
func TestTransientFailuresOfOneStream(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	d, s, h := l.device(64), l.stream(), l.pinned(64)
	l.Fail("cudaMemsetAsync", cudasim.Fault{Code: cudart.ErrIllegalAddress, Async: true, Transient: true})
	l.Fail("cudaMemsetAsync", cudasim.Fault{Nth: 2, Code: cudart.ErrLaunchFailure, Async: true, Transient: true})
	l.ok("cudaMemsetAsync", d, 1, 64, s)
	l.ok("cudaMemsetAsync", d, 1, 64, s)
	assert.Equal(t, cudart.ErrIllegalAddress, l.call("cudaStreamSynchronize", s))
	l.ok("cudaStreamSynchronize", s)

	// Of the two copies of a batch, one fails.
	m := mapped(t, 4096)
	copy(array[uintptr](m), []uintptr{d, d + 8, addr(&h[0]), addr(&h[8]), 8, 8, 1, 0, 0, 0})
	p := addr(&m[0])
	l.ok("cudaMemset", d, 7, 64)
	l.Fail("cudaMemcpyBatchAsync", cudasim.Fault{Code: cudart.ErrLaunchFailure, Async: true, Transient: true})
	l.ok("cudaMemcpyBatchAsync", p, p+16, p+32, 2, p+48, p+72, 1, s)
	assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaStreamSynchronize", s))
	l.ok("cudaMemcpy", addr(&h[0]), d, 64, d2h)
	assert.EqualValues(t, 7, h[0], "the first copy moved nothing")
	assert.Zero(t, h[8], "the second copied")
}

// Several streams report their errors in the order in which they were made.
func TestTransientFailuresOfSeveralStreams(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	d := l.device(64)
	var want []cudart.Code
	for i := range 8 {
		s, code := l.stream(), cudart.ErrLaunchFailure-cudart.Code(i)
		l.Fail("cudaMemsetAsync", cudasim.Fault{Stream: handle(s), Code: code, Async: true, Transient: true})
		l.ok("cudaMemsetAsync", d, 1, 64, s)
		want = append(want, code)
	}
	var got []cudart.Code
	for range want {
		got = append(got, l.call("cudaDeviceSynchronize"))
	}
	assert.Equal(t, want, got)
	l.ok("cudaDeviceSynchronize")
}

// A call that waits for its own work returns the work's error, and no later call
// does.
func TestTransientFailureOfASynchronousCall(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	d, s, h := l.device(64), l.stream(), make([]byte, 64)
	transient := cudasim.Fault{Code: cudart.ErrLaunchFailure, Async: true, Transient: true}
	l.Fail("cudaMemcpy", transient)
	l.Fail("cudaMemcpyAsync", transient)
	assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaMemcpy", d, addr(&h[0]), 64, h2d))
	assert.Equal(t, cudart.ErrLaunchFailure, l.call("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s), "pageable")
	l.ok("cudaDeviceSynchronize")
	l.ok("cudaStreamSynchronize", s)
	l.ok("cudaStreamSynchronize", 0)
	l.ok("cudaMemcpy", d, addr(&h[0]), 64, h2d)
}

// Not parallel: another Sim must not get the slot before the late calls.
func TestClose(t *testing.T) {
	locked(t)
	l := openDirty(t, cudasim.Config{})
	h := mapped(t, 64)
	l.ok("cudaHostRegister", addr(&h[0]), 64, 0)
	d := get[uintptr](l, "cudaMalloc", 1<<20)
	a := get[uintptr](l, "cudaHostAlloc", 64, 0)
	s := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
	e := get[uintptr](l, "cudaEventCreateWithFlags", 0)
	malloc, text := l.Symbol("cudaMalloc"), l.Symbol("cudaGetErrorName")
	l.Hold()
	l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
	l.ok("cudaEventRecord", e, s)
	waiting := make(chan cudart.Code)
	l.OnCall(func(fn string, _ int) { // the call below is inside
		if fn == "cudaStreamSynchronize" {
			close(waiting)
		}
	})
	result := make(chan cudart.Code, 1)
	go onFreshThread(func() { result <- cudart.Code(int32(l.raw("cudaStreamSynchronize", s))) })
	<-waiting
	err := l.Close()
	assert.ErrorContains(t, err, "simulated libcudart 13.0: not released: 1 device allocation (1048576 bytes), "+
		"1 host allocation (64 bytes), 1 registration (64 bytes), 1 stream, 1 event, 2 pending operations: ")
	assert.ErrorContains(t, err, fmt.Sprintf("device memory of device 0 at %#x, 1048576 bytes", d))
	assert.Equal(t, cudart.ErrCudartUnloading, <-result)
	assert.NoError(t, l.Close())
	assert.Zero(t, l.Symbol("cudaMalloc"))
	assert.Zero(t, bytesOf(a, 64)[63], "leaked host memory can still be read")
	r, _, _ := purego.SyscallN(malloc, addr(new(uintptr)), 1)
	assert.Equal(t, cudart.ErrCudartUnloading, cudart.Code(int32(r)))
	r, _, _ = purego.SyscallN(text, 2)
	assert.Zero(t, r)
}

// Not parallel: it needs all slots.
func TestSlotsAreUsedAgain(t *testing.T) {
	var sims []*cudasim.Sim
	for range 16 {
		s, err := cudasim.New(cudasim.Config{})
		require.NoError(t, err)
		sims = append(sims, s)
	}
	next := make(chan *cudasim.Sim)
	go func() {
		s, err := cudasim.New(cudasim.Config{Version: 11080})
		assert.NoError(t, err)
		next <- s
	}()
	old := (&lib{sims[3], t}).Symbol("cudaMemPrefetchAsync")
	late := get[uintptr](&lib{sims[3], t}, "cudaStreamCreateWithPriority", 1, 0)
	require.Error(t, sims[3].Close(), "a stream is left")
	s := <-next
	assert.Equal(t, cudart.ErrCudartUnloading, (&lib{s, t}).call("cudaStreamDestroy", late))
	assert.Empty(t, s.Misuses(), "of a closed one")
	assert.Equal(t, cudart.ErrInvalidResourceHandle, (&lib{s, t}).call("cudaStreamDestroy", 12345))
	assert.Len(t, s.Misuses(), 1)
	assert.NotZero(t, s.Symbol("cudaMalloc"))
	r, _, _ := purego.SyscallN(old, 0, 0, 0, 0, 0)
	assert.Equal(t, cudart.ErrCudartUnloading, cudart.Code(int32(r)), "another version's entry in the same slot")
	require.NoError(t, s.Close())
	for _, s := range sims {
		require.NoError(t, s.Close())
	}
	for range 100 {
		s, err := cudasim.New(cudasim.Config{})
		require.NoError(t, err)
		require.NoError(t, s.Close())
	}
}

func TestManyGoroutinesAndSims(t *testing.T) {
	t.Parallel()
	var sims sync.WaitGroup
	for range 2 {
		l := open(t, twoDevices)
		sims.Add(1)
		go func() {
			defer sims.Done()
			var workers sync.WaitGroup
			for i := range 20 {
				workers.Add(1)
				go func() {
					defer workers.Done()
					onFreshThread(func() {
						l.ok("cudaSetDevice", uintptr(i%2))
						for range 20 {
							assert.False(t, work(l))
						}
					})
				}()
			}
			workers.Wait()
			assert.NoError(t, l.Check())
		}()
	}
	sims.Wait()
}

// Not parallel: it looks at the heap.
func TestCallsDoNotLeak(t *testing.T) {
	locked(t)
	l := open(t, cudasim.Config{})
	h, d, s, e := l.pinned(64), l.device(64), l.stream(), l.event()
	round := func(n int) uint64 {
		for i := range n {
			get[int32](l, "cudaGetDevice")
			if i%20 != 0 {
				continue
			}
			l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
			l.ok("cudaEventRecord", e, s)
			l.ok("cudaStreamSynchronize", s)
			require.False(t, work(l))
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := round(1000)
	assert.Less(t, round(20_000), before+200<<10)
}

func BenchmarkTrivialCall(b *testing.B) {
	l := open(b, cudasim.Config{})
	v := new(int32)
	entry, p := l.Symbol("cudaGetDevice"), addr(v)
	b.ReportAllocs()
	for b.Loop() {
		purego.SyscallN(entry, p)
	}
}

func BenchmarkCopyAndSynchronize(b *testing.B) {
	l := open(b, cudasim.Config{})
	h, d, s := l.pinned(64), l.device(64), l.stream()
	b.ReportAllocs()
	for b.Loop() {
		l.ok("cudaMemcpyAsync", d, addr(&h[0]), 64, h2d, s)
		l.ok("cudaStreamSynchronize", s)
	}
}
