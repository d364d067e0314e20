//go:build linux && !android && (amd64 || arm64)

package testgpu

import (
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/dynlib"
)

// Kernels is a simulated library that also loads and launches code: it runs none, and records
// what it was called with. Version 12.8 and later have the functions of CUDA's runtime for that,
// earlier ones those of the driver.
type Kernels struct {
	*cudasim.Sim

	// What the calls are to do. Not to be changed during calls.
	Loading func()                 // called while code is loaded, unless it is nil
	Names   map[string]int         // kernels of any code, and their numbers of 8-byte parameters
	Codes   map[string]cudart.Code // results of functions, by their C names, if not success
	Log     string                 // of the compiler
	Quick   bool                   // launches go to a C function that does nothing

	mu       sync.Mutex
	loaded   []string // code
	unloaded int
	launches []Launched
	shared   int // set for dynamic shared memory
}

// Launched is a launch that Kernels got.
type Launched struct {
	Kernel      string
	Grid, Block [3]uint32
	Shared      int
	Stream      uintptr
	Args        []uint64
}

// Loaded returns the codes that were loaded, and how many were unloaded.
func (k *Kernels) Loaded() (codes []string, unloaded int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.loaded, k.unloaded
}

// Launches returns all launches.
func (k *Kernels) Launches() []Launched {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.launches
}

// Shared returns the dynamic shared memory that was allowed last.
func (k *Kernels) Shared() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.shared
}

// NewKernels starts a Kernels and opens it. The end of the test closes it. There is one at a
// time in a process: others wait for it.
func NewKernels(tb testing.TB, cfg cudasim.Config) (*Kernels, *cudart.Device) {
	tb.Helper()
	share.kernels <- struct{}{}
	tb.Cleanup(func() { <-share.kernels })
	sim, rt := Sim(tb, cfg) // closes it at the end
	if err := rt.Close(); err != nil {
		tb.Fatal(err)
	}
	k := &Kernels{Sim: sim, Codes: map[string]cudart.Code{}}
	currentKernels = k
	return k, first(tb, open(tb, cudart.Options{Source: k}))
}

var currentKernels *Kernels

// Symbol returns the entries of Kernels, and of the Sim where there is none.
func (k *Kernels) Symbol(name string) uintptr {
	for _, e := range kernelEntries() {
		if e.name == name {
			if k.Quick && e.launch {
				return noop()
			}
			return e.entry
		}
	}
	return k.Sim.Symbol(name)
}

// noop is a C function that returns 0 and allocates nothing, unlike calls back into Go.
var noop = sync.OnceValue(func() uintptr {
	libc, err := dynlib.Open("libc.so.6")
	if err != nil {
		panic(err)
	}
	return libc.Symbol("pthread_condattr_destroy")
})

type kernelEntry struct {
	name   string
	launch bool
	entry  uintptr
}

// kernelEntries are C functions, made once because they are never freed.
var kernelEntries = sync.OnceValue(func() []kernelEntry {
	return []kernelEntry{
		{name: "cuModuleLoadDataEx", entry: purego.NewCallback(func(out, code, n, options, values uintptr) uintptr {
			return currentKernels.load("cuModuleLoadDataEx", out, code, n, options, values)
		})},
		{name: "cuModuleUnload", entry: purego.NewCallback(func(handle uintptr) uintptr { return currentKernels.unload("cuModuleUnload", handle) })},
		{name: "cuModuleGetFunction", entry: purego.NewCallback(func(out, handle, name uintptr) uintptr {
			return currentKernels.get("cuModuleGetFunction", out, handle, name)
		})},
		{name: "cuFuncGetAttribute", entry: purego.NewCallback(func(out, attribute, fn uintptr) uintptr {
			return currentKernels.attribute(out, attribute, fn)
		})},
		{name: "cuFuncSetAttribute", entry: purego.NewCallback(func(fn, attribute, value uintptr) uintptr {
			return currentKernels.setAttribute("cuFuncSetAttribute", fn, attribute, value)
		})},
		{name: "cuLaunchKernel", launch: true, entry: purego.NewCallback(func(fn, gx, gy, gz, bx, by, bz, shared, stream, args, extra uintptr) uintptr {
			if extra != 0 {
				return uintptr(cudart.ErrInvalidValue)
			}
			return currentKernels.launch("cuLaunchKernel", fn, Launched{
				Grid: [3]uint32{uint32(gx), uint32(gy), uint32(gz)}, Block: [3]uint32{uint32(bx), uint32(by), uint32(bz)},
				Shared: int(uint32(shared)), Stream: stream,
			}, args)
		})},
	}
})

// at returns the value at an address.
func at[T any](address uintptr) *T { return *(**T)(unsafe.Pointer(&address)) }

func cString(address uintptr) string {
	n := 0
	for *at[byte](address + uintptr(n)) != 0 {
		n++
	}
	return string(unsafe.Slice(at[byte](address), n))
}

// Handles of what Kernels makes: the module, and kernels from 1 on.
const moduleHandle = 0x4d0d

func (k *Kernels) load(fn string, out, code, n, options, values uintptr) uintptr {
	if k.Loading != nil {
		k.Loading()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range n {
		if *at[uint32](options + 4*i) == 5 { // the buffer for errors, of the size that follows
			size := *at[uintptr](values + 8*i + 8)
			text := append([]byte(k.Log), 0)
			copy(unsafe.Slice(at[byte](*at[uintptr](values + 8*i)), size), text)
		}
	}
	if c := k.Codes[fn]; c != 0 {
		return uintptr(c)
	}
	k.loaded = append(k.loaded, cString(code))
	*at[uintptr](out) = moduleHandle
	return 0
}

func (k *Kernels) unload(fn string, handle uintptr) uintptr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.Codes[fn]; c != 0 {
		return uintptr(c)
	}
	if handle != moduleHandle {
		return uintptr(cudart.ErrInvalidResourceHandle)
	}
	k.unloaded++
	return 0
}

func (k *Kernels) get(fn string, out, handle, name uintptr) uintptr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.Codes[fn]; c != 0 {
		return uintptr(c)
	}
	if _, ok := k.Names[cString(name)]; !ok || handle != moduleHandle {
		return uintptr(cudart.ErrSymbolNotFound)
	}
	kernelNames = append(kernelNames, cString(name))
	*at[uintptr](out) = uintptr(len(kernelNames))
	return 0
}

// kernelNames are those of the handles, from 1 on.
var kernelNames []string

// What Kernels says of every kernel: threads of a block, bytes of static and of dynamic shared
// memory, registers of a thread.
const (
	KernelThreads   = 512
	KernelStatic    = 4096
	KernelDynamic   = 45056
	KernelRegisters = 33
)

func (k *Kernels) attribute(out, attribute, fn uintptr) uintptr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.Codes["cuFuncGetAttribute"]; c != 0 {
		return uintptr(c)
	}
	v, ok := map[uintptr]int32{0: KernelThreads, 1: KernelStatic, 2: 0, 3: 16, 4: KernelRegisters, 8: KernelDynamic}[attribute]
	if !ok {
		return uintptr(cudart.ErrInvalidValue)
	}
	*at[int32](out) = v
	return 0
}

func (k *Kernels) setAttribute(name string, fn, attribute, value uintptr) uintptr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.Codes[name]; c != 0 {
		return uintptr(c)
	}
	if attribute != 8 {
		return uintptr(cudart.ErrInvalidValue)
	}
	k.shared = int(int32(value))
	return 0
}

func (k *Kernels) launch(fn string, kernel uintptr, l Launched, args uintptr) uintptr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.Codes[fn]; c != 0 {
		return uintptr(c)
	}
	if kernel == 0 || int(kernel) > len(kernelNames) {
		return uintptr(cudart.ErrInvalidResourceHandle)
	}
	l.Kernel = kernelNames[kernel-1]
	for i := range k.Names[l.Kernel] {
		l.Args = append(l.Args, *at[uint64](*at[uintptr](args + 8*uintptr(i))))
	}
	k.launches = append(k.launches, l)
	return 0
}
