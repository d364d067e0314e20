package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rangesAtRandom are ranges of readers that all have the bytes of all, and what they have in order.
func rangesAtRandom(rnd *rand.Rand, readers []io.ReaderAt, all []byte, n int) (list []Range, want []byte) {
	for len(want) < n {
		g := Range{Reader: readers[rnd.IntN(len(readers))], N: min([]int{0, 1, 300, 9000, 70_000, 700_000, 3 * mib}[rnd.IntN(7)], n-len(want))}
		if rnd.IntN(5) == 0 {
			g.Reader, g.N = nil, min(g.N, 9000)
			want = append(want, make([]byte, g.N)...)
			list = append(list, g)
			continue
		}
		span := g.N
		if rnd.IntN(3) == 0 && g.N > 0 {
			g.Row = 1 + rnd.IntN([]int{100, 5000, 50_000}[rnd.IntN(3)])
			g.Stride = g.Row + rnd.IntN(3)*rnd.IntN(7000)
			for rows := (g.N - 1) / g.Row; rows*g.Stride+g.Row > len(all); rows = (g.N - 1) / g.Row {
				g.N /= 2
			}
			span = (g.N-1)/g.Row*g.Stride + g.Row
		}
		g.Off = int64(rnd.IntN(len(all) - span + 1))
		if len(list) > 0 && rnd.IntN(2) == 0 { // behind the last one, as tensors are
			last := list[len(list)-1]
			if end := last.last() + int64(rnd.IntN(2)*rnd.IntN(300)); last.Reader != nil && last.N > 0 && end+int64(span) <= int64(len(all)) {
				g.Reader, g.Off = last.Reader, end
			}
		}
		list = append(list, g)
		for i := 0; i < g.N; {
			at, some := int(g.Off)+i, g.N-i
			if g.Row > 0 {
				at, some = int(g.Off)+i/g.Row*g.Stride, min(some, g.Row)
			}
			want = append(want, all[at:][:some]...)
			i += some
		}
	}
	return list, want
}

func TestRangesArriveInTheirOrder(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	all := bytesOf(5, 8*mib+123)
	path := filepath.Join(t.TempDir(), "source")
	require.NoError(t, os.WriteFile(path, append([]byte("head"), all...), 0o600))
	var files []io.ReaderAt
	for range 2 {
		f, err := os.Open(path)
		require.NoError(t, err)
		defer f.Close()
		files = append(files, io.NewSectionReader(f, 4, int64(len(all))))
	}
	memory := []io.ReaderAt{bytes.NewReader(all), strings.NewReader(string(all))}
	nested, err := NewRanges([]Range{{Reader: files[0], N: 5 * mib}, {Reader: memory[0], Off: 5 * mib, N: len(all) - 5*mib}})
	require.NoError(t, err)
	other := []io.ReaderAt{onlyReaderAt{bytes.NewReader(all)}, nested}
	rnd := rand.New(rand.NewPCG(1, 2))
	for what, readers := range map[string][]io.ReaderAt{
		"files": files, "memory": memory, "readers": other, "files and memory": append(memory, files...), "all": append(append(other, memory...), files...),
	} {
		for seed := range 6 {
			if testing.Short() && seed > 2 && what != "all" {
				continue // many bytes, which the race detector and an emulator copy slowly
			}
			list, want := rangesAtRandom(rnd, readers, all, []int{1, 3000, mib, 40 * mib, 20*mib + 7, 33 * mib}[seed])
			ranges, err := NewRanges(list)
			require.NoError(t, err)
			require.Equal(t, len(want), ranges.Len())
			skip := seed % 2 * rnd.IntN(len(want))
			n := len(want) - skip
			mem := r.device(n)
			r.fill(mem, make([]byte, n))
			done, err := r.c.With(Call{DirectIO: seed%3 == 1}).UploadFrom(t.Context(), mem, ranges, int64(skip), n)
			require.NoError(t, err, "%s, %d", what, seed)
			require.Equal(t, n, done)
			require.True(t, bytes.Equal(want[skip:], r.onDevice(mem, n)), "%s, %d", what, seed)

			got := make([]byte, min(n, 9*mib))
			k, err := ranges.ReadAt(got, int64(skip))
			require.NoError(t, err)
			require.True(t, k == len(got) && bytes.Equal(want[skip:][:k], got), "%s, %d: ReadAt", what, seed)
			done, err = r.c.UploadFrom(t.Context(), mem, ranges, int64(skip), n+1)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.Equal(t, n, done)
		}
	}
}

// Small parts that are near one another are read by few calls.
func TestSmallRangesAreReadTogether(t *testing.T) {
	t.Parallel()
	all := bytesOf(5, mib)
	var list []Range
	for i := range 1000 {
		list = append(list, Range{Reader: os.Stdin, Off: int64(i * 1000), N: 900}, Range{N: 100}) // a file, which is not read
	}
	calls := 0
	r, err := NewRanges(list)
	require.NoError(t, err)
	got := make([]byte, r.Len())
	read := r.joined(func(_ io.ReaderAt, to []byte, off int64) (int, error) {
		calls++
		return copy(to, all[off:]), nil
	})
	_, n, err := read(got, 0, len(got))
	require.NoError(t, err)
	assert.Equal(t, len(got), n)
	assert.LessOrEqual(t, calls, 5)
	for i := range 1000 {
		require.True(t, bytes.Equal(all[i*1000:][:900], got[i*1000:][:900]))
		require.True(t, bytes.Equal(make([]byte, 100), got[i*1000+900:][:100]))
	}
}

// What precedes an error is there, and is counted, whatever is read together.
func TestErrorsOfRangesAreAtTheirBytes(t *testing.T) {
	t.Parallel()
	all := bytesOf(5, mib)
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		list, want := rangesAtRandom(rnd, []io.ReaderAt{os.Stdin}, all, 200_000)
		r, err := NewRanges(list)
		require.NoError(t, err)
		bad := int64(rnd.IntN(len(all)))
		broken := func(_ io.ReaderAt, to []byte, off int64) (int, error) {
			if off <= bad && bad < off+int64(len(to)) {
				return copy(to, all[off:bad]), errFlaky
			}
			return copy(to, all[off:]), nil
		}
		for _, read := range []readFunc{r.read(broken), r.joined(broken)} {
			got := make([]byte, len(want))
			_, n, err := read(got, 0, len(want))
			if err == nil {
				require.Equal(t, len(want), n)
			} else {
				require.ErrorIs(t, err, errFlaky)
				require.Less(t, n, len(want))
			}
			require.True(t, bytes.Equal(want[:n], got[:n]))
		}
	}
}

// A call may also read bytes between ranges, which are nobody's business.
func TestBytesBetweenRangesNeedNotBeReadable(t *testing.T) {
	t.Parallel()
	r, err := NewRanges([]Range{{Reader: os.Stdin, N: 100, Row: 10, Stride: 100}}) // a file, which is not read
	require.NoError(t, err)
	all := bytesOf(5, 1000)
	got := make([]byte, 100)
	_, n, err := r.joined(func(_ io.ReaderAt, to []byte, off int64) (int, error) {
		if off <= 150 && off+int64(len(to)) > 150 {
			return copy(to, all[off:150]), errFlaky
		}
		return copy(to, all[off:]), nil
	})(got, 0, len(got))
	require.NoError(t, err)
	require.Equal(t, len(got), n)
	for i := range 10 {
		require.True(t, bytes.Equal(all[100*i:][:10], got[10*i:][:10]))
	}
}

// Functions cannot be compared.
func TestRangesOfReadersThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	f := newFixture(t, Options{})
	all := bytesOf(5, 300)
	file := temporaryFile(t, all)
	reader := readerAtFunc(bytes.NewReader(all).ReadAt)
	r, err := NewRanges([]Range{{Reader: file, N: 100}, {Reader: reader, Off: 100, N: 100}, {Reader: reader, Off: 200, N: 100}})
	require.NoError(t, err)
	mem := f.device(300)
	done, err := f.c.With(Call{DirectIO: true}).UploadFrom(t.Context(), mem, r, 0, 300)
	require.NoError(t, err)
	require.Equal(t, 300, done)
	require.Equal(t, all, f.onDevice(mem, 300))
}

func temporaryFile(t *testing.T, all []byte) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "source")
	require.NoError(t, os.WriteFile(path, all, 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// The bytes before the first missing one arrive, and are counted, wherever readers end early.
func TestRangesThatEndEarlyAreCountedExactly(t *testing.T) {
	t.Parallel()
	f := newFixture(t, Options{})
	all := bytesOf(5, 3*mib)
	mem := f.device(len(all))
	for _, cut := range []int{0, 1, 4097, 60_000, 2*mib + 5} {
		for what, reader := range map[string]io.ReaderAt{
			"file": temporaryFile(t, all[:cut]), "memory": bytes.NewReader(all[:cut]), "reader": onlyReaderAt{strings.NewReader(string(all[:cut]))},
		} {
			for _, g := range []Range{{N: len(all)}, {N: len(all) / 2, Row: 500, Stride: 1000}, {N: len(all) / 2, Row: 50_000, Stride: 100_000}} {
				want := all[:cut]
				if g.Row > 0 {
					want = nil
					for at := 0; at < cut; at += g.Stride {
						want = append(want, all[at:min(at+g.Row, cut)]...)
					}
				}
				g.Reader = reader
				r, err := NewRanges([]Range{g, {N: 10}})
				require.NoError(t, err)
				for _, direct := range []bool{false, true} {
					done, err := f.c.With(Call{DirectIO: direct}).UploadFrom(t.Context(), mem, r, 0, g.N+10)
					require.ErrorIs(t, err, io.ErrUnexpectedEOF)
					require.Equal(t, len(want), done, "%s, %d, rows of %d", what, cut, g.Row)
					require.True(t, bytes.Equal(want, f.onDevice(mem, done)), "%s, %d, rows of %d", what, cut, g.Row)
				}
			}
		}
	}
}

func TestNoRangeIsReadAfterTheContext(t *testing.T) {
	t.Parallel()
	f := newFixture(t, Options{})
	file := temporaryFile(t, make([]byte, 1))
	for _, direct := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		var calls atomic.Int64
		reader := readerAtFunc(func(p []byte, _ int64) (int, error) {
			calls.Add(1)
			cancel()
			return len(p), nil
		})
		r, err := NewRanges([]Range{{Reader: file, N: 1}, {Reader: reader, N: 60_000, Row: 1, Stride: 2}})
		require.NoError(t, err)
		_, err = f.c.With(Call{DirectIO: direct}).UploadFrom(ctx, f.device(60_001), r, 0, 60_001)
		require.ErrorIs(t, err, context.Canceled)
		require.LessOrEqual(t, calls.Load(), int64(readers), "calls that had begun")
	}
}

// Section readers are read as their ReadAt reads, whether or not what they are sections of is read instead.
func TestSectionsAreReadAsTheyReadThemselves(t *testing.T) {
	t.Parallel()
	f := newFixture(t, Options{})
	all := bytesOf(5, 10_000)
	mem := f.device(10)
	for _, reader := range []io.ReaderAt{temporaryFile(t, all), bytes.NewReader(all)} {
		for what, s := range map[string]struct {
			*io.SectionReader
			off int64
		}{
			"before the start":       {io.NewSectionReader(reader, -5, 2000), 0},
			"partly before it":       {io.NewSectionReader(reader, -5, 2000), 5},
			"past the last offset":   {io.NewSectionReader(reader, 100, math.MaxInt64), math.MaxInt64 - 50},
			"of no known end":        {io.NewSectionReader(reader, 100, -5), 0},
			"past the end":           {io.NewSectionReader(reader, 100, 20), 30},
			"the end of a section's": {io.NewSectionReader(io.NewSectionReader(reader, 10, 30), 5, 100), 20},
		} {
			want := make([]byte, 10)
			n, wantErr := s.ReadAt(want, s.off)
			r, err := NewRanges([]Range{{Reader: s.SectionReader, Off: s.off, N: 10}})
			require.NoError(t, err)
			got := make([]byte, 10)
			k, err := r.ReadAt(got, 0)
			require.Equal(t, n, k, what)
			require.Equal(t, wantErr == nil, err == nil, what)
			for _, direct := range []bool{false, true} {
				v := f.c.With(Call{DirectIO: direct})
				k, err := v.UploadFrom(t.Context(), mem, s.SectionReader, s.off, 10)
				require.Equal(t, n, k, "%s: %v", what, err)
				require.Equal(t, wantErr == nil, err == nil, what)
				require.Equal(t, want[:n], f.onDevice(mem, n), what)
				k, err = v.UploadFrom(t.Context(), mem, r, 0, 10)
				require.Equal(t, n, k, "%s: %v", what, err)
				require.Equal(t, wantErr == nil, err == nil, what)
			}
		}
	}
}

// A copy of some bytes has to do with the ranges of these bytes alone, of however many there are.
func TestOnlyRangesThatAreCopiedAreOpened(t *testing.T) {
	t.Parallel()
	r, err := NewRanges([]Range{{Reader: os.Stdin, N: 10}, {Reader: os.Stdout, N: 10}, {N: 10}, {Reader: readerAtFunc(nil), N: 10}})
	require.NoError(t, err)
	files := func(off, n int) (int, bool) {
		files, rest := r.files(Call{}, off, n)
		return len(files.list), rest
	}
	for at, want := range []struct {
		off, n, files int
		rest          bool
	}{{0, 10, 1, false}, {9, 2, 2, false}, {10, 10, 1, false}, {10, 20, 1, false}, {20, 10, 0, false}, {20, 11, 0, true}, {0, 40, 2, true}} {
		got, rest := files(want.off, want.n)
		assert.Equal(t, want.files, got, "%d", at)
		assert.Equal(t, want.rest, rest, "%d", at)
	}
}

func TestRangesAreAReaderAt(t *testing.T) {
	t.Parallel()
	all := bytesOf(5, 1000)
	r, err := NewRanges([]Range{{Reader: bytes.NewReader(all), N: 300}, {Reader: bytes.NewReader(all), Off: 300, N: 700}})
	require.NoError(t, err)
	require.NoError(t, iotest.TestReader(io.NewSectionReader(r, 0, 1000), all))
	n, err := r.ReadAt(nil, 300)
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestRangesThatAreRefused(t *testing.T) {
	t.Parallel()
	mem := bytes.NewReader(make([]byte, 100))
	for want, g := range map[string]Range{
		"transfer: range 1: -1 bytes in rows of 0 every 0 bytes":       {Reader: mem, N: -1},
		"transfer: range 1: 5 bytes in rows of 4 every 3 bytes":        {Reader: mem, N: 5, Row: 4, Stride: 3},
		"transfer: range 1: 5 bytes in rows of -1 every 3 bytes":       {Reader: mem, N: 5, Row: -1, Stride: 3},
		"transfer: range 1: offset -1: must not be negative":           {Reader: mem, Off: -1, N: 1},
		"transfer: range 1: more than 9223372036854775807 bytes in al": {Reader: mem, N: math.MaxInt},
		"transfer: range 1: 3 rows every 9223372036854775807 bytes":    {Reader: mem, N: 3, Row: 1, Stride: math.MaxInt},
		"transfer: range 1: a Stride of 10 without a Row":              {Reader: mem, N: 5, Stride: 10},
		"transfer: range 1: a Stride of -10 without a Row":             {Reader: mem, N: 5, Stride: -10},
		"transfer: range 1: offset 9223372036854775807: must not be n": {Reader: mem, Off: math.MaxInt64, N: 1},
		"transfer: range 1: offset 1: must not be negative, nor the e": {Reader: mem, Off: 1, N: math.MaxInt},
		"transfer: range 1: the reader or writer is nil":               {Reader: (*os.File)(nil), N: 1},
	} {
		_, err := NewRanges([]Range{{N: 1}, g})
		require.ErrorContains(t, err, want)
	}
	var none *Ranges
	assert.Zero(t, none.Len())
	_, err := none.ReadAt(make([]byte, 1), 0)
	require.ErrorIs(t, err, io.EOF)
	r, err := NewRanges(nil)
	require.NoError(t, err)
	_, err = r.ReadAt(make([]byte, 1), -1)
	require.ErrorContains(t, err, "offset -1: must not be negative")
	f := newFixture(t, Options{})
	for _, r := range []*Ranges{r, none} {
		_, err = f.c.UploadFrom(t.Context(), f.device(1), r, 0, 1)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.ErrorContains(t, err, "*transfer.Ranges")
	}
	require.False(t, errors.Is(err, errNotMade), fmt.Sprint(err))
}
