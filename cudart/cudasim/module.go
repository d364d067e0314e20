package cudasim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/ptx"
)

// A module is code that is loaded on a device. Its Sim's mu guards it.
type module struct {
	dev     *device
	kernels map[string]ptx.Entry
	log     errorLog
	pending int // launches of its kernels that have not run
}

// A function is a kernel of a module.
type function struct {
	*module
	name    string
	params  []int // sizes in bytes
	kernel  kernel
	threads int // maximum of a block
	shared  int // maximum bytes of dynamic shared memory of a block
}

// Options of cuModuleLoadDataEx.
const (
	optionErrorLog     = 5
	optionErrorLogSize = 6
)

// An errorLog is the caller's buffer for the report of a load, 0 for none. It belongs to the
// module: real drivers, too, write to it when a kernel is looked up.
type errorLog struct {
	at   uintptr
	size int
}

// write writes a text that ends with a NUL, as much as fits.
func (l errorLog) write(format string, args ...any) {
	if l.at == 0 || l.size <= 0 {
		return
	}
	text := append([]byte(fmt.Sprintf(format, args...)), 0)
	n := copy(bytesAt(l.at, l.size), text)
	*pointer[byte](l.at + uintptr(n) - 1) = 0
}

// errorLog finds the buffer among the options of a load.
func (c *call) errorLog() (l errorLog) {
	n := c.num(2)
	if n <= 0 || c.ptr(3) == 0 || c.ptr(4) == 0 {
		return errorLog{}
	}
	values := array[uintptr](c.ptr(4), n)
	for i, option := range array[uint32](c.ptr(3), n) {
		switch option {
		case optionErrorLog:
			l.at = values[i]
		case optionErrorLogSize:
			l.size = int(uint32(values[i]))
		}
	}
	return l
}

// text returns a string of C's.
func text(at uintptr) string {
	n := 0
	for *pointer[byte](at + uintptr(n)) != 0 {
		n++
	}
	return string(bytesAt(at, n))
}

// Magic numbers of code for a device: a cubin and a fat binary.
const (
	cubinMagic  = "\x7fELF"
	fatbinMagic = "\x50\xed\x55\xba"
)

// moduleLoad takes PTX of which it has functions for a kernel at least: it has no machine
// code to run.
func (c *call) moduleLoad() cudart.Code {
	if c.ptr(0) == 0 || c.ptr(1) == 0 {
		return cudart.ErrInvalidValue
	}
	log, image := c.errorLog(), text(c.ptr(1))
	if strings.HasPrefix(image, cubinMagic) || strings.HasPrefix(image, fatbinMagic) {
		log.write("%s runs Go functions instead of kernels, whose names it reads from PTX: this is a cubin or a fat binary", c.Sim)
		return cudart.ErrNoKernelImageForDevice
	}
	code, ok := ptx.Parse([]byte(image))
	if !ok {
		return cudart.ErrInvalidKernelImage
	}
	if oldest := cudart.Version(1000*(code.Major+4) + 10*code.Minor); oldest > c.cfg.DriverVersion { // 7.8 is of CUDA 11.8
		log.write("PTX %d.%d is newer than CUDA %v", code.Major, code.Minor, c.cfg.DriverVersion)
		return cudart.ErrUnsupportedPtxVersion
	}
	m := &module{dev: c.dev, kernels: code.Kernels, log: log}
	names := slices.Sorted(maps.Keys(m.kernels))
	if len(names) > 0 && !slices.ContainsFunc(names, func(name string) bool { return c.kernel(name).run != nil }) {
		c.noFunction(m, names...)
		return cudart.ErrNoKernelImageForDevice
	}
	h := c.handle()
	c.modules[h] = m
	return put(c, 0, h)
}

// noFunction logs that kernels cannot run.
func (c *call) noFunction(m *module, names ...string) {
	m.log.write("%s runs Go functions instead of kernels, and has none for %s: see Config.Kernels of package cudasim", c.Sim, strings.Join(names, ", "))
}

// module returns the module with a handle, nil if there is none.
func (c *call) module(h uintptr) (*module, cudart.Code) {
	m := c.modules[h]
	if m == nil {
		return nil, c.stale("module", h)
	}
	c.on(m.dev, "module", h)
	return m, m.dev.makeContext()
}

// moduleUnload ends the module's functions, too.
func (c *call) moduleUnload() cudart.Code {
	m, code := c.module(c.ptr(0))
	if code != success {
		return code
	}
	if m.pending > 0 {
		c.misuse(busyModule, -1, "module %#x: unloaded with %d launches pending", c.ptr(0), m.pending)
	}
	c.dropModule(c.ptr(0))
	return success
}

func (s *Sim) dropModule(h uintptr) {
	m := s.modules[h]
	delete(s.modules, h)
	maps.DeleteFunc(s.functions, func(_ uintptr, f *function) bool { return f.module == m })
}

func (c *call) moduleGetFunction() cudart.Code {
	if c.ptr(0) == 0 || c.ptr(2) == 0 {
		return cudart.ErrInvalidValue
	}
	m, code := c.module(c.ptr(1))
	if code != success {
		return code
	}
	name := text(c.ptr(2))
	entry, ok := m.kernels[name]
	if !ok {
		return cudart.ErrSymbolNotFound
	}
	f := &function{module: m, name: name, params: entry.Params, kernel: c.kernel(name),
		threads: m.dev.cfg.Attributes[attrBlockThreads], shared: m.dev.cfg.Attributes[attrBlockShared]}
	if f.kernel.run == nil {
		c.noFunction(m, name)
		return cudart.ErrNoKernelImageForDevice
	}
	if entry.BlockThreads > 0 {
		f.threads = min(f.threads, entry.BlockThreads)
	}
	h := c.handle()
	c.functions[h] = f
	return put(c, 0, h)
}

// function returns the kernel with a handle.
func (c *call) function(h uintptr) (*function, cudart.Code) {
	f := c.functions[h]
	if f == nil {
		return nil, c.stale("kernel", h)
	}
	return f, f.dev.makeContext()
}

// Attributes of a device that bound launches.
const (
	attrBlockThreads  = 1
	attrBlockShared   = 8
	attrSharedAllowed = 97 // of a block that opts in
)

// Attributes of a function.
const (
	functionThreads       = 0
	functionRegisters     = 4
	functionDynamicShared = 8
	functionAttributes    = 15 // their number

	registers = 32 // of a thread of any kernel: Go functions use none
)

func (c *call) funcGetAttribute() cudart.Code {
	f, code := c.function(c.ptr(2))
	switch {
	case code != success:
		return code
	case c.u32(1) >= functionAttributes:
		return cudart.ErrInvalidValue
	}
	values := [functionAttributes]int{functionThreads: f.threads, functionRegisters: registers, functionDynamicShared: f.shared}
	return put(c, 0, int32(values[c.u32(1)]))
}

// funcSetAttribute raises the shared memory of a block; it takes no other attribute.
func (c *call) funcSetAttribute() cudart.Code {
	f, code := c.function(c.ptr(0))
	switch {
	case code != success:
		return code
	case c.u32(1) != functionDynamicShared, c.i32(2) < 0, c.i32(2) > f.dev.cfg.Attributes[attrSharedAllowed]:
		return cudart.ErrInvalidValue
	}
	f.shared = c.i32(2)
	return success
}

// Limits of the shape of a launch.
const (
	maxGridYZ = 1<<16 - 1
	maxBlockZ = 64
)

// launchKernel copies the arguments, and runs the kernel in the order of the stream.
func (c *call) launchKernel() cudart.Code {
	f, code := c.function(c.ptr(0))
	if code != success {
		return code
	}
	st, code := c.stream(c.ptr(8))
	if code != success {
		return code
	}
	l := &Launch{
		Kernel: f.name, Device: f.dev.ordinal, dev: f.dev,
		Grid:        [3]int{c.i32(1), c.i32(2), c.i32(3)},
		Block:       [3]int{c.i32(4), c.i32(5), c.i32(6)},
		SharedBytes: int(c.u32(7)),
	}
	switch code := f.shapeFits(l); {
	case st.dev != f.dev:
		return cudart.ErrInvalidResourceHandle
	case c.ptr(10) != 0, len(f.params) > 0 && c.ptr(9) == 0:
		return cudart.ErrInvalidValue
	case code != success:
		return code
	}
	for i, n := range f.params {
		arg := slices.Clone(bytesAt(*pointer[uintptr](c.ptr(9) + uintptr(8*i)), n))
		l.args = append(l.args, arg)
	}
	o := &operation{move: func() cudart.Code { return l.run(f.kernel.run) }, took: kernelTime}
	if f.kernel.time != nil {
		o.took += f.kernel.time(l)
	}
	o.uses = c.pointed(l)
	o.finish = func() { f.pending-- }
	f.pending++ // now: the code may be unloaded while the call waits for room
	if code = c.enqueue(st, o); code != success {
		f.pending--
	}
	return code
}

// shapeFits returns the code of a launch whose shape the kernel or its device does not allow.
func (f *function) shapeFits(l *Launch) cudart.Code {
	g, b := l.Grid, l.Block
	switch {
	case min(g[0], g[1], g[2], b[0], b[1], b[2]) <= 0, max(g[1], g[2]) > maxGridYZ, b[2] > maxBlockZ,
		max(b[0], b[1]) > 1<<20 || b[0]*b[1]*b[2] > f.dev.cfg.Attributes[attrBlockThreads],
		l.SharedBytes > f.shared:
		return cudart.ErrInvalidValue
	case b[0]*b[1]*b[2] > f.threads:
		return cudart.ErrLaunchOutOfResources
	}
	return success
}

// pointed returns the blocks to which arguments point, as far as one can tell: they are in use from the launch on.
func (c *call) pointed(l *Launch) (uses []*block) {
	for i, arg := range l.args {
		if len(arg) != int(unsafe.Sizeof(uintptr(0))) {
			continue
		}
		at := Arg[uint64](l, i)
		switch b := c.blocks.find(uintptr(at)); {
		case b == nil:
		case b.freeing:
			c.misuse(freedMemory, -1, "argument %d of kernel %s: memory %#x was freed by cudaFreeAsync", i, l.Kernel, at)
		default:
			uses = append(uses, b)
		}
	}
	return uses
}

// kernelTime is the duration of a kernel that does nothing.
const kernelTime = 2 * time.Microsecond
