package cudart

import (
	"fmt"
	"unsafe"
)

// batchSince is the first version of library and driver that copies batches.
const batchSince Version = 12080

// A CopyBatch is a list of copies that [Stream.CopyBatch] queues with one call.
// The zero value is an empty list. It may be queued again as it is, or filled
// anew after Reset, which keeps its room. It is not for several goroutines at
// once.
type CopyBatch struct {
	// What C reads during the call: three arrays, and one set of attributes
	// that goes for all copies from index 0 on.
	dsts, srcs []uintptr
	sizes      []int
	attributes copyAttributes
	from       uintptr

	err error // the first copy that cannot be
}

// copyAttributes is cudaMemcpyAttributes. The hints are for memory that CUDA
// does not know, and copies here have none.
type copyAttributes struct {
	order            int32 // 1: sources are read in the order of the stream
	srcHint, dstHint [2]int32
	flags            uint32
}

// ToDevice adds a copy of n bytes from pinned host memory to the device. What
// is said of src at [Stream.CopyToDevice] goes for it. No bytes are no copy.
func (b *CopyBatch) ToDevice(dst DevPtr, src unsafe.Pointer, n int) {
	b.add(uintptr(dst), uintptr(src), n)
}

// ToHost adds a copy of n bytes from the device into pinned host memory. What
// is said of dst at [Stream.CopyToHost] goes for it. No bytes are no copy.
func (b *CopyBatch) ToHost(dst unsafe.Pointer, src DevPtr, n int) {
	b.add(uintptr(dst), uintptr(src), n)
}

// OnDevice adds a copy of n bytes between places that the device reaches. No
// bytes are no copy.
func (b *CopyBatch) OnDevice(dst, src DevPtr, n int) {
	b.add(uintptr(dst), uintptr(src), n)
}

// add leaves copies of nothing out, which CUDA refuses in batches only.
func (b *CopyBatch) add(dst, src uintptr, n int) {
	switch {
	case n == 0:
		return
	case n < 0 && b.err == nil:
		b.err = invalid(fnMemcpyBatch, "copy %d, from %#x to %#x: size %d: must not be negative", len(b.sizes), src, dst, n)
	}
	b.dsts, b.srcs, b.sizes = append(b.dsts, dst), append(b.srcs, src), append(b.sizes, n)
}

// Len returns the number of copies.
func (b *CopyBatch) Len() int { return len(b.sizes) }

// Reset makes the list empty.
func (b *CopyBatch) Reset() {
	b.dsts, b.srcs, b.sizes, b.err = b.dsts[:0], b.srcs[:0], b.sizes[:0], nil
}

// copy describes copy i.
func (b *CopyBatch) copy(i int) string {
	return fmt.Sprintf("copy %d of %d: %d bytes from %#x to %#x", i, len(b.sizes), b.sizes[i], b.srcs[i], b.dsts[i])
}

// CanCopyBatch tells whether library and driver have what [Stream.CopyBatch]
// needs: CUDA 12.8 or later.
func (rt *Runtime) CanCopyBatch() bool {
	return rt.entry[fnMemcpyBatch] != 0 && rt.lib.Driver >= batchSince
}

// CopyBatch queues all copies of a list with one call (cudaMemcpyBatchAsync).
// They run in the order of the stream as a whole, and among each other in none:
// no copy may touch what another one writes. The list itself may be changed as
// soon as CopyBatch returns, the memory not before the stream has passed it.
//
// A library before 12.8 gives [ErrUnsupported], an older driver
// [ErrCallRequiresNewerDriver]: ask [Runtime.CanCopyBatch]. After an error some
// of the copies may have been queued; it tells which one was refused where the
// library does (before 13.0). An empty list is nothing to do.
func (s *Stream) CopyBatch(b *CopyBatch) error {
	const streamOrder = 1
	rt := s.dev.rt
	if b.err != nil {
		return b.err
	}
	if b.Len() == 0 {
		return nil
	}
	if rt.debug {
		if err := s.dev.checkBatch(b); err != nil {
			return err
		}
	}
	f := s.dev.begin(s)
	b.attributes.order = streamOrder
	f.host = unsafe.Pointer(b)
	f.args = [9]uintptr{
		uintptr(unsafe.Pointer(&b.dsts[0])), uintptr(unsafe.Pointer(&b.srcs[0])), uintptr(unsafe.Pointer(&b.sizes[0])), uintptr(b.Len()),
		uintptr(unsafe.Pointer(&b.attributes)), uintptr(unsafe.Pointer(&b.from)), 1, s.arg(),
	}
	f.out[0] = uint64(b.Len()) // none of the copies
	if rt.abi[fnMemcpyBatch] == abiFailIndex {
		f.args[7], f.args[8] = f.outPtr(0), s.arg()
	}
	code := s.dev.guard(fnMemcpyBatch, f)
	failed := f.out[0]
	rt.end(f)
	switch {
	case code == Success:
		return nil
	case failed < uint64(b.Len()):
		return rt.errorf(fnMemcpyBatch, code, "%s on %v", b.copy(int(failed)), s.dev)
	}
	return rt.errorf(fnMemcpyBatch, code, "%d copies on %v", b.Len(), s.dev)
}

// checkBatch is checkPinned for every copy. Either side may be the host's.
func (d *Device) checkBatch(b *CopyBatch) error {
	for i, n := range b.sizes {
		for _, at := range [2]uintptr{b.dsts[i], b.srcs[i]} {
			if err := d.checkPinned(fnMemcpyBatch, at, n); err != nil {
				return fmt.Errorf("%s: %w", b.copy(i), err)
			}
		}
	}
	return nil
}
