// Package cudart reaches NVIDIA's CUDA runtime library, libcudart, from Go
// without cgo: it finds the library on the host, loads it, and calls it.
//
//	rt, err := cudart.Open(cudart.Options{})
//	dev, err := rt.Device(0)
//	s, err := dev.NewStream(cudart.StreamOptions{})
//	err = s.CopyToDevice(dst, src, n)
//	err = s.Synchronize(ctx)
//
// It binds what moving memory needs: devices, device, host and managed memory,
// copies, streams and events. Package hostmem makes the host memory; package
// cudart/cudasim provides a simulated library for tests.
//
// # Loading
//
// [Open] uses Options.Source if it is set, else the library that
// Options.Library names, else the one that the environment variable
// PINNED_CUDART names. Otherwise it searches, and of all libraries that it
// finds it takes the newest that the driver supports. It searches, in this
// order:
//
//   - the libraries that the process has loaded already
//   - Python packages in $VIRTUAL_ENV, $CONDA_PREFIX, of the first python3 on
//     $PATH, in ~/.local, /usr/local and /usr
//   - $CONDA_PREFIX
//   - $LD_LIBRARY_PATH, and the path of the dynamic loader
//   - $CUDA_PATH, $CUDA_HOME, /usr/local/cuda, /usr/local/cuda-*, /opt/cuda
//   - the directories of the system's packages, and WSL's
//
// A file is checked before it is loaded, because the dynamic loader ends the
// process on a file that is cut off. A process that has more rights than its
// caller (setuid) ignores the environment. A library that was loaded is never
// unloaded.
//
// [Runtime.Library] returns the library in use and every one tried before it,
// with the reason why it was not taken. If none works, the error is an
// [OpenError] with the same, and with what to do ([OpenError.Remedy]).
//
// Versions 11.x, 12.x and 13.x are supported, with their differences. The call
// of a function that the library's version lacks returns [ErrUnsupported].
//
// # Threads
//
// Everything may be called from any goroutine. CUDA keeps the current device
// and the last error for each thread; every call here selects its own device
// on the thread that it happens to run on and takes its error away with it, so
// neither is ever left to chance. What other code does with the current device
// is not undone: code that calls CUDA by other means selects its device
// itself.
//
// Waits ([Stream.Synchronize], [Event.Synchronize]) take a context and occupy
// neither a thread nor a core, however many there are.
//
// # Memory lifetime
//
// An asynchronous copy returns before it ran. Its host memory must be pinned,
// must not be Go heap memory, and must stay as it is until the stream has
// passed the copy. Packages hostmem and transfer see to that. Device
// addresses, streams and events are numbers to Go, never pointers.
//
// Streams and events that are lost are destroyed by the garbage collector.
// Memory is not: only its owner knows whether the GPU still uses it.
//
// # Errors
//
// A failed call is an [*Error] with the C function, what it was asked, and the
// [Code], which works with errors.Is:
//
//	if errors.Is(err, cudart.ErrMemoryAllocation) { … }
//
// CUDA reports failures of asynchronous work at some later call: an error may
// tell of earlier work. Some cannot be recovered from, and say so.
//
// # Debugging
//
// PINNED_DEBUG=1, or Options.Debug, checks every asynchronous copy for host
// memory that is not pinned. PINNED_CUDART=/path/to/libcudart.so chooses the
// library.
package cudart
