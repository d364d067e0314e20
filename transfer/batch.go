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
	memory  allocations // of the device
	last    batchedCopy // that was added to the batch
}

type batchedCopy struct {
	host   unsafe.Pointer
	device cudart.DevPtr
	n      int
}

// newBatcher returns a batcher that uses batch, whatever is in it.
func newBatcher(on *cudart.Stream, batch *cudart.CopyBatch, down bool) batcher {
	batch.Reset()
	return batcher{on: on, batch: batch, down: down, batches: on.Device().Runtime().Library().CopyBatch, memory: allocations{dev: on.Device()}}
}

// add queues a copy of n bytes, or adds it to the batch. An address that is not known to be the device's is not
// for a batch: CUDA takes it for one of the host there, and reads or writes it.
func (b *batcher) add(host unsafe.Pointer, device cudart.DevPtr, n int) error {
	c := batchedCopy{host, device, n}
	switch {
	case !b.batches:
		return b.single(c)
	case !b.memory.hold(device, n):
		if err := b.flush(); err != nil {
			return err
		}
		return b.single(c)
	case b.down:
		b.batch.ToHost(host, device, n)
	default:
		b.batch.ToDevice(device, host, n)
	}
	b.last = c
	if b.batch.Len() < maxBatch {
		return nil
	}
	return b.flush()
}

// single queues a copy.
func (b *batcher) single(c batchedCopy) error {
	if b.down {
		return b.on.CopyToHost(c.host, c.device, c.n)
	}
	return b.on.CopyToDevice(c.device, c.host, c.n)
}

// flush queues the copies of the batch. One copy alone is quicker without a batch.
func (b *batcher) flush() error {
	defer b.batch.Reset()
	switch b.batch.Len() {
	case 0:
		return nil
	case 1:
		return b.single(b.last)
	}
	return b.on.CopyBatch(b.batch)
}
