// Package managed is CUDA's unified memory (cudaMallocManaged): memory that the CPU and
// the GPUs access at the same address, and that the driver moves between them by page
// faults. The package counts it, moves it before it is accessed, and keeps it from
// filling a card.
//
//	a, err := managed.New(ctx, dev, managed.Options{Reserve: 2 << 30})
//	m, err := a.Alloc(ctx, n)
//	x := hostmem.Slice[float32](m)                       // the CPU's view
//	err = m.All().Prefetch(ctx, stream, dev.Location())  // returns before it has moved
//	err = a.Move(ctx, managed.Host(), m.All())           // waits until it has
//	…                                         // queue work on m.DevPtr()
//	err = m.Close()
//	err = a.Close()
//
// # Coherence
//
// [Memory.Bytes] is the same memory as [Memory.DevPtr]. When the CPU may access it depends
// on the device attribute ConcurrentManagedAccess ([Allocator.Concurrent]).
//
// Where it is 1 (Linux, Pascal and later), the CPU may access any byte at any time; the
// page moves to the host. As with goroutines, who accesses the same bytes while the other
// side writes them has a data race: synchronise the stream before the CPU reads what the
// GPU writes, and write what the GPU reads before its work is queued.
//
// Where it is 0 (Windows, WSL, vGPU, gVisor and some containers), the CPU must not access
// any managed memory while any work of the device is pending: the process crashes with
// SIGSEGV. There is no prefetch and no advice, and no more memory than the card has. [New]
// refuses such a device unless Options.AllowExclusive is set. Use [Memory.HostBytes]
// there, which waits until the device is idle, and queue nothing until the access is over.
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
// Managed memory may be larger than the card. The driver then evicts pages while kernels
// run. That is slow, it can hang a card that others use too, and with some drivers the
// host. So Alloc refuses what could not be on the card all at once, next to
// Options.Reserve, and says by how much: [ErrOversubscribed]. Options.Oversubscribe allows
// it. CUDA reports how much device memory is free, but not which pages of managed memory are
// on the card: the capacity is an estimate, which assumes that other programs' share changes
// as little as the free memory allows. Memory beyond the card stays on the host: the GPU accesses it over the link,
// without faults, until it is prefetched. A [Plan] moves such memory through the card ahead
// of the work, or leaves on the host what the work reads or writes once, in order ([InPlace]).
//
// # Reserve
//
// Libraries such as cuBLAS allocate device memory of their own, and fail if managed memory
// has filled the card. Options.Reserve is kept for them: by refusing, by keeping memory on
// the host, and by [Allocator.KeepReserve], which moves memory away. What cannot be kept
// is an error that wraps [ErrReserve].
//
// # Memory lifetime
//
// [Memory.Close] frees the memory, and waits for the device's work first, as cudaFree
// does. Memory that is not closed stays allocated and counted. If a context ends while a call
// into CUDA does not return, the method returns, and its memory and Allocator stay in use
// until the call returns.
//
// # Threads
//
// Everything may be called from any goroutine.
package managed
