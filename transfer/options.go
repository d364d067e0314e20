package transfer

import (
	"fmt"
	"runtime"

	"github.com/gopinned/pinned/cudart"
)

// Options shape a copier. The zero value is what most programs want.
type Options struct {
	// Workers is how many goroutines copy at once. 0 means three quarters of
	// GOMAXPROCS, 16 at most, and all where that is four or less.
	Workers int
	// Chunk is the bytes of a slot of the ring, a multiple of 64 KiB from 512 KiB
	// on. 0 means 6 MiB, and 2 MiB for up to four workers. There are two slots a
	// worker.
	Chunk int
	// Label is shown where pinned memory is accounted for.
	Label string
}

const (
	kib = 1 << 10
	mib = 1 << 20

	// A copy's start costs the link as much as 300 KiB: on an H200 chunks of 2,
	// 4, 6 and 8 MiB reach 43, 50, 51.5 and 52 GB/s.
	defaultChunk = 6 * mib
	// A few workers cannot fill the link, and gain by what stays in their caches.
	fewWorkers, fewChunk = 4, 2 * mib
	leastChunk           = 512 * kib
	chunkUnit            = 64 * kib

	// One that the worker is at, and one for the copy engine.
	slotsAWorker = 2

	// A link is full with a dozen.
	mostWorkers = 16

	// Small copies have a ring of their own, so that they do not wait for the
	// chunks of large ones.
	smallCopy  = chunkUnit
	smallSlots = 16
)

func (o Options) resolve() (Options, error) {
	if o.Workers < 0 || o.Chunk < 0 || o.Chunk%chunkUnit != 0 || o.Chunk != 0 && o.Chunk < leastChunk {
		return o, fmt.Errorf("%d workers, chunks of %d bytes: must not be negative, chunks a multiple of %d and no less than %d", o.Workers, o.Chunk, chunkUnit, leastChunk)
	}
	if o.Workers == 0 {
		o.Workers = defaultWorkers(runtime.GOMAXPROCS(0))
	}
	if o.Chunk == 0 {
		o.Chunk = defaultChunk
		if o.Workers <= fewWorkers {
			o.Chunk = fewChunk
		}
	}
	if o.Label == "" {
		o.Label = "transfer ring"
	}
	return o, nil
}

func defaultWorkers(procs int) int {
	if procs <= 4 {
		return procs
	}
	return min(procs*3/4, mostWorkers)
}

// A Call shapes single copies: see [Copier.With].
type Call struct {
	// Stream makes the copy work of this stream, of the copier's device.
	Stream *cudart.Stream
	// Progress is called now and then with the bytes done of all: one call at
	// a time, from any goroutine, the last one with all of them if the copy
	// succeeds.
	Progress func(done, total int)
	// DirectIO reads and writes files past the page cache (O_DIRECT), where
	// the file system can: what is read once, and is larger than memory, then
	// leaves the cache to others.
	DirectIO bool
}
