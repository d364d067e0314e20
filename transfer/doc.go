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
// link's speed. Here several goroutines copy it through a ring of pinned memory,
// while the GPU's copy engines empty or fill the ring after them. Memory that is
// pinned already is recognised, and copied directly. All copiers of a device share
// its ring, which the last Close unmaps.
//
// A [Fanout] brings one source onto several devices, or pieces of it, each to places of
// its own.
//
// # Ordering
//
// A copy is complete when its method returns, and is in no order with other
// work of the GPU. With [Call].Stream it comes after what is queued on that stream,
// for which the call waits, and before what is queued there later. An upload of up
// to 1 MiB, and without Progress, does not wait: it is queued on the stream as long
// as no more than 16 MiB are, and the call returns as soon as its source may be
// changed. If CUDA reports an error for it later, the stream's Synchronize returns
// it.
//
// # Errors and cancellation
//
// When ctx ends, or something fails, a copy begins nothing more, waits for what the
// GPU is copying, and returns the error with the lowest offset. The bytes before the
// count that is returned, or before the offset in the error, are copied; those after
// may be.
//
// The GPU uses no memory for the copy any more then, unless the error wraps
// [ErrUnderWay]: if a call into CUDA does not return within two seconds of the end of
// ctx, or CUDA cannot report that the GPU is done. It may then still write to the
// device and, if the caller's memory is pinned, use that.
//
// # Callbacks
//
// Readers, writers and Progress functions run on goroutines of their own, and may
// block: other copies go on meanwhile. When ctx ends no further Read, Write or call of
// Progress begins, and one that runs may outlast the method. It may use the Copier.
// One that panics, or ends its goroutine as testing.T.FailNow does, fails the copy. So
// does a memory fault, for instance in a mapped file that another process has
// truncated.
//
// # Cores
//
// An upload keeps up to eight cores busy, that of a file ten, and a download five, and an
// upload twelve for each device while several devices have one. Copies at once on a device
// share these, unless Options.Workers says otherwise. All copies of the process together
// keep seven eighths of GOMAXPROCS busy, or all where that is no more than four. Those that
// wait for a chunk spin for up to 150 µs, on half of GOMAXPROCS at the most, and after a copy
// on a quarter. On hosts with several NUMA nodes workers run on the cores of the GPU's own.
//
// # Concurrency
//
// All methods may be called from any goroutine. Copies that run at once share the
// ring and the workers, chunk by chunk; an upload and a download use both directions of
// the link.
package transfer
