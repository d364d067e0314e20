//go:build linux && !android && (amd64 || arm64)

package cublas

import (
	"context"
	"errors"
	"math"
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
	status             map[string]Status // results of functions that are not to work
	block              map[string]chan struct{}
	calls              []string
	created, destroyed int
	stream             uintptr
}

const fakeHandle = 0xb1a5

var (
	fakeTurn  sync.Mutex
	fake      *fakeBLAS
	fakeEntry = sync.OnceValue(func() functions {
		return functions{
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

func (f *fakeBLAS) load(path string) (functions, error) {
	if path == "broken" {
		return functions{}, errors.New("it is broken")
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
	fake = &fakeBLAS{status: map[string]Status{}, block: map[string]chan struct{}{}}
	return fake, sim, s
}

func libraries(paths ...string) (list []findlib.Candidate) {
	for _, p := range paths {
		list = append(list, findlib.Candidate{Path: p})
	}
	return list
}

// Products of all shapes and transposes are those of matrices stored row by row.
func TestMultiplyTakesMatricesByRows(t *testing.T) {
	f, _, s := newFakeBLAS(t)
	b, err := open(t.Context(), s, libraries("broken", "good"), f.load)
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
	require.ErrorIs(t, b.Close(), Status(14))
	clear(f.status)
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	one, _ := matrix(1, 1, false)
	require.ErrorIs(t, b.Multiply(one, one, one, 1, 0), cudart.ErrClosed)
	assert.Equal(t, []int{1, 1}, []int{f.created, f.destroyed})
}

// A device without memory, and a GPU that fails, are not a machine without cuBLAS: another
// library would not help.
func TestAllocationFailureIsNotUnsupported(t *testing.T) {
	f, sim, s := newFakeBLAS(t)
	f.status["create"] = AllocFailed
	_, err := open(t.Context(), s, libraries("first", "second"), f.load)
	require.ErrorIs(t, err, AllocFailed)
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.NotErrorIs(t, err, errors.ErrUnsupported)
	assert.ErrorContains(t, err, "first: cublasCreate: CUBLAS_STATUS_ALLOC_FAILED (3)")
	assert.Equal(t, []string{"create"}, f.calls)

	clear(f.status)
	f.status["setStream"] = AllocFailed
	_, err = open(t.Context(), s, libraries("first"), f.load)
	require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	assert.Equal(t, []int{1, 1}, []int{f.created, f.destroyed}, "the handle is destroyed")

	clear(f.status)
	attach := "cudaFree"
	if testgpu.Driver() {
		attach = "cuCtxSetCurrent"
	}
	sim.Fail(attach, cudasim.Fault{Code: cudart.ErrIllegalAddress, Times: -1})
	_, err = open(t.Context(), s, libraries("first", "second"), f.load)
	require.ErrorIs(t, err, cudart.ErrIllegalAddress)
	assert.NotErrorIs(t, err, errors.ErrUnsupported)
	sim.ResetFaults()

	f.status["create"] = 1 // the library is for another driver
	_, err = open(t.Context(), s, libraries("first", "second", "broken"), f.load)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	for _, text := range []string{"first: cublasCreate: CUBLAS_STATUS_NOT_INITIALIZED (1)", "second: ", "broken: it is broken", "PINNED_CUBLAS"} {
		assert.ErrorContains(t, err, text)
	}
	_, err = open(t.Context(), s, nil, f.load)
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

// A call of cuBLAS that never returns holds up no New past its context. When it returns
// after all, the handle is destroyed.
func TestNewEndsWithItsContext(t *testing.T) {
	t.Parallel()
	f, _, s := newFakeBLAS(t)
	f.block["create"] = make(chan struct{})
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	over := make(chan error)
	go func() {
		_, err := open(ctx, s, libraries("good"), f.load)
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
	inside := groups.Of(s.Device())
	require.NoError(t, inside.Begin(t.Context()), "a place is free again")
	inside.End()
	for destroyed := false; !destroyed; {
		f.mu.Lock()
		destroyed = f.destroyed == 1
		f.mu.Unlock()
	}
	_, err = open(ctx, s, libraries("good"), f.load)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
}

// Zero values, nil and shapes out of range are errors, and none panics.
func TestZeroNilAndOutOfRangeAreErrors(t *testing.T) {
	_, _, s := newFakeBLAS(t)
	var none context.Context
	one := Matrix{P: 1, Rows: 1, Cols: 1}
	for name, h := range map[string]*Handle{"nil": nil, "zero": new(Handle)} {
		for call, f := range map[string]func() error{
			"Multiply":            func() error { return h.Multiply(one, one, one, 1, 0) },
			"Multiply of nothing": func() error { return h.Multiply(Matrix{}, Matrix{}, Matrix{}, 1, 0) },
			"Close":               h.Close,
			"CloseContext":        func() error { return h.CloseContext(none) },
			"New without ctx":     func() error { _, err := New(none, s); return err },
			"New, no stream":      func() error { _, err := New(t.Context(), nil); return err },
			"New, zero stream":    func() error { _, err := New(t.Context(), new(cudart.Stream)); return err },
			"New, simulated":      func() error { _, err := New(t.Context(), s); return err },
		} {
			assert.NotPanics(t, func() { assert.ErrorContains(t, f(), "cublas: ", "%s: %s", name, call) }, "%s: %s", name, call)
		}
	}
	_ = Status(math.MinInt32).Error()
	assert.Equal(t, Matrix{Transposed: true}, Matrix{}.T())
}
