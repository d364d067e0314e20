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
	"github.com/gopinned/pinned/internal/raw"
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
		if rt.entry[s.fn] = source.Symbol(s.name); rt.entry[s.fn] == 0 && s.required {
			rt.modules.err = fmt.Errorf("%s is not exported by %s: %w", s.name, source, errors.ErrUnsupported)
			return
		}
	}
}

func init() {
	raw.Load = func(device any, code []byte) (raw.Module, error) {
		m, err := device.(*Device).loadModule(code)
		if err != nil {
			return nil, err
		}
		return m, nil
	}
	raw.AddressRange = func(device any, p uintptr) (base uintptr, n int) {
		return device.(*Device).addressRange(p)
	}
	raw.CopyPageable = func(stream any, dst uintptr, src unsafe.Pointer, n int) error {
		s := stream.(*Stream)
		return s.Device().copy(s, dst, uintptr(src), src, n, hostToDevice)
	}
	raw.QueryEvent = func(event any) (done bool, err error) { return event.(*Event).c.query() }
	raw.WaitEvent = func(stream, event any) error { return stream.(*Stream).with(fnStreamWaitEvent, event.(*Event).c) }
	raw.Closed = func(runtime any) bool { return runtime.(*Runtime).isClosed() }
	raw.Debug = func(runtime any) bool { return runtime.(*Runtime).inDebug() }
	raw.AtClose = func(runtime any, f func() error) { runtime.(*Runtime).keepCleanup(f) }
}

// addressRange returns the allocation that contains an address of the device's (cuMemGetAddressRange), n 0 if
// none does or the library cannot tell.
func (d *Device) addressRange(p uintptr) (base uintptr, n int) {
	if d.rt.modules.once.Do(d.rt.bindModules); d.rt.entry[fnMemGetAddressRange] == 0 {
		return 0, 0
	}
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), f.outPtr(1), p
	out, err := d.do(fnMemGetAddressRange, f, func() string { return fmt.Sprintf("%#x on %v", p, d) })
	if err != nil {
		return 0, 0
	}
	return uintptr(out[0]), int(out[1])
}

// A module is code that is loaded on a device. Package kernel adds what makes launches
// safe: checks of arguments, and a Close that waits for kernels under way.
type module struct {
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

// failed makes the error of a call that may have compiled.
func (l *jitLog) failed(err error) error {
	return &raw.CompileError{Log: string(bytes.TrimSpace([]byte(cString(l.text[:])))), Err: err}
}

// loadModule loads code. The driver compiles PTX, which takes a fraction of a second, and keeps the
// result in a cache on disk. The error wraps [ErrUnsupportedPtxVersion] if the PTX is of a newer
// CUDA than the driver, and [ErrNoKernelImageForDevice] if the code is for other devices, or if the
// device is a simulated one that has no Go functions instead of its kernels.
func (d *Device) loadModule(image []byte) (*module, error) {
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
	m := &module{dev: d, jit: newJITLog()}
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

// Unload unloads the code (cuModuleUnload).
func (m *module) Unload() error {
	f := m.dev.begin(nil)
	f.args[0] = m.handle
	_, err := m.dev.do(fnModuleUnload, f, func() string { return fmt.Sprintf("module %#x on %v", m.handle, m.dev) })
	runtime.KeepAlive(m.jit)
	return err
}

// A kernelFunction is a kernel of a module.
type kernelFunction struct {
	module *module
	name   string
	handle uintptr // CUfunction
	limits raw.Limits
}

// Function looks up a kernel. The error wraps [ErrSymbolNotFound] if the module has none of that name.
func (m *module) Function(name string) (raw.Function, error) {
	cName := append([]byte(name), 0)
	f := m.dev.begin(nil)
	f.host = unsafe.Pointer(&cName[0])
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), m.handle, uintptr(f.host)
	out, err := m.dev.do(fnModuleGetFunction, f, func() string { return fmt.Sprintf("kernel %q on %v", name, m.dev) })
	if err != nil {
		return nil, m.jit.failed(err)
	}
	fn := &kernelFunction{module: m, name: name, handle: uintptr(out[0])}
	l := &fn.limits
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

// Limits are as CUDA reported them, and as AllowShared has set them.
func (fn *kernelFunction) Limits() *raw.Limits { return &fn.limits }

// String returns the name and the device, for messages.
func (fn *kernelFunction) String() string {
	return fmt.Sprintf("kernel %s on %v", fn.name, fn.module.dev)
}

// AllowShared lets launches use n bytes of dynamic shared memory a block, which without it
// is 48 KiB less the static part (cuFuncSetAttribute). The error wraps [ErrInvalidValue] if
// the device has less.
func (fn *kernelFunction) AllowShared(n int) error {
	const maxDynamicSharedMemorySize = 8
	if n < 0 {
		return invalid(fnFuncSetAttribute, "%d bytes of shared memory: must not be negative", n)
	}
	f := fn.module.dev.rt.begin()
	f.args[0], f.args[1], f.args[2] = fn.handle, maxDynamicSharedMemorySize, uintptr(n)
	_, err := fn.module.dev.do(fnFuncSetAttribute, f, func() string { return fmt.Sprintf("%d bytes of dynamic shared memory for %v", n, fn) })
	if err == nil {
		fn.limits.DynamicShared = n
	}
	return err
}

func newArgs() *raw.Args {
	a := &raw.Args{}
	for i := range a.Values {
		a.Addresses[i] = uintptr(unsafe.Pointer(&a.Values[i]))
	}
	return a
}

// Args returns memory for arguments. It is pooled, so that a launch allocates nothing.
func (fn *kernelFunction) Args() *raw.Args { return fn.module.dev.rt.launches.Get().(*raw.Args) }

// Launch queues a kernel (cuLaunchKernel). The error wraps [ErrInvalidValue] if a number is out of
// range, and [ErrLaunchOutOfResources] if a block needs too much. Errors of the kernel itself
// appear at later calls, and some make the context unusable: see [Error].
func (fn *kernelFunction) Launch(stream any, c raw.Config, args *raw.Args) error {
	defer fn.module.dev.rt.launches.Put(args)
	s := stream.(*Stream)
	switch {
	case !s.made():
		return errors.New("cuLaunchKernel: the stream is nil, or a zero value")
	case fn.module.dev != s.dev:
		return invalid(fnLaunchKernel, "%v cannot be launched on %v", fn, s)
	case !valid(c.Grid) || !valid(c.Block) || c.SharedBytes < 0:
		return invalid(fnLaunchKernel, "%v: %+v: numbers must be positive and fit 32 bits", fn, c)
	}
	f := s.dev.begin(s)
	f.host = unsafe.Pointer(args)
	f.args = [maxCallArgs]uintptr{
		fn.handle, uintptr(c.Grid[0]), uintptr(max(c.Grid[1], 1)), uintptr(max(c.Grid[2], 1)),
		uintptr(c.Block[0]), uintptr(max(c.Block[1], 1)), uintptr(max(c.Block[2], 1)),
		uintptr(c.SharedBytes), s.arg(), uintptr(unsafe.Pointer(&args.Addresses)),
	}
	_, err := s.dev.do(fnLaunchKernel, f, func() string { return fmt.Sprintf("%v, %+v, on %v", fn, c, s) })
	return err
}

func valid(d [3]int) bool {
	const limit = 1<<31 - 1
	return d[0] > 0 && d[1] >= 0 && d[2] >= 0 && d[0] <= limit && d[1] <= limit && d[2] <= limit
}

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
	if code := d.guard(fnFree, fr); code != success {
		return d.rt.errorf(fnFree, code, "attach the context of %v", d)
	}
	f()
	return nil
}
