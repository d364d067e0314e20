package transfer

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

var (
	_ io.ReaderAt   = (*Reader)(nil)
	_ io.WriterTo   = (*Reader)(nil)
	_ io.ReaderFrom = (*Writer)(nil)
	_ io.Writer     = (*Writer)(nil)
)

// What iotest expects of any reader holds for device memory.
func TestReaderPassesIOTest(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	want := bytesOf(1, 1000)
	mem := r.device(len(want))
	r.fill(mem, want)
	require.NoError(t, iotest.TestReader(r.c.NewReader(t.Context(), mem, len(want)), want))
	require.NoError(t, iotest.TestReader(r.c.NewReader(t.Context(), mem, 0), nil))
}

// io.Copy between device memory and anything moves what io.Copy between byte slices
// would.
func TestStreamsOfDeviceMemory(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const maxN = 3*mib + 17
	data := bytesOf(2, maxN)
	mem, back := r.device(maxN), r.device(maxN)
	r.fill(mem, data)
	random := rand.New(rand.NewPCG(1, 2))
	for range 30 {
		n := random.IntN(maxN + 1)
		first := random.IntN(n + 1)
		in := r.c.NewReader(t.Context(), mem, n)
		head := make([]byte, first)
		_, err := io.ReadFull(in, head)
		require.NoError(t, err)
		require.Equal(t, n-first, in.Len())
		var rest bytes.Buffer
		copied, err := io.Copy(&rest, in)
		require.NoError(t, err)
		require.EqualValues(t, n-first, copied)
		require.Zero(t, in.Len())
		require.True(t, bytes.Equal(data[:n], append(head, rest.Bytes()...)))

		out := r.c.NewWriter(t.Context(), back, n)
		_, err = out.Write(data[:first])
		require.NoError(t, err)
		var source io.Reader = bytes.NewReader(data[first:n])
		if random.IntN(2) == 0 {
			source = onlyReader{source}
		}
		copied, err = io.Copy(out, source)
		require.NoError(t, err)
		require.EqualValues(t, n-first, copied)
		require.Zero(t, out.Len())
		require.True(t, bytes.Equal(data[:n], r.onDevice(back, n)))
	}
}

type onlyReader struct{ io.Reader }

// A file on disk comes onto the device and back through io.Copy.
func TestStreamsOfFiles(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	data := bytesOf(3, 2*mib+5)
	name := filepath.Join(t.TempDir(), "in")
	require.NoError(t, os.WriteFile(name, data, 0o600))
	in, err := os.Open(name)
	require.NoError(t, err)
	defer in.Close()
	mem := r.device(3 * mib)
	w := r.c.NewWriter(t.Context(), mem, 3*mib)
	n, err := io.Copy(w, in)
	require.NoError(t, err, "a source that ends before the memory")
	require.EqualValues(t, len(data), n)
	require.Equal(t, 3*mib-len(data), w.Len())
	out, err := os.Create(name + ".out")
	require.NoError(t, err)
	n, err = io.Copy(out, r.c.NewReader(t.Context(), mem, len(data)))
	require.NoError(t, err)
	require.EqualValues(t, len(data), n)
	require.NoError(t, out.Close())
	got, err := os.ReadFile(name + ".out")
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

func TestSourcesLongerThanTheWriterAreErrors(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	mem := r.device(10)
	for name, source := range map[string]io.Reader{
		"a reader with a position": strings.NewReader("0123456789x"),
		"another":                  onlyReader{strings.NewReader("0123456789x")},
	} {
		w := r.c.NewWriter(t.Context(), mem, 10)
		n, err := io.Copy(w, source)
		require.ErrorIs(t, err, io.ErrShortWrite, name)
		require.EqualValues(t, 10, n, name)
		require.Equal(t, "0123456789", string(r.onDevice(mem, 10)), name)
	}
	w := r.c.NewWriter(t.Context(), mem, 4)
	n, err := w.Write([]byte("abcdef"))
	require.ErrorIs(t, err, io.ErrShortWrite)
	require.Equal(t, 4, n)
	require.Equal(t, "abcd456789", string(r.onDevice(mem, 10)))
	n, err = w.Write(nil)
	require.NoError(t, err)
	require.Zero(t, n)
}

// A source that ends before its time is an error: only io.EOF is an end.
func TestWriterReadFromReportsTruncatedSources(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = 3 * mib
	data := bytesOf(4, n)
	mem, other := r.device(8*n), r.device(n)
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, err := z.Write(data)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	gunzip := func(of []byte) io.Reader {
		g, err := gzip.NewReader(bytes.NewReader(of))
		require.NoError(t, err)
		return g
	}
	n64, err := r.c.NewWriter(t.Context(), mem, 2*n).ReadFrom(gunzip(zipped.Bytes()))
	require.NoError(t, err)
	require.EqualValues(t, n, n64)
	require.True(t, bytes.Equal(data, r.onDevice(mem, n)))

	failsAfter := func(has int, err error) io.Reader {
		return io.MultiReader(bytes.NewReader(data[:has]), iotest.ErrReader(err))
	}
	// The source of a pipe is another copy, whose own source has ended early.
	piped := func() io.Reader {
		from, to := io.Pipe()
		go func() {
			_, err := to.Write(data[:1000])
			_, early := r.c.UploadReader(t.Context(), other, strings.NewReader("short"), 100)
			to.CloseWithError(errors.Join(err, early))
		}()
		return from
	}
	sources := map[string]func() io.Reader{
		"half of a gzip stream":      func() io.Reader { return gunzip(zipped.Bytes()[:zipped.Len()/2]) },
		"another copy that is short": piped,
		"section of a short source":  func() io.Reader { return io.NewSectionReader(flaky{data, mib, ""}, 0, n) },
		"end that is wrapped":        func() io.Reader { return failsAfter(5, fmt.Errorf("connection: %w", io.EOF)) },
	}
	for _, has := range []int{0, 1, mib, n} {
		sources[fmt.Sprintf("body cut after %d bytes", has)] = func() io.Reader { return failsAfter(has, io.ErrUnexpectedEOF) }
	}
	for name, source := range sources {
		for _, capacity := range []int{n, n + 1, 8 * n} {
			w := r.c.NewWriter(t.Context(), mem, capacity)
			n64, err := io.Copy(w, source())
			require.Error(t, err, name)
			if name != "end that is wrapped" {
				require.ErrorIs(t, err, io.ErrUnexpectedEOF, name)
			}
			require.EqualValues(t, capacity-w.Len(), n64, name)
			require.True(t, bytes.Equal(data[:n64], r.onDevice(mem, int(n64))), name)
		}
	}
}

func TestReaderAndWriterReportErrors(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	mem := r.device(100)
	var none context.Context
	own := errors.New("own")
	for name, tt := range map[string]struct {
		use  func() error
		want any
	}{
		"nil context, read":  {func() error { _, err := r.c.NewReader(none, mem, 9).Read(make([]byte, 1)); return err }, "the context is nil"},
		"nil context, write": {func() error { _, err := r.c.NewWriter(none, mem, 9).Write(make([]byte, 1)); return err }, "the context is nil"},
		"negative, read":     {func() error { _, err := r.c.NewReader(t.Context(), mem, -1).Read(make([]byte, 1)); return err }, "negative"},
		"negative, write to": {func() error { _, err := r.c.NewReader(t.Context(), mem, -1).WriteTo(io.Discard); return err }, "negative"},
		"negative, write":    {func() error { _, err := r.c.NewWriter(t.Context(), mem, -1).Write(make([]byte, 1)); return err }, "negative"},
		"negative, read from": {func() error {
			_, err := r.c.NewWriter(t.Context(), mem, -1).ReadFrom(strings.NewReader("x"))
			return err
		}, "negative"},
		"negative offset": {func() error { _, err := r.c.NewReader(t.Context(), mem, 9).ReadAt(make([]byte, 1), -1); return err }, "negative"},
		"past the end":    {func() error { _, err := r.c.NewReader(t.Context(), mem, 9).ReadAt(make([]byte, 1), 9); return err }, io.EOF},
		"a reader fails": {func() error {
			_, err := r.c.NewWriter(t.Context(), mem, 9).ReadFrom(iotest.ErrReader(own))
			return err
		}, own},
		"a reader fails at the end": {func() error {
			source := io.MultiReader(strings.NewReader("123456789"), iotest.ErrReader(own))
			_, err := r.c.NewWriter(t.Context(), mem, 9).ReadFrom(source)
			return err
		}, own},
		"a reader ends its goroutine at the end": {func() error {
			source := io.MultiReader(strings.NewReader("123456789"), readerFunc(func([]byte) (int, error) { runtime.Goexit(); return 0, nil }))
			_, err := r.c.NewWriter(t.Context(), mem, 9).ReadFrom(source)
			return err
		}, "ended its goroutine"},
		"a reader blocks at the end": {func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			source := io.MultiReader(strings.NewReader("123456789"), readerFunc(func([]byte) (int, error) { select {} }))
			_, err := r.c.NewWriter(ctx, mem, 9).ReadFrom(source)
			return err
		}, context.DeadlineExceeded},
	} {
		err := tt.use()
		if want, ok := tt.want.(error); ok {
			assert.ErrorIs(t, err, want, name)
		} else {
			assert.ErrorContains(t, err, tt.want.(string), name)
		}
	}
	assert.Equal(t, 9, r.c.NewReader(t.Context(), cudart.DevPtr(1), 9).Len())
}

// Len does not wait for the copy that calls it, through its reader, its writer or Progress.
func TestStreamsWhoseLenIsCalledByTheirCopy(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	const n = mib
	mem := r.device(n)
	var in *Reader
	var out *Writer
	lens := func(int, int) {
		assert.Equal(t, n, in.Len())
		assert.Equal(t, n, out.Len())
	}
	v := r.c.With(Call{Progress: lens})
	in, out = v.NewReader(t.Context(), mem, n), v.NewWriter(t.Context(), mem, n)
	source := bytes.NewReader(make([]byte, n))
	copied, err := out.ReadFrom(readerFunc(func(p []byte) (int, error) { lens(0, 0); return source.Read(p) }))
	require.NoError(t, err)
	require.EqualValues(t, n, copied)
	require.Zero(t, out.Len())
	out = v.NewWriter(t.Context(), mem, n)
	copied, err = in.WriteTo(writerFunc(func(p []byte) (int, error) { lens(0, 0); return len(p), nil }))
	require.NoError(t, err)
	require.EqualValues(t, n, copied)
	require.Zero(t, in.Len())
}

// A copy that a stream's own copy begins waits for that: until the context ends.
func TestStreamsThatCopyWithinTheirCopy(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{})
	mem := r.device(100)
	ctx, cancel := context.WithCancelCause(t.Context())
	out := r.c.NewWriter(ctx, mem, 100)
	within := make(chan error, 1)
	_, err := out.ReadFrom(readerFunc(func(p []byte) (int, error) {
		go cancel(assert.AnError)
		_, err := out.Write(p)
		within <- err
		return 0, err
	}))
	for _, err := range []error{err, <-within} {
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, assert.AnError)
	}
	require.Equal(t, 100, out.Len())
}
