package loader

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// Options configure a loader. Only BatchSize must be set.
type Options struct {
	// BatchSize is the number of samples of a batch, at least 1.
	BatchSize int
	// Workers is the number of goroutines that read samples, at most 2^20. 0 means
	// GOMAXPROCS, and three quarters of it if it is more than 4: enough for samples in
	// memory. A source that waits for disks or networks needs a worker for each request in
	// flight, hundreds or thousands.
	Workers int
	// Transform changes sample i in place after Read. Waiting belongs in Read, which Workers goroutines
	// call at the same time, and computing in Transform, which at most MaxTransforms of them do; 0
	// means GOMAXPROCS. A Source that has a method Transform is refused, so that it is not forgotten.
	Transform     func(ctx context.Context, i int, sample [][]byte) error
	MaxTransforms int
	// Prefetch is the number of batches that are filled or copied ahead of the consumer.
	// 0 means the batches that all workers fill at the same time, and 64 MiB more: at least 3
	// and at most 256 batches more (1,024 where the GPU gathers), and not more than an epoch has.
	Prefetch int
	// MaxBytes limits the host memory, and the device memory, of the loader, in bytes: it
	// reduces Prefetch, to no less than 1. 0 means no limit.
	MaxBytes int

	// Unordered delivers batches in the order in which they are complete, so that a slow
	// sample delays only its own batch.
	Unordered bool
	// Shuffle delivers the samples of each epoch in a random order, which depends on Seed and
	// the number of the epoch alone, on any machine. The order takes no memory. [Shards] are shuffled
	// within windows.
	Shuffle bool
	// Seed selects the orders of Shuffle.
	Seed uint64
	// DropLast drops the last batch of an epoch if it is not full. With fewer samples than
	// BatchSize an epoch has no batch then.
	DropLast bool
	// Start is the place where the first loop begins: the Position of the last batch that was
	// used, with the same samples, BatchSize, DropLast, Shuffle and Seed.
	Start Position

	// Retries is the number of times that a failed sample is tried again, from Read on.
	Retries int
	// SkipErrors skips samples that fail, and counts them; their batches are shorter. If it is
	// not set, the first sample that fails ends the epoch.
	SkipErrors bool

	// OnDevice is called for each batch after its copy was queued on s, the loader's own stream, and
	// before it is delivered. It may queue kernels and copies on s that change the batch on the
	// device. The streams of [Batch.Use] wait for them, and [Batch.Wait] does; [Batch.Host] keeps
	// the bytes as they were. b has Field, Len, Indices, Epoch and Number, and memory for BatchSize
	// samples. Its other methods fail as after Release, and it must not be used after OnDevice has
	// returned. One call is made at a time, and meanwhile no copy is queued: OnDevice must not wait
	// for s. An error or a panic ends the epoch before the batch. NewHost refuses OnDevice.
	OnDevice func(s *cudart.Stream, b *Batch) error

	// HostBatches has the CPU fill the batches also of samples that the GPU could gather itself, so that
	// [Batch.Host] has them: see [InMemory]. Transform does, too.
	HostBatches bool

	// Label is the label of the pinned memory in the lists of package hostmem. "" means
	// "loader". NewHost does not use it.
	Label string
}

// fieldAlign is the alignment of each field of a batch on the device, in bytes, as of cudaMalloc.
const fieldAlign = 256

const (
	// prefetchBytes keep a link busy while a worker wakes up.
	prefetchBytes = 64 << 20
	// maxPrefetch limits the slots that are searched, and the events that are created.
	maxPrefetch = 256
	// maxGatherPrefetch is the same where the GPU gathers: small batches have more memory ahead, which takes fewer kernels.
	maxGatherPrefetch = 1024
	// blockBytes take the workers longer to fill than one worker to wake up.
	blockBytes = 1 << 20
	// minBlocks is the minimum number of blocks in memory: one is filled, the next one is
	// published, one is being copied, and one is lent to the consumer.
	minBlocks = 4
	// maxWorkers goroutines take some GiB.
	maxWorkers = 1 << 20
)

// A layout has the offsets of the fields in a batch.
type layout struct {
	sizes   []int // bytes of each field of a sample
	offsets []int // offset of each field in a batch, in bytes
	samples int   // capacity of a batch
	bytes   int   // size of a batch
	block   int   // maximum number of batches of a block
	lists   int   // lists of indices of a gatherer
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

// sample returns the bytes of a sample.
func (l layout) sample() int {
	n := 0
	for _, size := range l.sizes {
		n += size
	}
	return n
}

// ofIndices returns the layout of a batch of indices instead of samples.
func (l layout) ofIndices() layout {
	size := l.lists * indexBytes
	return layout{sizes: []int{size}, offsets: []int{0}, samples: l.samples, bytes: size * l.samples, block: l.block}
}

// blockOf returns the number of batches of a block of at most n bytes, a quarter of the slots at most.
func (l layout) blockOf(n, slots int) int { return max(1, min(n/l.bytes, slots/minBlocks)) }

// claimSize returns the number of samples of a claim, in a block of batches: 1 if there are many
// workers, and a share of the block if there are few, which would contend for each sample.
func (l layout) claimSize(batches, workers int) int {
	return max(1, min(batches*l.samples/(2*workers), l.samples))
}

// resolve checks the options and sets the defaults. lists is the number of lists of indices of a loader with a gatherer, or 0.
func (o Options) resolve(src Source, lists int) (Options, layout, error) {
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
	l.lists = lists
	if o.Workers == 0 {
		o.Workers = defaultWorkers(runtime.GOMAXPROCS(0), lists > 0)
	}
	o.Workers = min(o.Workers, n)
	if o.Workers > maxWorkers {
		return o, l, fmt.Errorf("Options.Workers is %d: at most %d", o.Workers, maxWorkers)
	}
	if o.MaxTransforms == 0 {
		o.MaxTransforms = runtime.GOMAXPROCS(0)
	}
	o.MaxTransforms = min(o.MaxTransforms, o.Workers)
	if o.Prefetch, err = o.prefetch(l, n); err != nil {
		return o, l, err
	}
	l.block = l.blockOf(blockBytes, o.slots())
	if o.Label == "" {
		o.Label = "loader"
	}
	return o, l, nil
}

// prefetch returns Prefetch for n samples: its default if it is 0, and no more than MaxBytes allow.
func (o Options) prefetch(l layout, n int) (int, error) {
	batches := o.Prefetch
	if batches == 0 {
		most := maxPrefetch
		if l.lists > 0 {
			most = maxGatherPrefetch
		}
		ahead := o.Workers*l.claimSize(1, o.Workers)/l.samples + min(max(prefetchBytes/l.bytes, 3), most)
		batches = min(ahead, n/l.samples+1)
	}
	bytes := max(l.bytes, l.ofIndices().bytes) // of a batch, where it takes more
	if batches > math.MaxInt/bytes-1 {
		return 0, fmt.Errorf("Options.Prefetch is %d: too many batches of %d bytes", batches, bytes)
	}
	if o.MaxBytes == 0 {
		return batches, nil
	}
	fit := o.MaxBytes / bytes
	if fit < 2 {
		return 0, fmt.Errorf("Options.MaxBytes is %d: two batches of %d bytes do not fit", o.MaxBytes, bytes)
	}
	return min(batches, fit-1), nil
}

// shape returns the number of samples of a source, and the sizes of their fields. A source that is
// a nil pointer may panic.
func shape(src Source) (n int, fields []int, err error) {
	defer bounded.Recovered(&err)
	return src.Len(), slices.Clone(src.Fields()), nil
}

// slots returns the number of batches in memory. One is lent to the consumer.
func (o Options) slots() int { return o.Prefetch + 1 }

func defaultWorkers(procs int, gather bool) int {
	switch {
	case gather:
		return min(gatherWorkers, procs)
	case procs <= 4:
		return procs
	}
	return procs * 3 / 4
}
