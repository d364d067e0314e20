package transfer

import (
	"fmt"
	"runtime"
)

// Options shape a Copier. The zero value is what most programs want.
type Options struct {
	// Workers is how many goroutines copy at once, up to 1024. 0 means three
	// quarters of GOMAXPROCS, 16 at most, and all where that is four or less.
	Workers int
	// Chunk is the bytes of a slot of the ring: a multiple of 64 KiB, from 512
	// KiB to 1 GiB. 0 means 6 MiB, and 2 MiB for up to four workers. There are
	// two slots a worker.
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
	mostChunk            = 1024 * mib
	chunkUnit            = 64 * kib

	// One that the worker is at, and one for the copy engine.
	slotsAWorker = 2

	// A link is full with a dozen.
	mostDefaultWorkers = 16
	mostWorkers        = 1024

	// Small copies have a ring of their own, so that they do not wait for the
	// chunks of large ones.
	smallCopy  = chunkUnit
	smallSlots = 16
)

func (o Options) resolve() (Options, error) {
	switch {
	case o.Workers < 0 || o.Workers > mostWorkers:
		return o, fmt.Errorf("Options.Workers: %d: must be from 0 to %d", o.Workers, mostWorkers)
	case o.Chunk == 0:
	case o.Chunk < leastChunk || o.Chunk > mostChunk || o.Chunk%chunkUnit != 0:
		return o, fmt.Errorf("Options.Chunk: %d bytes: must be 0 or a multiple of %d from %d to %d", o.Chunk, chunkUnit, leastChunk, mostChunk)
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
	return min(procs*3/4, mostDefaultWorkers)
}
