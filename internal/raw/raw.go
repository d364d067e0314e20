// Package raw has what package cudart gives to the other packages of this module and not to users:
// what skips the checks that users need. Package cudart sets the variables when it is initialised, unless their comments
// name another package; the values behind the interfaces are its own.
package raw

import (
	"fmt"
	"os"
	"unsafe"
)

// MaxArgs is the number of arguments that a launch can have.
const MaxArgs = 32

// Load loads PTX, a cubin or a fat binary on a *cudart.Device (cuModuleLoadDataEx). code may be
// changed afterwards. The error of code that cannot be used is a [*CompileError].
var Load func(device any, code []byte) (Module, error)

// AddressRange returns the allocation that contains an address that a *cudart.Device can access
// (cuMemGetAddressRange). n is 0 if none does, or the library cannot tell.
var AddressRange func(device any, p uintptr) (base uintptr, n int)

// AtClose has the Close of a *cudart.Runtime call f last. An f that fails is called again by the next Close.
var AtClose func(runtime any, f func() error)

// Closed reports whether the Close of a *cudart.Runtime was called.
var Closed func(runtime any) bool

// Debug reports whether a *cudart.Runtime was opened with Options.Debug or PINNED_DEBUG=1.
var Debug func(runtime any) bool

// CopyPageable copies n bytes from any host memory to device memory, in order with a *cudart.Stream
// (cudaMemcpyAsync). It waits for the stream, and until CUDA has copied src to a staging buffer of its own; the bytes
// may reach the device later. Where the device reads pageable memory itself
// (cudart.AttrPageableMemoryAccessUsesHostPageTables), src must stay unchanged until the stream has passed the copy.
var CopyPageable func(stream any, dst uintptr, src unsafe.Pointer, n int) error

// CheckBuffer returns an error that names the field of hostmem.Options which is out of range, and the size in bytes of the
// reserved pages that are requested, 0 for ordinary ones. Package hostmem sets it.
var CheckBuffer func(options any) (pageSize int, err error)

// BeginPartly begins a copy of memory that is registered in the background, and not all registered yet: nil of any other
// memory. Package hostmem sets it.
var BeginPartly func(mem []byte) Partly

// Order has the methods of package fence about the order of a stream's work.
var Order any

// QueryEvent reports whether the work that a *cudart.Event recorded is done (cudaEventQuery). Programs query a
// cudart.Point.
var QueryEvent func(event any) (done bool, err error)

// WaitEvent makes work that is queued later on a *cudart.Stream wait for the work that a *cudart.Event recorded
// (cudaStreamWaitEvent). Programs use cudart.Stream.WaitPoint.
var WaitEvent func(stream, event any) error

// EndSim closes a *cudasim.Sim whose streams may be destroyed a moment later, and returns what its Check finds. Package
// cudasim sets it.
var EndSim func(sim any) error

// TrafficOf returns the counts of a *cudasim.Sim so far. Package cudasim sets it.
var TrafficOf func(sim any) ManagedTraffic

// ManagedTraffic counts what happened to pages of managed memory, of 64 KiB each.
type ManagedTraffic struct {
	FaultsOnDevice int // pages that an operation of a device had to fetch, or made there
	FaultsOnHost   int // pages that Sim.TouchManaged had to fetch, or made there
	Evictions      int // pages that left a device because it was full
}

// A Partly is a copy of memory that is registered in the background. End ends it: registering waits for that.
type Partly interface {
	End()
	ReadOnly() bool
	// Prefix returns how many of n bytes at an offset are all registered, or all not.
	Prefix(off, n int) (bytes int, registered bool)
	// File returns the file with the bytes at an offset, and where they are in it; nil if it is unknown.
	File(off int) (f *os.File, at int64)
}

// A Module is code that is loaded on a device.
type Module interface {
	// Function looks up a kernel (cuModuleGetFunction) and its limits (cuFuncGetAttribute). CUDA may
	// compile the code only now: the error of code that cannot be used is a [*CompileError].
	Function(name string) (Function, error)

	// Unload unloads the code (cuModuleUnload). No kernel of the module may run, and none of its
	// Functions may be used any more.
	Unload() error
}

// A Function is a kernel of a Module. It is valid until the Module is unloaded.
type Function interface {
	fmt.Stringer

	// Limits are as CUDA reported them when the kernel was looked up, and as AllowShared has set them.
	Limits() *Limits

	// AllowShared lets launches use n bytes of dynamic shared memory a block (cuFuncSetAttribute).
	// Not to be called during launches.
	AllowShared(n int) error

	// Args returns memory for the arguments of one launch. It is reused, and has the values of
	// earlier ones.
	Args() *Args

	// Launch queues the kernel on a *cudart.Stream (cuLaunchKernel), and takes args back. Each argument
	// is in the low bytes of a word. Their number and sizes are not checked: CUDA reads as many
	// as the kernel has.
	Launch(stream any, c Config, args *Args) error
}

// Args are the values of the arguments, which C reads during a launch, and their addresses.
type Args struct {
	Values    [MaxArgs]uint64
	Addresses [MaxArgs]uintptr
}

// Limits are properties of a kernel on its device.
type Limits struct {
	BlockThreads  int
	StaticShared  int
	DynamicShared int
	Registers     int
	LocalBytes    int
}

// A Config is the shape of a launch. Y and Z are 1 if they are 0.
type Config struct {
	Grid, Block [3]int
	SharedBytes int
}

// A CompileError is code that CUDA could not load.
type CompileError struct {
	Log string // of the compiler
	Err error  // the failed call
}

// Error returns the call's error and the log.
func (e *CompileError) Error() string {
	if e.Log == "" {
		return fmt.Sprint(e.Err)
	}
	return fmt.Sprint(e.Err, "\n", e.Log)
}

// Unwrap returns the call's error.
func (e *CompileError) Unwrap() error { return e.Err }
