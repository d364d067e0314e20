// Package transfer copies anything between host and GPU at the speed of the
// link: Go slices, files, readers and writers, most of which are not pinned.
//
//	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
//	err = c.Upload(ctx, dst, anyGoBytes)
//	err = c.Download(ctx, anyGoBytes, src)
//	n, err := c.UploadFrom(ctx, dst, file, off, n)
//	n, err = c.DownloadTo(ctx, file, off, src, n)
//	err = c.Close()
//
// The CUDA runtime copies such memory with one thread, at a fifth of the
// link's speed. Here several goroutines copy it through a ring of pinned memory
// that is allocated once, while the GPU's copy engines empty or fill the ring
// after them. Memory that is pinned already is recognised, and copied directly.
//
// # Ordering
//
// A copy is complete when its method returns, and is in no order with other
// work of the GPU. With [Call].Stream it is work of that stream: it begins when
// what was queued there before is done, and what is queued there afterwards
// sees it. An upload then returns as soon as its source may be changed, often
// before the bytes have arrived; if CUDA reports an error for them later, the
// stream's Synchronize returns it.
//
// # Errors and cancellation
//
// When ctx ends, or something fails, a copy starts no more chunks, waits for
// those that were queued, and returns the error with the least offset. The GPU
// uses no memory for it any more then, unless the error says that it may still
// be copying: then CUDA does not report when it is done, and the device is lost.
// Bytes before the count that is returned, or the offset in the error, are
// copied; those after may be. A Read or Write that blocks is waited for.
//
// # Callbacks
//
// Readers, writers and Progress functions are called by several goroutines,
// most of which are the copier's own. One that panics, or ends its goroutine as
// testing.T.FailNow does, fails the copy. So does a memory fault, for instance
// in a mapped file that another process has truncated.
//
// # Cores
//
// A copy keeps up to Options.Workers cores busy as long as it takes: three
// quarters of them by default, and all where there are no more than four. On
// hosts with several NUMA nodes workers run on the cores of the GPU's own.
//
// # Concurrency
//
// All methods may be called from any goroutine. Copies that run at once share
// the ring and the cores, chunk by chunk; an upload and a download use both
// directions of the link.
package transfer
