//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestFind(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	b, err := Alloc(t.Context(), dev, 3*4096+5, Options{})
	require.NoError(t, err)
	mem := b.Bytes()
	for name, want := range map[string]struct{ from, to int }{
		"all": {0, len(mem)}, "a part": {7, 4097}, "the last byte": {len(mem) - 1, len(mem)},
	} {
		p, off, ok := Find(mem[want.from:want.to])
		require.True(t, ok, name)
		assert.Equal(t, want.from, off, name)
		assert.Equal(t, len(mem), p.Len(), name)
	}
	more := unsafe.Slice(unsafe.SliceData(mem), len(mem)+1) // the page has it, the buffer has not
	for name, other := range map[string][]byte{
		"nothing": nil, "no bytes": mem[5:5], "the Go heap": make([]byte, 10), "a byte more": more,
	} {
		_, _, ok := Find(other)
		assert.False(t, ok, name)
	}
	require.NoError(t, b.Close())
	_, _, ok := Find(mem)
	assert.False(t, ok, "after Close")
}

// Neighbours are two, although the kernel may report one mapping.
func TestFindStaysWithinOne(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	mem, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Skip(err)
	}
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	first, err := Register(t.Context(), dev, mem[:4096], RegisterOptions{})
	require.NoError(t, err)
	second, err := Register(t.Context(), dev, mem[4096:], RegisterOptions{})
	require.NoError(t, err)
	_, _, ok := Find(mem)
	assert.False(t, ok)
	p, off, ok := Find(mem[5000:])
	require.True(t, ok)
	assert.Equal(t, 5000-4096, off)
	assert.Equal(t, 4096, p.Len())
	require.NoError(t, first.Close())
	_, _, ok = Find(mem[:10])
	assert.False(t, ok)
	require.NoError(t, second.Close())
}

// What is closed, if only half, is not found any more; what is lost neither, and
// being findable keeps nothing from being lost.
func TestFindForgets(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	require.NoError(t, err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	b, err := Alloc(t.Context(), dev, 4096, Options{})
	require.NoError(t, err)
	sim.Fail("cudaHostUnregister", cudasim.Fault{Code: cudart.ErrUnknown})
	require.Error(t, b.Close())
	_, _, ok := Find(b.Bytes())
	assert.False(t, ok, "after a Close that failed")
	require.NoError(t, b.Close())

	b, err = Alloc(t.Context(), dev, 4096, Options{})
	require.NoError(t, err)
	mem := b.Bytes()
	runtime.KeepAlive(b)
	b = nil
	assert.Eventually(t, func() bool {
		runtime.GC()
		_, _, ok := Find(mem)
		return !ok
	}, 10*time.Second, 10*time.Millisecond)
	assert.Eventually(t, func() bool {
		process.mu.RLock()
		defer process.mu.RUnlock()
		start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
		return !slices.ContainsFunc(process.index, func(h *holding) bool { return h.start == start && !h.hidden })
	}, 10*time.Second, time.Millisecond, "or it would hide what comes to lie there later")
	_ = rt.Close()
	_ = sim.Close() // an error of what was lost
}

func TestFindDoesNotAllocate(t *testing.T) {
	dev := testgpu.Device(t)
	b, err := Alloc(t.Context(), dev, 4096, Options{})
	require.NoError(t, err)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if _, _, ok := Find(b.Bytes()); !ok {
			t.Error("not found")
		}
	}))
	require.NoError(t, b.Close())
}

func BenchmarkFind(b *testing.B) {
	dev := testgpu.Device(b)
	var all []*Buffer
	for range 100 {
		buf, err := Alloc(b.Context(), dev, 4096, Options{})
		require.NoError(b, err)
		all = append(all, buf)
	}
	mem := all[50].Bytes()
	for b.Loop() {
		if _, _, ok := Find(mem); !ok {
			b.Fatal("not found")
		}
	}
	for _, buf := range all {
		require.NoError(b, buf.Close())
	}
}
