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
// behind them. Memory that is pinned already is recognised, and copied
// directly.
//
// # Ordering
//
// A copy is complete when its method returns, and is in no order with other
// work of the GPU. With [Call].Stream it is work of that stream: it begins when
// what was queued there before is done, and what is queued there afterwards
// sees it. An upload then returns as soon as its source may be changed, often
// before the bytes have arrived.
//
// # Cancellation
//
// When ctx ends, or something fails, a copy stops taking chunks, waits for
// those that are on their way, and returns: nothing is in flight then. What
// its target holds is some of each. A Read or Write that blocks is waited for.
//
// # Cores
//
// A copy keeps up to Options.Workers cores busy as long as it takes: three
// quarters of them by default, and all where there are no more than four. The
// rest is left to others. On hosts with several NUMA nodes workers run on the
// cores of the GPU's own.
//
// # Threads
//
// All methods may be called from any goroutine. Copies that run at once share
// the ring and the cores, chunk by chunk; an upload and a download use both
// directions of the link.
package transfer
