package loader

import "context"

// A Source has the samples of a data set. Its methods are called from many
// goroutines.
type Source interface {
	// Len returns how many samples there are, which does not change.
	Len() int

	// Fields returns the bytes of each field of a sample, such as an image and
	// its label. A field of a batch is that of its samples back to back.
	Fields() []int

	// Read writes sample i, from 0 on, into its place in pinned memory: one
	// slice for each field, as long as the field, valid until Read returns.
	// What is there before is left from others. ctx ends when the sample is
	// not wanted any more.
	Read(ctx context.Context, i int, sample [][]byte) error
}

// A Transformer is a Source whose samples need computing. What waits belongs
// into Read, of which Options.Workers run at once, and what keeps a core busy
// into Transform, of which Options.Computing do.
type Transformer interface {
	Source

	// Transform changes sample i in place. It is called after Read.
	Transform(ctx context.Context, i int, sample [][]byte) error
}

// Func makes a Source of n samples with the given fields of a function that
// reads one.
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
