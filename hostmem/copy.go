package hostmem

import (
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// CopyToDevice queues a copy of n bytes at offset off to the device
// (cudaMemcpyAsync, once for each span that it touches). The bytes must not
// change before the stream has passed the copy.
func (b *Buffer) CopyToDevice(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
	return b.copy(s, "to device", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(skip), at, n)
	})
}

// CopyFromDevice queues a copy of n bytes from the device to offset off
// (cudaMemcpyAsync, once for each span that it touches). Until the stream has
// passed the copy the buffer holds old bytes, or some of each: synchronise
// before reading.
func (b *Buffer) CopyFromDevice(s *cudart.Stream, off int, src cudart.DevPtr, n int) error {
	return b.copy(s, "from device", off, n, func(at unsafe.Pointer, skip, n int) error {
		return s.CopyToHost(at, src+cudart.DevPtr(skip), n)
	})
}

func (b *Buffer) copy(s *cudart.Stream, what string, off, n int, one func(at unsafe.Pointer, skip, n int) error) error {
	if off < 0 || n < 0 || off > b.Len()-n {
		return fmt.Errorf("hostmem: copy %s: bytes %d to %d are not all within %v", what, off, off+n, b)
	}
	b.use.RLock()
	defer b.use.RUnlock()
	if b.closed {
		return fmt.Errorf("hostmem: copy %s: %v: %w", what, b, ErrClosed)
	}
	b.streams.add(s)
	base := b.pinned.base
	if len(b.spans) == 1 {
		return one(unsafe.Add(base, off), 0, n)
	}
	return pieces(b.spans, off, n, func(at, n int) error {
		return one(unsafe.Add(base, at), at-off, n)
	})
}
