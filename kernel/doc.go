// Package kernel loads GPU code and launches kernels on streams of package cudart, with no
// compiler and no CUDA toolkit, neither to build nor to run.
//
//	m, err := kernel.Load(ctx, dev, ptx)
//	k, err := m.Kernel(ctx, "saxpy")
//	err = k.Launch(s, kernel.Threads(n, 256), kernel.Arg(y), kernel.Arg(x), kernel.Arg(float32(a)), kernel.Arg(n))
//	err = s.Synchronize(ctx)
//	err = m.Close()
//
// # Loading
//
// [Load] takes PTX, a cubin or a fat binary, and checks that the code has one of these formats and
// is whole, because CUDA looks at it only when a kernel is looked up. The driver compiles PTX for
// the device (cuModuleLoadDataEx), and keeps the
// result in a cache on disk. If it cannot, the error has the compiler's log: see
// [JITError]. A simulated device runs Go functions instead of kernels, which its configuration has
// (see package cudasim).
//
// # Launching
//
// [Kernel.Launch] checks the shape against the kernel's limits ([Kernel.Limits]). For PTX it also
// checks the number and the sizes of the arguments against the kernel's parameters, because CUDA
// reads beyond wrong ones. It allocates nothing. It cannot check how the kernel uses them: a kernel
// that accesses memory which is not allocated makes the context unusable.
//
// # Contexts and threads
//
// All methods may be called from any goroutine. Functions that load or look up code, or wait,
// take a context. A launch takes none: it is one call of CUDA, and takes as long as the call.
//
// # Memory lifetime
//
// A launch returns before the kernel has run. Device memory that it uses must stay allocated,
// and host memory pinned, until the stream has passed it: record a [cudart.Point] or
// synchronize. [Module.Close] waits for the module's kernels.
package kernel
