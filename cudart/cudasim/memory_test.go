//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

func TestDeviceMemory(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 8 * mib}}})
	free, total := new(uint64), new(uint64)
	info := func() (uint64, uint64) {
		l.ok("cudaMemGetInfo", addr(free), addr(total))
		return *free, *total
	}
	p := get[uintptr](l, "cudaMalloc", 3*mib)
	f, n := info()
	assert.EqualValues(t, 5*mib, f)
	assert.EqualValues(t, 8*mib, n)
	q := new(uintptr)
	assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaMalloc", addr(q), 5*mib+1))
	assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaMalloc", addr(q), ^uintptr(0)))
	*q = 5
	l.ok("cudaMalloc", addr(q), 0)
	assert.Zero(t, *q)
	l.ok("cudaFree", 0)
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaFree", p+512))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaFreeHost", p))
	h := make([]byte, 64)
	tests := []struct {
		name     string
		dst, src uintptr
		n, kind  uintptr
		code     cudart.Code
	}{
		{"last bytes", p + 3*mib - 64, addr(&h[0]), 64, h2d, 0},
		{"one too many", p + 3*mib - 63, addr(&h[0]), 64, h2d, 1},
		{"before", p - 1, addr(&h[0]), 1, h2d, 1},
		{"nil", p, 0, 1, h2d, 1},
		{"nothing", 0, 0, 0, h2d, 0},
		{"wraps around", p, addr(&h[0]), ^uintptr(0) - 5, h2d, 1},
		{"direction", p, addr(&h[0]), 1, 5, cudart.Code(21)},
		{"device said to be host", addr(&h[0]), p, 1, h2d, 1},
		{"host said to be device", p, addr(&h[0]), 1, d2d, 1},
		{"any", p, addr(&h[0]), 64, 4, 0},
		{"host to host", addr(&h[1]), addr(&h[0]), 1, 0, 0},
	}
	for _, tt := range tests {
		assert.Equal(t, tt.code, l.call("cudaMemcpy", tt.dst, tt.src, tt.n, tt.kind), tt.name)
	}
	l.ok("cudaFree", p)
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaFree", p))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMemcpy", p, addr(&h[0]), 1, h2d))
	f, _ = info()
	assert.EqualValues(t, 8*mib, f)
	require.NoError(t, l.Check())
}

func TestDeviceMemoryIsNotTheCPUs(t *testing.T) {
	t.Parallel()
	l := open(t, cudasim.Config{})
	p := l.device(64)
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	assert.Panics(t, func() { *(*(**byte)(unsafe.Pointer(&p))) = 1 })
}

func TestFreeWaitsForTheDevice(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	h, s := l.pinned(mib), l.stream()
	d := get[uintptr](l, "cudaMalloc", mib)
	l.ok("cudaMemsetAsync", d, 4, mib, s)
	l.ok("cudaMemcpyAsync", addr(&h[0]), d, mib, d2h, s)
	l.ok("cudaFree", d)
	assert.EqualValues(t, 4, h[mib-1])
	assert.Zero(t, l.Outstanding().PendingOps)
}

func TestStreamOrderedMemory(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	h, s := l.pinned(64), l.stream()
	p := get[uintptr](l, "cudaMallocAsync", 64, s)
	l.Hold()
	l.ok("cudaMemsetAsync", p, 4, 64, s)
	l.ok("cudaMemcpyAsync", addr(&h[0]), p, 64, d2h, s)
	l.ok("cudaFreeAsync", p, s)
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaMemsetAsync", p, 5, 64, s))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaFreeAsync", p, s))
	assert.Equal(t, 0, l.Outstanding().DeviceAllocs)
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	assert.EqualValues(t, 4, h[63])
	require.Len(t, l.Misuses(), 2)
	assert.Equal(t, "freed memory", l.Misuses()[0].Kind)
}

func TestHostMemory(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	p := get[uintptr](l, "cudaHostAlloc", 5000, 4)
	assert.EqualValues(t, 4, get[uint32](l, "cudaHostGetFlags", p+4999))
	assert.Equal(t, p, get[uintptr](l, "cudaHostGetDevicePointer", p, 0))
	assert.EqualValues(t, 1, attributes(l, p).kind)
	assert.Equal(t, cudasim.Outstanding{HostAllocs: 1, HostBytes: 5000}, l.Outstanding())
	v := new(uint64)
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaHostAlloc", addr(v), 1, 8))
	assert.Equal(t, cudart.ErrHostMemoryAlreadyRegistered, l.call("cudaHostRegister", p, 10, 0))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaHostUnregister", p))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaFree", p))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaFreeHost", p+1))
	assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaHostGetFlags", addr(v), p+5000))
	l.ok("cudaFreeHost", p)
	l.ok("cudaFreeHost", 0)
}

type pointerAttributes struct {
	kind, device int32
	dev, host    uintptr
	_            [8]int64
}

func attributes(l *lib, p uintptr) pointerAttributes {
	return get[pointerAttributes](l, "cudaPointerGetAttributes", p)
}

func TestPointerAttributes(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, twoDevices)
	l.ok("cudaSetDevice", 1)
	h, d := l.pinned(100), l.device(100)
	m := get[uintptr](l, "cudaMallocManaged", 100, 1)
	stray := addr(&make([]byte, 100)[0])
	assert.Equal(t, pointerAttributes{kind: 1, device: 1, dev: addr(&h[50]), host: addr(&h[50])}, attributes(l, addr(&h[50])))
	assert.Equal(t, pointerAttributes{kind: 2, device: 1, dev: d + 7}, attributes(l, d+7))
	assert.Equal(t, pointerAttributes{kind: 3, device: 1, dev: m, host: m}, attributes(l, m))
	assert.Equal(t, pointerAttributes{device: -2, host: stray}, attributes(l, stray))
	l.ok("cudaFree", m)
}

func TestRegister(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{MaxRegister: mib})
	m := mapped(t, 2*mib)
	at := func(off int) uintptr { return addr(&m[0]) + uintptr(off) }
	const page = 4096
	steps := []struct {
		name string
		fn   string
		args []uintptr
		code cudart.Code
	}{
		{"nothing", "cudaHostRegister", []uintptr{at(0), 0, 0}, 1},
		{"nil", "cudaHostRegister", []uintptr{0, page, 0}, 1},
		{"flags", "cudaHostRegister", []uintptr{at(0), page, 0xff}, 1},
		{"wraps around", "cudaHostRegister", []uintptr{at(0), ^uintptr(0), 0}, 1},
		{"too large", "cudaHostRegister", []uintptr{at(0), mib + 1, 0}, 2},
		{"not page aligned", "cudaHostRegister", []uintptr{at(100), 1000, 3}, 0},
		{"neighbour in the same page", "cudaHostRegister", []uintptr{at(1100), 50, 0}, 0},
		{"again", "cudaHostRegister", []uintptr{at(100), 1000, 0}, 712},
		{"overlap at the end", "cudaHostRegister", []uintptr{at(1149), 10, 0}, 712},
		{"overlap around", "cudaHostRegister", []uintptr{at(0), page, 0}, 712},
		{"unregister inside", "cudaHostUnregister", []uintptr{at(101)}, 1},
		{"unregister unknown", "cudaHostUnregister", []uintptr{at(0)}, 713},
		{"unregister nil", "cudaHostUnregister", []uintptr{0}, 1},
		{"unregister", "cudaHostUnregister", []uintptr{at(100)}, 0},
		{"unregister again", "cudaHostUnregister", []uintptr{at(100)}, 713},
		{"unregister the neighbour", "cudaHostUnregister", []uintptr{at(1100)}, 0},
		{"at the limit", "cudaHostRegister", []uintptr{at(0), mib, 0}, 0},
		{"its end", "cudaHostUnregister", []uintptr{at(0)}, 0},
	}
	for _, s := range steps {
		require.Equal(t, s.code, l.call(s.fn, s.args...), s.name)
	}
	if assert.Zero(t, l.Outstanding()) {
		l.ok("cudaHostRegister", at(0), 100, 3)
		assert.EqualValues(t, 3, get[uint32](l, "cudaHostGetFlags", at(99)))
		assert.Equal(t, at(99), get[uintptr](l, "cudaHostGetDevicePointer", at(99), 0))
		assert.Equal(t, cudasim.Outstanding{Registrations: 1, RegisteredBytes: 100}, l.Outstanding())
		l.ok("cudaHostUnregister", at(0))
	}
}

func TestHostsThatRefuseToPin(t *testing.T) {
	t.Parallel()
	const page = 4096
	register := func(l *lib, at uintptr, n int) cudart.Code { return l.call("cudaHostRegister", at, uintptr(n), 0) }
	t.Run("confidential computing", func(t *testing.T) {
		t.Parallel()
		l := open(t, cudasim.Config{NoRegister: true})
		p := addr(&mapped(t, page)[0])
		assert.Equal(t, cudart.ErrNotSupported, register(l, p, 1))
		assert.Equal(t, cudart.ErrNotSupported, register(l, p, page))
		assert.EqualValues(t, 1, get[int32](l, "cudaDeviceGetAttribute", uintptr(cudart.AttrHostRegisterSupported), 0))
		l.ok("cudaFreeHost", get[uintptr](l, "cudaHostAlloc", page, 0))
	})
	t.Run("number of registrations", func(t *testing.T) {
		t.Parallel()
		l := open(t, cudasim.Config{MaxRegistrations: 2})
		p := addr(&mapped(t, 3*page)[0])
		h := get[uintptr](l, "cudaHostAlloc", page, 0) // is no registration
		assert.Equal(t, cudart.Code(0), register(l, p, page))
		assert.Equal(t, cudart.Code(0), register(l, p+page, page))
		assert.Equal(t, cudart.ErrMemoryAllocation, register(l, p+2*page, 1))
		l.ok("cudaHostUnregister", p)
		assert.Equal(t, cudart.Code(0), register(l, p+2*page, 1))
		l.ok("cudaHostUnregister", p+page)
		l.ok("cudaHostUnregister", p+2*page)
		l.ok("cudaFreeHost", h)
	})
	t.Run("short of memory", func(t *testing.T) {
		t.Parallel()
		l := open(t, cudasim.Config{HostMemory: 3 * page})
		p := addr(&mapped(t, 4*page)[0])
		assert.Equal(t, cudart.ErrInvalidValue, register(l, p, 3*page+1))
		assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaHostAlloc", addr(new(uintptr)), 3*page+1, 0))
		assert.Equal(t, cudart.Code(0), register(l, p, 2*page))
		assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaHostAlloc", addr(new(uintptr)), page+1, 0))
		h := get[uintptr](l, "cudaHostAlloc", page, 0)
		assert.Equal(t, cudart.ErrInvalidValue, register(l, p+3*page, 1))
		l.ok("cudaFreeHost", h)
		assert.Equal(t, cudart.Code(0), register(l, p+3*page, page))
		l.ok("cudaHostUnregister", p)
		l.ok("cudaHostUnregister", p+3*page)
		assert.Zero(t, l.LeakedBytes())
	})
	t.Run("WSL", func(t *testing.T) {
		t.Parallel()
		host := cudasim.WSL()
		host.MaxPinned = 3 * page
		l := open(t, host)
		p := addr(&mapped(t, 4*page)[0])
		assert.Equal(t, cudart.ErrMemoryAllocation, register(l, p, 3*page+1))
		assert.Equal(t, cudart.Code(0), register(l, p, 2*page))
		assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaHostAlloc", addr(new(uintptr)), page+1, 0), "both count together")
		h := get[uintptr](l, "cudaHostAlloc", page, 0)
		assert.Equal(t, cudart.ErrMemoryAllocation, register(l, p+2*page, 1))
		l.ok("cudaFreeHost", h)
		l.ok("cudaHostUnregister", p)
		assert.Zero(t, get[int32](l, "cudaDeviceGetAttribute", uintptr(cudart.AttrCanUseHostPointerForRegisteredMem), 0))
	})
	t.Run("no cudaHostRegister", func(t *testing.T) {
		t.Parallel()
		l := open(t, cudasim.NoHostRegister())
		assert.Equal(t, cudart.ErrNotSupported, register(l, addr(&mapped(t, page)[0]), page))
		l.ok("cudaFreeHost", get[uintptr](l, "cudaHostAlloc", page, 0))
	})
	t.Run("Linux 6.11, cudaHostAlloc", func(t *testing.T) {
		t.Parallel()
		l := open(t, cudasim.Config{LeakAbove: 2 * page})
		assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaHostAlloc", addr(new(uintptr)), 2*page+1, 0))
		assert.Equal(t, 2*page+1, l.LeakedBytes())
		l.ok("cudaFreeHost", get[uintptr](l, "cudaHostAlloc", 2*page, 0))
		assert.Equal(t, 2*page+1, l.LeakedBytes())
	})
	t.Run("Linux 6.11", func(t *testing.T) {
		t.Parallel()
		l := open(t, cudasim.Config{LeakAbove: 2 * page, HostMemory: 8 * page})
		p := addr(&mapped(t, 4*page)[0])
		assert.Equal(t, cudart.Code(0), register(l, p, 2*page))
		l.ok("cudaHostUnregister", p)
		assert.Zero(t, l.LeakedBytes())
		assert.Equal(t, cudart.ErrInvalidValue, register(l, p, 2*page+1))
		assert.Equal(t, 2*page+1, l.LeakedBytes())
		assert.Equal(t, cudart.ErrInvalidValue, register(l, p, 3*page), "the address is not taken")
		assert.Equal(t, 5*page+1, l.LeakedBytes())
		assert.Equal(t, cudart.ErrMemoryAllocation, l.call("cudaHostAlloc", addr(new(uintptr)), 3*page, 0), "what leaked is pinned")
		assert.Equal(t, cudart.ErrInvalidValue, register(l, p, 3*page))
		assert.Equal(t, 5*page+1, l.LeakedBytes(), "there was no memory to pin")
		assert.Zero(t, l.Outstanding())
	})
}

// A device that uses the host's page tables copies memory that is not registered as it
// does other memory: at the same speed, later, and in the order of the stream.
func TestSharedPageTablesCopyWithoutStaging(t *testing.T) {
	t.Parallel()
	locked(t)
	const n = 1 << 20
	host := cudasim.SharedPageTables()
	host.Devices[0].Link.PageableHostToDevice.Rate = 1e-6 // a quarter of an hour for these copies
	l := openDirty(t, host)
	m := mapped(t, n)
	m[n-1] = 7
	d, s := l.device(n), l.stream()
	l.Hold()
	l.ok("cudaMemcpyAsync", d, addr(&m[0]), n, 1, s) // does not wait
	m[n-1] = 8
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	back := mapped(t, n)
	l.ok("cudaMemcpy", addr(&back[0]), d, n, 2)
	assert.Equal(t, byte(8), back[n-1], "read when the stream came to it")
	assert.Zero(t, l.Outstanding().Registrations)

	unmapped := mapped(t, n)
	at := addr(&unmapped[0])
	l.Hold()
	l.ok("cudaMemcpyAsync", d, at, n, 1, s)
	require.NoError(t, unix.Mprotect(unmapped, unix.PROT_NONE))
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	require.Len(t, l.Misuses(), 1)
	assert.Equal(t, "unmapped memory", l.Misuses()[0].Kind)
}

func TestHostsAreSimulated(t *testing.T) {
	t.Parallel()
	names := make(map[string]bool)
	for name, cfg := range cudasim.Hosts() {
		require.False(t, names[name], name)
		names[name] = true
		sim, err := cudasim.New(cfg)
		require.NoError(t, err, name)
		require.NoError(t, sim.Close())
	}
	require.Len(t, names, 7)
}

func TestRegisterMindsProtection(t *testing.T) {
	t.Parallel()
	const n = 4 * 4096
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, make([]byte, n), 0o600))
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, f.Close()) })
	const anonymous = -1
	tests := []struct {
		name     string
		fd       int
		prot     int
		flags    int
		plain    cudart.Code
		readOnly cudart.Code
		hangs    bool
	}{
		{"anonymous", anonymous, unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE, 0, 0, false},
		{"no access", anonymous, unix.PROT_NONE, unix.MAP_PRIVATE, 1, 1, false},
		{"read-only anonymous", anonymous, unix.PROT_READ, unix.MAP_PRIVATE, 1, 0, false},
		{"shared file", int(f.Fd()), unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED, 0, 0, false},
		{"read-only shared file", int(f.Fd()), unix.PROT_READ, unix.MAP_SHARED, 1, 0, false},
		{"read-only private file", int(f.Fd()), unix.PROT_READ, unix.MAP_PRIVATE, 1, 1, true},
		{"private file", int(f.Fd()), unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE, 0, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			locked(t)
			flags := tt.flags
			if tt.fd == anonymous {
				flags |= unix.MAP_ANON
			}
			m, err := unix.Mmap(tt.fd, 0, n, tt.prot, flags)
			require.NoError(t, err)
			defer func() { assert.NoError(t, unix.Munmap(m)) }()
			l := openDirty(t, cudasim.Config{})
			for flag, want := range map[uintptr]cudart.Code{0: tt.plain, 8: tt.readOnly} {
				p := uintptr(unsafe.Pointer(unsafe.SliceData(m)))
				assert.Equal(t, want, l.call("cudaHostRegister", p, n, flag), "flag %d", flag)
				if want == cudart.Code(0) {
					l.ok("cudaHostUnregister", p)
				}
			}
			if tt.hangs {
				require.Len(t, l.Misuses(), 1)
				assert.Equal(t, "driver hang", l.Misuses()[0].Kind)
			} else {
				assert.NoError(t, l.Check())
			}
		})
	}
	t.Run("hole", func(t *testing.T) {
		l := open(t, cudasim.Config{})
		m := mapped(t, n)
		require.NoError(t, unix.Mprotect(m[4096:8192], unix.PROT_NONE))
		assert.Equal(t, cudart.ErrInvalidValue, l.call("cudaHostRegister", addr(&m[0]), n, 0))
	})
	t.Run("not supported", func(t *testing.T) {
		l := open(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{
			cudart.AttrHostRegisterSupported: 0}}}})
		m := mapped(t, n)
		assert.Equal(t, cudart.ErrNotSupported, l.call("cudaHostRegister", addr(&m[0]), n, 0))
	})
}

func TestCopiesMustStayInOneRegistration(t *testing.T) {
	t.Parallel()
	locked(t)
	l := open(t, cudasim.Config{})
	m := mapped(t, 4*4096)
	p := addr(&m[0])
	d, s := l.device(len(m)), l.stream()
	l.ok("cudaHostRegister", p, 4096, 0)
	l.ok("cudaHostRegister", p+4096, 4096, 0)
	for name, at := range map[string]uintptr{"two registrations": p, "into unregistered": p + 4096, "from unregistered": p + 1} {
		for _, fn := range []string{"cudaMemcpy", "cudaMemcpyAsync"} {
			assert.Equal(t, cudart.ErrInvalidValue, l.call(fn, d, at, 8192, h2d, s), "%s: %s to device", name, fn)
			assert.Equal(t, cudart.ErrInvalidValue, l.call(fn, at, d, 8192, d2h, s), "%s: %s to host", name, fn)
		}
	}
	l.ok("cudaMemcpyAsync", d, p+4096, 4096, h2d, s)
	l.ok("cudaStreamSynchronize", s)
	l.ok("cudaMemcpy", d, p+8192, 4096, h2d)
	l.ok("cudaHostUnregister", p)
	l.ok("cudaHostUnregister", p+4096)
}

func TestUnmappedWhileRegistered(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	d, s := l.device(4096), l.stream()
	m, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	p := addr(&m[0])
	l.ok("cudaHostRegister", p, 4096, 0)
	l.Hold()
	l.ok("cudaMemcpyAsync", d, p, 4096, h2d, s)
	// No other mapping may get the address meanwhile: remove the access instead.
	require.NoError(t, unix.Mprotect(m, unix.PROT_NONE))
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	require.NoError(t, unix.Munmap(m))
	l.ok("cudaHostUnregister", p) // CUDA does not notice either
	kinds := []string{}
	for _, m := range l.Misuses() {
		kinds = append(kinds, m.Kind)
	}
	assert.Contains(t, kinds, "unmapped memory")
	assert.ErrorContains(t, l.Check(), "unmapped memory: copy")
}

func TestUnregisterWithCopiesPending(t *testing.T) {
	t.Parallel()
	locked(t)
	l := openDirty(t, cudasim.Config{})
	d, s, m := l.device(4096), l.stream(), mapped(t, 4096)
	l.ok("cudaHostRegister", addr(&m[0]), 4096, 0)
	l.Hold()
	l.ok("cudaMemcpyAsync", d, addr(&m[0]), 4096, h2d, s)
	l.ok("cudaHostUnregister", addr(&m[0]))
	l.Release()
	l.ok("cudaStreamSynchronize", s)
	require.Len(t, l.Misuses(), 1)
	assert.Equal(t, "busy memory", l.Misuses()[0].Kind)
}
