package transfer

import (
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// maxBatch is the number of copies that one call queues. With ten times as many the call
// takes more than twice as long for each copy: see RATIONALE.md.
const maxBatch = 1000

// A batcher queues copies between host memory and the device on a stream: maxBatch with one call
// (cudaMemcpyBatchAsync), where CUDA has that, and else each by a call.
type batcher struct {
	on      *cudart.Stream
	batch   *cudart.CopyBatch
	down    bool
	batches bool
	last    struct { // copy that was added
		host   unsafe.Pointer
		device cudart.DevPtr
		n      int
	}
}

// newBatcher returns a batcher that uses batch, whatever is in it.
func newBatcher(on *cudart.Stream, batch *cudart.CopyBatch, down bool) batcher {
	batch.Reset()
	return batcher{on: on, batch: batch, down: down, batches: on.Device().Runtime().CanCopyBatch()}
}

// add queues a copy of n bytes, or adds it to the batch.
func (b *batcher) add(host unsafe.Pointer, device cudart.DevPtr, n int) error {
	b.last.host, b.last.device, b.last.n = host, device, n
	switch {
	case !b.batches:
		return b.single()
	case b.down:
		b.batch.ToHost(host, device, n)
	default:
		b.batch.ToDevice(device, host, n)
	}
	if b.batch.Len() < maxBatch {
		return nil
	}
	return b.flush()
}

// single queues the last copy.
func (b *batcher) single() error {
	if b.down {
		return b.on.CopyToHost(b.last.host, b.last.device, b.last.n)
	}
	return b.on.CopyToDevice(b.last.device, b.last.host, b.last.n)
}

// flush queues the copies of the batch. One copy alone is quicker without a batch.
func (b *batcher) flush() error {
	defer b.batch.Reset()
	if b.batch.Len() == 1 {
		return b.single()
	}
	return b.on.CopyBatch(b.batch)
}
