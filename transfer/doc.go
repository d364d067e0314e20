// Package transfer copies anything between host and GPU at the speed of the
// link: Go slices, files, readers and writers, pinned or not.
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
// A [Fanout] copies one source onto several devices, or pieces of it, each to addresses of
// its own. [hostmem.Bytes] and [hostmem.BytesOf] give the memory of slices of numbers, arrays and structs.
//
// Package transfer/blocks copies many small blocks of pinned memory by lists of indices.
//
// # Ordering
//
// A copy is complete when its method returns, and is not ordered with other work of the GPU. With
// [Call].Stream it is ordered after the work that is queued on that stream, which the call waits
// for, and before work that is queued there later. Uploads of up to 1 MiB without Progress do not
// wait: while no more than 16 MiB are queued on the stream, they are queued there too, and return
// as soon as their source may be changed. If CUDA reports an error for it later, the stream's
// Synchronize returns it.
//
// # Errors and cancellation
//
// When ctx ends, or something fails, a copy begins no more work, waits for copies that the GPU has
// begun, and returns the error with the lowest offset. The bytes before the returned count, or
// before the offset in the error, are copied; later bytes may be. If a context has ended, errors.Is
// matches its error and its cause.
//
// After the method returns, the GPU no longer uses memory for the copy, unless the error wraps
// [ErrUnderWay]: then a call into CUDA did not return within two seconds of the end of ctx, or CUDA
// cannot report that the GPU is done. The GPU may still write to the device and, if the caller's
// memory is pinned, use that memory.
//
// # Callbacks
//
// Readers, writers and Progress functions run on separate goroutines. They may use the Copier, and
// may block without delaying other copies. When ctx ends, no further Read, Write or call of
// Progress begins, and a call in progress may outlast the method. A call that panics, or ends its
// goroutine as testing.T.FailNow does, fails the copy. So does a memory fault, for instance in a
// mapped file that another process has truncated.
//
// # Cores
//
// An upload keeps up to eight cores busy, an upload of a file ten, a download five. While several
// devices have uploads, each upload uses up to twelve cores for each of its devices. Concurrent
// copies on a device share these cores, unless Options.Workers sets another number. All copies of
// the process together use seven eighths of GOMAXPROCS, or all of it if it is four or less.
// Goroutines that wait for a chunk spin for up to 150 µs, on half of GOMAXPROCS at most, and after
// a copy on a quarter. On hosts with several NUMA nodes workers run on the cores of the GPU's node.
//
// # Concurrency
//
// All methods may be called from any goroutine. Copies that run at once share the
// ring and the workers, chunk by chunk; an upload and a download use both directions of
// the link.
package transfer
