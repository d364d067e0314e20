// Package hostmem gives Go programs pinned host memory: memory that the GPU
// reads and writes directly, at the speed of the link.
//
//	buf, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{})
//	copy(buf.Bytes(), data)
//	err = buf.CopyToDevice(stream, dst, 0, n) // returns before it ran
//	err = stream.Synchronize(ctx)
//	err = buf.Close()
//
// [Alloc] maps exactly what is requested, to a page, makes it resident with several
// threads, and registers it once (cudaHostRegister). Hosts that refuse this get memory
// from cudaHostAlloc instead: see [Method]. Package hostmem/pool keeps such
// memory for reuse. [Register] pins memory that other code mapped, and [MapFile] lets
// the GPU read a file's page cache without a copy.
//
// # Memory lifetime
//
// Pinned memory belongs to the caller that opened it, until Close. After the first call of Close,
// the object's methods refuse copies and return no memory. Close waits for the copies that they
// have queued, then unregisters, then unmaps. It does not wait for copies that were queued by other
// means: wait for them before. Do not use a slice from Bytes after Close: its addresses are no
// longer mapped.
//
// Registered memory is never unmapped. If unregistering fails, or CUDA cannot report whether a copy
// is done, the memory stays, Close returns an error, and may be called again. Objects that are
// garbage collected without Close are counted and listed ([ReadStats], [Outstanding]). Their memory
// stays too, because slices of it may be in use.
//
// # Threads
//
// Everything may be called from any goroutine. Callers order what copies and
// goroutines do to the bytes themselves.
//
// Functions that take a context return within a second of its end, even if a call into CUDA does
// not: such a call occupies one thread, and its effects are undone when it returns. Only a few
// goroutines call CUDA for a device at the same time; the others wait until their contexts end.
//
// # Huge pages
//
// Buffers of 2 MiB and more use transparent huge pages, which pin twice as fast;
// smaller ones do not. Options.HugePages chooses the reserved ones of hugetlb, or
// none. Notes lists requests that the host refused, which cost speed only.
//
// # Limits
//
// Pinned memory cannot be swapped, and a host without any left kills processes. So a guard refuses
// requests that would leave too little memory available on the host or in the process's cgroup: see
// [Limits]. [SetLimits] also bounds what the process has pinned. A pool has a limit of its own. A
// request beyond a limit waits until memory is released, or its context ends; if no release can
// help, it returns [ErrLimit].
//
// # Debugging
//
// [Outstanding] lists the memory that is pinned. With PINNED_DEBUG=1, or
// cudart.Options.Debug, it has the stacks of the calls that pinned it, and so has a pool's
// Outstanding for its leases.
package hostmem
