// Package cublas multiplies matrices in device memory by NVIDIA's cuBLAS, which it finds and
// loads at run time. Building needs neither the library nor a toolkit.
//
//	h, err := cublas.New(ctx, s)
//	err = h.Multiply(c, x, y, 1, 0) // c = x * y, in the order of stream s
//	err = s.Synchronize(ctx)
//	err = h.Close()
//
// # Loading
//
// [New] looks where package cudart looks for libcudart. The environment variable PINNED_CUBLAS names a file
// instead. An error that wraps [errors.ErrUnsupported] reports that no library works here.
//
// # Matrices
//
// A [Matrix] is float32, row by row. [Matrix.T] is its transpose, without a copy.
package cublas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/dynlib"
	"github.com/gopinned/pinned/internal/findlib"
	"github.com/gopinned/pinned/internal/lifetime"
)

var (
	errNilContext = errors.New("the context is nil")
	errNotMade    = errors.New("the Handle is nil or zero: New makes one")
)

// variable names the libcublas to load.
const variable = "PINNED_CUBLAS"

// libcublas describes the library to the search.
var libcublas = findlib.Library{
	Name:      "libcublas",
	Sonames:   []string{"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"},
	Wheel:     "nvidia_cublas",
	WheelDirs: []string{"nvidia/cu*"},
	Toolkit:   true,
}

// A Handle multiplies matrices on one stream, in float32 without TF32. Its methods may be called
// from any goroutine. Close it before the stream.
type Handle struct {
	stream *cudart.Stream
	handle uintptr // cublasHandle_t
	fn     functions
	life   lifetime.Lifetime
	calls  sync.Pool // of *call
}

// functions are the addresses of the functions of a library.
type functions struct{ create, destroy, setStream, sgemm uintptr }

// A call holds the memory that C reads and writes, in the heap.
type call struct {
	handle      uintptr
	alpha, beta float32
	args        [14]uintptr
}

// New finds and loads libcublas, and makes a handle for a stream (cublasCreate, cublasSetStream),
// which takes some ten MiB of device memory. It takes the version of the CUDA runtime in use, or
// else the newest that the driver supports.
//
// The error wraps [errors.ErrUnsupported] if no libcublas works, or if the device is a
// simulated one. It does not if the device has too little free memory ([AllocFailed]), if
// CUDA reports an error, or if ctx ends first: then the error is ctx's, and a call that does
// not return is abandoned. A nil context or stream is an error.
func New(ctx context.Context, s *cudart.Stream) (*Handle, error) {
	switch {
	case ctx == nil:
		return nil, fmt.Errorf("cublas: %w", errNilContext)
	case s == nil || s.Device() == nil:
		return nil, errors.New("cublas: the stream is nil or zero")
	}
	lib := s.Device().Runtime().Library()
	if lib.Simulated {
		return nil, fmt.Errorf("cublas: %s has no code of cuBLAS: %w", lib.Path, errors.ErrUnsupported)
	}
	return open(ctx, s, candidates(lib.Runtime.Major(), lib.Driver.Major()), load)
}

// groups bound, for each device, the threads in calls of open that were abandoned.
var groups bounded.Each[cudart.Device, bounded.Group]

// open makes a handle of the first library that works.
func open(ctx context.Context, s *cudart.Stream, list []findlib.Candidate, load func(path string) (functions, error)) (*Handle, error) {
	h, err := bounded.Do(ctx, bounded.Call[*Handle]{Group: groups.Of(s.Device()), Run: func() (*Handle, error) {
		return openFirst(ctx, s, list, load)
	}, Late: func(h *Handle, err error) {
		if err == nil {
			_ = lifetime.Undo(ctx, h.CloseContext)
		}
	}})
	if err != nil {
		return nil, fmt.Errorf("cublas: %w", err)
	}
	return h, nil
}

func openFirst(ctx context.Context, s *cudart.Stream, list []findlib.Candidate, load func(path string) (functions, error)) (*Handle, error) {
	var failed []error
	for _, c := range list {
		if ctx.Err() != nil {
			return nil, bounded.Ended(ctx)
		}
		fn, err := load(c.Path)
		h := &Handle{stream: s, fn: fn, calls: sync.Pool{New: func() any { return new(call) }}}
		if err == nil {
			err = h.create()
		}
		if err == nil {
			return h, nil
		}
		err = fmt.Errorf("%s: %w", c.Path, err)
		var ofCUDA *cudart.Error
		switch {
		case errors.Is(err, cudart.ErrMemoryAllocation): // another library has no more memory
			return nil, fmt.Errorf("%w (free device memory, or keep managed memory from filling it: managed.Options.Reserve)", err)
		case errors.As(err, &ofCUDA):
			return nil, err
		}
		failed = append(failed, err)
	}
	if len(failed) == 0 {
		failed = append(failed, errors.New("found none that the driver supports"))
	}
	return nil, fmt.Errorf("no usable libcublas (%s names one): %w: %w", variable, errors.Join(failed...), errors.ErrUnsupported)
}

// candidates returns the libraries to try, in order.
func candidates(runtime, driver int) []findlib.Candidate {
	if named := findlib.Getenv(variable); named != "" {
		return []findlib.Candidate{{Path: named}}
	}
	list, _ := findlib.This().Find(libcublas)
	list = slices.DeleteFunc(list, func(c findlib.Candidate) bool { return c.Version.Major > driver })
	slices.SortStableFunc(list, func(a, b findlib.Candidate) int {
		rank := func(c findlib.Candidate) int {
			if c.Version.Major == runtime {
				return math.MaxInt
			}
			return c.Version.Major
		}
		return cmp.Compare(rank(b), rank(a))
	})
	return list
}

// load loads a library.
func load(path string) (fn functions, err error) {
	if err := findlib.This().Check(path); err != nil {
		return fn, err
	}
	// libcublas needs libcublasLt by its name. A library of that name that is loaded serves.
	if lt := strings.Replace(filepath.Base(path), "libcublas", "libcublasLt", 1); filepath.IsAbs(path) {
		beside := filepath.Join(filepath.Dir(path), lt)
		if _, err := os.Stat(beside); err == nil && findlib.This().Check(beside) == nil {
			_, _ = dynlib.Open(beside) // else the loader looks for it, and reports
		}
	}
	lib, err := dynlib.Open(path)
	if err != nil {
		return fn, err
	}
	for name, to := range map[string]*uintptr{
		"cublasCreate_v2": &fn.create, "cublasDestroy_v2": &fn.destroy,
		"cublasSetStream_v2": &fn.setStream, "cublasSgemm_v2": &fn.sgemm,
	} {
		if *to = lib.Symbol(name); *to == 0 {
			return fn, fmt.Errorf("%s is not exported", name)
		}
	}
	return fn, nil
}

// create makes the handle.
func (h *Handle) create() error {
	c := h.calls.Get().(*call)
	defer h.calls.Put(c)
	if err := h.call("cublasCreate", h.fn.create, uintptr(unsafe.Pointer(&c.handle))); err != nil {
		return err
	}
	h.handle = c.handle
	if err := h.call("cublasSetStream", h.fn.setStream, h.handle, uintptr(h.stream.Handle())); err != nil {
		return errors.Join(err, h.destroy())
	}
	return nil
}

func (h *Handle) destroy() error { return h.call("cublasDestroy", h.fn.destroy, h.handle) }

// call calls a function of cuBLAS on a thread with the device current.
func (h *Handle) call(name string, entry uintptr, args ...uintptr) error {
	var status Status
	err := h.stream.Device().Do(func() { status = Status(dynlib.Call(entry, args...)) })
	if err == nil && status != 0 {
		err = status
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// A Status is a cublasStatus_t other than success.
type Status int32

// AllocFailed is CUBLAS_STATUS_ALLOC_FAILED: the device has too little free memory for
// cuBLAS, as when managed memory fills it. errors.Is reports that it is
// [cudart.ErrMemoryAllocation].
const AllocFailed Status = 3

// Error returns the name and the number.
func (s Status) Error() string {
	names := map[Status]string{
		1: "CUBLAS_STATUS_NOT_INITIALIZED", 3: "CUBLAS_STATUS_ALLOC_FAILED", 7: "CUBLAS_STATUS_INVALID_VALUE", 8: "CUBLAS_STATUS_ARCH_MISMATCH",
		11: "CUBLAS_STATUS_MAPPING_ERROR", 13: "CUBLAS_STATUS_EXECUTION_FAILED", 14: "CUBLAS_STATUS_INTERNAL_ERROR", 15: "CUBLAS_STATUS_NOT_SUPPORTED",
	}
	return fmt.Sprintf("%s (%d)", cmp.Or(names[s], "unrecognized cublasStatus_t"), int32(s))
}

// Is reports whether target is the error code of CUDA with the meaning of the status.
func (s Status) Is(target error) bool {
	return s == AllocFailed && target == cudart.ErrMemoryAllocation
}

// A Matrix is float32 in device memory, row by row without gaps.
type Matrix struct {
	P          cudart.DevPtr
	Rows, Cols int  // of the memory
	Transposed bool // as an operand it stands for its transpose
}

// T returns the transpose, of the same memory.
func (m Matrix) T() Matrix {
	m.Transposed = !m.Transposed
	return m
}

// shape returns the numbers of rows and columns of the operand.
func (m Matrix) shape() (rows, cols int) {
	if m.Transposed {
		return m.Cols, m.Rows
	}
	return m.Rows, m.Cols
}

// operation returns the cublasOperation_t of the operand.
func (m Matrix) operation() uintptr {
	if m.Transposed {
		return 1 // CUBLAS_OP_T
	}
	return 0 // CUBLAS_OP_N
}

// String returns the shape, for messages.
func (m Matrix) String() string {
	if m.Transposed {
		return fmt.Sprintf("%dx%d transposed", m.Rows, m.Cols)
	}
	return fmt.Sprintf("%dx%d", m.Rows, m.Cols)
}

// checkProduct returns an error if c = x * y has no such shapes. Dimensions of cuBLAS are of type int.
func checkProduct(c, x, y Matrix) error {
	m, k := x.shape()
	inner, n := y.shape()
	if min(m, n, k) <= 0 || max(m, n, k) > math.MaxInt32 || inner != k || c.Transposed || c.Rows != m || c.Cols != n {
		return cudart.ErrInvalidValue
	}
	return nil
}

// made reports whether New has made the Handle.
func (h *Handle) made() bool { return h != nil && h.stream != nil }

// Multiply queues c = alpha * x * y + beta * c (cublasSgemm). The error wraps
// [cudart.ErrInvalidValue] if the shapes do not fit, [cudart.ErrClosed], or is a [Status].
func (h *Handle) Multiply(c, x, y Matrix, alpha, beta float32) error {
	err := checkProduct(c, x, y)
	switch {
	case err != nil:
	case !h.made():
		err = errNotMade
	case !h.life.Begin():
		err = cudart.ErrClosed
	default:
		err = h.multiply(c, x, y, alpha, beta)
		h.life.End()
	}
	if err != nil {
		return fmt.Errorf("cublas: multiply %v by %v into %v: %w", x, y, c, err)
	}
	return nil
}

func (h *Handle) multiply(c, x, y Matrix, alpha, beta float32) error {
	f := h.calls.Get().(*call)
	defer h.calls.Put(f)
	_, inner := x.shape()
	f.alpha, f.beta = alpha, beta
	// cuBLAS stores matrices by columns: its c is the transpose of this c, and that is y' * x'.
	f.args = [14]uintptr{
		h.handle, y.operation(), x.operation(), uintptr(c.Cols), uintptr(c.Rows), uintptr(inner),
		uintptr(unsafe.Pointer(&f.alpha)), uintptr(y.P), uintptr(y.Cols), uintptr(x.P), uintptr(x.Cols),
		uintptr(unsafe.Pointer(&f.beta)), uintptr(c.P), uintptr(c.Cols),
	}
	return h.call("cublasSgemm", h.fn.sgemm, f.args[:]...)
}

// Close waits for the stream's work and destroys the handle (cublasDestroy). After an error it
// may be called again; once it has returned nil it does nothing.
func (h *Handle) Close() error { return h.CloseContext(context.Background()) }

// CloseContext is Close that ends with ctx, with its error. A nil ctx is an error.
func (h *Handle) CloseContext(ctx context.Context) (err error) {
	switch {
	case !h.made():
		err = errNotMade
	case ctx == nil:
		err = errNilContext
	default:
		err = h.life.Close(ctx, func(ctx context.Context) error {
			if err := h.stream.Point().Wait(ctx); err != nil {
				return err
			}
			return h.destroy()
		})
	}
	if err != nil {
		return fmt.Errorf("cublas: close: %w", err)
	}
	return nil
}
