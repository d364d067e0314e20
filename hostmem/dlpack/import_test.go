//go:build linux && !android && (amd64 || arm64)

package dlpack

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// What another library would have: structs in C memory, and a deleter of its own, which
// counts its calls by address.
var (
	theirCalls   = make(chan uintptr, 100)
	theirDeleter = purego.NewCallback(func(self uintptr) uintptr {
		theirCalls <- self
		return 0
	})
)

// theirs are the tensors of another library.
type theirs struct {
	versioned      cVersioned
	unversioned    cUnversioned
	shape, strides [3]int64
	data           [24]byte
}

// newTheirs makes a tensor of 2 x 3 numbers of 4 bytes.
func newTheirs(t *testing.T) *theirs {
	t.Helper()
	mem, unmap, err := hostos.Map(int(unsafe.Sizeof(theirs{})), 0)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unmap()) })
	x := (*theirs)(unsafe.Pointer(&mem[0]))
	x.shape, x.strides = [3]int64{2, 3}, [3]int64{3, 1}
	for i := range x.data {
		x.data[i] = byte(i)
	}
	d := cTensor{data: addressOf(&x.data), deviceType: CPU, ndim: 2, dtype: DataType{Int, 32, 1},
		shape: addressOf(&x.shape), strides: addressOf(&x.strides)}
	x.versioned = cVersioned{major: 1, minor: 7, context: 0x1234, deleter: theirDeleter, tensor: d}
	x.unversioned = cUnversioned{context: 0x1234, deleter: theirDeleter, tensor: d}
	return x
}

// both are the two structs of x, which are to be imported in the same way.
func (x *theirs) both(t *testing.T, change func(d *cTensor), test func(in *Imported, err error, address uintptr)) {
	t.Helper()
	change(&x.versioned.tensor)
	change(&x.unversioned.tensor)
	v := addressOf(&x.versioned)
	in, err := Import(Versioned(v))
	test(in, err, v)
	u := addressOf(&x.unversioned)
	in, err = ImportUnversioned(Unversioned(u))
	test(in, err, u)
}

func TestImport(t *testing.T) {
	want := make([]byte, 24)
	for i := range want {
		want[i] = byte(i)
	}
	for name, tt := range map[string]struct {
		change func(x *theirs, d *cTensor)
		tensor Tensor
		bytes  []byte
	}{
		"strides":    {func(*theirs, *cTensor) {}, Tensor{Device: CPU, Type: DataType{Int, 32, 1}, Shape: []int{2, 3}}, want},
		"no strides": {func(_ *theirs, d *cTensor) { d.strides = 0 }, Tensor{Device: CPU, Type: DataType{Int, 32, 1}, Shape: []int{2, 3}}, want},
		"pinned":     {func(_ *theirs, d *cTensor) { d.deviceType = CUDAHost }, Tensor{Device: CUDAHost, Type: DataType{Int, 32, 1}, Shape: []int{2, 3}}, want},
		"offset": {func(x *theirs, d *cTensor) { d.byteOffset, d.ndim, d.strides = 4, 1, 0 },
			Tensor{Device: CPU, Type: DataType{Int, 32, 1}, Shape: []int{2}}, want[4:12]},
		"vectors": {func(_ *theirs, d *cTensor) { d.dtype, d.ndim, d.strides = DataType{Uint, 16, 4}, 1, 0 },
			Tensor{Device: CPU, Type: DataType{Uint, 16, 4}, Shape: []int{2}}, want[:16]},
		"one": {func(_ *theirs, d *cTensor) { d.ndim, d.shape, d.strides = 0, 0, 0 },
			Tensor{Device: CPU, Type: DataType{Int, 32, 1}, Shape: []int{}}, want[:4]},
		"nothing": {func(_ *theirs, d *cTensor) { d.ndim, d.data = 3, 0 }, // shape[2] is 0
			Tensor{Device: CPU, Type: DataType{Int, 32, 1}, Shape: []int{2, 3, 0}}, want[:0]},
	} {
		t.Run(name, func(t *testing.T) {
			x := newTheirs(t)
			x.both(t, func(d *cTensor) { tt.change(x, d) }, func(in *Imported, err error, address uintptr) {
				require.NoError(t, err)
				assert.Equal(t, tt.tensor, in.Tensor)
				assert.Equal(t, tt.bytes, slices.Clone(in.Bytes()))
				assert.Empty(t, theirCalls, "the memory is still in use")
				require.NoError(t, in.Close())
				assert.Equal(t, address, <-theirCalls)
				assert.Nil(t, in.Bytes())
				require.NoError(t, in.Close(), "a second Close does nothing")
				assert.Empty(t, theirCalls)
			})
		})
	}
	x := newTheirs(t)
	x.versioned.flags = 1
	in, err := Import(Versioned(addressOf(&x.versioned)))
	require.NoError(t, err)
	assert.True(t, in.ReadOnly)
	x.versioned.deleter = 0 // may be absent
	require.NoError(t, in.Close())
	assert.Empty(t, theirCalls)
}

// A dimension of one element may have any stride.
func TestStrideOfOneElementDoesNotMatter(t *testing.T) {
	x := newTheirs(t)
	x.shape, x.strides = [3]int64{1, 6, 1}, [3]int64{-77, 1, 1 << 60}
	x.both(t, func(d *cTensor) { d.ndim = 3 }, func(in *Imported, err error, _ uintptr) {
		require.NoError(t, err)
		assert.Len(t, in.Bytes(), 24)
	})
}

func TestImportsThatAreRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		change      func(x *theirs, d *cTensor)
		want        string
		unsupported bool
	}{
		"a GPU's":           {func(_ *theirs, d *cTensor) { d.deviceType = 2 }, "device type is 2", true},
		"half bytes":        {func(_ *theirs, d *cTensor) { d.dtype.Bits = 4 }, "int4", true},
		"no bits":           {func(_ *theirs, d *cTensor) { d.dtype.Bits = 0 }, "int0", true},
		"no lanes":          {func(_ *theirs, d *cTensor) { d.dtype.Lanes = 0 }, "0 lanes", true},
		"column-major":      {func(x *theirs, _ *cTensor) { x.strides = [3]int64{1, 2} }, "strides are [1 2]", true},
		"gaps":              {func(x *theirs, _ *cTensor) { x.strides = [3]int64{4, 1} }, "strides are [4 1]", true},
		"negative dims":     {func(_ *theirs, d *cTensor) { d.ndim = -1 }, "-1 dimensions", false},
		"many dims":         {func(_ *theirs, d *cTensor) { d.ndim = 65 }, "65 dimensions", false},
		"no shape":          {func(_ *theirs, d *cTensor) { d.shape = 0 }, "its shape is at address 0x0", false},
		"negative shape":    {func(x *theirs, _ *cTensor) { x.shape[1] = -3 }, "dimension 1 is negative", false},
		"overflow":          {func(x *theirs, _ *cTensor) { x.shape = [3]int64{1 << 31, 1 << 31} }, "larger than the address space", false},
		"empty, overflow":   {func(x *theirs, d *cTensor) { x.shape, d.ndim, d.strides = [3]int64{0, 1 << 62, 1 << 62}, 3, 0 }, "larger than the address space", false},
		"no data":           {func(_ *theirs, d *cTensor) { d.data = 0 }, "address out of range", false},
		"offset wraps":      {func(_ *theirs, d *cTensor) { d.byteOffset = ^uint64(0) }, "address out of range", false},
		"end wraps":         {func(_ *theirs, d *cTensor) { d.data = ^uintptr(0) - 3 }, "address out of range", false},
		"size without data": {func(x *theirs, d *cTensor) { x.shape[0], d.data = 1, 0 }, "address out of range", false},
	} {
		x := newTheirs(t)
		x.both(t, func(d *cTensor) { tt.change(x, d) }, func(in *Imported, err error, _ uintptr) {
			assert.Nil(t, in, name)
			if assert.ErrorContains(t, err, tt.want, name) {
				assert.ErrorContains(t, err, "dlpack: import: ", name)
				assert.Equal(t, tt.unsupported, errors.Is(err, errors.ErrUnsupported), name)
			}
			assert.Empty(t, theirCalls, "the tensor is the caller's")
		})
	}
	x := newTheirs(t)
	x.versioned.major = 2
	x.versioned.tensor = cTensor{}
	v := Versioned(addressOf(&x.versioned))
	_, err := Import(v)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "DLPack 2.7, and only 1.x is supported")
	v.Delete()
	assert.Equal(t, uintptr(v), <-theirCalls)
	_, err = Import(0)
	require.EqualError(t, err, "dlpack: import: the address is 0")
	_, err = ImportUnversioned(0)
	require.EqualError(t, err, "dlpack: import: the address is 0")
}

// C calls the deleter on a thread that is not Go's.
func TestDeleterOnAThreadOfC(t *testing.T) {
	dev := testgpu.Device(t)
	buf := alloc(t, dev, 4096, hostmem.Options{})
	create, err := purego.Dlsym(purego.RTLD_DEFAULT, "pthread_create")
	require.NoError(t, err)
	join, err := purego.Dlsym(purego.RTLD_DEFAULT, "pthread_join")
	require.NoError(t, err)
	for range 20 {
		release, released := signal()
		v, err := Export(buf.Bytes(), Tensor{Type: float32s, Shape: []int{10}}, release)
		require.NoError(t, err)
		thread := new([2]uintptr)
		var pin runtime.Pinner
		pin.Pin(thread)
		rc, _, _ := purego.SyscallN(create, addressOf(thread), 0, at[cVersioned](uintptr(v)).deleter, uintptr(v))
		require.Zero(t, int32(rc))
		rc, _, _ = purego.SyscallN(join, thread[0], 0)
		require.Zero(t, int32(rc))
		pin.Unpin()
		<-released
	}
}

// A process that has no C function left for the deleter gets an error, not purego's panic.
// The functions are never freed, so the test runs in a process of its own.
func TestExportWithoutAFreeCallback(t *testing.T) {
	const child = "PINNED_TEST_CALLBACKS"
	if os.Getenv(child) == "" {
		cmd := hosttest.Command(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
		cmd.Env = append(os.Environ(), child+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: "+t.Name())
		return
	}
	buf := alloc(t, testgpu.Device(t), 4096, hostmem.Options{})
	require.Panics(t, func() {
		for {
			purego.NewCallback(func(uintptr) uintptr { return 0 })
		}
	})
	for range 2 {
		_, err := Export(buf.Bytes(), Tensor{Type: float32s}, func() { t.Error("released") })
		require.ErrorContains(t, err, "dlpack: export 4096 bytes: make the deleter: ")
	}
	assert.Zero(t, live())
	x := newTheirs(t)
	in, err := Import(Versioned(addressOf(&x.versioned)))
	require.NoError(t, err, "which needs no function of ours")
	require.NoError(t, in.Close())
}

// What is exported can be imported, as by a consumer.
func TestExportAndImport(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	buf := alloc(t, dev, 24, hostmem.Options{})
	release, released := signal()
	v, err := Export(buf.Bytes(), Tensor{Type: float32s, Shape: []int{2, 3}}, release)
	require.NoError(t, err)
	in, err := Import(v)
	require.NoError(t, err)
	copy(buf.Bytes(), "the same memory")
	assert.Equal(t, buf.Bytes(), in.Bytes())
	assert.Equal(t, Tensor{Device: CUDAHost, Type: DataType{Float, 32, 1}, Shape: []int{2, 3}}, in.Tensor)
	assert.Empty(t, released)
	require.NoError(t, in.Close())
	<-released
}
