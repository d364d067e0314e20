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
}

// newBatcher returns a batcher that uses batch, whatever is in it.
func newBatcher(on *cudart.Stream, batch *cudart.CopyBatch, down bool) batcher {
	batch.Reset()
	return batcher{on, batch, down, on.Device().Runtime().CanCopyBatch()}
}

// add queues a copy of n bytes, or adds it to the batch.
func (b *batcher) add(host unsafe.Pointer, device cudart.DevPtr, n int) error {
	switch {
	case b.batches && b.down:
		b.batch.ToHost(host, device, n)
	case b.batches:
		b.batch.ToDevice(device, host, n)
	case b.down:
		return b.on.CopyToHost(host, device, n)
	default:
		return b.on.CopyToDevice(device, host, n)
	}
	if b.batch.Len() < maxBatch {
		return nil
	}
	return b.flush()
}

// flush queues the copies of the batch.
func (b *batcher) flush() error {
	defer b.batch.Reset()
	return b.on.CopyBatch(b.batch)
}
