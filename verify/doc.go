// Package verify proves that bytes survive the way to the GPU and back.
//
// [Run] sends patterns through every kind of host memory that programs use:
// hostmem's pinned buffers, registered memory, cudaHostAlloc, Go heap memory,
// memory that the device maps, and managed memory, in place and moved by
// prefetches; and through every method of a [transfer.Copier]. With Plan.Peer the bytes go
// by another device, too. Sizes go from one byte over odd ones and page edges to
// gigabytes, with unaligned ends, on one and on several streams.
//
//	report, err := verify.Run(ctx, dev, verify.Plan{Full: true})
//	if err == nil {
//		err = report.Err()
//	}
//
// # What makes it a proof
//
// The bytes expected are computed from the pattern at each offset, not taken
// from a copy of what was sent. Before each round trip the memory on the device
// and the memory that receives are filled with bytes which are wrong at every
// place, with a different value for each, so that a copy that did nothing is
// detected, and which one it was. Guards around every target show bytes written
// outside.
//
// # What a mismatch shows
//
// A [Mismatch] has the place of the first wrong byte, how many are wrong,
// whether they start and end at pages of one of the addresses or have one
// distance, and what they are: the old bytes of a target that a copy did
// not reach, the right bytes of another place, or one value.
//
// # Memory lifetime
//
// Run and StaleRead release what they allocate before they return or panic.
// Memory that the GPU may still be using, because a copy does not end or because
// CUDA does not return whether it has, stays allocated, and so does what CUDA refuses
// twice to release. The error has how much stays.
//
// # Synchronising
//
// [StaleRead] shows what reading the target of an asynchronous copy before
// synchronising gives: old bytes, without an error from any call.
package verify
