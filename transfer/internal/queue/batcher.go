// Package queue queues copies on streams: it batches them, finds the allocations that they are in, and bounds
// the threads that block meanwhile.
package queue

import (
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// Calls bounds the threads in calls that queue work on a stream, which block while the stream is full.
var Calls bounded.Each[cudart.Stream, bounded.Group]

// MaxBatch is the number of copies that one call queues. With ten times as many the call
// takes more than twice as long for each copy: see RATIONALE.md.
const MaxBatch = 1000

// A Batcher queues copies between host memory and the device on a stream: MaxBatch with one call
// (cudaMemcpyBatchAsync), where CUDA has that, and else each by a call.
type Batcher struct {
	on      *cudart.Stream
	batch   *cudart.CopyBatch
	down    bool
	Batches bool        // whether copies are batched
	Memory  Allocations // of the device
	last    batchedCopy // that was added to the batch
}

type batchedCopy struct {
	host   unsafe.Pointer
	device cudart.DevPtr
	n      int
}

// NewBatcher returns a Batcher that uses batch, whatever is in it.
func NewBatcher(on *cudart.Stream, batch *cudart.CopyBatch, down bool) Batcher {
	batch.Reset()
	return Batcher{on: on, batch: batch, down: down, Batches: on.Device().Runtime().Library().CopyBatch, Memory: Allocations{Device: on.Device()}}
}

// Add queues a copy of n bytes, or adds it to the batch. An address that is not known to be the device's is not
// for a batch: CUDA takes it for one of the host there, and reads or writes it.
func (b *Batcher) Add(host unsafe.Pointer, device cudart.DevPtr, n int) error {
	c := batchedCopy{host, device, n}
	switch {
	case !b.Batches:
		return b.single(c)
	case !b.Memory.Hold(device, n):
		if err := b.Flush(); err != nil {
			return err
		}
		return b.single(c)
	case b.down:
		b.batch.ToHost(host, device, n)
	default:
		b.batch.ToDevice(device, host, n)
	}
	b.last = c
	if b.batch.Len() < MaxBatch {
		return nil
	}
	return b.Flush()
}

// single queues a copy.
func (b *Batcher) single(c batchedCopy) error {
	if b.down {
		return b.on.CopyToHost(c.host, c.device, c.n)
	}
	return b.on.CopyToDevice(c.device, c.host, c.n)
}

// Flush queues the copies of the batch. One copy alone is quicker without a batch.
func (b *Batcher) Flush() error {
	defer b.batch.Reset()
	switch b.batch.Len() {
	case 0:
		return nil
	case 1:
		return b.single(b.last)
	}
	return b.on.CopyBatch(b.batch)
}
