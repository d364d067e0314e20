//go:build linux && !android && (amd64 || arm64)

package transfer

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

// requireCounts copies mem there and back, and requires that it went by the way
// named, right.
func (r *fixture) requireCounts(direct bool, mem []byte, what string) {
	r.Helper()
	n := len(mem)
	dev := r.device(n)
	want := bytesOf(uint64(n), n)
	copy(mem, want)
	before := r.c.Stats()
	require.NoError(r, r.c.Upload(r.Context(), dev, mem), what)
	require.True(r, bytes.Equal(want, r.onDevice(dev, n)), "%s: on the device", what)
	clear(mem)
	require.NoError(r, r.c.Download(r.Context(), mem, dev), what)
	require.True(r, bytes.Equal(want, mem), "%s: back", what)
	after := r.c.Stats()
	staged, straight := after.StagedBytes-before.StagedBytes, after.DirectBytes-before.DirectBytes
	if direct {
		assert.Equal(r, 2*n, straight, what)
		assert.Zero(r, staged, what)
	} else {
		assert.Equal(r, 2*n, staged, what)
	}
}

func TestPinnedMemoryIsCopiedDirectly(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	ctx := t.Context()
	for name, o := range map[string]hostmem.Options{"buffer": {}, "chunks": {Chunk: 2 * mib}} {
		buf, err := hostmem.Alloc(ctx, r.dev, 7*mib+5, o)
		require.NoError(t, err)
		r.requireCounts(true, buf.Bytes(), name)
		r.requireCounts(true, buf.Bytes()[mib+1:5*mib], name+", a part")
		r.requireCounts(true, buf.Bytes()[2*mib-1:2*mib+1], name+", two bytes at a seam")
		require.NoError(t, buf.Close())
	}
	leases, err := pool.New(r.dev, pool.Options{})
	require.NoError(t, err)
	for _, n := range []int{100, 5 * mib} {
		l, err := leases.Get(ctx, n)
		require.NoError(t, err)
		r.requireCounts(true, l.Bytes(), "lease")
		require.NoError(t, l.Release())
	}
	require.NoError(t, leases.Close())

	// Not hostmem's: CUDA is asked.
	const n = 3 * mib
	p, err := r.dev.HostAlloc(n, 0)
	require.NoError(t, err)
	r.requireCounts(true, unsafe.Slice((*byte)(p), n), "cudaHostAlloc")
	require.NoError(t, r.dev.FreeHost(p))

	r.requireCounts(false, make([]byte, n), "the Go heap")
	both, release, err := hostos.MapHuge(n)
	require.NoError(t, err)
	r.requireCounts(false, both, "pageable")

	// Two registrations side by side, which one copy cannot cross.
	defer func() { require.NoError(t, release()) }()
	for _, half := range [][]byte{both[:2*mib], both[2*mib:]} {
		at := unsafe.Pointer(&half[0])
		require.NoError(t, r.dev.HostRegister(at, len(half), 0))
		defer func() { require.NoError(t, r.dev.HostUnregister(at)) }()
	}
	r.requireCounts(true, both[:2*mib], "one registration")
	r.requireCounts(false, both, "two registrations")
}

// Long copies are queued in pieces, each from and to its own place.
func TestPinnedMemoryOfSeveralPieces(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 1})
	const n = directPiece + 5*mib + 3
	dev := r.device(n)
	buf, err := hostmem.Alloc(t.Context(), r.dev, n, hostmem.Options{})
	require.NoError(t, err)
	mem := buf.Bytes()
	for name, at := range map[string]int{"buffer": 0, "a part of it": 1} {
		part := mem[at:]
		copy(part, bytesOf(uint64(at), len(part)))
		sum := sha256.Sum256(part)
		require.NoError(t, r.c.Upload(t.Context(), dev, part), name)
		require.Equal(t, sum, sha256.Sum256(r.onDevice(dev, len(part))), name)
		clear(part)
		require.NoError(t, r.c.Download(t.Context(), part, dev), name)
		require.Equal(t, sum, sha256.Sum256(part), name)
	}
	require.NoError(t, buf.Close())

	p, err := r.dev.HostAlloc(n, 0)
	require.NoError(t, err)
	foreign := unsafe.Slice((*byte)(p), n)
	copy(foreign, bytesOf(3, n))
	sum := sha256.Sum256(foreign)
	require.NoError(t, r.c.Upload(t.Context(), dev, foreign))
	require.Equal(t, sum, sha256.Sum256(r.onDevice(dev, n)))
	clear(foreign)
	require.NoError(t, r.c.Download(t.Context(), foreign, dev))
	require.Equal(t, sum, sha256.Sum256(foreign))
	require.NoError(t, r.dev.FreeHost(p))
}

// Memory of which one end is pinned is not: no copy of it is tried that CUDA
// would refuse.
func TestMemoryThatIsPinnedInPart(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	gpu, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, gpu, Options{Workers: 1})
	const n = 4 * mib
	dev := r.device(n)
	mem, release, err := hostos.MapHuge(n)
	require.NoError(t, err)
	defer func() { require.NoError(t, release()) }()
	calls := func() int {
		before := sim.Calls("cudaMemcpyAsync")
		require.NoError(t, r.c.Upload(t.Context(), dev, mem))
		require.NoError(t, r.c.Download(t.Context(), mem, dev))
		return sim.Calls("cudaMemcpyAsync") - before
	}
	staged := calls()
	for name, half := range map[string][]byte{"first": mem[:n/2], "last": mem[n/2:]} {
		at := unsafe.Pointer(&half[0])
		require.NoError(t, gpu.HostRegister(at, len(half), 0))
		require.Equal(t, staged, calls(), name)
		require.NoError(t, gpu.HostUnregister(at))
	}
	require.Zero(t, r.c.Stats().DirectBytes)
}

func TestAMappedFileIsASource(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	want := bytesOf(4, 3*mib)
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, want, 0o600))
	f, err := hostmem.MapFile(t.Context(), r.dev, path, hostmem.FileOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	dev := r.device(len(want))
	require.NoError(t, r.c.Upload(t.Context(), dev, f.Bytes()))
	require.True(t, bytes.Equal(want, r.onDevice(dev, len(want))))
	assert.Equal(t, len(want), r.c.Stats().DirectBytes)
	require.ErrorIs(t, r.c.Download(t.Context(), f.Bytes(), dev), hostmem.ErrReadOnly)
}
