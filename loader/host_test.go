package loader

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
)

func heap(n int) ([]byte, error) { return make([]byte, n), nil }

// newHostLoader returns a loader without a device, and its memory.
func newHostLoader(t testing.TB, src Source, o Options) (l *Loader, memory []byte) {
	t.Helper()
	l, err := NewHost(src, o.of(src), func(n int) ([]byte, error) {
		memory = make([]byte, n)
		return memory, nil
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l, memory
}

// requireHostBatch requires that the samples of a batch are in memory, where the batch says.
func requireHostBatch(t testing.TB, b *Batch, memory []byte, fields ...int) {
	t.Helper()
	for f, size := range fields {
		off, want := b.Offset(f), make([]byte, size)
		require.Zero(t, off%fieldAlign)
		require.Len(t, b.Host(f), b.Len()*size)
		for at, i := range b.Indices() {
			writeSample(want, i, f)
			require.Equal(t, want, memory[off+at*size:off+(at+1)*size], "%v: sample %d, place %d, field %d", b, i, at, f)
		}
	}
}

type delivered struct {
	indices  []int
	position Position
}

// The batches of a loader without a device are those of a loader for a device, in their order, with
// their positions; and a position of one resumes the other.
func TestHostBatchesAreThoseOfADevice(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	const n, epochs = 103, 3
	fields := []int{100, 1, 257}
	for _, o := range []Options{
		{BatchSize: 10},
		{BatchSize: 10, DropLast: true, Workers: 20},
		{BatchSize: 10, Shuffle: true, Seed: 3, Workers: 7},
		{BatchSize: 1, Shuffle: true, Workers: 3},
		{BatchSize: 1000, Workers: 200},
		{BatchSize: 7, Workers: 1, Prefetch: 1},
	} {
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			deviceLoader := newLoaderFor(t, dev, numbered(n, fields...), o)
			var want []delivered
			for range epochs {
				for b, err := range deviceLoader.Batches(t.Context()) {
					require.NoError(t, err)
					want = append(want, delivered{append([]int(nil), b.Indices()...), b.Position()})
				}
			}
			for from := 0; from < len(want); from += 1 + len(want)/5 {
				if from > 0 {
					o.Start = want[from-1].position
				}
				l, memory := newHostLoader(t, numbered(n, fields...), o)
				var got []delivered
				for range l.Epochs(epochs) {
					for b, err := range l.Batches(t.Context()) {
						require.NoError(t, err)
						require.NoError(t, b.Wait(t.Context()))
						requireHostBatch(t, b, memory, fields...)
						got = append(got, delivered{append([]int(nil), b.Indices()...), b.Position()})
					}
				}
				require.Equal(t, want[from:], got)
				require.Positive(t, l.Stats().Samples)
				require.Zero(t, l.Stats().Copying)
			}
		})
	}
}

// A batch that is retained is not written, while others are filled in the rest of the memory; and a
// loop that has no memory left waits for a release.
func TestHostBatchesStayUntilTheirRelease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testHostBatchesStay)
}

func testHostBatchesStay(t *testing.T) {
	const size = 64
	l, memory := newHostLoader(t, numbered(40, size), Options{BatchSize: 4, Prefetch: 2, Workers: 3})
	delivered := make(chan *Batch)
	go func() {
		defer close(delivered)
		for b, err := range l.Batches(t.Context()) {
			if !assert.NoError(t, err) {
				return
			}
			b.Retain()
			delivered <- b
		}
	}()
	var held []*Batch
	for range 3 {
		held = append(held, <-delivered)
	}
	synctest.Wait()
	select {
	case b := <-delivered:
		require.Fail(t, "there is no memory for it", "%v", b)
	default:
	}
	for i := 3; i < 10; i++ {
		for _, b := range held {
			requireHostBatch(t, b, memory, size)
		}
		at := i % len(held) // also out of order
		place := held[at].Offset(0)
		require.NoError(t, held[at].Release())
		b := <-delivered
		require.Equal(t, i, b.Number())
		require.Equal(t, place, b.Offset(0), "in the memory that was released")
		held[at] = b
	}
	for _, b := range held {
		requireHostBatch(t, b, memory, size)
		require.NoError(t, b.Release())
	}
	_, more := <-delivered
	require.False(t, more)
}

// Samples that are skipped leave no holes, and errors end the epoch after the batches before them,
// as with a device.
func TestHostLoaderSkipsAndFails(t *testing.T) {
	t.Parallel()
	src := newFailing(20, 8)
	src.read = only(9)
	l, memory := newHostLoader(t, src, Options{BatchSize: 8, SkipErrors: true})
	var indices []int
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		requireHostBatch(t, b, memory, 8)
		indices = append(indices, b.Indices()...)
	}
	require.Len(t, indices, 19)
	require.NotContains(t, indices, 9)

	l, _ = newHostLoader(t, src, Options{BatchSize: 8})
	batches := 0
	for b, err := range l.Batches(t.Context()) {
		if err != nil {
			require.ErrorIs(t, err, errBad)
			continue
		}
		require.Equal(t, batches, b.Number())
		batches++
	}
	require.Equal(t, 1, batches)
}

func TestHostLoaderErrors(t *testing.T) {
	t.Parallel()
	src, o := numbered(10, 8), Options{BatchSize: 4, Prefetch: 1}
	full := errors.New("full")
	_, err := NewHost(src, o, func(int) ([]byte, error) { return nil, full })
	require.ErrorIs(t, err, full)
	require.ErrorContains(t, err, "loader: new host: 2 batches of 256 bytes: full")
	_, err = NewHost(src, o.of(src), func(n int) ([]byte, error) { return make([]byte, n-1), nil })
	require.ErrorContains(t, err, "loader: new host: 2 batches of 256 bytes: the function for memory returned 511 bytes")

	l, _ := newHostLoader(t, src, o)
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		require.ErrorIs(t, b.Use(nil), errNoDevice)
		require.ErrorIs(t, b.Use(new(cudart.Stream)), errNoDevice)
		require.Zero(t, b.Field(0))
	}
}
