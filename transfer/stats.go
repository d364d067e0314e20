package transfer

import "sync/atomic"

// Stats tell what a copier did so far, and by which way.
type Stats struct {
	Copies   int // calls of methods that copy, and had something to
	Failures int // of them
	// Bytes that went through the ring, that were pinned and needed none, and
	// that were part of copies in batches.
	StagedBytes, DirectBytes, BatchedBytes int
	// RingBytes are pinned as long as the copier is open.
	RingBytes int
}

type counters struct {
	copies, failures, stagedBytes, directBytes, batchedBytes atomic.Int64
}

// Stats returns what was done so far by c and all copiers it shares with.
func (c *Copier) Stats() Stats {
	return Stats{
		Copies:       int(c.stats.copies.Load()),
		Failures:     int(c.stats.failures.Load()),
		StagedBytes:  int(c.stats.stagedBytes.Load()),
		DirectBytes:  int(c.stats.directBytes.Load()),
		BatchedBytes: int(c.stats.batchedBytes.Load()),
		RingBytes:    c.large.buf.Kept() + c.small.buf.Kept(),
	}
}
