package dlpack

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
)

var float32s = DataType{Code: Float, Bits: 32}

func alloc(t testing.TB, dev *cudart.Device, n int, o hostmem.Options) *hostmem.Buffer {
	t.Helper()
	buf, err := hostmem.Alloc(t.Context(), dev, n, o)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, buf.Close()) })
	return buf
}

// signal returns a release function, and a channel that it sends to.
func signal() (release func(), released <-chan struct{}) {
	c := make(chan struct{}, 10)
	return func() { c <- struct{}{} }, c
}

func live() int {
	exports.mu.Lock()
	defer exports.mu.Unlock()
	return len(exports.live)
}

// The offsets and sizes are those that a C compiler makes of dlpack.h 1.1 on 64 bits.
func TestStructsAreThoseOfTheHeader(t *testing.T) {
	t.Parallel()
	var d cTensor
	assert.EqualValues(t, 4, unsafe.Sizeof(d.dtype))
	assert.EqualValues(t, 1, unsafe.Offsetof(d.dtype.Bits))
	assert.EqualValues(t, 2, unsafe.Offsetof(d.dtype.Lanes))
	assert.Equal(t, []uintptr{0, 8, 12, 16, 20, 24, 32, 40, 48}, []uintptr{
		unsafe.Offsetof(d.data), unsafe.Offsetof(d.deviceType), unsafe.Offsetof(d.deviceID), unsafe.Offsetof(d.ndim),
		unsafe.Offsetof(d.dtype), unsafe.Offsetof(d.shape), unsafe.Offsetof(d.strides), unsafe.Offsetof(d.byteOffset), unsafe.Sizeof(d),
	})
	var u cUnversioned
	assert.Equal(t, []uintptr{0, 48, 56, 64}, []uintptr{
		unsafe.Offsetof(u.tensor), unsafe.Offsetof(u.context), unsafe.Offsetof(u.deleter), unsafe.Sizeof(u),
	})
	var v cVersioned
	assert.Equal(t, []uintptr{0, 4, 8, 16, 24, 32, 80}, []uintptr{
		unsafe.Offsetof(v.major), unsafe.Offsetof(v.minor), unsafe.Offsetof(v.context), unsafe.Offsetof(v.deleter),
		unsafe.Offsetof(v.flags), unsafe.Offsetof(v.tensor), unsafe.Sizeof(v),
	})
}

func TestExportedFields(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	buf := alloc(t, dev, 1<<20, hostmem.Options{})
	mem := buf.Bytes()
	for name, tt := range map[string]struct {
		mem            []byte
		in             Tensor
		device         DeviceType
		dtype          DataType
		shape, strides []int
		flags          uint64
	}{
		"row-major": {mem, Tensor{Type: float32s, Shape: []int{2, 3, 4}}, 3, DataType{Float, 32, 1}, []int{2, 3, 4}, []int{12, 4, 1}, 0},
		"the cpu's": {mem[8:], Tensor{Device: CPU, Type: DataType{Code: Bool, Bits: 8}, Shape: []int{5}}, 1, DataType{Bool, 8, 1}, []int{5}, []int{1}, 0},
		"strided":   {mem[64:], Tensor{Type: DataType{Code: Int, Bits: 64}, Shape: []int{3, 2}, Strides: []int{1, 100}, ReadOnly: true}, 3, DataType{Int, 64, 1}, []int{3, 2}, []int{1, 100}, 1},
		"one":       {mem[:16], Tensor{Type: DataType{Complex, 128, 1}}, 3, DataType{Complex, 128, 1}, []int{}, []int{}, 0},
		"vectors":   {mem, Tensor{Type: DataType{Float, 32, 4}, Shape: []int{1 << 16}}, 3, DataType{Float, 32, 4}, []int{1 << 16}, []int{1}, 0},
		"exact":     {mem[:40:40], Tensor{Type: float32s, Shape: []int{10}}, 3, DataType{Float, 32, 1}, []int{10}, []int{1}, 0},
		"no copies": {mem[:4], Tensor{Type: float32s, Shape: []int{1000}, Strides: []int{0}}, 3, DataType{Float, 32, 1}, []int{1000}, []int{0}, 0},
		"nothing":   {nil, Tensor{Type: float32s, Shape: []int{7, 0}}, 3, DataType{Float, 32, 1}, []int{7, 0}, []int{0, 1}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			release, released := signal()
			v, err := Export(tt.mem, tt.in, release)
			require.NoError(t, err)
			c := at[cVersioned](uintptr(v))
			assert.Equal(t, []uint32{1, 0}, []uint32{c.major, c.minor})
			assert.Equal(t, tt.flags, c.flags)
			same := func(d *cTensor) {
				t.Helper()
				assert.Equal(t, addressOf(unsafe.SliceData(tt.mem)), d.data)
				assert.Equal(t, tt.device, d.deviceType)
				assert.Zero(t, d.deviceID)
				assert.Equal(t, tt.dtype, d.dtype)
				assert.EqualValues(t, len(tt.shape), d.ndim)
				assert.Equal(t, tt.shape, ints(d.shape, d.ndim))
				assert.Equal(t, tt.strides, ints(d.strides, d.ndim))
				assert.Zero(t, d.byteOffset)
			}
			same(&c.tensor)
			v.Delete()
			<-released

			u, err := ExportUnversioned(tt.mem, tt.in, release)
			if tt.in.ReadOnly {
				require.ErrorContains(t, err, "Tensor.ReadOnly")
				return
			}
			require.NoError(t, err)
			same(&at[cUnversioned](uintptr(u)).tensor)
			u.Delete()
			<-released
			assert.Empty(t, released)
		})
	}
}

// It is not parallel, because other memory may get the address of what was closed.
func TestTensorsThatAreRefused(t *testing.T) {
	dev := testgpu.Device(t)
	buf := alloc(t, dev, 4096, hostmem.Options{})
	chunks := alloc(t, dev, 8<<20, hostmem.Options{Chunk: 2 << 20})
	closed, err := hostmem.Alloc(t.Context(), dev, 4096, hostmem.Options{})
	require.NoError(t, err)
	gone := closed.Bytes()
	require.NoError(t, closed.Close())
	pageable, unmap, err := hostos.Map(4096, 0)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unmap()) }()
	mem := buf.Bytes()
	const huge = 1 << 62
	bytes := DataType{Code: Uint, Bits: 8}
	for name, tt := range map[string]struct {
		mem  []byte
		t    Tensor
		want string
	}{
		"the Go heap":       {make([]byte, 64), Tensor{Type: bytes, Shape: []int{64}}, "not pinned"},
		"pageable":          {pageable, Tensor{Type: bytes, Shape: []int{64}}, "not pinned"},
		"closed":            {gone, Tensor{Type: bytes, Shape: []int{64}}, "not pinned"},
		"too short":         {mem[:39], Tensor{Type: float32s, Shape: []int{10}}, "the tensor needs 40"},
		"no memory":         {nil, Tensor{Type: float32s}, "the tensor needs 4"},
		"strides too long":  {mem[:1000], Tensor{Type: float32s, Shape: []int{2, 3}, Strides: []int{248, 1}}, "the tensor needs 1004"},
		"several spans":     {chunks.Bytes(), Tensor{Type: bytes, Shape: []int{2<<20 + 1}}, "byte 2097152 begins another registration"},
		"a later seam":      {chunks.Bytes()[4<<20-1:], Tensor{Type: bytes, Shape: []int{2}}, "byte 1 begins"},
		"misaligned":        {mem[2:], Tensor{Type: float32s, Shape: []int{10}}, "not a multiple of 4, the alignment of float32"},
		"a GPU's":           {mem, Tensor{Device: 2, Type: float32s}, "Tensor.Device of 2"},
		"negative device":   {mem, Tensor{Device: -1, Type: float32s}, "Tensor.Device of -1"},
		"no type":           {mem, Tensor{Shape: []int{1}}, "Tensor.Type"},
		"four bits":         {mem, Tensor{Type: DataType{Code: 17, Bits: 4}}, "Tensor.Type of code 17, 4 bits"},
		"elements overflow": {mem, Tensor{Type: bytes, Shape: []int{math.MaxInt, 2, 4}, Strides: []int{0, 0, 1}}, "larger than the address space"},
		"extent overflows":  {mem, Tensor{Type: bytes, Shape: []int{3, 2}, Strides: []int{math.MaxInt, 1}}, "larger than the address space"},
		"negative shape":    {mem, Tensor{Type: bytes, Shape: []int{2, -1}}, "dimension 1 is negative"},
		"negative, empty":   {mem, Tensor{Type: bytes, Shape: []int{0, -1}}, "dimension 1 is negative"},
		"negative stride":   {mem, Tensor{Type: bytes, Shape: []int{2}, Strides: []int{-1}}, "Tensor.Strides of [-1]: dimension 0 is negative"},
		"missing strides":   {mem, Tensor{Type: bytes, Shape: []int{2, 2}, Strides: []int{1}}, "Tensor.Strides for 1 dimensions"},
		"many dimensions":   {mem, Tensor{Type: bytes, Shape: make([]int, 65)}, "65 dimensions"},
		"product overflows": {mem, Tensor{Type: bytes, Shape: []int{huge, huge}}, "address space"},
		"sign overflows":    {mem, Tensor{Type: bytes, Shape: []int{huge, 2}}, "address space"},
		"bytes overflow":    {mem, Tensor{Type: float32s, Shape: []int{huge}}, "address space"},
		"stride overflows":  {mem, Tensor{Type: bytes, Shape: []int{3}, Strides: []int{huge}}, "address space"},
		"empty, overflows":  {mem, Tensor{Type: bytes, Shape: []int{0, huge, huge}}, "address space"},
		"empty, negative":   {mem, Tensor{Type: bytes, Shape: []int{0}, Strides: []int{-1}}, "Tensor.Strides of [-1]: dimension 0 is negative"},
		"wraps around":      {mem, Tensor{Type: DataType{Code: Uint, Bits: 64}, Shape: []int{1 << 61}}, "address space"},
	} {
		v, err := Export(tt.mem, tt.t, func() { t.Error("released") })
		if assert.Error(t, err, name) {
			assert.ErrorContains(t, err, "dlpack: export ", name)
			assert.ErrorContains(t, err, tt.want, name)
		}
		assert.Zero(t, v, name)
		u, err := ExportUnversioned(tt.mem, tt.t, nil)
		assert.ErrorContains(t, err, tt.want, name)
		assert.Zero(t, u, name)
	}
}

// The memory is neither lost nor unmapped before the deleter was called, although only the
// release function refers to it.
func TestExportKeepsTheMemory(t *testing.T) {
	dev := testgpu.Device(t)
	const label = "exported, and nowhere else"
	closed := make(chan error, 1)
	v := func() Versioned {
		buf, err := hostmem.Alloc(t.Context(), dev, 1000, hostmem.Options{Label: label})
		require.NoError(t, err)
		copy(buf.Bytes(), "still here")
		v, err := Export(buf.Bytes(), Tensor{Type: DataType{Code: Uint, Bits: 8}, Shape: []int{1000}}, func() { closed <- buf.Close() })
		require.NoError(t, err)
		return v
	}()
	collectGarbage(t)
	data := at[cVersioned](uintptr(v)).tensor.data
	assert.Equal(t, "still here", string(unsafe.Slice(at[byte](data), 10)))
	assert.Empty(t, closed)
	assert.True(t, slices.ContainsFunc(hostmem.Outstanding(), func(h hostmem.Holding) bool { return h.Label == label && !h.Lost }))
	v.Delete()
	require.NoError(t, <-closed)
}

// collectGarbage returns when cleanups of lost objects have run.
func collectGarbage(t *testing.T) {
	t.Helper()
	for range 3 { // a cleanup may make more garbage
		ran := make(chan struct{})
		runtime.AddCleanup(new([64]byte), func(c chan struct{}) { close(c) }, ran)
		require.Eventually(t, func() bool {
			runtime.GC()
			select {
			case <-ran:
				return true
			default:
				return false
			}
		}, 20*time.Second, time.Millisecond)
	}
}

// A pool that is closed leaves the memory of tensors to their consumers, and unmaps it when
// the last deleter was called.
func TestTensorOutlivesThePool(t *testing.T) {
	dev := testgpu.Device(t)
	for name, n := range map[string]int{"small": 1000, "large": 3 << 20} {
		t.Run(name, func(t *testing.T) {
			p, err := pool.New(dev, pool.Options{})
			require.NoError(t, err)
			lease, err := p.Get(t.Context(), n)
			require.NoError(t, err)
			copy(lease.Bytes(), "still here")
			released := make(chan error, 1)
			v, err := Export(lease.Bytes(), Tensor{Type: DataType{Code: Uint, Bits: 8}, Shape: []int{n}}, func() { released <- lease.Release() })
			require.NoError(t, err)
			require.ErrorIs(t, p.Close(), cudart.ErrInUse)
			require.Positive(t, p.Stats().ReservedBytes)
			in, err := Import(v)
			require.NoError(t, err)
			assert.Equal(t, "still here", string(in.Bytes()[:10]))
			in.Bytes()[n-1] = 1
			require.NoError(t, in.Close())
			require.NoError(t, <-released)
			require.NoError(t, p.Close())
			assert.Zero(t, p.Stats().ReservedBytes)
		})
	}
}

// A deleter that is called twice, or by many at once, releases once.
func TestDeleterReleasesOnce(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	buf := alloc(t, dev, 4096, hostmem.Options{})
	for range 20 {
		var released atomic.Int32
		done := make(chan struct{}, 10)
		v, err := Export(buf.Bytes(), Tensor{Type: float32s, Shape: []int{10}}, func() { released.Add(1); done <- struct{}{} })
		require.NoError(t, err)
		var group sync.WaitGroup
		for range 5 {
			group.Go(v.Delete)
		}
		group.Wait()
		<-done
		v.Delete()
		assert.EqualValues(t, 1, released.Load())
	}
	nothing, err := Export(buf.Bytes(), Tensor{Type: float32s}, nil)
	require.NoError(t, err)
	nothing.Delete()
	Versioned(0).Delete()
	Unversioned(0).Delete()
}

// All tensors share one C function, and what C has lies outside Go's heap.
func TestManyTensors(t *testing.T) {
	dev := testgpu.Device(t)
	buf := alloc(t, dev, 1<<20, hostmem.Options{})
	const tensors = 5000 // more callbacks than purego has
	var released atomic.Int32
	var group sync.WaitGroup
	before := live()
	addresses := make([]Versioned, tensors)
	for g := range 4 {
		group.Go(func() {
			for i := g; i < tensors; i += 4 {
				v, err := Export(buf.Bytes()[4*i:], Tensor{Type: float32s, Shape: []int{i % 7, 2}}, func() { released.Add(1) })
				if !assert.NoError(t, err) {
					return
				}
				addresses[i] = v
			}
		})
	}
	group.Wait()
	require.Equal(t, tensors, live()-before)
	seen := make(map[Versioned]bool)
	for i, v := range addresses {
		c := at[cVersioned](uintptr(v))
		require.False(t, seen[v])
		seen[v] = true
		require.Equal(t, []int{i % 7, 2}, ints(c.tensor.shape, 2))
		require.Equal(t, at[cVersioned](uintptr(addresses[0])).deleter, c.deleter)
	}
	for g := range 4 {
		group.Go(func() {
			for i := g; i < tensors; i += 4 {
				addresses[i].Delete()
			}
		})
	}
	group.Wait()
	require.Equal(t, before, live())
	require.Eventually(t, func() bool { return released.Load() == tensors }, 20*time.Second, time.Millisecond)
}

// A lease is not reused before the deleter was called, and then not before the stream that
// the release function names has passed the consumer's copies. Not parallel: on a real GPU
// cudaHostUnregister of another test would wait for the host function here, and keep calls of
// this test waiting.
func TestLeaseIsReusedWhenConsumerAndGPUAreDone(t *testing.T) {
	dev := testgpu.Device(t)
	p, err := pool.New(dev, pool.Options{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, p.Close()) }()
	const n = 100_000
	lease, err := p.Get(t.Context(), n)
	require.NoError(t, err)
	place := lease.Pointer()

	theirs, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, theirs.Close()) }()
	stream, err := dev.StreamFromHandle(theirs.Handle())
	require.NoError(t, err)
	defer func() { assert.NoError(t, stream.Close()) }()
	released := make(chan error, 1)
	v, err := Export(lease.Bytes(), Tensor{Type: float32s, Shape: []int{n / 4}}, func() { released <- lease.Release(stream) })
	require.NoError(t, err)

	isReused := func() bool {
		next, err := p.Get(t.Context(), n)
		require.NoError(t, err)
		defer func() { require.NoError(t, next.Release()) }()
		return next.Pointer() == place
	}
	require.False(t, isReused(), "the consumer has it")
	mem, err := dev.Malloc(n)
	require.NoError(t, err)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	defer open()
	require.NoError(t, theirs.LaunchHostFunc(func() { <-gate }))
	require.NoError(t, theirs.CopyToDevice(mem, place, n)) // the consumer's copy
	v.Delete()
	require.NoError(t, <-released)
	require.False(t, isReused(), "the copy has not run")
	open()
	require.NoError(t, theirs.Synchronize(t.Context()))
	require.Eventually(t, func() bool { // on a busy machine a query may take longer than Trim waits for it
		_, err := p.Trim(t.Context(), 0)
		return assert.NoError(t, err) && p.Stats().PendingBytes == 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, dev.Free(mem))
}
