// Package kernel loads GPU code and launches kernels on streams of package cudart, with no
// compiler and no CUDA toolkit, neither to build nor to run.
//
//	m, err := kernel.Load(dev, ptx)
//	k, err := m.Kernel("saxpy")
//	err = k.Launch(s, kernel.Threads(n, 256), kernel.Ptr(y), kernel.Ptr(x), kernel.Float32(a), kernel.Int(n))
//	err = s.Synchronize(ctx)
//	err = m.Close()
//
// # Loading
//
// [Load] takes PTX, a cubin or a fat binary, and checks that it is one and whole, as CUDA
// itself looks at it when a kernel is looked up first. The driver compiles PTX for the device
// (cuModuleLoadDataEx), and keeps what it compiled in a cache on disk. If it cannot, the error has the compiler's log: see
// [cudart.JITError]. A simulated device runs no kernels: the error wraps
// [errors.ErrUnsupported].
//
// # Launching
//
// [Kernel.Launch] checks the shape against the kernel's limits ([Kernel.Limits]) and, for PTX, the number and
// the sizes of arguments against the kernel's parameters: with wrong ones CUDA reads beyond
// them. It allocates nothing. It cannot check what the kernel does with them: a kernel that
// accesses memory which is not allocated makes the context unusable.
//
// # The package's own kernels
//
// [Memory] fills, checks, copies and times memory. The source is in src, in CUDA C;
// scripts/ptx.sh compiles it to the PTX that is embedded, for all devices of compute capability
// 7.5 or later and drivers of CUDA 11.8 or later, and records the hashes of both.
//
// # Threads
//
// All methods may be called from any goroutine.
//
// # Memory lifetime
//
// A launch returns before the kernel has run. Device memory that it uses must stay allocated,
// and host memory pinned, until the stream has passed it: record a [cudart.Point] or
// synchronize. [Module.Close] waits for the module's kernels.
package kernel
