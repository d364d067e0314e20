// Package cudart calls NVIDIA's CUDA runtime library, libcudart, from Go without cgo. It finds the
// library on the host, loads it and calls its functions. It can call the driver's library, libcuda,
// instead.
//
//	rt, err := cudart.Open(ctx, cudart.Options{})
//	dev, err := rt.Device(0)
//	s, err := dev.NewStream(cudart.StreamOptions{})
//	err = s.CopyToDevice(dst, src, n)
//	err = s.Synchronize(ctx)
//
// It covers devices, memory of the device and the host, managed memory, copies, streams and events,
// and loading and launching code. Package hostmem allocates pinned host memory, package managed
// unified memory, package kernel launches kernels, and package cudart/cudasim simulates a library
// for tests.
//
// # Loading
//
// [Open] uses the first of these that is set: Options.Source, Options.Library, the environment
// variable PINNED_CUDART. If none is set, it searches in this order, and uses the newest library
// that the driver supports:
//
//   - the libraries that the process has loaded already
//   - Python packages in $VIRTUAL_ENV, $CONDA_PREFIX, of the first python3 on
//     $PATH, in ~/.local, /usr/local and /usr
//   - $CONDA_PREFIX
//   - $LD_LIBRARY_PATH, and the path of the dynamic loader
//   - $CUDA_PATH, $CUDA_HOME, /usr/local/cuda, /usr/local/cuda-*, /opt/cuda
//   - the directories of the system's packages, and WSL's
//   - the driver's own library, libcuda.so.1, if none of these works: see below
//
// Open checks a file before it loads it, because a truncated file makes the dynamic loader end the
// process. A process that has more rights than its caller (setuid) ignores the environment. A
// loaded library is never unloaded.
//
// [Runtime.Library] returns the library in use and all libraries tried before it, with the reasons
// why they were rejected. If none works, the error is an [OpenError] with the same list and with a
// remedy ([OpenError.Remedy]).
//
// Versions 11.x, 12.x and 13.x are supported, with their differences. A function
// that the library's version lacks returns [errors.ErrUnsupported] when it is called.
//
// # The driver alone
//
// Everything that this package does with libcudart it does with libcuda.so.1 too, which
// every host with a driver has: see [DriverAPI]. Open takes it where no libcudart works.
// PINNED_CUDA_API=driver or Options.API choose it, and so does a libcuda that
// Options.Library or PINNED_CUDART names; PINNED_CUDA_API=runtime excludes it. [Library] has the API
// in use and the functions that are missing; drivers of CUDA 11.4 and later have all that are
// required. Package and methods keep the names of the runtime's functions, and so does
// [Error.Op]: each stands for the driver's function of the same meaning, cudaMalloc for
// cuMemAlloc, cudaMemcpyAsync for cuMemcpyHtoDAsync. A [Code] has the same number in both, and
// the message has the driver's name of it, too.
//
// Contexts are the devices' primary ones, as with libcudart, made by the first call that needs
// one and kept until the process ends. So streams, events and memory of libraries that use the
// runtime are the same objects. If other code resets a device, calls on streams and events that
// were made before return [ErrContextIsDestroyed], and the next call that allocates, registers
// or creates a stream initializes the device anew.
//
// # Threads
//
// All methods may be called from any goroutine. CUDA keeps a current device and a
// last error for each thread, and goroutines move between threads. So every call
// locks its thread, selects its device (cudaSetDevice) and takes the last error
// (cudaGetLastError). It does not restore the device that was current before:
// other code that calls CUDA must select its own. On a host with one device nothing is
// selected: a context that other code has left on a thread is used there, with both APIs.
//
// Libraries of other vendors that install a signal handler without SA_ONSTACK end a Go process when the
// signal comes. Library.Notes names those that [Open] found.
//
// # Waiting
//
// [Stream.Synchronize] and [Point.Wait] take a context and end with it. A wait
// occupies neither a thread nor a core; all waits of a Runtime share one thread.
//
// A stream does its work in order. A [Point] is a place in that order, and reports
// whether the GPU has reached it: only then may memory be changed, reused or
// unmapped that work before the Point uses. [Stream.WaitPoint] makes another stream
// wait for it. An [Event] measures time.
//
// A call into the library can block: in a driver that hangs, or on a stream that is full (about a
// thousand entries). It then occupies its goroutine and one thread, but delays no other stream and
// no wait. [Runtime.Stuck] lists such calls.
//
// # Other libraries
//
// Other code of the process may use the same devices. [Stream.Handle] and
// [Event.Handle] are for libraries that take a cudaStream_t or a cudaEvent_t, and
// [Device.StreamFromHandle] is for a stream that another library owns.
//
// # Memory lifetime
//
// An asynchronous copy returns before it has run. Its host memory must be pinned,
// must not be Go heap memory, and must stay mapped and unchanged until the stream
// has passed the copy. Packages hostmem and transfer ensure that; package cudart
// checks, in debug mode, that the memory is pinned. Device addresses, streams and
// events are integers in Go, never pointers.
//
// The garbage collector destroys streams and events that are lost. It does not free
// memory, because it cannot know whether the GPU still uses it.
//
// # Device memory
//
// [Device.Alloc] returns device memory with its size: [DeviceMemory.Range] checks the
// bounds of a part of it. [Device.Malloc] returns the bare address.
//
// # Sizes
//
// Sizes are bytes. Copies and memsets take 0 bytes or more, and do nothing for 0.
// Allocations, registrations, prefetches and advice take 1 byte or more. Any other size is
// [ErrInvalidValue], and the library is not called.
//
// # Errors
//
// A failed call is an [*Error] with the C function, its arguments and the [Code]
// that the library returned:
//
//	if errors.Is(err, cudart.ErrMemoryAllocation) { … }
//
// Each method lists the errors that have a meaning of their own there. Besides
// these, every method that calls the library returns:
//
//   - any other Code. CUDA reports errors of asynchronous work at some later call,
//     so a Code may be one of earlier work. After some of them the process must be
//     restarted; the message says so.
//   - [ErrClosed], if the Runtime, Stream or Event is closed
//   - [errors.ErrUnsupported], if the library does not export the function, and for all
//     of package cudart on platforms other than Linux on amd64 and arm64
//
// Errors name the C function instead of this package.
//
// # Debugging
//
// Options.Debug, or PINNED_DEBUG=1, checks that the host memory of every asynchronous copy is
// pinned (cudaPointerGetAttributes), at its first and its last byte. It does not detect Go heap
// memory given to [Device.HostRegister]; hostmem.Register always does.
// PINNED_CUDART=/path/to/libcudart.so chooses the library, and PINNED_CUDA_API=runtime or driver
// its API.
package cudart
