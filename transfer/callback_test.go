package transfer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
)

// liar is a reader and writer that does its work, and returns another count.
type liar struct {
	count func(n int) int
}

func (l liar) Read(p []byte) (int, error)             { return l.count(len(p)), nil }
func (l liar) Write(p []byte) (int, error)            { return l.count(len(p)), nil }
func (l liar) ReadAt(p []byte, _ int64) (int, error)  { return l.count(len(p)), nil }
func (l liar) WriteAt(p []byte, _ int64) (int, error) { return l.count(len(p)), nil }

// A count that cannot be is an error, and no byte outside of the target is
// written.
func TestImpossibleCountsAreErrors(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	for _, n := range []int{13, 700 * kib} {
		const capacity = 128 * kib
		mem := r.device(n + capacity)
		for name, count := range map[string]func(n int) int{
			"one more": func(n int) int { return n + 1 },
			"much":     func(n int) int { return n + capacity },
			"most":     func(int) int { return math.MaxInt },
			"negative": func(int) int { return -904 },
			"least":    func(int) int { return math.MinInt },
		} {
			l := liar{count}
			for method, call := range map[string]func() (int, error){
				"Read":    func() (int, error) { return r.c.UploadReader(t.Context(), mem, l, n) },
				"ReadAt":  func() (int, error) { return r.c.UploadFrom(t.Context(), mem, l, 0, n) },
				"Write":   func() (int, error) { return r.c.DownloadWriter(t.Context(), l, mem, n) },
				"WriteAt": func() (int, error) { return r.c.DownloadTo(t.Context(), l, 0, mem, n) },
			} {
				what := fmt.Sprintf("%s: %s of %d", method, name, n)
				r.fill(mem, make([]byte, n+capacity))
				done, err := call()
				require.ErrorContains(t, err, fmt.Sprintf("transfer.liar.%s returned the count ", method), what)
				require.Zero(t, done, what)
				require.True(t, bytes.Equal(make([]byte, n+capacity), r.onDevice(mem, n+capacity)), what)
			}
		}
	}
}

// A short read puts its bytes on the device, and none of those that the ring
// holds from copies before.
func TestShortReadsCopyTheirBytesOnly(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	const n = 3 * mib
	mem, want := r.device(n), bytesOf(5, n)
	for _, has := range []int{0, 1, 512*kib + 1, n - 1} {
		for how, upload := range map[string]func(has []byte) (int, error){
			"reader":   func(has []byte) (int, error) { return r.c.UploadReader(t.Context(), mem, bytes.NewReader(has), n) },
			"readerAt": func(has []byte) (int, error) { return r.c.UploadFrom(t.Context(), mem, bytes.NewReader(has), 0, n) },
			"error": func(has []byte) (int, error) {
				return r.c.UploadReader(t.Context(), mem, io.MultiReader(bytes.NewReader(has), iotest.ErrReader(errFlaky)), n)
			},
		} {
			what := fmt.Sprintf("%s of %d", how, has)
			require.NoError(t, r.c.Upload(t.Context(), mem, bytes.Repeat([]byte{9}, n)), what) // is in the ring now
			r.fill(mem, make([]byte, n))
			done, err := upload(want[:has])
			require.Error(t, err, what)
			require.Equal(t, has, done, what)
			require.True(t, bytes.Equal(append(bytes.Clone(want[:has]), make([]byte, n-has)...), r.onDevice(mem, n)), what)
		}
	}
}

// A callback that ends its goroutine, or panics, fails the copy with an error. Nothing
// is in flight then, no memory of the ring is lost, and Close works.
func TestCallbacksThatDoNotReturn(t *testing.T) {
	t.Parallel()
	const n = 6 * mib
	want := bytesOf(1, n)
	type operation func(ctx context.Context, r *fixture, end func()) error
	progress := func(end func()) Call { return Call{Progress: func(int, int) { end() }} }
	for name, operation := range map[string]operation{
		"readerAt": func(ctx context.Context, r *fixture, end func()) error {
			_, err := r.c.UploadFrom(ctx, r.device(n), hooked{want, end}, 0, n)
			return err
		},
		"writerAt": func(ctx context.Context, r *fixture, end func()) error {
			_, err := r.c.DownloadTo(ctx, hooked{make([]byte, n), end}, 0, r.device(n), n)
			return err
		},
		"reader": func(ctx context.Context, r *fixture, end func()) error {
			_, err := r.c.UploadReader(ctx, r.device(n), &hookedStream{hooked{want, end}, 0}, n)
			return err
		},
		"writer": func(ctx context.Context, r *fixture, end func()) error {
			_, err := r.c.DownloadWriter(ctx, &hookedStream{hooked{make([]byte, n), end}, 0}, r.device(n), n)
			return err
		},
		"progress of an upload": func(ctx context.Context, r *fixture, end func()) error {
			return r.c.With(progress(end)).Upload(ctx, r.device(n), want)
		},
		"progress of a download": func(ctx context.Context, r *fixture, end func()) error {
			_, err := r.c.With(progress(end)).DownloadTo(ctx, hooked{make([]byte, n), func() {}}, 0, r.device(n), n)
			return err
		},
		"progress of a small copy": func(ctx context.Context, r *fixture, end func()) error {
			return r.c.With(progress(end)).Download(ctx, make([]byte, 100), r.device(100))
		},
		"progress of pinned memory": func(ctx context.Context, r *fixture, end func()) error {
			buf, err := hostmem.Alloc(ctx, r.dev, n, hostmem.Options{})
			if err != nil {
				return err
			}
			defer func() { assert.NoError(r, buf.Close()) }()
			return r.c.With(progress(end)).Upload(ctx, r.device(n), buf.Bytes())
		},
		"progress of parts": func(ctx context.Context, r *fixture, end func()) error {
			return r.c.With(progress(end)).UploadAll(ctx, cutUp(want, r.device(n), 0, 5000))
		},
	} {
		for how, end := range map[string]func(){"exits": runtime.Goexit, "panics": func() { panic("out of patience") }} {
			t.Run(fmt.Sprintf("%s/%s", name, how), func(t *testing.T) {
				t.Parallel()
				sim, rt := testgpu.Sim(t, cudasim.Config{})
				dev, err := rt.Device(0)
				require.NoError(t, err)
				r := fixtureOn(t, dev, Options{Workers: 2})
				for range 3 {
					failed := operation(t.Context(), r, end)
					if how == "panics" {
						require.ErrorContains(t, failed, "panic: out of patience")
						require.ErrorContains(t, failed, "callback_test.go:", "the stack")
					} else {
						require.ErrorIs(t, failed, bounded.ErrExited)
					}
					require.Zero(t, sim.PendingCopies())
				}
				st := r.c.Stats()
				require.Equal(t, st.Copies, st.Failures)
				mem := r.device(n)
				require.NoError(t, r.c.Upload(t.Context(), mem, want))
				require.True(t, bytes.Equal(want, r.onDevice(mem, n)))
				require.NoError(t, r.c.Close(), "memory of the ring that was lost would be in use")
			})
		}
	}
}

// hooked calls hook before each read and write of its bytes.
type hooked struct {
	data []byte
	hook func()
}

func (h hooked) ReadAt(p []byte, off int64) (int, error) {
	h.hook()
	return copy(p, h.data[off:]), nil
}

func (h hooked) WriteAt(p []byte, off int64) (int, error) {
	h.hook()
	return copy(h.data[off:], p), nil
}

type hookedStream struct {
	hooked
	at int64
}

func (h *hookedStream) Read(p []byte) (int, error) {
	n, err := h.ReadAt(p, h.at)
	h.at += int64(n)
	return n, err
}

func (h *hookedStream) Write(p []byte) (int, error) {
	n, err := h.WriteAt(p, h.at)
	h.at += int64(n)
	return n, err
}

func TestReadersAreNotCalledAfterCancellation(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	const n, before = 700 * kib, 5
	mem, want := r.device(n), bytesOf(1, n)
	ctx, cancel := context.WithCancelCause(t.Context())
	var reads atomic.Int32
	from := &hookedStream{hooked{want, func() {
		if reads.Add(1) == before {
			cancel(assert.AnError)
		}
	}}, 0}
	done, err := r.c.UploadReader(ctx, mem, iotest.OneByteReader(from), n)
	require.ErrorIs(t, err, assert.AnError)
	require.ErrorIs(t, err, context.Canceled)
	require.EqualValues(t, before, reads.Load())
	require.LessOrEqual(t, done, before)
	require.Equal(t, want[:done], r.onDevice(mem, done))
}

// hesitant returns nothing a number of times before each byte.
type hesitant struct {
	from  io.Reader
	times int
	empty int
	reads int
}

func (h *hesitant) Read(p []byte) (int, error) {
	h.reads++
	if h.empty < h.times {
		h.empty++
		return 0, nil
	}
	h.empty = 0
	return h.from.Read(p[:1])
}

func TestReadersThatReturnNothing(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 1})
	mem, want := r.device(50), bytesOf(1, 50)
	never := &hesitant{times: math.MaxInt}
	done, err := r.c.UploadReader(t.Context(), mem, never, 50)
	require.ErrorIs(t, err, io.ErrNoProgress)
	require.Zero(t, done)
	require.Equal(t, 100, never.reads)

	done, err = r.c.UploadReader(t.Context(), mem, &hesitant{from: bytes.NewReader(want), times: 99}, 50)
	require.NoError(t, err)
	require.Equal(t, 50, done)
	require.Equal(t, want, r.onDevice(mem, 50))
}

// full takes so many bytes, and then ends a write in one of several ways.
type full struct {
	bytes.Buffer
	capacity int
	err      error
	all      bool // the write that fills it returns an error too
	writes   int  // after the one that failed
	failed   bool
}

func (f *full) Write(p []byte) (int, error) {
	if f.failed {
		f.writes++
	}
	n := min(len(p), f.capacity)
	f.capacity -= n
	f.Buffer.Write(p[:n])
	if n < len(p) || f.all && f.capacity == 0 {
		f.failed = true
		return n, f.err
	}
	return n, nil
}

// The count is what the writer took, so that a copy can be continued there. After a failure it is not written to again.
func TestDownloadCountsWhatTheWriterReported(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	const n = 6 * mib
	mem, want := r.device(n), bytesOf(1, n)
	r.fill(mem, want)
	for _, capacity := range []int{0, 1, 512 * kib, 512*kib + 1, 3*mib + 777, 5 * mib, n - 1} {
		for name, w := range map[string]*full{
			"short":    {capacity: capacity},
			"error":    {capacity: capacity, err: errFlaky},
			"at once":  {capacity: capacity, err: errFlaky, all: true},
			"with EOF": {capacity: capacity, err: io.EOF},
		} {
			what := fmt.Sprintf("%s: %d", name, capacity)
			done, err := r.c.DownloadWriter(t.Context(), w, mem, n)
			is := w.err
			if is == nil {
				is = io.ErrShortWrite
			}
			require.ErrorIs(t, err, is, what)
			require.ErrorContains(t, err, fmt.Sprintf("at byte %d of %d", capacity, n), what)
			require.Equal(t, capacity, done, what)
			require.True(t, bytes.Equal(want[:capacity], w.Bytes()), what)
			require.Zero(t, w.writes, what)
		}
	}
}
