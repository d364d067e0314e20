// Package pool keeps pinned host memory for reuse.
//
//	p, err := pool.New(dev, pool.Options{MaxBytes: 8 << 30})
//	l, err := p.Get(ctx, n)
//	copy(l.Bytes(), data)
//	err = l.CopyToDevice(stream, dst, 0, n) // returns before it ran
//	err = l.Release()                       // the copy may still be running
//	err = p.Close()
//
// Pinning 1 MiB takes some hundred microseconds, getting it from a pool less
// than a tenth of one.
//
// # Memory lifetime
//
// [Pool.Get] returns a [Lease], which has its memory until [Lease.Release].
// Release may be called while the GPU still works on the memory: the pool
// records where that work ends in each stream, and reuses the memory, or unmaps it, only when
// the GPU has passed that point. It knows the streams of the lease's own copies; streams on
// which other work on the memory was queued are given to Release.
//
// # Sizes
//
// Blocks below 2 MiB are cut from shared registrations of 2 to 32 MiB; n bytes
// take less than 64 bytes, or an eighth, more. From 2 MiB on a block is a
// registration of its own, as large as requested, to a page, and is reused for
// requests that leave less than an eighth of it unused.
//
// # Limits
//
// Options.MaxBytes bounds the pinned memory of the pool, and hostmem.SetLimits that of the
// process. At a limit Get waits until memory is released, or its context ends, and
// [Pool.TryGet] returns an error. Idle memory is unmapped after Options.IdleTime, by
// [Pool.Trim], and when other requests of the process wait for its limit.
//
// # Threads
//
// Everything may be called from any goroutine.
package pool
