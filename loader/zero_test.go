package loader

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A pointed source panics if it is nil.
type pointed struct{ n int }

func (s *pointed) Len() int                                { return s.n }
func (*pointed) Fields() []int                             { return []int{8} }
func (*pointed) Read(context.Context, int, [][]byte) error { return nil }

// Zero values, nil, and arguments out of range are errors, or yield zero values.
func TestZeroNilAndOutOfRange(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	s := stream(t, dev)
	src, o, ctx := numbered(10, 8), Options{BatchSize: 4}, t.Context()
	var none context.Context
	l := newLoaderFor(t, dev, src, o)
	var b, released *Batch
	for one, err := range l.Batches(ctx) {
		require.NoError(t, err)
		one.Retain()
		if released == nil {
			released = one
			continue
		}
		b = one
		break
	}
	require.NoError(t, released.Release())
	defer func() { require.NoError(t, b.Release()) }()
	made := func(_ *Loader, err error) error { return err }
	first := func(l *Loader, ctx context.Context) (err error) {
		errs := 0
		for one, got := range l.Batches(ctx) {
			assert.Nil(t, one)
			err = got
			errs++
		}
		assert.Equal(t, 1, errs)
		return err
	}
	memory := memoryOf(t, 5, 3, 8)
	sample, two := [][]byte{make([]byte, 3), make([]byte, 8)}, [][]byte{make([]byte, 6), make([]byte, 16)}
	for _, test := range []struct {
		err  error
		want string
	}{
		{made(New(none, dev, src, o)), "loader: new: the context is nil"},
		{made(New(ctx, nil, src, o)), "loader: new: the device is nil or zero"},
		{made(New(ctx, dev, nil, o)), "loader: new: the source is nil"},
		{made(New(ctx, dev, (*pointed)(nil), o)), "loader: new: Len or Fields of the source: panic: "},
		{made(New(ctx, dev, &pointed{}, o)), "loader: new: the source has no samples"},
		{made(New(ctx, dev, Func(math.MaxInt, []int{8}, src.Read), Options{BatchSize: 4, Workers: 1<<20 + 1})), "loader: new: Options.Workers is 1048577: at most 1048576"},
		{made(New(ctx, dev, src, Options{BatchSize: 4,
			Start: Position{Done: "9223372036854775807", Order: "10 samples in batches of 4"}})), "loader: new: Options.Start.Done is \"9223372036854775807\": "},
		{made(NewHost(nil, o, heap)), "loader: new host: the source is nil"},
		{made(NewHost(src, o, nil)), "loader: new host: the function for memory is nil"},
		{made(NewHost(src, Options{}, heap)), "loader: new host: Options.BatchSize is 0: must be positive"},
		{first(l, none), "loader: batches: the context is nil"},
		{first(new(Loader), ctx), "loader: batches: the loader is nil or zero"},
		{first(nil, ctx), "loader: batches: the loader is nil or zero"},
		{l.CloseContext(none), "loader: close: the context is nil"},
		{new(Loader).Close(), "loader: close: the loader is nil or zero"},
		{(*Loader)(nil).CloseContext(ctx), "loader: close: the loader is nil or zero"},
		{new(Loader).EndEpoch(), "loader: end epoch: the loader is nil or zero"},
		{(*Loader)(nil).EndEpoch(), "loader: end epoch: the loader is nil or zero"},
		{b.Use(nil), "loader: use batch 1 of epoch 0: the stream is nil or zero"},
		{b.Use(new(cudart.Stream)), "loader: use batch 1 of epoch 0: the stream is nil or zero"},
		{made(New(ctx, new(cudart.Device), src, o)), "loader: new: the device is nil or zero"},
		{released.Use(s), "loader: use batch 0 of epoch 0: already released"},
		{new(Batch).Use(s), "loader: use batch 0 of epoch 0: the batch is nil or zero"},
		{(*Batch)(nil).Use(s), "loader: use batch 0 of epoch 0: the batch is nil or zero"},
		{b.Wait(none), "loader: wait for batch 1 of epoch 0: "},
		{released.Wait(ctx), "loader: wait for batch 0 of epoch 0: already released"},
		{new(Batch).Wait(ctx), "loader: wait for batch 0 of epoch 0: the batch is nil or zero"},
		{(*Batch)(nil).Wait(ctx), "loader: wait for batch 0 of epoch 0: the batch is nil or zero"},
		{released.Release(), "loader: release batch 0 of epoch 0: already released"},
		{new(Batch).Release(), "loader: release batch 0 of epoch 0: the batch is nil or zero"},
		{(*Batch)(nil).Release(), "loader: release batch 0 of epoch 0: the batch is nil or zero"},
		{memory.Read(ctx, 5, sample), "loader: memory: sample 5 of 5"},
		{memory.Read(ctx, -1, sample), "loader: memory: sample -1 of 5"},
		{memory.Read(ctx, 0, nil), "loader: memory: the destination has 0 fields, not 2"},
		{memory.ReadBatch(ctx, []int{0, 7}, two), "loader: memory: sample 7 of 5"},
		{memory.ReadBatch(ctx, []int{0, 1}, sample), "loader: memory: field 0: the destination has 3 bytes, not 6"},
		{Func(1, []int{8}, nil).Read(ctx, 0, sample), "loader: Func: the function is nil"},
	} {
		assert.ErrorContains(t, test.err, test.want)
	}
	for _, zero := range []*Batch{nil, new(Batch)} {
		assert.Zero(t, zero.Len())
		assert.Empty(t, zero.Indices())
		assert.Zero(t, zero.Field(0))
		assert.Nil(t, zero.Host(0))
		assert.Equal(t, -1, zero.Offset(0))
		assert.Zero(t, zero.Epoch())
		assert.Zero(t, zero.Number())
		assert.Zero(t, zero.Position())
		assert.Equal(t, "batch 0 of epoch 0", zero.String())
		zero.Retain()
	}
	for _, f := range []int{-1, 1, math.MaxInt, math.MinInt} {
		assert.Zero(t, b.Field(f))
		assert.Nil(t, b.Host(f))
		assert.Equal(t, -1, b.Offset(f))
	}
	for _, l := range []*Loader{nil, new(Loader)} {
		for range l.Epochs(1) {
			assert.Fail(t, "there is none")
		}
	}
	assert.Zero(t, new(Loader).Stats())
	assert.Zero(t, (*Loader)(nil).Stats())
	assert.NotEmpty(t, Stats{}.Bottleneck())
	_, err := InMemory(nil)
	require.Error(t, err)
}
