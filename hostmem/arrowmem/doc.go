// Package arrowmem is an allocator for Apache Arrow in Go with pinned memory, so that
// Arrow's buffers are copied to a GPU and back at the speed of the link.
//
//	p, err := pool.New(dev, pool.Options{MaxBytes: 8 << 30})
//	a, err := arrowmem.New(p, arrowmem.Options{})
//	b := array.NewFloat32Builder(a) // of github.com/apache/arrow-go
//	…
//	err = copier.Upload(ctx, dst, column.Data().Buffers()[1].Bytes())
//
// An [Allocator] has the three methods of arrow-go's memory.Allocator. This package does
// not import arrow-go, and works with all versions of it. Small allocations share
// registrations of 2 to 32 MiB, as all small leases of a pool do.
//
// # Memory lifetime
//
// Arrow has the memory until Free, which it calls when the last reference to a buffer is
// released. The memory returns to the pool then, which reuses it when the GPU is done with
// it. Methods of package transfer return when the copy does not use the memory any more.
// For copies that are queued by other means, name their streams in Options.Streams.
package arrowmem
