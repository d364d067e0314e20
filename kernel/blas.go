package kernel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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

// BLASEnv is the environment variable that names the libcublas to load.
const BLASEnv = "PINNED_CUBLAS"

// libcublas describes the library to the search.
var libcublas = findlib.Library{
	Name:      "libcublas",
	Sonames:   []string{"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"},
	Wheel:     "nvidia_cublas",
	WheelDirs: []string{"nvidia/cu*"},
	Toolkit:   true,
}

// BLAS multiplies matrices by NVIDIA's cuBLAS, in float32 without TF32.
type BLAS struct {
	stream *cudart.Stream
	handle uintptr // cublasHandle_t
	fn     blasFunctions
	life   lifetime.Lifetime
	calls  *sync.Pool // of *blasCall
}

type blasFunctions struct{ create, destroy, setStream, sgemm uintptr }

// A blasCall holds what C reads and writes, in the heap.
type blasCall struct {
	handle      uintptr
	alpha, beta float32
	args        [14]uintptr
}

// NewBLAS finds and loads libcublas, and makes a handle for one stream (cublasCreate,
// cublasSetStream), which takes some ten MiB of device memory. It looks where package cudart
// looks for libcudart, unless PINNED_CUBLAS names a file, and takes the version of the runtime
// in use, or else the newest that the driver supports. Close it before the stream.
//
// The error wraps [cudart.ErrUnsupported] if no libcublas works, or if the device is a
// simulated one: [Network.Multiply] needs none. It does not if the device has too little free
// memory ([BLASAllocFailed]), if CUDA reports an error, or if ctx ends first: then the error is
// ctx's, and a call that does not return is left behind. A nil context or stream is an error.
func NewBLAS(ctx context.Context, s *cudart.Stream) (*BLAS, error) {
	var b *BLAS
	var err error
	switch {
	case ctx == nil:
		err = errNilContext
	case noStream(s):
		err = errNilStream
	case s.Device().Runtime().Library().Simulated:
		err = fmt.Errorf("%s runs no kernels: %w", s.Device().Runtime().Library().Path, cudart.ErrUnsupported)
	default:
		lib := s.Device().Runtime().Library()
		b, err = newBLAS(ctx, s, blasCandidates(lib.Runtime.Major(), lib.Driver.Major()), loadBLAS)
	}
	if err != nil {
		return nil, fmt.Errorf("kernel: cuBLAS: %w", err)
	}
	return b, nil
}

// blasLoads bounds the threads that calls of newBLAS occupy which were left behind.
var blasLoads bounded.Group

// newBLAS makes a handle of the first of the libraries that works.
func newBLAS(ctx context.Context, s *cudart.Stream, list []findlib.Candidate, load func(path string) (blasFunctions, error)) (*BLAS, error) {
	if err := blasLoads.Enter(ctx); err != nil {
		return nil, err
	}
	return bounded.Do(ctx, bounded.Call[*BLAS]{Run: func() (*BLAS, error) {
		defer blasLoads.Leave()
		var failed []error
		for _, c := range list {
			if ctx.Err() != nil {
				return nil, bounded.Ended(ctx)
			}
			fn, err := load(c.Path)
			b := &BLAS{stream: s, fn: fn, calls: &sync.Pool{New: func() any { return new(blasCall) }}}
			if err == nil {
				err = b.create()
			}
			var ofCUDA *cudart.Error
			switch {
			case err == nil:
				return b, nil
			case errors.Is(err, cudart.ErrMemoryAllocation): // so it is with any library
				return nil, fmt.Errorf("%s: %w (free device memory, or keep managed memory from filling the card: managed.Options.Reserve)", c.Path, err)
			case errors.As(err, &ofCUDA):
				return nil, fmt.Errorf("%s: %w", c.Path, err)
			}
			failed = append(failed, fmt.Errorf("%s: %w", c.Path, err))
		}
		if len(failed) == 0 {
			failed = append(failed, errors.New("found none that the driver supports"))
		}
		return nil, fmt.Errorf("no usable libcublas (%s names one): %w: %w", BLASEnv, errors.Join(failed...), cudart.ErrUnsupported)
	}, Late: func(b *BLAS, err error) {
		if err == nil {
			_ = lifetime.Undo(ctx, b.CloseContext)
		}
	}})
}

// blasCandidates returns the libraries to try, in order.
func blasCandidates(runtime, driver int) []findlib.Candidate {
	if named := findlib.Getenv(BLASEnv); named != "" {
		return []findlib.Candidate{{Path: named}}
	}
	list, _ := findlib.This().Find(libcublas)
	list = slices.DeleteFunc(list, func(c findlib.Candidate) bool { return c.Version.Major > driver })
	slices.SortStableFunc(list, func(a, b findlib.Candidate) int {
		rank := func(c findlib.Candidate) int {
			if c.Version.Major == runtime {
				return 1 << 10
			}
			return c.Version.Major
		}
		return cmp.Compare(rank(b), rank(a))
	})
	return list
}

// loadBLAS loads a library.
func loadBLAS(path string) (fn blasFunctions, err error) {
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
func (b *BLAS) create() error {
	c := b.calls.Get().(*blasCall)
	defer b.calls.Put(c)
	if err := b.call("cublasCreate", b.fn.create, uintptr(unsafe.Pointer(&c.handle))); err != nil {
		return err
	}
	b.handle = c.handle
	if err := b.call("cublasSetStream", b.fn.setStream, b.handle, uintptr(b.stream.Handle())); err != nil {
		return errors.Join(err, b.call("cublasDestroy", b.fn.destroy, b.handle))
	}
	return nil
}

// call calls a function of cuBLAS on a thread with the device current.
func (b *BLAS) call(name string, entry uintptr, args ...uintptr) error {
	var status int32
	if err := b.stream.Device().Do(func() { status = int32(dynlib.Call(entry, args...)) }); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if status != 0 {
		return fmt.Errorf("%s: %w", name, BLASStatus(status))
	}
	return nil
}

// A BLASStatus is a cublasStatus_t other than success.
type BLASStatus int32

// BLASAllocFailed is CUBLAS_STATUS_ALLOC_FAILED: the device has too little free memory for
// cuBLAS, as when managed memory fills it. errors.Is reports that it is
// [cudart.ErrMemoryAllocation].
const BLASAllocFailed BLASStatus = 3

// Error returns the name and the number.
func (s BLASStatus) Error() string {
	names := map[BLASStatus]string{
		1: "CUBLAS_STATUS_NOT_INITIALIZED", 3: "CUBLAS_STATUS_ALLOC_FAILED", 7: "CUBLAS_STATUS_INVALID_VALUE", 8: "CUBLAS_STATUS_ARCH_MISMATCH",
		11: "CUBLAS_STATUS_MAPPING_ERROR", 13: "CUBLAS_STATUS_EXECUTION_FAILED", 14: "CUBLAS_STATUS_INTERNAL_ERROR", 15: "CUBLAS_STATUS_NOT_SUPPORTED",
	}
	return fmt.Sprintf("%s (%d)", cmp.Or(names[s], "unrecognized cublasStatus_t"), int32(s))
}

// Is reports what the status is among the codes of CUDA.
func (s BLASStatus) Is(target error) bool {
	return s == BLASAllocFailed && target == cudart.ErrMemoryAllocation
}

// made reports whether NewBLAS has made it.
func (b *BLAS) made() bool { return b != nil && b.stream != nil }

// Multiply queues c = alpha * x * y + beta * c (cublasSgemm). The error wraps
// [cudart.ErrInvalidValue] if the shapes do not fit, [ErrClosed], or is a [BLASStatus].
func (b *BLAS) Multiply(c, x, y Matrix, alpha, beta float32) error {
	rows, cols, inner, err := product(c, x, y)
	switch {
	case err != nil:
		return err
	case !b.made():
		return fmt.Errorf("kernel: multiply: %w", errNotMade)
	case !b.life.Begin():
		return fmt.Errorf("kernel: multiply: cuBLAS is %w", ErrClosed)
	}
	defer b.life.End()
	f := b.calls.Get().(*blasCall)
	defer b.calls.Put(f)
	f.alpha, f.beta = alpha, beta
	// cuBLAS takes columns: row by row, c is the transpose of c, and that is y' * x'.
	f.args = [14]uintptr{
		b.handle, uintptr(index(y.Transposed)), uintptr(index(x.Transposed)),
		uintptr(cols), uintptr(rows), uintptr(inner), uintptr(unsafe.Pointer(&f.alpha)),
		uintptr(y.P), uintptr(y.Cols), uintptr(x.P), uintptr(x.Cols), uintptr(unsafe.Pointer(&f.beta)),
		uintptr(c.P), uintptr(c.Cols),
	}
	if err := b.call("cublasSgemm", b.fn.sgemm, f.args[:]...); err != nil {
		return fmt.Errorf("kernel: multiply %v by %v: %w", x, y, err)
	}
	return nil
}

// Close waits for the stream's work and destroys the handle (cublasDestroy). After an error it
// may be called again; once it has returned nil it does nothing.
func (b *BLAS) Close() error { return b.CloseContext(context.Background()) }

// CloseContext is Close that ends with ctx, with its error. A nil ctx is an error.
func (b *BLAS) CloseContext(ctx context.Context) error {
	switch {
	case !b.made():
		return fmt.Errorf("kernel: close cuBLAS: %w", errNotMade)
	case ctx == nil:
		return fmt.Errorf("kernel: close cuBLAS: %w", errNilContext)
	}
	err := b.life.Close(ctx, func(ctx context.Context) error {
		if err := b.stream.Point().Wait(ctx); err != nil {
			return err
		}
		return b.call("cublasDestroy", b.fn.destroy, b.handle)
	})
	if err != nil {
		return fmt.Errorf("kernel: close cuBLAS: %w", err)
	}
	return nil
}
