package loader

import (
	"context"
	"encoding/binary"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// A numbered source has samples that show which they are, in fields of the
// given sizes, and in every byte.
func numbered(n int, fields ...int) Source {
	return Func(n, fields, func(_ context.Context, i int, sample [][]byte) error {
		for f, b := range sample {
			writeSample(b, i, f)
		}
		return nil
	})
}

func writeSample(b []byte, i, field int) {
	var tag [8]byte
	binary.LittleEndian.PutUint64(tag[:], uint64(i)*0x9e3779b97f4a7c15+uint64(field))
	for at := range b {
		b[at] = tag[at%8] + byte(at/8)
	}
}

// requireBatch requires that a batch on the device is that of its indices, read
// by means of the stream that uses it.
func requireBatch(t testing.TB, b *Batch, s *cudart.Stream, fields ...int) {
	t.Helper()
	require.NoError(t, b.Use(s))
	require.NoError(t, s.Synchronize(t.Context()))
	for f, size := range fields {
		got, err := download(s.Device(), b.Field(f), b.Len()*size)
		require.NoError(t, err)
		want := make([]byte, size)
		for at, i := range b.Indices() {
			writeSample(want, i, f)
			require.Equal(t, want, got[at*size:(at+1)*size], "%v: sample %d, place %d, field %d", b, i, at, f)
		}
		require.Equal(t, got, b.Host(f), "the same in pinned memory")
	}
}

func download(dev *cudart.Device, p cudart.DevPtr, n int) ([]byte, error) {
	b := make([]byte, n)
	if n == 0 {
		return b, nil
	}
	return b, dev.CopyToHost(unsafe.Pointer(&b[0]), p, n)
}

// of returns the options for a source of the tests. Some sources compute their samples.
func (o Options) of(src Source) Options {
	if c, ok := src.(interface {
		compute(ctx context.Context, i int, sample [][]byte) error
	}); ok {
		o.Transform = c.compute
	}
	return o
}

func newLoaderFor(t testing.TB, dev *cudart.Device, src Source, o Options) *Loader {
	t.Helper()
	l, err := New(t.Context(), dev, src, o.of(src))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

func stream(t testing.TB, dev *cudart.Device) *cudart.Stream {
	t.Helper()
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// epochOf is the indices of the batches of an epoch, each verified.
func epochOf(t testing.TB, l *Loader, s *cudart.Stream, fields ...int) [][]int {
	t.Helper()
	var all [][]int
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		requireBatch(t, b, s, fields...)
		all = append(all, append([]int(nil), b.Indices()...))
	}
	return all
}

// lent returns how many slots the consumer has. It waits for the driver, which may be collecting slots that
// were released.
func lent(l *Loader) (n int) {
	d := &l.driver
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		n = 0
		idle := d.requests.Load() == 0
		for _, s := range l.slots {
			if s.lent.Load() && d.released[s.at/64].Load()&(1<<(s.at%64)) == 0 {
				n++
			}
		}
		if n == 0 || idle && d.requests.Load() == 0 || time.Now().After(deadline) {
			return n
		}
	}
}
