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

// Code is loaded by the driver's library, libcuda, which does so in all its versions. It
// uses the same context: the runtime uses the device's primary one, a cudaStream_t is a
// CUstream, and the runtime's error codes have the driver's numbers.

// A moduleBinding is the state of binding libcuda's functions for code, which happens when code
// is loaded first.
type moduleBinding struct {
	once sync.Once
	err  error
}

// bindModules looks up the functions for code in libcuda, which libcudart has loaded already, if
// it is not the library in use itself.
func (rt *Runtime) bindModules() {
	source := rt.source
	if source.Symbol(moduleSymbols[0].name) == 0 {
		if rt.lib.Simulated {
			rt.modules.err = fmt.Errorf("%s runs no kernels: %w", rt.lib.Path, errors.ErrUnsupported)
			return
		}
		libcuda, err := dynlib.Open(cmp.Or(findlib.This().Driver().LibPath, "libcuda.so.1"))
		if err != nil {
			rt.modules.err = fmt.Errorf("libcuda cannot be loaded: %w: %w", err, errors.ErrUnsupported)
			return
		}
		source = libcuda
	}
	for _, s := range moduleSymbols {
		if rt.entry[s.fn] = source.Symbol(s.name); rt.entry[s.fn] == 0 {
			rt.modules.err = fmt.Errorf("%s is not exported by %s: %w", s.name, source, errors.ErrUnsupported)
			return
		}
	}
}

// A Module is code that is loaded on a device. Package kernel adds what makes launches
// safe: checks of arguments, and a Close that waits for kernels under way.
type Module struct {
	dev    *Device
	handle uintptr // CUmodule
	jit    *jitLog // CUDA may compile when a function is looked up
}

// A jitLog receives the report of CUDA's compiler: it holds the options of a load, and their
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
	Err error  // the failed call, an *Error
}

// Error returns the call's error and the log.
func (e *JITError) Error() string {
	if e.Log == "" {
		return fmt.Sprint(e.Err)
	}
	return fmt.Sprint(e.Err, "\n", e.Log)
}

// Unwrap returns the call's error.
func (e *JITError) Unwrap() error { return e.Err }

// failed makes the error of a call that may have compiled.
func (l *jitLog) failed(err error) error {
	return &JITError{Log: string(bytes.TrimSpace([]byte(cString(l.text[:])))), Err: err}
}

// LoadModule loads PTX, a cubin or a fat binary on the device (cuModuleLoadDataEx). The
// driver compiles PTX, which takes a fraction of a second, and keeps the result in a cache
// on disk. image may be changed afterwards. The error of code that cannot be used is a
// [*JITError]; it wraps [ErrUnsupportedPtxVersion] if the PTX is of a newer CUDA than the
// driver, and [ErrNoKernelImageForDevice] if the code is for other devices, or if the device is
// a simulated one that has no Go functions in place of its kernels.
func (d *Device) LoadModule(image []byte) (*Module, error) {
	if !d.made() {
		return nil, notMade(fnModuleLoad)
	}
	if len(image) == 0 {
		return nil, fmt.Errorf("cuModuleLoadDataEx: on %v: the code is empty", d)
	}
	if d.rt.modules.once.Do(d.rt.bindModules); d.rt.modules.err != nil {
		return nil, fmt.Errorf("cuModuleLoadDataEx: on %v: %w", d, d.rt.modules.err)
	}
	image = append(bytes.Clone(image), 0) // PTX ends with a zero byte
	m := &Module{dev: d, jit: newJITLog()}
	f := d.begin(nil)
	f.host = unsafe.Pointer(&image[0])
	f.args = [maxCallArgs]uintptr{
		f.outPtr(0), uintptr(f.host), uintptr(len(m.jit.options)),
		uintptr(unsafe.Pointer(&m.jit.options)), uintptr(unsafe.Pointer(&m.jit.values)),
	}
	out, err := d.do(fnModuleLoad, f, func() string { return fmt.Sprintf("%d bytes on %v", len(image)-1, d) })
	if err != nil {
		return nil, m.jit.failed(err)
	}
	m.handle = uintptr(out[0])
	return m, nil
}

// Device returns the device on which the code is loaded.
func (m *Module) Device() *Device {
	if m == nil {
		return nil
	}
	return m.dev
}

// Unload unloads the code (cuModuleUnload). No kernel of the module may run, and none of
// its Functions may be used any more.
func (m *Module) Unload() error {
	if !m.Device().made() {
		return notMade(fnModuleUnload)
	}
	f := m.dev.begin(nil)
	f.args[0] = m.handle
	_, err := m.dev.do(fnModuleUnload, f, func() string { return fmt.Sprintf("module %#x on %v", m.handle, m.dev) })
	runtime.KeepAlive(m.jit)
	return err
}

// A Function is a kernel of a Module. It is valid until the Module is unloaded.
type Function struct {
	module *Module
	name   string
	handle uintptr // CUfunction

	// Limits are as CUDA reported them when Module.Function returned.
	Limits FunctionLimits
}

// FunctionLimits are properties of a kernel on its device.
type FunctionLimits struct {
	BlockThreads  int // maximum threads of a block
	StaticShared  int // bytes of shared memory of a block that the code itself declares
	DynamicShared int // maximum bytes of dynamic shared memory, see Function.AllowShared
	Registers     int // of a thread
	LocalBytes    int // of a thread, in device memory
}

// Function looks up a kernel (cuModuleGetFunction) and its limits (cuFuncGetAttribute). The
// error wraps [ErrSymbolNotFound] if the module has none of that name. CUDA may compile the
// code only now: the error of code that cannot be used is a [*JITError].
func (m *Module) Function(name string) (*Function, error) {
	if !m.Device().made() {
		return nil, notMade(fnModuleGetFunction)
	}
	cName := append([]byte(name), 0)
	f := m.dev.begin(nil)
	f.host = unsafe.Pointer(&cName[0])
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), m.handle, uintptr(f.host)
	out, err := m.dev.do(fnModuleGetFunction, f, func() string { return fmt.Sprintf("kernel %q on %v", name, m.dev) })
	if err != nil {
		return nil, m.jit.failed(err)
	}
	fn := &Function{module: m, name: name, handle: uintptr(out[0])}
	l := &fn.Limits
	for _, a := range []struct {
		number uintptr // CUfunction_attribute
		to     *int
	}{{0, &l.BlockThreads}, {1, &l.StaticShared}, {3, &l.LocalBytes}, {4, &l.Registers}, {8, &l.DynamicShared}} {
		f := m.dev.begin(nil)
		f.args[0], f.args[1], f.args[2] = f.outPtr(0), a.number, fn.handle
		if out, err = m.dev.do(fnFuncGetAttribute, f, fn.String); err != nil {
			return nil, m.jit.failed(err)
		}
		*a.to = out.int(0)
	}
	return fn, nil
}

// Name returns the name of the kernel.
func (fn *Function) Name() string {
	if fn == nil {
		return ""
	}
	return fn.name
}

// Device returns the device on which the kernel is loaded.
func (fn *Function) Device() *Device {
	if fn == nil {
		return nil
	}
	return fn.module.Device()
}

// String returns the name and the device, for messages.
func (fn *Function) String() string { return fmt.Sprintf("kernel %s on %v", fn.Name(), fn.Device()) }

// AllowShared lets launches use n bytes of dynamic shared memory a block, which without it
// is 48 KiB less the static part (cuFuncSetAttribute). The error wraps [ErrInvalidValue] if
// the device has less. Not to be called during launches of fn.
func (fn *Function) AllowShared(n int) error {
	const maxDynamicSharedMemorySize = 8
	if !fn.Device().made() {
		return notMade(fnFuncSetAttribute)
	}
	if n < 0 {
		return invalid(fnFuncSetAttribute, "%d bytes of shared memory: must not be negative", n)
	}
	f := fn.module.dev.rt.begin()
	f.args[0], f.args[1], f.args[2] = fn.handle, maxDynamicSharedMemorySize, uintptr(n)
	_, err := fn.module.dev.do(fnFuncSetAttribute, f, func() string { return fmt.Sprintf("%d bytes of dynamic shared memory for %v", n, fn) })
	if err == nil {
		fn.Limits.DynamicShared = n
	}
	return err
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

// A launch is the values of the arguments, which C reads during a launch, and their
// addresses. It is pooled, so that a launch allocates nothing.
type launch struct {
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

// Launch queues a kernel (cuLaunchKernel). Each argument is in the low bytes of a word.
// Their number and sizes are not checked: package kernel does that, and CUDA reads as many
// as the kernel has. The error wraps [ErrInvalidValue] if a number is out of range, and
// [ErrLaunchOutOfResources] if a block needs too much. Errors of the kernel itself appear at
// later calls, and some make the context unusable: see [Error].
func (s *Stream) Launch(fn *Function, c LaunchConfig, args []uint64) error {
	switch {
	case !s.made():
		return errors.New("cuLaunchKernel: the stream is nil, or a zero value")
	case !fn.Device().made():
		return fmt.Errorf("cuLaunchKernel: %v: the function is nil, or a zero value", s)
	case fn.module.dev != s.dev:
		return invalid(fnLaunchKernel, "%v cannot be launched on %v", fn, s)
	case len(args) > MaxKernelArgs:
		return invalid(fnLaunchKernel, "%v: %d arguments: at most %d", fn, len(args), MaxKernelArgs)
	case !c.Grid.valid() || !c.Block.valid() || c.SharedBytes < 0:
		return invalid(fnLaunchKernel, "%v: %+v: numbers must be positive and fit 32 bits", fn, c)
	}
	rt := s.dev.rt
	l := rt.launches.Get().(*launch)
	copy(l.values[:], args)
	f := s.dev.begin(s)
	f.host = unsafe.Pointer(l)
	f.args = [maxCallArgs]uintptr{
		fn.handle, uintptr(c.Grid.X), uintptr(max(c.Grid.Y, 1)), uintptr(max(c.Grid.Z, 1)),
		uintptr(c.Block.X), uintptr(max(c.Block.Y, 1)), uintptr(max(c.Block.Z, 1)),
		uintptr(c.SharedBytes), s.arg(), uintptr(unsafe.Pointer(&l.addresses)),
	}
	_, err := s.dev.do(fnLaunchKernel, f, func() string { return fmt.Sprintf("%v, %+v, on %v", fn, c, s) })
	rt.launches.Put(l)
	return err
}

func (d Dim) valid() bool {
	const limit = 1<<31 - 1
	return d.X > 0 && d.Y >= 0 && d.Z >= 0 && d.X <= limit && d.Y <= limit && d.Z <= limit
}

// Size returns the number of blocks or threads.
func (d Dim) Size() int { return d.X * max(d.Y, 1) * max(d.Z, 1) }

// Do calls f on a thread on which the device is current, and its context attached
// (cudaSetDevice, cudaFree): for libraries that use the current device of their thread, such
// as cuBLAS. f must not call methods of other devices. It works after [Runtime.Close]. After
// an error f was not called.
func (d *Device) Do(f func()) error {
	switch {
	case !d.made():
		return notMade(fnSetDevice)
	case f == nil:
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
