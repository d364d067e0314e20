//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestFullStreamBlocksEveryCallThatEnqueues(t *testing.T) {
	t.Parallel()
	locked(t)
	const depth = 3
	l := open(t, cudasim.Config{QueueDepth: depth, Devices: twoDevices.Devices})
	l.ok("cudaSetDevice", 1)
	there := get[uintptr](l, "cudaMalloc", 64)
	l.ok("cudaSetDevice", 0)
	h, d, other := l.pinned(64), l.device(64), l.device(64)
	a, b, e, onB := l.stream(), l.stream(), l.event(), l.event()
	managed := get[uintptr](l, "cudaMallocManaged", 64, 1)
	out := mapped(t, 64)
	nothing := purego.NewCallback(func(uintptr) {})
	// One batch: target, source, size, attributes (order 1), their first copy.
	copy(array[uintptr](out), []uintptr{d, addr(&h[0]), 64, 1, 0, 0, 0})
	var freed uintptr
	tests := []struct {
		fn     string
		args   func() []uintptr
		stream uintptr
	}{
		{"cudaMemcpyAsync", func() []uintptr { return []uintptr{d, addr(&h[0]), 64, h2d, a} }, a},
		{"cudaMemcpyPeerAsync", func() []uintptr { return []uintptr{d, 0, there, 1, 64, a} }, a},
		{"cudaMemsetAsync", func() []uintptr { return []uintptr{d, 0, 64, a} }, a},
		{"cudaMemPrefetchAsync", func() []uintptr { return []uintptr{managed, 64, 1, 0, a} }, a},
		{"cudaEventRecord", func() []uintptr { return []uintptr{e, a} }, a},
		{"cudaStreamWaitEvent", func() []uintptr { return []uintptr{a, onB, 0} }, a},
		{"cudaLaunchHostFunc", func() []uintptr { return []uintptr{a, nothing, 0} }, a},
		{"cudaMallocAsync", func() []uintptr { return []uintptr{addr(&out[56]), 64, a} }, a},
		{"cudaFreeAsync", func() []uintptr { return []uintptr{freed, a} }, a},
		{"cudaMemcpyBatchAsync", func() []uintptr {
			p := addr(&out[0])
			return []uintptr{p, p + 8, p + 16, 1, p + 24, p + 48, 1, a}
		}, a},
		{"cudaMemcpy", func() []uintptr { return []uintptr{d, addr(&h[0]), 64, h2d} }, 0},
		{"cudaMemset", func() []uintptr { return []uintptr{d, 0, 64} }, 0},
	}
	for _, tt := range tests {
		t.Run(tt.fn, func(t *testing.T) {
			l := &lib{l.Sim, t}
			freed = get[uintptr](l, "cudaMalloc", 64)
			l.Hold()
			l.ok("cudaEventRecord", onB, b)
			for range depth {
				l.ok("cudaEventRecord", e, tt.stream)
			}
			done := l.begin(tt.fn, tt.args()...)
			l.awaitBlocked(tt.fn, 1)
			assert.Equal(t, map[string]int{tt.fn: 1}, l.Blocked())
			assert.Equal(t, 1+depth, l.Outstanding().PendingOps, "what blocks is not enqueued")
			l.ok("cudaMemsetAsync", other, 0, 64, b) // other streams have room
			assert.Equal(t, cudart.ErrNotReady, l.call("cudaStreamQuery", tt.stream))
			assert.Empty(t, done)
			l.Release()
			assert.Equal(t, cudart.Code(0), <-done)
			assert.Empty(t, l.Blocked())
			l.ok("cudaDeviceSynchronize")
			if tt.fn != "cudaFreeAsync" {
				l.ok("cudaFree", freed)
			}
			if tt.fn == "cudaMallocAsync" {
				l.ok("cudaFree", array[uintptr](out)[7])
			}
		})
	}
	l.ok("cudaFree", managed)
	l.ok("cudaSetDevice", 1)
	l.ok("cudaFree", there)
	l.ok("cudaSetDevice", 0)
}

func TestQueueDepth(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ depth, fits int }{"default": {0, 1024}, "two": {2, 2}, "no limit": {-1, 3000}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := open(t, cudasim.Config{QueueDepth: tt.depth})
			s, e := l.stream(), l.event()
			l.Hold()
			for range tt.fits {
				l.ok("cudaEventRecord", e, s)
			}
			assert.Equal(t, tt.fits, l.Outstanding().PendingOps)
			if tt.depth >= 0 {
				done := l.begin("cudaEventRecord", e, s)
				l.awaitBlocked("cudaEventRecord", 1)
				l.Release()
				assert.Equal(t, cudart.Code(0), <-done)
			}
			l.Release()
			l.ok("cudaStreamSynchronize", s)
		})
	}
}

// Callers that fill a stream faster than it works lose nothing.
func TestFullStreamKeepsAllWork(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{QueueDepth: 2})
	d, s := l.device(64), l.stream()
	const threads, each = 4, 200
	var done []<-chan struct{}
	for range threads {
		ended := make(chan struct{})
		done = append(done, ended)
		go onFreshThread(func() {
			defer close(ended)
			for range each {
				assert.Equal(t, cudart.Code(0), cudart.Code(int32(l.raw("cudaMemsetAsync", d, 1, 64, s))))
			}
		})
	}
	for _, ended := range done {
		<-ended
	}
	l.ok("cudaStreamSynchronize", s)
	assert.Equal(t, threads*each, l.Calls("cudaMemsetAsync"))
	assert.Zero(t, l.Outstanding().PendingOps)
}

// A caller that waits for room gets an error when there will be none, and what
// its call had begun is undone.
func TestFullStreamThatEnds(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		end  func(l *lib, s uintptr)
		code cudart.Code
	}{
		"destroyed": {func(l *lib, s uintptr) { l.ok("cudaStreamDestroy", s) }, cudart.ErrInvalidResourceHandle},
		"lost":      {func(l *lib, _ uintptr) { require.NoError(l.t, l.LoseDevice(0)) }, cudart.ErrLaunchFailure},
		"reset":     {func(l *lib, _ uintptr) { l.ok("cudaDeviceReset") }, cudart.ErrInvalidResourceHandle},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locked(t)
			l := openDirty(t, cudasim.Config{QueueDepth: 1})
			s := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
			d, e := get[uintptr](l, "cudaMalloc", 64), get[uintptr](l, "cudaEventCreateWithFlags", 0)
			freed := get[uintptr](l, "cudaMalloc", 64)
			m := mapped(t, 4096)
			p := addr(&m[0])
			l.ok("cudaHostRegister", p+64, 64, 0)
			copy(array[uintptr](m), []uintptr{d, p + 64, 64, 1, 0, 0, 0}) // as above
			stuck, running := make(chan struct{}), make(chan struct{})
			l.ok("cudaLaunchHostFunc", s, purego.NewCallback(func(uintptr) { close(running); <-stuck }), 0)
			<-running
			calls := []<-chan cudart.Code{
				l.begin("cudaMemcpyAsync", d, p+64, 64, h2d, s),
				l.begin("cudaMemcpyBatchAsync", p, p+8, p+16, 1, p+24, p+48, 1, s),
				l.begin("cudaMemsetAsync", d, 1, 64, s),
				l.begin("cudaMallocAsync", p+56, 64, s),
				l.begin("cudaFreeAsync", freed, s),
				l.begin("cudaEventRecord", e, s),
			}
			l.awaitBlocked("", len(calls))
			tt.end(l, s)
			for _, c := range calls {
				assert.Equal(t, tt.code, <-c)
			}
			want := 2
			if name == "reset" {
				want = 0
			}
			assert.Equal(t, want, l.Outstanding().DeviceAllocs)
			close(stuck)
			if name == "reset" {
				free, total := new(uint64), new(uint64)
				l.ok("cudaMemGetInfo", addr(free), addr(total))
				assert.Equal(t, *total, *free)
			}
			if name == "destroyed" {
				l.ok("cudaHostUnregister", p+64) // no copy is pending
				l.ok("cudaMemset", freed, 1, 64) // it was not
				l.ok("cudaFree", freed)
				l.ok("cudaFree", d)
				l.ok("cudaEventDestroy", e)
				assert.NoError(t, l.Check())
			}
		})
	}
}

// Memory of a call that waits for room is in use already.
func TestUnregisterWhileACopyWaitsForRoom(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{QueueDepth: 1})
	d, s, e, m := l.device(64), l.stream(), l.event(), mapped(t, 4096)
	l.ok("cudaHostRegister", addr(&m[0]), 4096, 0)
	l.Hold()
	l.ok("cudaEventRecord", e, s)
	done := l.begin("cudaMemcpyAsync", d, addr(&m[0]), 64, h2d, s)
	l.awaitBlocked("cudaMemcpyAsync", 1)
	l.ok("cudaHostUnregister", addr(&m[0]))
	require.Len(t, l.Misuses(), 1)
	assert.Equal(t, "busy memory", l.Misuses()[0].Kind)
	l.Release()
	assert.Equal(t, cudart.Code(0), <-done)
	l.ok("cudaStreamSynchronize", s)
}

// array is memory outside Go's heap as values that C reads and writes.
func array[T any](mem []byte) []T {
	var v T
	return unsafe.Slice((*T)(unsafe.Pointer(&mem[0])), len(mem)/int(unsafe.Sizeof(v)))
}
