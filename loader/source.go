package loader

import "context"

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
	// slices hold bytes of an earlier sample. Read should return when ctx ends:
	// the sample is not wanted any more, and the loop waits for Read.
	Read(ctx context.Context, i int, sample [][]byte) error
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
	return funcSource{n, fields, read}
}

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
