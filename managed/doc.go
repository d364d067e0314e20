// Package managed is CUDA's unified memory (cudaMallocManaged): memory that the CPU and
// the GPUs access at the same address, and that the driver moves between them by page
// faults. The package counts it, moves it before it is accessed, and leaves a reserve of the
// device memory free.
//
//	a, err := managed.New(ctx, dev, managed.Options{Reserve: 2 << 30})
//	m, err := a.Alloc(ctx, n, managed.AllocOptions{})
//	x := hostmem.Slice[float32](m.Bytes())                       // the CPU's view
//	err = m.Whole().Prefetch(ctx, stream, dev.Location())  // returns before it has moved
//	err = a.Move(ctx, cudart.HostLocation(), m.Whole())           // waits until it has
//	…                                         // queue work on m.Ptr()
//	err = m.Close()
//	err = a.Close()
//
// # Coherence
//
// [Memory.Bytes] is the same memory as [Memory.Ptr]. The device attribute
// ConcurrentManagedAccess ([cudart.AttrConcurrentManagedAccess]) defines when the CPU may access it.
//
// If the attribute is 1 (Linux, Pascal and later), the CPU may access any byte at any time; the
// page moves to the host. As with goroutines, an access to bytes that the other side writes at the
// same time is a data race: synchronise the stream before the CPU reads results of the GPU, and
// write the input of the GPU before its work is queued.
//
// If the attribute is 0 (Windows, WSL, vGPU, gVisor and some containers), the CPU must not access
// any managed memory while any work of the device is pending: the process crashes with
// SIGSEGV. There is no prefetch and no advice, and no more memory than the device memory holds.
// [New] refuses such a device unless Options.AllowExclusive is set. Use [Memory.HostBytes], which
// waits until the device is idle, and queue no work until the access is over.
//
// Memory from CUDA is zero at first.
//
// # Moving
//
// [Range.Prefetch] moves memory in the order of a stream, [Allocator.Move] at once and at the
// speed of the link, and a [Plan] ahead of work whose accesses are known. [Range.Discard]
// spares the copy of bytes that will be overwritten. [Range.Advise] tells the driver what to do
// when memory is accessed elsewhere. [Range.MappedByHost] reports how much is on the host.
//
// # Oversubscription
//
// Managed memory may be larger than the device memory. The driver evicts pages while kernels
// run then. That is slow, it can hang a device that other programs use too, and with some drivers
// the host. So Alloc refuses memory that exceeds the capacity of the device memory, less
// Options.Reserve, with an error that contains the figures: [ErrOversubscribed]. CUDA reports how
// much device memory is free, but not which pages of managed memory are there. So the capacity is
// an estimate, which assumes that other programs' memory changes as little as the free memory
// allows.
//
// Options.Oversubscribe allows memory beyond the capacity. It stays on the host: the GPU accesses
// it over the link, without page faults, until it is prefetched. A [Plan] moves memory to the
// device ahead of the work and back, or leaves memory on the host that the work reads or writes
// once, in order ([InPlace]).
//
// # Reserve
//
// Libraries such as cuBLAS allocate device memory of their own, and fail if managed memory
// occupies all of it. Options.Reserve is left free for them: Alloc refuses memory, or leaves it on
// the host, and [Allocator.Reclaim] moves memory to the host. If the reserve cannot be free, the
// error wraps [ErrReserve].
//
// # Memory lifetime
//
// [Memory.Close] waits for the device's work and frees the memory (cudaFree). Memory that is not
// closed stays allocated and counted. If a context ends while a call
// into CUDA does not return, the method returns, and its memory and Allocator are in use
// until the call returns.
//
// # Threads
//
// Any goroutine may call any function and method.
package managed
