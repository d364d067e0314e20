package loader

import (
	"context"
	"errors"
)

// A Source has the samples of a data set. Its methods are called from many
// goroutines.
type Source interface {
	// Len returns how many samples there are. It must not change.
	Len() int

	// Fields returns the bytes of each field of a sample, such as an image and
	// its label. A field of a batch is that of its samples back to back.
	Fields() []int

	// Read writes sample i, counted from 0, into its place in pinned memory: one
	// slice for each field, as long as the field, valid until Read returns. The
	// slices hold bytes of an earlier sample. Read should return when ctx ends: the
	// loop has ended and waits for Read. The next loop may read the sample again.
	Read(ctx context.Context, i int, sample [][]byte) error
}

// A BatchSource is a Source that reads many samples in one call, which saves a call
// for each sample, and is how requests can be sent together.
type BatchSource interface {
	Source

	// ReadBatch writes the samples of the given numbers into their places in pinned
	// memory. It is called in place of Read, with the samples that a worker claims at
	// a time, all of one batch: BatchSize / (2 * Workers) or fewer, of batches below
	// 1 MiB, several of which are filled together, up to BatchSize; and one at least.
	// samples has one slice for each field, with the samples of the call back to back, in
	// the order of indices: len(indices) times the size of the field. Neither slice may
	// be used after ReadBatch returns. The contexts are those of Read.
	//
	// If ReadBatch returns an error, panics or ends its goroutine, its samples are
	// read again one at a time, by Read: then an error is that of a sample, and the
	// others are not affected. [Stats].Retried counts them.
	ReadBatch(ctx context.Context, indices []int, samples [][]byte) error
}

// A Transformer is a Source whose samples need computing. Waiting belongs in
// Read, of which Options.Workers run at once, and computing in Transform, of
// which Options.MaxTransforms do.
type Transformer interface {
	Source

	// Transform changes sample i in place. It is called after Read.
	Transform(ctx context.Context, i int, sample [][]byte) error
}

// Func returns a Source of n samples with the given fields, which calls read
// for each sample.
func Func(n int, fields []int, read func(ctx context.Context, i int, sample [][]byte) error) Source {
	if read == nil {
		read = func(context.Context, int, [][]byte) error { return errNoFunction }
	}
	return funcSource{n, fields, read}
}

var errNoFunction = errors.New("loader: Func without a function")

type funcSource struct {
	n      int
	fields []int
	read   func(ctx context.Context, i int, sample [][]byte) error
}

func (s funcSource) Len() int      { return s.n }
func (s funcSource) Fields() []int { return s.fields }
func (s funcSource) Read(ctx context.Context, i int, sample [][]byte) error {
	return s.read(ctx, i, sample)
}
