//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"runtime"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

const mib = 1 << 20

// A lib calls a simulator's C functions as a C program would.
type lib struct {
	*cudasim.Sim
	t testing.TB
}

// open starts a simulator that must be clean at the end.
func open(t testing.TB, cfg cudasim.Config) *lib {
	t.Helper()
	l := openDirty(t, cfg)
	t.Cleanup(func() { assert.NoError(t, l.Check()) })
	return l
}

// openDirty starts one whose leftovers the test itself looks at.
func openDirty(t testing.TB, cfg cudasim.Config) *lib {
	t.Helper()
	sim, err := cudasim.New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = sim.Close() })
	return &lib{sim, t}
}

// call calls a function by name; the test must hold the OS thread where the
// thread matters.
func (l *lib) call(fn string, args ...uintptr) cudart.Code {
	l.t.Helper()
	entry := l.Symbol(fn)
	require.NotZero(l.t, entry, fn)
	r, _, _ := purego.SyscallN(entry, args...)
	return cudart.Code(int32(r))
}

// ok calls a function that must succeed.
func (l *lib) ok(fn string, args ...uintptr) {
	l.t.Helper()
	require.Equal(l.t, cudart.Code(0), l.call(fn, args...), fn)
}

// get calls a function whose first argument is where its result goes.
func get[T any](l *lib, fn string, args ...uintptr) T {
	l.t.Helper()
	v := new(T)
	l.ok(fn, append([]uintptr{addr(v)}, args...)...)
	return *v
}

// addr is an address for C to write to. What it points to must not be on a
// goroutine's stack, which can move: the store makes it escape.
func addr[T any](p *T) uintptr {
	atomic.StorePointer(&escaped, unsafe.Pointer(p))
	return uintptr(unsafe.Pointer(p))
}

var escaped unsafe.Pointer

// pinned is registered memory outside Go's heap.
func (l *lib) pinned(n int) []byte {
	l.t.Helper()
	m := mapped(l.t, n)
	l.ok("cudaHostRegister", addr(&m[0]), uintptr(n), 0)
	l.t.Cleanup(func() { l.ok("cudaHostUnregister", addr(&m[0])) })
	return m
}

func (l *lib) device(n int) uintptr {
	l.t.Helper()
	p := get[uintptr](l, "cudaMalloc", uintptr(n))
	l.t.Cleanup(func() { l.ok("cudaFree", p) })
	return p
}

func (l *lib) stream() uintptr {
	l.t.Helper()
	s := get[uintptr](l, "cudaStreamCreateWithPriority", 1, 0)
	l.t.Cleanup(func() { l.ok("cudaStreamDestroy", s) })
	return s
}

func (l *lib) event() uintptr {
	l.t.Helper()
	e := get[uintptr](l, "cudaEventCreateWithFlags", 0)
	l.t.Cleanup(func() { l.ok("cudaEventDestroy", e) })
	return e
}

func mapped(t testing.TB, n int) []byte {
	t.Helper()
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}

// locked keeps the test on its OS thread.
func locked(t testing.TB) {
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
}

// onFreshThread runs f on an OS thread that never called the library and ends
// afterwards.
func onFreshThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		f()
	}()
	<-done
}

const (
	h2d = 1
	d2h = 2
	d2d = 3
)

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	for _, v := range []cudart.Version{11080, 12040, 12080, 13000} {
		t.Run(v.String(), func(t *testing.T) {
			t.Parallel()
			l := open(t, cudasim.Config{Version: v})
			src, dst := l.pinned(3*mib+5), l.pinned(3*mib+5)
			for i := range src {
				src[i] = byte(i * 7)
			}
			d, s := l.device(len(src)), l.stream()
			l.ok("cudaMemcpyAsync", d, addr(&src[0]), uintptr(len(src)), h2d, s)
			l.ok("cudaMemcpyAsync", addr(&dst[0]), d, uintptr(len(src)), d2h, s)
			l.ok("cudaStreamSynchronize", s)
			assert.Equal(t, src, dst)
			assert.EqualValues(t, v, get[int32](l, "cudaRuntimeGetVersion"))
			assert.Equal(t, []int{0}, l.Contexts())
		})
	}
}

// raw calls a function and returns all of its result.
func (l *lib) raw(fn string, args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(l.Symbol(fn), args...)
	return r
}

func goString(p uintptr) string {
	var b []byte
	for ; ; p++ {
		c := **(**byte)(unsafe.Pointer(&p))
		if c == 0 {
			return string(b)
		}
		b = append(b, c)
	}
}

func bytesOf(p uintptr, n int) []byte { return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), n) }
