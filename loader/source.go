package loader

import (
	"context"
	"errors"

	"github.com/gopinned/pinned/internal/ntcopy"
)

// A Source reads the samples of a data set. Many goroutines call its methods at the same time.
type Source interface {
	// Len returns the number of samples. New calls it.
	Len() int

	// Fields returns the size of each field of a sample in bytes, such as of an image and
	// its label. A batch has the field of all its samples back to back. New calls it.
	Fields() []int

	// Read writes sample i, counted from 0, into the loader's host memory: sample has one slice for
	// each field, with the size of the field, valid until Read returns. The slices contain
	// bytes of an earlier sample. Read should return when ctx ends: the loop has ended and
	// waits for Read. The next loop may read the sample again.
	Read(ctx context.Context, i int, sample [][]byte) error
}

// Copy copies a sample from memory into the loader's host memory, past the CPU's caches (non-temporal
// stores), and returns the number of bytes as the built-in copy does. The GPU would have to fetch the
// bytes from the caches otherwise. It is for sources of batches of up to 256 KiB that no Transform reads
// again: larger batches are faster by copy. [CopySamples] copies many. It does not block.
func Copy(sample, from []byte) int { return ntcopy.Copy(sample, from) }

// A BatchSource is a Source that reads many samples in one call. That saves a call for each
// sample, and lets a source send requests together.
type BatchSource interface {
	Source

	// ReadBatch writes the samples with the given numbers into the loader's host memory. The loader
	// calls it instead of Read. The samples of a call belong to one batch. A call has at least one
	// sample, and at most BatchSize / (2 * Workers). Workers fill several batches below 1 MiB at
	// the same time, and a call for such a batch may have up to BatchSize samples. samples has one
	// slice for each field, with the samples of the call back to back, in the order of indices:
	// len(indices) times the size of the field. Neither slice may be used after ReadBatch returns.
	// ctx is as in Read.
	//
	// If ReadBatch returns an error, panics or ends its goroutine, Read reads its samples again
	// one at a time, so that an error belongs to one sample and does not affect the others.
	// [Stats].Retried counts the samples.
	ReadBatch(ctx context.Context, indices []int, samples [][]byte) error
}

// Func returns a Source of n samples with the given sizes of fields, which calls read
// for each sample: see [Source]. It does not block. If read is nil, all samples fail.
func Func(n int, fields []int, read func(ctx context.Context, i int, sample [][]byte) error) Source {
	if read == nil {
		read = func(context.Context, int, [][]byte) error { return errNoFunction }
	}
	return funcSource{n, fields, read}
}

var errNoFunction = errors.New("loader: Func: the function is nil")

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
