package kernel

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/raw"
)

// A Kernel is a function of a [Module] that runs on its device.
type Kernel struct {
	module   *Module
	function raw.Function
	limits   *raw.Limits // of function
	parsed   bool        // if params are: CUDA has no query for them, and only PTX is parsed
	params   []int       // sizes of its parameters in bytes
}

// A Dim is a number of blocks or threads in three dimensions. Y and Z are 1 if they are 0.
type Dim struct{ X, Y, Z int }

// Size returns the number of blocks or threads: 0 if a dimension is negative, and [math.MaxInt] if the
// number is larger.
func (d Dim) Size() int {
	if min(d.X, d.Y, d.Z) < 0 {
		return 0
	}
	size := d.X
	for _, n := range []int{max(d.Y, 1), max(d.Z, 1)} {
		if size > math.MaxInt/n {
			return math.MaxInt
		}
		size *= n
	}
	return size
}

func (d Dim) all() [3]int { return [3]int{d.X, d.Y, d.Z} }

// A Config is the shape of a launch.
type Config struct {
	Grid        Dim // blocks
	Block       Dim // threads of a block
	SharedBytes int // dynamic shared memory of a block
}

// Limits are properties of a kernel on its device.
type Limits struct {
	BlockThreads  int // maximum threads of a block
	StaticShared  int // bytes of shared memory of a block that the code itself declares
	DynamicShared int // maximum bytes of dynamic shared memory: see [Kernel.AllowShared]
	Registers     int // of a thread
	LocalBytes    int // of a thread, in device memory
}

// Threads returns the shape of a launch with at least n threads, in blocks of block threads
// each. If n or block is not positive, it returns the zero Config, which Launch refuses. It does
// not block.
func Threads(n, block int) Config {
	if n <= 0 || block <= 0 {
		return Config{}
	}
	return Config{Grid: Dim{X: (n-1)/block + 1}, Block: Dim{X: block}}
}

// A Value is the value of a kernel's parameter. [Arg] makes it.
type Value struct {
	bits uint64
	size uint8
}

// Arg returns v as an argument: Arg(ptr), Arg(n), Arg(float32(2)). The size of T is the size of the
// parameter: an int is 64 bits, as size_t and long long are, and an int32 is C's int. A bool of C is
// a uint8. Mapped host memory has a [cudart.DevPtr], too.
func Arg[T cudart.Number](v T) Value {
	var a Value
	if a.size = uint8(unsafe.Sizeof(v)); a.size <= 8 {
		*(*T)(unsafe.Pointer(&a.bits)) = v
	}
	return a
}

// made reports whether Module.Kernel has made the Kernel.
func (k *Kernel) made() bool { return k != nil && k.module != nil }

// Limits returns the maximum number of threads of a block, its shared memory in bytes, and more
// (cuFuncGetAttribute, called by Module.Kernel). It does not block.
func (k *Kernel) Limits() Limits {
	if !k.made() {
		return Limits{}
	}
	return Limits(*k.limits)
}

// String returns the name and the device, for messages.
func (k *Kernel) String() string {
	if !k.made() {
		return "no kernel"
	}
	return k.function.String()
}

// AllowShared lets launches use n bytes of dynamic shared memory for each block
// (cuFuncSetAttribute). Without it the limit is 48 KiB less the shared memory
// that the code declares. The error wraps [cudart.ErrInvalidValue] if n is negative or more than
// the device has, or [cudart.ErrClosed]. Not to be called during launches of k.
func (k *Kernel) AllowShared(n int) error {
	switch {
	case !k.made():
		return k.errorf("%w", errZero)
	case !k.module.life.Begin():
		return k.errorf("the module is %w", cudart.ErrClosed)
	}
	defer k.module.life.End()
	if err := k.function.AllowShared(n); err != nil {
		return k.errorf("%w", err)
	}
	return nil
}

// Launch queues a run of the kernel on a stream (cuLaunchKernel), with
// at most 32 arguments. It allocates nothing. Parameters that are structs by value are
// not supported.
//
// The error wraps [cudart.ErrInvalidValue] if there are no blocks or threads, if the kernel allows
// fewer threads or less shared memory, or, for PTX, if the arguments do not match the kernel's
// parameters. It wraps [cudart.ErrClosed] if the module or the stream is closed. Errors of the
// kernel appear at later calls that use the stream or the device.
func (k *Kernel) Launch(s *cudart.Stream, c Config, args ...Value) error {
	switch {
	case !k.made():
		return k.errorf("%w", errZero)
	case isZero(s):
		return k.errorf("%w", errNilStream)
	}
	m := k.module
	if err := k.checkShape(c); err != nil {
		return err
	}
	if err := k.checkArgs(args); err != nil {
		return err
	}
	if !m.life.Begin() {
		return k.errorf("the module is %w", cudart.ErrClosed)
	}
	defer m.life.End()
	values := k.function.Args()
	for i, a := range args {
		values.Values[i] = a.bits
	}
	err := k.function.Launch(s, raw.Config{Grid: c.Grid.all(), Block: c.Block.all(), SharedBytes: c.SharedBytes}, values)
	if s.Device() == m.dev {
		m.fence.Add(s)
	}
	if err != nil {
		return k.errorf("%w", err)
	}
	return nil
}

// Limits of all devices of compute capability 3.0 or later.
const (
	maxGridX, maxGridYZ = math.MaxInt32, math.MaxUint16
	maxBlockZ           = 64
)

func (k *Kernel) checkShape(c Config) error {
	l, grid, block := k.limits, c.Grid, c.Block
	switch {
	case grid.X <= 0 || grid.Y < 0 || grid.Z < 0:
		return k.invalid("grid %+v: the number of blocks must be positive", grid)
	case block.X <= 0 || block.Y < 0 || block.Z < 0:
		return k.invalid("block %+v: the number of threads must be positive", block)
	case grid.X > maxGridX || grid.Y > maxGridYZ || grid.Z > maxGridYZ:
		return k.invalid("grid %+v: at most %d blocks in x, %d in y and z", grid, maxGridX, maxGridYZ)
	case max(block.X, block.Y) > l.BlockThreads || block.Z > maxBlockZ || block.Size() > l.BlockThreads:
		return k.invalid("block %+v: at most %d threads, %d in z", block, l.BlockThreads, maxBlockZ)
	case c.SharedBytes < 0 || c.SharedBytes > l.DynamicShared:
		return k.invalid("%d bytes of shared memory: 0 to %d (AllowShared raises it)", c.SharedBytes, l.DynamicShared)
	}
	return nil
}

func (k *Kernel) checkArgs(args []Value) error {
	switch {
	case len(args) > raw.MaxArgs:
		return k.invalid("%d arguments: at most %d", len(args), raw.MaxArgs)
	case !k.parsed:
		for i, a := range args {
			if a.size == 0 || a.size > 8 {
				return k.invalid("argument %d has %d bytes: Arg makes arguments of 1, 2, 4 and 8", i, a.size)
			}
		}
		return nil
	case len(args) != len(k.params):
		return k.invalid("%d arguments: the kernel has %d", len(args), len(k.params))
	}
	for i, a := range args {
		switch n := k.params[i]; {
		case int(a.size) == n && n <= 8:
		case n == 1 || n == 2 || n == 4 || n == 8:
			return k.invalid("argument %d has %d bytes: the parameter has %d", i, a.size, n)
		default:
			return k.errorf("parameter %d is a struct by value: %w", i, errors.ErrUnsupported)
		}
	}
	return nil
}

func (k *Kernel) invalid(format string, a ...any) error {
	return k.errorf("%w", &cudart.Error{Op: "arguments", Code: cudart.ErrInvalidValue, Detail: fmt.Sprintf(format, a...)})
}

func (k *Kernel) errorf(format string, a ...any) error {
	return fmt.Errorf("kernel: launch %v: "+format, append([]any{k}, a...)...)
}
