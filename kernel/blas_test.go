//go:build linux && !android && (amd64 || arm64)

package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/findlib"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A fakeBLAS is a libcublas in Go: its functions are C functions, of which a process has one
// set, and its product is computed at once, column by column as cuBLAS stores matrices.
type fakeBLAS struct {
	mu                 sync.Mutex
	status             map[string]BLASStatus // results of functions that are not to work
	block              map[string]chan struct{}
	calls              []string
	created, destroyed int
	stream             uintptr
}

const fakeHandle = 0xb1a5

var (
	fakeTurn  sync.Mutex
	fake      *fakeBLAS
	fakeEntry = sync.OnceValue(func() blasFunctions {
		return blasFunctions{
			create: purego.NewCallback(func(handle *uintptr) uintptr {
				return fake.call("create", func() { *handle = fakeHandle; fake.created++ })
			}),
			destroy: purego.NewCallback(func(handle uintptr) uintptr {
				return fake.call("destroy", func() { fake.destroyed++ })
			}),
			setStream: purego.NewCallback(func(handle, stream uintptr) uintptr {
				return fake.call("setStream", func() { fake.stream = stream })
			}),
			sgemm: purego.NewCallback(func(handle, ta, tb, m, n, k uintptr, alpha, a *float32, lda uintptr, b *float32, ldb uintptr, beta, c *float32, ldc uintptr) uintptr {
				return fake.call("sgemm", func() {
					// at is element (row, col) of op(x), where x has ld rows of memory a column.
					at := func(x *float32, ld, transposed, row, col uintptr) *float32 {
						if transposed == 1 {
							row, col = col, row
						}
						return (*float32)(unsafe.Add(unsafe.Pointer(x), 4*(col*ld+row)))
					}
					for i := range m {
						for j := range n {
							sum := float32(0)
							for l := range k {
								sum += *at(a, lda, ta, i, l) * *at(b, ldb, tb, l, j)
							}
							to := at(c, ldc, 0, i, j)
							*to = *alpha*sum + *beta**to
						}
					}
				})
			}),
		}
	})
)

func (f *fakeBLAS) call(name string, work func()) uintptr {
	f.mu.Lock()
	f.calls = append(f.calls, name)
	block := f.block[name]
	f.mu.Unlock()
	if block != nil {
		<-block
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.status[name]; s != 0 {
		return uintptr(s)
	}
	work()
	return 0
}

func (f *fakeBLAS) load(path string) (blasFunctions, error) {
	if path == "broken" {
		return blasFunctions{}, errors.New("it is broken")
	}
	return fakeEntry(), nil
}

func newFakeBLAS(t *testing.T) (*fakeBLAS, *cudasim.Sim, *cudart.Stream) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	s, err := rt.Devices()[0].NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	fakeTurn.Lock()
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		fakeTurn.Unlock()
	})
	fake = &fakeBLAS{status: map[string]BLASStatus{}, block: map[string]chan struct{}{}}
	return fake, sim, s
}

func libraries(paths ...string) (list []findlib.Candidate) {
	for _, p := range paths {
		list = append(list, findlib.Candidate{Path: p})
	}
	return list
}

// Products of all shapes and transposes are those of matrices stored row by row.
func TestBLASMultipliesMatricesStoredByRows(t *testing.T) {
	f, _, s := newFakeBLAS(t)
	b, err := newBLAS(t.Context(), s, libraries("broken", "good"), f.load)
	require.NoError(t, err)
	assert.Equal(t, uintptr(s.Handle()), f.stream)
	r := rand.New(rand.NewPCG(1, 2))
	matrix := func(rows, cols int, transposed bool) (Matrix, []float32) {
		v := make([]float32, rows*cols)
		for i := range v {
			v[i] = float32(r.IntN(9) - 4)
		}
		m := Matrix{P: cudart.DevPtr(uintptr(unsafe.Pointer(&v[0]))), Rows: rows, Cols: cols}
		if transposed {
			m = Matrix{P: m.P, Rows: cols, Cols: rows}.T()
		}
		return m, v
	}
	at := func(m Matrix, v []float32, row, col int) float32 {
		if m.Transposed {
			row, col = col, row
		}
		return v[row*m.Cols+col]
	}
	for _, shape := range [][3]int{{1, 1, 1}, {2, 3, 4}, {5, 1, 3}, {3, 4, 2}} {
		for kind := range 4 {
			x, xs := matrix(shape[0], shape[2], kind&1 != 0)
			y, ys := matrix(shape[2], shape[1], kind&2 != 0)
			c, cs := matrix(shape[0], shape[1], false)
			var want []float32
			for i := range shape[0] {
				for j := range shape[1] {
					sum := float32(0)
					for k := range shape[2] {
						sum += at(x, xs, i, k) * at(y, ys, k, j)
					}
					want = append(want, 2*sum-3*cs[i*shape[1]+j])
				}
			}
			require.NoError(t, b.Multiply(c, x, y, 2, -3))
			require.Equal(t, want, cs, "%v by %v", x, y)
		}
	}
	require.ErrorIs(t, b.Multiply(Matrix{}, Matrix{}, Matrix{}, 1, 0), cudart.ErrInvalidValue)
	f.status["destroy"] = 14
	require.ErrorIs(t, b.Close(), BLASStatus(14))
	clear(f.status)
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	one, _ := matrix(1, 1, false)
	require.ErrorIs(t, b.Multiply(one, one, one, 1, 0), ErrClosed)
	assert.Equal(t, []int{1, 1}, []int{f.created, f.destroyed})
}

// A device without memory, and a GPU that fails, are not a machine without cuBLAS: another
// library would not help.
func TestBLASWithoutMemoryIsNotUnsupported(t *testing.T) {
	f, sim, s := newFakeBLAS(t)
	f.status["create"] = BLASAllocFailed
	_, err := newBLAS(t.Context(), s, libraries("first", "second"), f.load)
	require.ErrorIs(t, err, BLASAllocFailed)
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.NotErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "first: cublasCreate: CUBLAS_STATUS_ALLOC_FAILED (3)")
	assert.Equal(t, []string{"create"}, f.calls)

	clear(f.status)
	f.status["setStream"] = BLASAllocFailed
	_, err = newBLAS(t.Context(), s, libraries("first"), f.load)
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.Equal(t, []int{1, 1}, []int{f.created, f.destroyed}, "the handle is destroyed")

	clear(f.status)
	sim.Fail("cudaFree", cudasim.Fault{Code: cudart.ErrIllegalAddress, Times: -1}) // attaches the context
	_, err = newBLAS(t.Context(), s, libraries("first", "second"), f.load)
	require.ErrorIs(t, err, cudart.ErrIllegalAddress)
	assert.NotErrorIs(t, err, errors.ErrUnsupported)
	sim.ResetFaults()

	f.status["create"] = 1 // the library is for another driver
	_, err = newBLAS(t.Context(), s, libraries("first", "second", "broken"), f.load)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	for _, text := range []string{"first: cublasCreate: CUBLAS_STATUS_NOT_INITIALIZED (1)", "second: ", "broken: it is broken", BLASEnv} {
		assert.ErrorContains(t, err, text)
	}
	_, err = newBLAS(t.Context(), s, nil, f.load)
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

// A call of cuBLAS that never returns holds up no NewBLAS past its context. When it returns
// after all, the handle is destroyed.
func TestBLASThatBlocksEndsWithItsContext(t *testing.T) {
	t.Parallel()
	f, _, s := newFakeBLAS(t)
	f.block["create"] = make(chan struct{})
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	over := make(chan error)
	go func() {
		_, err := newBLAS(ctx, s, libraries("good"), f.load)
		over <- err
	}()
	for called := false; !called; {
		f.mu.Lock()
		called = len(f.calls) > 0
		f.mu.Unlock()
	}
	cancel(cause)
	err := <-over
	for _, want := range []error{context.Canceled, cause, bounded.ErrStuck} {
		require.ErrorIs(t, err, want)
	}
	assert.NotErrorIs(t, err, errors.ErrUnsupported)
	close(f.block["create"])
	require.NoError(t, blasLoads.Enter(t.Context()), "a place is free again")
	blasLoads.Leave()
	for destroyed := false; !destroyed; {
		f.mu.Lock()
		destroyed = f.destroyed == 1
		f.mu.Unlock()
	}
	_, err = newBLAS(ctx, s, libraries("good"), f.load)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
}

// One that runs no kernels has the results of checks all the same.
func TestReadResult(t *testing.T) {
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	p, err := dev.Malloc(ResultBytes)
	require.NoError(t, err)
	m := &Memory{Module: &Module{dev: dev, module: new(cudart.Module)}}
	require.NoError(t, m.ResetResult(s, p))
	require.NoError(t, s.Synchronize(t.Context()))
	found, err := m.ReadResult(p)
	require.NoError(t, err)
	assert.Equal(t, Found{Wrong: 0, First: -1}, found)
	words := [2]uint64{3, 12345678901}
	require.NoError(t, dev.CopyToDevice(p, unsafe.Pointer(&words), ResultBytes))
	found, err = m.ReadResult(p)
	require.NoError(t, err)
	assert.Equal(t, Found{Wrong: 3, First: 12345678901}, found)
	require.NoError(t, dev.Free(p))
	require.NoError(t, s.Close())
}

// Network.Multiply has several blocks share the inner dimension where c has few tiles. They
// add, so that c is made beta * c before.
func TestProductThatIsShared(t *testing.T) {
	const processors = 108 // of the simulated device: see below
	k, dev := testgpu.NewKernels(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Attributes: map[cudart.Attr]int{cudart.AttrMultiProcessorCount: processors}}}})
	k.Names = make(map[string]int)
	for name, params := range parsePTX(networkPTX) {
		k.Names[name] = len(params)
	}
	n, err := NewNetwork(dev)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	const rows, cols = 65, 10
	c, err := dev.Malloc(4 * rows * cols)
	require.NoError(t, err)
	for _, tt := range []struct {
		rows, inner int
		beta        float32
		z           int // blocks that share the inner dimension
		before      string
	}{
		{rows, tileShare, 0, 1, ""},
		{rows, 2*tileShare - 1, 0.5, 1, ""},
		{rows, 2 * tileShare, 0, 2, "memset"},
		{rows, 2 * tileShare, 1, 2, ""},
		{rows, 3 * tileShare, 0.5, 3, "pinned_scale"},
		{rows, 1000 * tileShare, 0, 4 * processors / 2, "memset"},
		{tile * 2 * processors, 3 * tileShare, 0.5, 1, ""},
	} {
		name := fmt.Sprintf("%+v", tt)
		launched, memsets := len(k.Launches()), k.Calls("cudaMemsetAsync")
		to := Matrix{P: c, Rows: tt.rows, Cols: cols}
		a, b := Matrix{P: 0x1000, Rows: tt.inner, Cols: tt.rows}.T(), Matrix{P: 0x2000, Rows: tt.inner, Cols: cols}
		require.NoError(t, n.Multiply(s, to, a, b, 2, tt.beta), name)
		launches := k.Launches()[launched:]
		want := []string{"pinned_multiply_tn"}
		if tt.before == "pinned_scale" {
			want = []string{"pinned_scale", want[0]}
			assert.Equal(t, []uint64{uint64(c), uint64(Float32(tt.beta).bits), uint64(to.Len())}, launches[0].Args, name)
		}
		var got []string
		for _, l := range launches {
			got = append(got, l.Kernel)
		}
		assert.Equal(t, want, got, name)
		memset := 0
		if tt.before == "memset" {
			memset = 1
		}
		assert.Equal(t, memset, k.Calls("cudaMemsetAsync")-memsets, name)
		l := launches[len(launches)-1]
		assert.Equal(t, [3]uint32{uint32((tt.rows-1)/tile + 1), 1, uint32(tt.z)}, l.Grid, name)
		assert.Equal(t, []uint64{uint64(c), 0x1000, 0x2000, uint64(tt.rows), cols, uint64(tt.inner), Float32(2).bits, Float32(tt.beta).bits}, l.Args, name)
	}
	require.NoError(t, s.Synchronize(t.Context()))
	require.NoError(t, dev.Free(c))
	require.NoError(t, s.Close())
	require.NoError(t, n.Close())
}
