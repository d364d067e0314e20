// Package hostmem gives Go programs pinned host memory: memory that the GPU
// reads and writes directly, at the speed of the link.
//
//	buf, err := hostmem.Alloc(ctx, dev, n, hostmem.Options{})
//	copy(buf.Bytes(), data)
//	err = buf.CopyToDevice(stream, dst, 0, n) // returns before it ran
//	err = stream.Synchronize(ctx)
//	err = buf.Close()
//
// [Alloc] maps exactly what is asked, to a page, makes it resident with several
// threads, and registers it once. A [Pool] lends such memory again and again.
// [Register] pins memory that others mapped, and [MapFile] lets the GPU read a
// file's page cache with no copy at all.
//
// # Memory lifetime
//
// Pinned memory belongs to whoever opened it, until Close. Close waits for the
// copies that were queued through the object's own methods, then unregisters,
// then unmaps; copies queued by other means are their caller's to wait for. A
// slice from Bytes must not be used after Close, when its addresses are no
// longer mapped.
//
// Registered memory is never unmapped. Where unregistering fails, or it cannot
// be known whether a copy is still under way, the memory stays, the error says
// so, and Close may be called again. Objects that are lost without Close are
// counted and listed ([ReadStats], [Outstanding]), and their memory stays too:
// slices of it may be in use.
//
// # Threads
//
// Everything may be called from any goroutine. What copies and goroutines do to
// the bytes themselves is for their callers to order.
//
// # Huge pages
//
// Buffers from 2 MiB on use transparent huge pages, which pin twice as fast;
// smaller ones never cost one. Options.HugePages takes the reserved ones of
// hugetlb, or none. Whatever the host refused is told by Notes, and costs speed
// only.
//
// # Limits
//
// Pinned memory cannot be swapped, and a host without any left kills processes.
// So one allocation takes at most nine tenths of what the host or the process's
// cgroup can spare at that moment, and [SetLimits] bounds the whole process. A
// pool has a limit of its own. What a limit forbids is [ErrLimit] or, where
// memory may come back, a wait that ends with its context.
//
// # Debugging
//
// PINNED_DEBUG=1, or cudart.Options.Debug, keeps the stack of whoever opened
// what [Outstanding] lists, and of each lease of a pool.
package hostmem
