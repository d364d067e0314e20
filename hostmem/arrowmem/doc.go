// Package arrowmem is an allocator for Apache Arrow in Go whose memory is pinned, so that
// copies of Arrow's buffers to a GPU and back run at the speed of the link.
//
//	p, err := pool.New(dev, pool.Options{MaxBytes: 8 << 30})
//	a, err := arrowmem.New(p, arrowmem.Options{})
//	b := array.NewFloat32Builder(a) // of github.com/apache/arrow-go
//	…
//	err = copier.Upload(ctx, dst, column.Data().Buffers()[1].Bytes())
//
// An [Allocator] has the three methods of arrow-go's memory.Allocator. This package does
// not import arrow-go, and works with all of its versions.
//
// # Memory lifetime
//
// Memory is Arrow's until Free, which Arrow calls when the last reference to a buffer is
// released. It then returns to the pool, which reuses it when the GPU is done with it as
// well. Methods of package transfer return when they do not need the memory any more. For
// copies that were queued by other means, name their streams in Options.Streams.
package arrowmem
