package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/hosttest"
)

// An openedRange is a range that was opened, and what became of it.
type openedRange struct {
	off, n int64
	read   int
	closed bool
}

// A rangeSource is a RangeOpener that records its ranges.
type rangeSource struct {
	io.ReaderAt // is not called
	t           *testing.T
	content     []byte
	fail        int64 // offset at which reading fails, if not 0
	cut         int64 // offset at which ranges end, if not 0

	mu     sync.Mutex
	ranges []*openedRange
}

func (s *rangeSource) OpenRange(_ context.Context, off, n int64) (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := &openedRange{off: off, n: n}
	s.ranges = append(s.ranges, o)
	return &rangeBody{o, s}, nil
}

type rangeBody struct {
	*openedRange
	s *rangeSource
}

func (b *rangeBody) Read(p []byte) (int, error) {
	assert.False(b.s.t, b.closed, "read after Close")
	at := b.off + int64(b.read)
	switch {
	case int64(b.read) == b.n || b.s.cut > 0 && at >= b.s.cut:
		return 0, io.EOF
	case b.s.fail > 0 && at >= b.s.fail:
		return 0, errFlaky
	}
	end := b.off + b.n
	if b.s.fail > 0 {
		end = min(end, b.s.fail)
	}
	if b.s.cut > 0 {
		end = min(end, b.s.cut)
	}
	n := copy(p[:min(len(p), 300_000)], b.s.content[at:end])
	b.read += n
	return n, nil
}

func (b *rangeBody) Close() error {
	b.s.mu.Lock()
	defer b.s.mu.Unlock()
	assert.False(b.s.t, b.closed, "closed twice")
	b.closed = true
	return nil
}

func (s *rangeSource) requireClosed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.ranges {
		require.True(s.t, o.closed, "range of %d bytes at %d", o.n, o.off)
	}
}

// A RangeOpener is read once, by long ranges that lie one behind the other.
func TestRangesAreOpenedOncePerSection(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const off, n = 777, 20*mib + 5
	want := bytesOf(1, off+n)
	for name, source := range map[string]func(s *rangeSource) io.ReaderAt{
		"alone":   func(s *rangeSource) io.ReaderAt { return s },
		"section": func(s *rangeSource) io.ReaderAt { return io.NewSectionReader(s, 0, off+n) },
	} {
		s := &rangeSource{t: t, content: want}
		mem := r.device(n)
		done, err := r.c.UploadFrom(t.Context(), mem, source(s), off, n)
		require.NoError(t, err, name)
		require.Equal(t, n, done)
		require.True(t, bytes.Equal(want[off:], r.onDevice(mem, n)), name)
		s.requireClosed()
		slices.SortFunc(s.ranges, func(a, b *openedRange) int { return int(a.off - b.off) })
		require.LessOrEqual(t, len(s.ranges), 3, name)
		at := int64(off)
		for _, o := range s.ranges {
			require.Equal(t, at, o.off, name)
			require.EqualValues(t, o.n, o.read, name)
			at += o.n
		}
		require.EqualValues(t, off+n, at, name)
	}
}

// Ranges of several openers, files and memory arrive whatever their order and their gaps, with and without O_DIRECT.
func TestRangesOfOpenersArrive(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	all := bytesOf(1, 24*mib)
	random := rand.New(rand.NewPCG(1, 2))
	for _, call := range []Call{{}, {DirectIO: true}} {
		for range max(1, 5/hosttest.Stride()) {
			a, b := &rangeSource{t: t, content: all}, &rangeSource{t: t, content: all}
			list, want := rangesAtRandom(random, []io.ReaderAt{a, b, temporaryFile(t, all), bytes.NewReader(all)}, all, 20*mib)
			ranges, err := NewRanges(list)
			require.NoError(t, err)
			n := ranges.Len()
			mem := r.device(n)
			done, err := r.c.With(call).UploadFrom(t.Context(), mem, ranges, 0, n)
			require.NoError(t, err)
			require.Equal(t, n, done)
			require.True(t, bytes.Equal(want, r.onDevice(mem, n)))
			a.requireClosed()
			b.requireClosed()
		}
	}
}

// Columns are read with the bytes between them, by one range a section.
func TestColumnsOfAnOpenerAreOneRange(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const row, stride, rows = 3000, 7000, 1000
	all := bytesOf(1, stride*rows)
	s := &rangeSource{t: t, content: all}
	ranges, err := NewRanges([]Range{{Reader: s, Off: 5, N: row * rows, Row: row, Stride: stride}})
	require.NoError(t, err)
	var want []byte
	for i := range rows {
		want = append(want, all[5+i*stride:][:row]...)
	}
	mem := r.device(len(want))
	_, err = r.c.UploadFrom(t.Context(), mem, ranges, 0, len(want))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, r.onDevice(mem, len(want))))
	require.Len(t, s.ranges, 1)
	s.requireClosed()
}

// After a failure the bytes before it are on the device, and no range stays open.
func TestAFailingRangeEndsTheCopyThere(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = 20 * mib
	want := bytesOf(1, n)
	for _, at := range []int64{1, 3 * mib, 11*mib + 7, n - 1} {
		for name, tt := range map[string]struct {
			s   *rangeSource
			err error
		}{
			"fails":      {&rangeSource{t: t, content: want, fail: at}, errFlaky},
			"ends early": {&rangeSource{t: t, content: want, cut: at}, io.ErrUnexpectedEOF},
		} {
			mem := r.device(n)
			r.fill(mem, make([]byte, n))
			done, err := r.c.UploadFrom(t.Context(), mem, tt.s, 0, n)
			require.ErrorIs(t, err, tt.err, name)
			require.EqualValues(t, at, done, name)
			require.True(t, bytes.Equal(want[:at], r.onDevice(mem, int(at))), name)
		}
	}
	_, err := r.c.UploadFrom(t.Context(), r.device(5), nilOpener{}, 0, 5)
	require.ErrorContains(t, err, "nil reader")
}

type nilOpener struct{}

func (nilOpener) ReadAt([]byte, int64) (int, error) { return 0, errors.New("not called") }
func (nilOpener) OpenRange(context.Context, int64, int64) (io.ReadCloser, error) {
	return nil, nil //nolint:nilnil // what a mistaken source may return
}

// A rangeValue cannot be compared with another.
type rangeValue struct {
	*rangeSource
	_ []byte
}

// Sources of any type arrive, also those that Go cannot compare.
func TestRangeOpenersOfAnyTypeArrive(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = 9*mib + 5
	s := &rangeSource{t: t, content: bytesOf(1, n)}
	mem := r.device(n)
	_, err := r.c.UploadFrom(t.Context(), mem, rangeValue{rangeSource: s}, 0, n)
	require.NoError(t, err)
	require.True(t, bytes.Equal(s.content, r.onDevice(mem, n)))
	s.requireClosed()
}
