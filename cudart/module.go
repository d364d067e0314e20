package cudart

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/internal/dynlib"
	"github.com/gopinned/pinned/internal/findlib"
)

// Code is loaded by one of two libraries. CUDA's runtime can from 12.8 on. Before, the
// driver's own library does it, on the same context: the runtime uses the device's primary
// context, and a cudaStream_t is a CUstream.

// librarySince is the first version of library and driver in which the runtime loads code.
const librarySince Version = 12080

// A codeAPI is the set of functions that load and launch code.
type codeAPI struct{ load, unload, get, setAttribute, launch function }

var (
	runtimeCode = codeAPI{fnLibraryLoad, fnLibraryUnload, fnLibraryGetKernel, fnFuncSetAttribute, fnLaunchKernel}
	driverCode  = codeAPI{fnModuleLoad, fnModuleUnload, fnModuleGetFunction, fnDriverFuncSetAttribute, fnDriverLaunchKernel}
)

// A driverBinding is the state of binding libcuda, which happens when code is loaded first.
type driverBinding struct {
	once sync.Once
	err  error
}

// codeAPI returns the functions to use.
func (rt *Runtime) codeAPI() (*codeAPI, error) {
	inRuntime := rt.lib.Driver >= librarySince
	for _, fn := range []function{fnLibraryLoad, fnLibraryUnload, fnLibraryGetKernel, fnFuncGetAttributes, fnFuncSetAttribute, fnLaunchKernel} {
		inRuntime = inRuntime && rt.entry[fn] != 0
	}
	if inRuntime {
		return &runtimeCode, nil
	}
	rt.driver.once.Do(func() { rt.driver.err = rt.bindDriver() })
	return &driverCode, rt.driver.err
}

// bindDriver looks up the functions of libcuda, which libcudart has loaded already.
func (rt *Runtime) bindDriver() error {
	source := rt.source
	if source.Symbol(driverSymbols[0].name) == 0 {
		if rt.lib.Simulated {
			return rt.noKernels()
		}
		libcuda, err := dynlib.Open(cmp.Or(findlib.This().Driver().LibPath, "libcuda.so.1"))
		if err != nil {
			return fmt.Errorf("%s (runtime %s) loads no code, and libcuda cannot be loaded: %w: %w", rt.lib.Path, rt.lib.Runtime, err, ErrUnsupported)
		}
		source = libcuda
	}
	for _, s := range driverSymbols {
		if rt.entry[s.fn] = source.Symbol(s.name); rt.entry[s.fn] == 0 {
			return fmt.Errorf("%s is not exported by %s: %w", s.name, source, ErrUnsupported)
		}
	}
	return nil
}

// noKernels is the error of a simulated library.
func (rt *Runtime) noKernels() error {
	return fmt.Errorf("%s runs no kernels: %w", rt.lib.Path, ErrUnsupported)
}

// A Module is code that is loaded on a device. Package kernel adds what makes launches
// safe: checks of arguments, and a Close that waits for kernels under way.
type Module struct {
	dev    *Device
	api    *codeAPI
	handle uintptr // cudaLibrary_t or CUmodule
	jit    *jitLog // CUDA may compile when a function is looked up
}

// jitLog is where CUDA writes what its compiler reports: the options of a load, and their
// values.
type jitLog struct {
	options [2]uint32
	values  [2]uintptr
	text    [16 << 10]byte
}

func newJITLog() *jitLog {
	const errorLogBuffer, errorLogBufferSizeBytes = 5, 6
	l := &jitLog{options: [2]uint32{errorLogBuffer, errorLogBufferSizeBytes}}
	l.values = [2]uintptr{uintptr(unsafe.Pointer(&l.text[0])), uintptr(len(l.text) - 1)}
	return l
}

// A JITError is code that CUDA could not load. Unwrap returns the [*Error] of the call.
type JITError struct {
	Log string // of the compiler (ptxas), with line numbers of the PTX; may be empty
	Err error
}

// Error returns the call's error and the log.
func (e *JITError) Error() string {
	if e.Log == "" {
		return e.Err.Error()
	}
	return e.Err.Error() + "\n" + e.Log
}

// Unwrap returns the call's error.
func (e *JITError) Unwrap() error { return e.Err }

// failed makes the error of a call that may have compiled.
func (l *jitLog) failed(err error) error {
	return &JITError{Log: string(bytes.TrimSpace([]byte(cString(l.text[:])))), Err: err}
}

// LoadModule loads PTX, a cubin or a fat binary on the device (cudaLibraryLoadData of CUDA
// 12.8 or later, else cuModuleLoadDataEx). The driver compiles PTX, which takes a fraction
// of a second, and keeps the result in a cache on disk. image may be changed afterwards. The
// error of code that cannot be used is a [*JITError]; it wraps [ErrUnsupportedPtxVersion] if
// the PTX is of a newer CUDA than the driver, [ErrNoKernelImageForDevice] if the code is for
// other devices, and [ErrUnsupported] if the library is a simulated one, which runs no kernels.
func (d *Device) LoadModule(image []byte) (*Module, error) {
	if len(image) == 0 {
		return nil, fmt.Errorf("cudaLibraryLoadData: on %v: the code is empty", d)
	}
	api, err := d.rt.codeAPI()
	if err != nil {
		return nil, fmt.Errorf("cuModuleLoadDataEx: on %v: %w", d, err)
	}
	image = append(bytes.Clone(image), 0) // PTX ends with a zero byte
	m := &Module{dev: d, api: api, jit: newJITLog()}
	options, values := uintptr(unsafe.Pointer(&m.jit.options)), uintptr(unsafe.Pointer(&m.jit.values))
	f := d.rt.begin()
	defer d.rt.end(f)
	f.host = unsafe.Pointer(&image[0])
	f.args = [maxCallArgs]uintptr{f.outPtr(0), uintptr(f.host), options, values, uintptr(len(m.jit.options))}
	if api == &driverCode {
		f.args = [maxCallArgs]uintptr{f.outPtr(0), uintptr(f.host), uintptr(len(m.jit.options)), options, values}
	}
	code := d.guard(api.load, f)
	if code == ErrNotSupported && d.rt.lib.Simulated {
		return nil, fmt.Errorf("%s: on %v: %w", api.load.name(), d, d.rt.noKernels())
	}
	if code != Success {
		return nil, m.jit.failed(d.rt.errorf(api.load, code, "%d bytes on %v", len(image)-1, d))
	}
	m.handle = uintptr(f.out[0])
	return m, nil
}

// Device returns the device on which the code is loaded.
func (m *Module) Device() *Device { return m.dev }

// Unload unloads the code (cudaLibraryUnload, cuModuleUnload). No kernel of the module may
// run, and none of its Functions may be used any more.
func (m *Module) Unload() error {
	f := m.dev.rt.begin()
	defer m.dev.rt.end(f)
	f.args[0] = m.handle
	code := m.dev.guard(m.api.unload, f)
	runtime.KeepAlive(m.jit)
	if code != Success {
		return m.dev.rt.errorf(m.api.unload, code, "module %#x on %v", m.handle, m.dev)
	}
	return nil
}

// A Function is a kernel of a Module. It is valid until the Module is unloaded.
type Function struct {
	module *Module
	name   string
	handle uintptr // cudaKernel_t or CUfunction

	// Limits is what CUDA reported when the Function was looked up.
	Limits FunctionLimits
}

// FunctionLimits are properties of a kernel on its device.
type FunctionLimits struct {
	BlockThreads  int // the most threads of a block
	StaticShared  int // bytes of shared memory of a block that the code itself declares
	DynamicShared int // the most bytes of dynamic shared memory, see Function.AllowShared
	Registers     int // of a thread
	LocalBytes    int // of a thread, in device memory
}

// Function looks up a kernel (cudaLibraryGetKernel, cuModuleGetFunction) and its limits
// (cudaFuncGetAttributes, cuFuncGetAttribute). The error wraps [ErrSymbolNotFound] if the
// module has none of that name. CUDA may compile the code only now: the error of code that
// cannot be used is a [*JITError].
func (m *Module) Function(name string) (*Function, error) {
	rt := m.dev.rt
	cName := append([]byte(name), 0)
	f := rt.begin()
	defer rt.end(f)
	f.host = unsafe.Pointer(&cName[0])
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), m.handle, uintptr(f.host)
	if code := m.dev.guard(m.api.get, f); code != Success {
		return nil, m.jit.failed(rt.errorf(m.api.get, code, "kernel %q on %v", name, m.dev))
	}
	fn := &Function{module: m, name: name, handle: uintptr(f.out[0])}
	var err error
	if m.api == &driverCode {
		err = fn.askDriver(f)
	} else {
		err = fn.askRuntime(f)
	}
	if err != nil {
		return nil, m.jit.failed(err)
	}
	return fn, nil
}

// funcAttributes is cudaFuncAttributes. The reserved part is more than CUDA writes.
type funcAttributes struct {
	shared, constant, local                                                       uint64
	maxThreads, registers, ptxVersion, binaryVersion, cacheMode, maxDynamicShared int32
	reserved                                                                      [512]byte
}

func (fn *Function) askRuntime(f *frame) error {
	a := new(funcAttributes)
	f.host = unsafe.Pointer(a)
	f.args[0], f.args[1] = uintptr(f.host), fn.handle
	if code := fn.module.dev.guard(fnFuncGetAttributes, f); code != Success {
		return fn.errorf(fnFuncGetAttributes, code)
	}
	fn.Limits = FunctionLimits{
		BlockThreads: int(a.maxThreads), StaticShared: int(a.shared), DynamicShared: int(a.maxDynamicShared),
		Registers: int(a.registers), LocalBytes: int(a.local),
	}
	return nil
}

// askDriver asks for one attribute after the other, by the number of each.
func (fn *Function) askDriver(f *frame) error {
	l := &fn.Limits
	for _, a := range []struct {
		number uintptr
		to     *int
	}{{0, &l.BlockThreads}, {1, &l.StaticShared}, {3, &l.LocalBytes}, {4, &l.Registers}, {8, &l.DynamicShared}} {
		f.args[0], f.args[1], f.args[2] = f.outPtr(0), a.number, fn.handle
		if code := fn.module.dev.guard(fnDriverFuncGetAttribute, f); code != Success {
			return fn.errorf(fnDriverFuncGetAttribute, code)
		}
		*a.to = f.out.int(0)
	}
	return nil
}

func (fn *Function) errorf(called function, code Code) error {
	return fn.module.dev.rt.errorf(called, code, "%v", fn)
}

// Name returns the name of the kernel.
func (fn *Function) Name() string { return fn.name }

// Device returns the device on which the kernel is loaded.
func (fn *Function) Device() *Device { return fn.module.dev }

// String returns the name and the device, for messages.
func (fn *Function) String() string { return fmt.Sprintf("kernel %s on %v", fn.name, fn.module.dev) }

// AllowShared lets launches use n bytes of dynamic shared memory a block, which without it
// is 48 KiB less the static part (cudaFuncSetAttribute, cuFuncSetAttribute). The error wraps
// [ErrInvalidValue] if the device has less. Not to be called during launches of fn.
func (fn *Function) AllowShared(n int) error {
	const maxDynamicSharedMemorySize = 8
	if n < 0 {
		return invalid(fn.module.api.setAttribute, "%d bytes of shared memory: must not be negative", n)
	}
	rt := fn.module.dev.rt
	f := rt.begin()
	defer rt.end(f)
	f.args[0], f.args[1], f.args[2] = fn.handle, maxDynamicSharedMemorySize, uintptr(n)
	if code := fn.module.dev.guard(fn.module.api.setAttribute, f); code != Success {
		return rt.errorf(fn.module.api.setAttribute, code, "%d bytes of dynamic shared memory for %v", n, fn)
	}
	fn.Limits.DynamicShared = n
	return nil
}

// MaxKernelArgs is the number of arguments that a launch can have.
const MaxKernelArgs = 32

// A Dim is a number of blocks or threads in three dimensions. Y and Z are 1 if they are 0.
type Dim struct{ X, Y, Z int }

// A LaunchConfig is the shape of a launch.
type LaunchConfig struct {
	Grid        Dim // blocks
	Block       Dim // threads of a block
	SharedBytes int // dynamic shared memory of a block
}

// A launch is what C reads during a launch: a cudaLaunchConfig_t, the values of the
// arguments, and their addresses. It is pooled, so that a launch allocates nothing.
type launch struct {
	grid, block   [3]uint32
	sharedBytes   uint64
	stream        uintptr
	attributes    uintptr
	numAttributes uint64

	values    [MaxKernelArgs]uint64
	addresses [MaxKernelArgs]uintptr
}

func newLaunch() *launch {
	l := &launch{}
	for i := range l.values {
		l.addresses[i] = uintptr(unsafe.Pointer(&l.values[i]))
	}
	return l
}

var (
	errNilStream   = errors.New("the stream is nil")
	errNilFunction = errors.New("the function is nil")
)

// Launch queues a kernel (cudaLaunchKernelExC, cuLaunchKernel). Each argument is in the low
// bytes of a word. Their number and sizes are not checked: package kernel does that, and
// CUDA reads as many as the kernel has. The error wraps [ErrInvalidValue] if a number is out
// of range, and [ErrLaunchOutOfResources] if a block needs too much. Errors of the
// kernel itself appear at later calls, and some make the context unusable: see [Error].
func (s *Stream) Launch(fn *Function, c LaunchConfig, args []uint64) error {
	switch {
	case s == nil:
		return fmt.Errorf("cuLaunchKernel: %w", errNilStream)
	case fn == nil:
		return fmt.Errorf("cuLaunchKernel: %v: %w", s, errNilFunction)
	case fn.module.dev != s.dev:
		return invalid(fn.module.api.launch, "%v cannot be launched on %v", fn, s)
	case len(args) > MaxKernelArgs:
		return invalid(fn.module.api.launch, "%v: %d arguments: at most %d", fn, len(args), MaxKernelArgs)
	case !c.Grid.valid() || !c.Block.valid() || c.SharedBytes < 0:
		return invalid(fn.module.api.launch, "%v: %+v: numbers must be positive and fit 32 bits", fn, c)
	}
	rt, api := s.dev.rt, fn.module.api
	l := rt.launches.Get().(*launch)
	copy(l.values[:], args)
	l.grid, l.block = c.Grid.words(), c.Block.words()
	f := s.dev.begin(s)
	f.host = unsafe.Pointer(l)
	arguments := uintptr(unsafe.Pointer(&l.addresses))
	if api == &driverCode {
		f.args = [maxCallArgs]uintptr{
			fn.handle, uintptr(l.grid[0]), uintptr(l.grid[1]), uintptr(l.grid[2]),
			uintptr(l.block[0]), uintptr(l.block[1]), uintptr(l.block[2]),
			uintptr(c.SharedBytes), s.arg(), arguments,
		}
	} else {
		l.sharedBytes, l.stream = uint64(c.SharedBytes), s.arg()
		f.args[0], f.args[1], f.args[2] = uintptr(f.host), fn.handle, arguments
	}
	code := s.dev.guard(api.launch, f)
	rt.end(f)
	rt.launches.Put(l)
	if code != Success {
		return rt.errorf(api.launch, code, "%v, %+v, on %v", fn, c, s)
	}
	return nil
}

func (d Dim) valid() bool {
	const most = 1<<31 - 1
	return d.X > 0 && d.Y >= 0 && d.Z >= 0 && d.X <= most && d.Y <= most && d.Z <= most
}

func (d Dim) words() [3]uint32 {
	return [3]uint32{uint32(d.X), uint32(max(d.Y, 1)), uint32(max(d.Z, 1))}
}

// Size returns the number of blocks or threads.
func (d Dim) Size() int { return d.X * max(d.Y, 1) * max(d.Z, 1) }

// Do calls f on a thread on which the device is current, and its context attached
// (cudaSetDevice, cudaFree): for libraries that use the current device of their thread, such
// as cuBLAS. f must not call methods of other devices. It works after [Runtime.Close]. After
// an error f was not called.
func (d *Device) Do(f func()) error {
	if f == nil {
		return fmt.Errorf("cudaSetDevice: %v: the function is nil", d)
	}
	fr := d.rt.begin()
	defer d.rt.end(fr)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fr.args[0] = 0 // cudaFree of nothing attaches the context
	if code := d.guard(fnFree, fr); code != Success {
		return d.rt.errorf(fnFree, code, "attach the context of %v", d)
	}
	f()
	return nil
}
