// Package verify proves that copies to the GPU and back keep every byte.
//
// [Run] sends patterns through every kind of host memory that programs use: hostmem's pinned
// buffers, registered memory, cudaHostAlloc, Go heap memory, memory that the device maps, and
// managed memory, in place and moved by prefetches; and through every method of a
// [transfer.Copier]. With Plan.Peer the bytes also pass through another device. Sizes go from one
// byte over odd ones and page edges to gigabytes, with unaligned ends, on one and on several
// streams.
//
//	report, err := verify.Run(ctx, dev, verify.Plan{Full: true})
//	if err == nil {
//		err = report.Err()
//	}
//
// # What makes it a proof
//
// The expected bytes are computed from the pattern at each offset, not taken
// from a copy of the sent bytes. Before each round trip every target is filled with
// poison: bytes that differ from the expected ones at every offset, and between
// targets. So a copy that did nothing is detected and named. Guards around every
// target show bytes written outside.
//
// Device memory is filled by a copy too, which the verified copy overwrites: a byte that is flipped
// during the fill shows only in a guard. Two thirds of the bytes that cross the link are compared.
//
// # What a mismatch shows
//
// A [Mismatch] has the offset of the first mismatched byte, their number, whether they
// start and end at pages of one of the addresses or at one distance, and a [Cause]: the
// poison of a target that a copy did not reach, the expected bytes of another offset, or
// one value.
//
// # Memory lifetime
//
// Run and StaleRead release what they allocate before they return or panic. Memory stays
// allocated if the GPU may still use it, because a copy does not end or CUDA does not
// report that it has, and if CUDA refuses twice to release it. The error has the number of
// bytes.
//
// # Synchronising
//
// [StaleRead] reads the target of an asynchronous copy before it synchronizes: it gets old
// bytes, and no call returns an error.
package verify
