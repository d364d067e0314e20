package cudart

import (
	"fmt"
	"unsafe"
)

// batchSince is the first version of library and driver with batches of copies.
const batchSince Version = 12080

// A CopyBatch is a list of copies that [Stream.CopyBatch] queues with one call. The
// zero value is an empty list. A list may be queued several times. Only one goroutine
// may use it at a time.
type CopyBatch struct {
	// What C reads during the call: three arrays, and one set of attributes for
	// all copies from index 0 on.
	dsts, srcs []uintptr
	sizes      []int
	attributes copyAttributes
	from       uintptr

	err error // of the first copy with a negative size
}

// copyAttributes is cudaMemcpyAttributes. The hints are for memory that is not
// CUDA's, and stay 0.
type copyAttributes struct {
	order            int32 // 1: sources are read in the stream's order
	srcHint, dstHint [2]int32
	flags            uint32
}

// ToDevice adds a copy of n bytes from pinned host memory to device memory. The
// requirements of [Stream.CopyToDevice] apply. A copy of 0 bytes is ignored; if
// n < 0, [Stream.CopyBatch] returns an error.
func (b *CopyBatch) ToDevice(dst DevPtr, src unsafe.Pointer, n int) {
	b.add(uintptr(dst), uintptr(src), n)
}

// ToHost adds a copy of n bytes from device memory to pinned host memory. The
// requirements of [Stream.CopyToHost] apply. A copy of 0 bytes is ignored; if n < 0,
// [Stream.CopyBatch] returns an error.
func (b *CopyBatch) ToHost(dst unsafe.Pointer, src DevPtr, n int) {
	b.add(uintptr(dst), uintptr(src), n)
}

// add ignores copies of 0 bytes, because CUDA refuses them in batches.
func (b *CopyBatch) add(dst, src uintptr, n int) {
	switch {
	case n == 0 || b == nil: // queueing a nil batch is an error
		return
	case n < 0 && b.err == nil:
		b.err = invalid(fnMemcpyBatch, "copy %d, from %#x to %#x: size %d: must not be negative", len(b.sizes), src, dst, n)
	}
	b.dsts, b.srcs, b.sizes = append(b.dsts, dst), append(b.srcs, src), append(b.sizes, n)
}

// Len returns the number of copies.
func (b *CopyBatch) Len() int {
	if b == nil {
		return 0
	}
	return len(b.sizes)
}

// Reset makes the list empty, and keeps its memory for the next copies.
func (b *CopyBatch) Reset() {
	if b == nil {
		return
	}
	b.dsts, b.srcs, b.sizes, b.err = b.dsts[:0], b.srcs[:0], b.sizes[:0], nil
}

// copy describes copy i, for messages.
func (b *CopyBatch) copy(i int) string {
	return fmt.Sprintf("copy %d of %d: %d bytes from %#x to %#x", i, len(b.sizes), b.sizes[i], b.srcs[i], b.dsts[i])
}

// CopyBatch queues all copies of a list with one call (cudaMemcpyBatchAsync, of CUDA
// 12.8 or later). An empty list is ignored. The batch as a whole has its place in the
// stream's order; its copies run in any order, so none may use bytes that another one
// writes. When CopyBatch returns, the list may be changed; the memory may not, until
// the stream has passed the batch. On a default stream, where CUDA refuses batches, the
// copies are queued one by one.
//
// The error wraps [errors.ErrUnsupported] if the library is older than 12.8,
// [ErrCallRequiresNewerDriver] if the driver is (see [Library]), and
// [ErrInvalidValue] if a copy has a negative size or runs past its memory; libraries
// before 13.0 say which copy it is. After an error some copies may have been queued.
func (s *Stream) CopyBatch(b *CopyBatch) error {
	const streamOrder = 1
	switch {
	case !s.made():
		return notMade(fnMemcpyBatch)
	case b == nil:
		return fmt.Errorf("cudaMemcpyBatchAsync: %v: the batch is nil", s)
	case b.err != nil:
		return b.err
	case b.Len() == 0:
		return nil
	}
	if err := s.dev.checkBatch(b); err != nil {
		return err
	}
	if s.isDefault() {
		for i, n := range b.sizes {
			if err := s.dev.copy(s, b.dsts[i], b.srcs[i], nil, n, byAddress); err != nil {
				return fmt.Errorf("%s: %w", b.copy(i), err)
			}
		}
		return nil
	}
	rt, f := s.dev.rt, s.dev.begin(s)
	f.entries = b.Len()
	b.attributes.order = streamOrder
	f.host = unsafe.Pointer(b)
	f.args = [maxCallArgs]uintptr{
		uintptr(unsafe.Pointer(&b.dsts[0])), uintptr(unsafe.Pointer(&b.srcs[0])), uintptr(unsafe.Pointer(&b.sizes[0])), uintptr(b.Len()),
		uintptr(unsafe.Pointer(&b.attributes)), uintptr(unsafe.Pointer(&b.from)), 1, s.arg(),
	}
	f.out[0] = uint64(b.Len()) // none of the copies
	if rt.abi[fnMemcpyBatch] == abiFailIndex {
		f.args[7], f.args[8] = f.outPtr(0), s.arg()
	}
	_, err := s.dev.do(fnMemcpyBatch, f, func() string {
		if failed := f.out[0]; failed < uint64(b.Len()) {
			return fmt.Sprintf("%s on %v", b.copy(int(failed)), s.dev)
		}
		return fmt.Sprintf("%d copies on %v", b.Len(), s.dev)
	})
	return err
}

// checkBatch is checkPinned for every copy, on both sides: device memory passes.
func (d *Device) checkBatch(b *CopyBatch) error {
	if !d.rt.debug {
		return nil
	}
	for i, n := range b.sizes {
		for _, at := range [2]uintptr{b.dsts[i], b.srcs[i]} {
			if err := d.checkPinned(fnMemcpyBatch, at, n); err != nil {
				return fmt.Errorf("%s: %w", b.copy(i), err)
			}
		}
	}
	return nil
}
