package loader

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"

	"github.com/gopinned/pinned/internal/bounded"
)

// Options shape a loader. Only BatchSize has to be set.
type Options struct {
	// BatchSize is the number of samples of a batch, 1 at least.
	BatchSize int
	// Workers is how many goroutines read samples. 0 means three quarters of
	// GOMAXPROCS, and all if that is four or less, which is right for samples in
	// memory; sources that wait want as many as they can have in flight, hundreds
	// or thousands.
	Workers int
	// MaxTransforms is how many of the workers are in [Transformer].Transform at
	// once, at the most. 0 means GOMAXPROCS.
	MaxTransforms int
	// Prefetch is how many batches are filled or copied ahead of the consumer. 0
	// means as many as the workers can be at and 64 MiB more, but at least three
	// and at most 256 more, and no more than an epoch has.
	Prefetch int
	// MaxBytes bounds the bytes of pinned memory, and those of device memory:
	// fewer batches are filled ahead then, but two at least. 0 is no bound.
	MaxBytes int

	// Unordered gives batches as they are complete, so that a slow sample delays
	// its own batch only.
	Unordered bool
	// Shuffle gives the samples of each epoch in a random order of its own, which
	// Seed and the epoch decide, on any machine. The order takes no memory.
	Shuffle bool
	// Seed decides the orders of Shuffle.
	Seed uint64
	// DropLast leaves out the last batch of an epoch if it is not full. With
	// fewer samples than BatchSize an epoch has no batch then.
	DropLast bool
	// Start is where to go on: the Position of the last batch that was used, with
	// the same samples, BatchSize, DropLast, Shuffle and Seed.
	Start Position

	// Retries is how often a sample that failed is tried again, from reading on.
	Retries int
	// SkipErrors leaves out samples that fail, and counts them; their batches
	// are shorter. Otherwise the first one ends the epoch.
	SkipErrors bool

	// Label names the pinned memory where hostmem lists it.
	Label string
}

// fieldAlign is what every field of a batch is aligned to on the device, as
// cudaMalloc aligns.
const fieldAlign = 256

const (
	// aheadBytes keep a link full while a worker wakes up.
	aheadBytes = 64 << 20
	// aheadBatches bounds what has to be searched, and the events that are created.
	aheadBatches = 256
	// blockBytes take the workers longer to fill than one of them to wake up.
	blockBytes = 1 << 20
	// inBlocks is into how many blocks the memory is divided at least: one is filled,
	// one is open after it, one is being copied, and one is with the consumer.
	inBlocks = 4
	// maxWorkers is a million goroutines, which take some GiB.
	maxWorkers = 1 << 20
)

// A layout is where the fields of a batch lie.
type layout struct {
	sizes   []int // bytes of each field of a sample
	offsets []int // of each field of a batch
	samples int   // that there is room for
	bytes   int   // of a batch
	block   int   // batches that are opened at once, at the most
}

func newLayout(sizes []int, samples int) (layout, error) {
	l := layout{sizes: sizes, samples: samples}
	if len(sizes) == 0 {
		return l, errors.New("the source has no fields")
	}
	for i, n := range sizes {
		if n <= 0 {
			return l, fmt.Errorf("field %d of the source has %d bytes: must be positive", i, n)
		}
		if n > (math.MaxInt-fieldAlign-l.bytes)/samples {
			return l, fmt.Errorf("field %d of the source has %d bytes: too many for a batch of %d samples", i, n, samples)
		}
		l.offsets = append(l.offsets, l.bytes)
		l.bytes += (n*samples + fieldAlign - 1) / fieldAlign * fieldAlign
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

// claimSize returns the samples that a worker claims at a time in a block of batches: one if
// there are many workers, and a share of the block if a few would meet all the time.
func (l layout) claimSize(batches, workers int) int {
	return max(1, min(batches*l.samples/(2*workers), l.samples))
}

// resolve checks the options and sets those that are 0.
func (o Options) resolve(src Source) (Options, layout, error) {
	for _, option := range []struct {
		name string
		n    int
	}{
		{"Options.Workers", o.Workers}, {"Options.MaxTransforms", o.MaxTransforms}, {"Options.Prefetch", o.Prefetch},
		{"Options.MaxBytes", o.MaxBytes}, {"Options.Retries", o.Retries},
	} {
		if option.n < 0 {
			return o, layout{}, fmt.Errorf("%s is %d: must not be negative", option.name, option.n)
		}
	}
	if o.BatchSize <= 0 {
		return o, layout{}, fmt.Errorf("Options.BatchSize is %d: must be positive", o.BatchSize)
	}
	n, fields, err := shape(src)
	if err != nil {
		return o, layout{}, fmt.Errorf("Len or Fields of the source: %w", err)
	}
	if n <= 0 {
		return o, layout{}, errors.New("the source has no samples")
	}
	l, err := newLayout(fields, min(o.BatchSize, n))
	if err != nil {
		return o, l, err
	}
	if o.Workers == 0 {
		o.Workers = defaultWorkers(runtime.GOMAXPROCS(0))
	}
	o.Workers = min(o.Workers, n)
	if o.Workers > maxWorkers {
		return o, l, fmt.Errorf("Options.Workers is %d: at most %d", o.Workers, maxWorkers)
	}
	if o.MaxTransforms == 0 {
		o.MaxTransforms = runtime.GOMAXPROCS(0)
	}
	o.MaxTransforms = min(o.MaxTransforms, o.Workers)
	if o.Prefetch == 0 {
		ahead := o.Workers*l.claimSize(1, o.Workers)/l.samples + min(max(aheadBytes/l.bytes, 3), aheadBatches)
		o.Prefetch = min(ahead, n/l.samples+1)
	}
	if o.Prefetch > math.MaxInt/l.bytes-1 {
		return o, l, fmt.Errorf("Options.Prefetch is %d: too many batches of %d bytes", o.Prefetch, l.bytes)
	}
	if o.MaxBytes > 0 {
		fit := o.MaxBytes / l.bytes
		if fit < 2 {
			return o, l, fmt.Errorf("Options.MaxBytes is %d: two batches of %d bytes do not fit", o.MaxBytes, l.bytes)
		}
		o.Prefetch = min(o.Prefetch, fit-1)
	}
	l.block = max(1, min(blockBytes/l.bytes, o.slots()/inBlocks))
	if o.Label == "" {
		o.Label = "loader"
	}
	return o, l, nil
}

// shape returns the number of samples of a source, and their fields. A source that is a nil
// pointer may panic.
func shape(src Source) (n int, fields []int, err error) {
	defer bounded.Recovered(&err)
	return src.Len(), slices.Clone(src.Fields()), nil
}

// slots are batches in memory at once: one is the consumer's.
func (o Options) slots() int { return o.Prefetch + 1 }

func defaultWorkers(procs int) int {
	if procs <= 4 {
		return procs
	}
	return procs * 3 / 4
}
