package loader

import (
	"errors"
	"fmt"
	"math"
	"runtime"
)

// Options shape a loader. Only BatchSize has to be set.
type Options struct {
	// BatchSize is the samples of a batch.
	BatchSize int
	// Workers is how many goroutines read samples. 0 means three quarters of
	// GOMAXPROCS, and all where that is four or less, which is right for samples in
	// memory; sources that wait want as many as they can have in flight, hundreds
	// or thousands.
	Workers int
	// Computing is how many of them run [Transformer].Transform at once. 0 means
	// GOMAXPROCS.
	Computing int
	// Prefetch is how many batches are filled or copied ahead of the consumer. 0
	// means as many as the workers can be at and 64 MiB more, but three more at
	// least and 64 at most, and no more than an epoch has.
	Prefetch int
	// MaxBytes bounds the pinned memory, and the device's: fewer batches are
	// then filled ahead, two at least. 0 is no bound.
	MaxBytes int

	// Unordered gives batches as they are complete, so that a slow sample holds
	// up its own batch only.
	Unordered bool
	// Shuffle draws the samples of each epoch in an order of its own, which
	// Seed and the epoch decide, on any machine.
	Shuffle bool
	Seed    uint64
	// DropLast leaves out the last batch if it is not full.
	DropLast bool
	// Start is where to go on: the Position of the last batch that was used.
	Start Position

	// Retries is how often a sample that failed is tried again, from reading on.
	Retries int
	// SkipErrors leaves out samples that fail, and counts them; their batches
	// are shorter. Otherwise the first one ends the epoch.
	SkipErrors bool

	// Label is shown where pinned memory is accounted for.
	Label string
}

// fieldAlign is what every field of a batch is aligned to on the device, as
// cudaMalloc aligns.
const fieldAlign = 256

// aheadBytes keep a link full in spite of all that has to wake up for a batch.
const aheadBytes = 64 << 20

// A layout is where the fields of a batch lie.
type layout struct {
	sizes   []int // bytes of each field of a sample
	offsets []int // of each field of a batch
	bytes   int   // of a batch
}

func newLayout(sizes []int, batch int) (layout, error) {
	l := layout{sizes: sizes}
	if len(sizes) == 0 {
		return l, errors.New("the source has no fields")
	}
	for i, n := range sizes {
		if n <= 0 {
			return l, fmt.Errorf("field %d of the source has %d bytes: must be positive", i, n)
		}
		if n > (math.MaxInt-fieldAlign-l.bytes)/batch {
			return l, fmt.Errorf("field %d of the source has %d bytes: too many for a batch of %d samples", i, n, batch)
		}
		l.offsets = append(l.offsets, l.bytes)
		l.bytes += (n*batch + fieldAlign - 1) / fieldAlign * fieldAlign
	}
	return l, nil
}

// sample is the bytes of a sample.
func (l layout) sample() int {
	n := 0
	for _, size := range l.sizes {
		n += size
	}
	return n
}

func (o Options) resolve(src Source) (Options, layout, error) {
	for name, n := range map[string]int{
		"Workers": o.Workers, "Computing": o.Computing, "Prefetch": o.Prefetch, "MaxBytes": o.MaxBytes, "Retries": o.Retries,
		"Start.Epoch": o.Start.Epoch, "Start.Batch": o.Start.Batch,
	} {
		if n < 0 {
			return o, layout{}, fmt.Errorf("%s %d: must not be negative", name, n)
		}
	}
	if o.BatchSize <= 0 {
		return o, layout{}, fmt.Errorf("batch size %d: must be positive", o.BatchSize)
	}
	if src.Len() <= 0 {
		return o, layout{}, errors.New("the source has no samples")
	}
	o.BatchSize = min(o.BatchSize, max(src.Len(), 1))
	l, err := newLayout(src.Fields(), o.BatchSize)
	if err != nil {
		return o, l, err
	}
	if o.Workers == 0 {
		o.Workers = defaultWorkers(runtime.GOMAXPROCS(0))
	}
	o.Workers = min(o.Workers, src.Len())
	if o.Computing == 0 {
		o.Computing = runtime.GOMAXPROCS(0)
	}
	o.Computing = min(o.Computing, o.Workers)
	if o.Prefetch == 0 {
		ahead := o.Workers*o.grain()/o.BatchSize + min(max(aheadBytes/l.bytes, 3), 64)
		o.Prefetch = min(ahead, src.Len()/o.BatchSize+1)
	}
	if o.Prefetch > math.MaxInt/l.bytes-1 {
		return o, l, fmt.Errorf("prefetch of %d: too many batches of %d bytes", o.Prefetch, l.bytes)
	}
	if o.MaxBytes > 0 {
		fit := o.MaxBytes / l.bytes
		if fit < 2 {
			return o, l, fmt.Errorf("limit of %d bytes: two batches of %d bytes do not fit", o.MaxBytes, l.bytes)
		}
		o.Prefetch = min(o.Prefetch, fit-1)
	}
	if o.Label == "" {
		o.Label = "loader"
	}
	return o, l, nil
}

// grain is how many samples a worker claims at a time: one where there are many
// workers, and a share of a batch where a few would meet all the time.
func (o Options) grain() int { return max(1, o.BatchSize/(2*o.Workers)) }

// slots are batches in memory at once: one is the consumer's.
func (o Options) slots() int { return o.Prefetch + 1 }

func defaultWorkers(procs int) int {
	if procs <= 4 {
		return procs
	}
	return procs * 3 / 4
}
