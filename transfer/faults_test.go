package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
)

// requireEnded waits until there are no more goroutines than before.
func requireEnded(t testing.TB, before int) {
	t.Helper()
	for range 1000 { // workers stay for a second
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	buf := make([]byte, 1<<16)
	t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
}

// A bench has what the operations of a sweep of faults use, on a device of its own.
type bench struct {
	t     *testing.T
	sim   *cudasim.Sim
	rt    *cudart.Runtime
	c     *Copier
	dev   *cudart.Device
	mem   cudart.DevPtr
	buf   *hostmem.Buffer
	strm  *cudart.Stream
	bytes []byte // on the device at first, and in buf

	dir, file string // a file with these bytes
}

const benchBytes = 2*mib + 5

// newBenches returns a function that makes benches, on CUDA of a version.
func newBenches(t *testing.T) func(t *testing.T, version cudart.Version) *bench {
	dir := t.TempDir()
	want := bytesOf(3, benchBytes)
	file := filepath.Join(dir, "from")
	require.NoError(t, os.WriteFile(file, want, 0o600))
	return func(t *testing.T, version cudart.Version) *bench {
		b := &bench{t: t, bytes: bytes.Clone(want), dir: dir, file: file}
		var err error
		b.sim, err = cudasim.New(testgpu.Config(cudasim.Config{Version: version}))
		require.NoError(t, err)
		b.rt, err = cudart.Open(context.Background(), cudart.Options{Source: b.sim})
		require.NoError(t, err)
		b.dev, err = b.rt.Device(0)
		require.NoError(t, err)
		b.c, err = NewCopier(t.Context(), b.dev, Options{Workers: 2})
		require.NoError(t, err)
		b.mem, err = b.dev.Malloc(benchBytes)
		require.NoError(t, err)
		b.buf, err = hostmem.Alloc(t.Context(), b.dev, benchBytes, hostmem.Options{})
		require.NoError(t, err)
		copy(b.buf.Bytes(), want)
		b.strm, err = b.dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
		require.NoError(t, b.c.Upload(t.Context(), b.mem, want))
		return b
	}
}

// close requires that all works and can be released.
func (b *bench) close(what string) {
	t := b.t
	after := make([]byte, benchBytes)
	require.NoError(t, b.c.Upload(t.Context(), b.mem, b.bytes), what)
	require.NoError(t, b.c.Download(t.Context(), after, b.mem), what)
	require.True(t, bytes.Equal(b.bytes, after), what)
	require.NoError(t, b.strm.Close())
	(&fixture{TB: t, c: b.c}).closeSoon()
	require.NoError(t, b.buf.Close())
	require.NoError(t, b.dev.Free(b.mem))
	require.NoError(t, b.rt.Close())
	testgpu.End(t, b.sim)
}

// calls runs f and counts the calls of each C function, but of those that cannot fail.
func (b *bench) calls(f func()) map[string]int {
	var mu sync.Mutex
	calls := make(map[string]int)
	b.sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	f()
	b.sim.OnCall(nil)
	mu.Lock()
	defer mu.Unlock()
	calls = maps.Clone(calls)
	delete(calls, "cudaGetLastError")
	return calls
}

// operations are all ways of copying. What they return is to be bench.bytes.
var operations = map[string]func(ctx context.Context, b *bench) ([]byte, error){
	"upload": func(ctx context.Context, b *bench) ([]byte, error) {
		return nil, b.c.Upload(ctx, b.mem, b.bytes)
	},
	"small upload": func(ctx context.Context, b *bench) ([]byte, error) {
		return nil, b.c.Upload(ctx, b.mem, b.bytes[:100])
	},
	"medium upload": func(ctx context.Context, b *bench) ([]byte, error) { // in pieces
		return nil, b.c.Upload(ctx, b.mem, b.bytes[:300*kib])
	},
	"upload pinned": func(ctx context.Context, b *bench) ([]byte, error) {
		return nil, b.c.Upload(ctx, b.mem, b.buf.Bytes())
	},
	"upload on a stream": func(ctx context.Context, b *bench) ([]byte, error) {
		return nil, errors.Join(b.c.With(Call{Stream: b.strm}).Upload(ctx, b.mem, b.bytes), b.strm.Synchronize(ctx))
	},
	"small upload on a stream": func(ctx context.Context, b *bench) ([]byte, error) {
		return nil, errors.Join(b.c.With(Call{Stream: b.strm}).Upload(ctx, b.mem, b.bytes[:100]), b.strm.Synchronize(ctx))
	},
	"upload parts": func(ctx context.Context, b *bench) ([]byte, error) {
		return nil, b.c.UploadAll(ctx, cutUp(b.bytes, b.mem, 0, 5000))
	},
	"upload file": func(ctx context.Context, b *bench) ([]byte, error) {
		f, err := os.Open(b.file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		_, err = b.c.UploadFrom(ctx, b.mem, f, 0, benchBytes)
		return nil, err
	},
	"upload file past the cache": func(ctx context.Context, b *bench) ([]byte, error) {
		f, err := os.Open(b.file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		_, err = b.c.With(Call{DirectIO: true}).UploadFrom(ctx, b.mem, f, 0, benchBytes)
		return nil, err
	},
	"upload reader": func(ctx context.Context, b *bench) ([]byte, error) {
		_, err := b.c.UploadReader(ctx, b.mem, struct{ io.Reader }{bytes.NewReader(b.bytes)}, benchBytes)
		return nil, err
	},
	"download": func(ctx context.Context, b *bench) ([]byte, error) {
		got := make([]byte, benchBytes)
		return got, b.c.Download(ctx, got, b.mem)
	},
	"small download": func(ctx context.Context, b *bench) ([]byte, error) {
		got := bytes.Clone(b.bytes)
		clear(got[:100])
		return got, b.c.Download(ctx, got[:100], b.mem)
	},
	"download pinned": func(ctx context.Context, b *bench) ([]byte, error) {
		clear(b.buf.Bytes())
		err := b.c.Download(ctx, b.buf.Bytes(), b.mem)
		return b.buf.Bytes(), err
	},
	"download parts": func(ctx context.Context, b *bench) ([]byte, error) {
		got := make([]byte, benchBytes)
		return got, b.c.DownloadAll(ctx, cutUp(got, b.mem, 0, 5000))
	},
	"download file": func(ctx context.Context, b *bench) ([]byte, error) {
		f, err := os.CreateTemp(b.dir, "to")
		if err != nil {
			return nil, err
		}
		defer os.Remove(f.Name())
		defer f.Close()
		if _, err := b.c.DownloadTo(ctx, f, 0, b.mem, benchBytes); err != nil {
			return nil, err
		}
		return os.ReadFile(f.Name())
	},
	"download buffer": func(ctx context.Context, b *bench) ([]byte, error) {
		var w bytes.Buffer
		_, err := b.c.DownloadWriter(ctx, &w, b.mem, benchBytes)
		return w.Bytes(), err
	},
	"download writer": func(ctx context.Context, b *bench) ([]byte, error) {
		var w bytes.Buffer
		_, err := b.c.DownloadWriter(ctx, struct{ io.Writer }{&w}, b.mem, benchBytes)
		return w.Bytes(), err
	},
}

// isQueued reports whether an operation may leave copies to a stream.
func isQueued(operation string) bool { return strings.HasSuffix(operation, "on a stream") }

// TestEveryCallCanFail makes each CUDA call of each operation fail in turn, once or from
// then on. The operation fails with an error that names the call, or works all the same;
// nothing is in flight, the next one works when the fault is over, and all can be
// released. Not parallel: it counts goroutines and what is pinned.
func TestEveryCallCanFail(t *testing.T) {
	benches := newBenches(t)
	before, pinned := runtime.NumGoroutine(), hostmem.ReadStats().ReservedBytes
	failed := 0
	var cells []cell
	for _, version := range []cudart.Version{12040, 13000} {
		for _, name := range slices.Sorted(maps.Keys(operations)) {
			b := benches(t, version)
			calls := b.calls(func() {
				_, err := operations[name](t.Context(), b)
				require.NoError(t, err, name)
			})
			b.close(name)
			for _, fn := range slices.Sorted(maps.Keys(calls)) {
				add := func(nth, times int) {
					dims := []string{name, fmt.Sprintf("CUDA %v", version), fmt.Sprintf("%s %d times", fn, times), fmt.Sprintf("%s, call %d", fn, min(nth, 4))}
					cells = append(cells, cell{dims, func(t *testing.T) {
						if benches(t, version).fails(t, name, fn, nth, times) {
							failed++
						}
					}})
				}
				times := calls[fn]
				if strings.HasSuffix(fn, "Query") { // as often as the wait happens to ask
					times = min(times, 2)
				}
				for nth := 1; nth <= times; nth++ {
					add(nth, 1)
				}
				add(1, -1)
			}
		}
	}
	cells = thin(cells)
	for _, c := range cells {
		t.Run(strings.Join(c.dims, "/"), c.run)
	}
	requireEnded(t, before)
	require.Equal(t, pinned, hostmem.ReadStats().ReservedBytes)
	require.NotZero(t, failed)
	t.Logf("%d faults: %d copies failed, %d worked all the same", len(cells), failed, len(cells)-failed)
}

// fails runs an operation with calls that fail, and reports whether it has failed.
func (b *bench) fails(t *testing.T, name, fn string, nth, times int) bool {
	b.sim.Fail(fn, cudasim.Fault{Nth: nth, Times: times, Code: cudart.ErrInvalidResourceHandle})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a wait that has no end
	defer cancel()
	var got []byte
	var failed error
	calls := b.calls(func() { got, failed = operations[name](ctx, b) })
	b.sim.ResetFaults()
	if failed != nil {
		require.GreaterOrEqual(t, calls[fn], nth)
		require.ErrorIs(t, failed, cudart.ErrInvalidResourceHandle)
		require.ErrorContains(t, failed, fn)
	} else if got != nil {
		require.True(t, bytes.Equal(b.bytes, got))
	}
	if !isQueued(name) {
		require.Zero(t, b.sim.PendingCopies())
	}
	// The next one works, or reports a call that was in progress: then the one after it.
	_, err := operations[name](t.Context(), b)
	if times < 0 && errors.Is(err, cudart.ErrInvalidResourceHandle) {
		_, err = operations[name](t.Context(), b)
	}
	require.NoError(t, err)
	b.close(t.Name())
	return failed != nil
}

// Making and closing a copier, with each call failing in turn.
func TestMakingAndClosingCanFail(t *testing.T) {
	pinned := hostmem.ReadStats().ReservedBytes
	positions := 0
	for nth := 1; ; nth++ {
		sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
		require.NoError(t, err)
		rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
		require.NoError(t, err)
		dev, err := rt.Device(0)
		require.NoError(t, err)
		start := sim.TotalCalls()
		sim.FailCall(start+nth, cudart.ErrInvalidResourceHandle)
		c, err := NewCopier(t.Context(), dev, Options{Workers: 1})
		made := err == nil
		if !made {
			require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
			require.ErrorContains(t, err, "transfer: new copier on device 0")
		} else {
			if err := c.Close(); err != nil {
				require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
				require.ErrorContains(t, err, "transfer: close copier on device 0")
				require.NoError(t, c.Close(), "it may be tried again")
			}
			require.NoError(t, c.Close(), "once more does nothing")
			require.ErrorIs(t, c.Upload(t.Context(), 1, []byte{1}), cudart.ErrClosed)
		}
		calls := sim.TotalCalls() - start
		sim.ResetFaults()
		require.NoError(t, rt.Close())
		testgpu.End(t, sim)
		positions++
		if made && nth > calls {
			break
		}
	}
	require.Equal(t, pinned, hostmem.ReadStats().ReservedBytes)
	require.Greater(t, positions, 15)
	t.Logf("%d faults", positions)
}

// flaky fails at a byte, in one of several ways.
type flaky struct {
	data []byte
	at   int
	how  string
}

var errFlaky = errors.New("the disk is on fire")

func (f flaky) fail(n int) (int, error) {
	switch f.how {
	case "error":
		return n, errFlaky
	case "panic":
		panic(errFlaky)
	case "end":
		return n, io.EOF
	case "nothing":
		return n, nil
	}
	return n, io.ErrUnexpectedEOF
}

func (f flaky) ReadAt(p []byte, off int64) (int, error) {
	if n := copy(p, f.data[off:max(int(off), f.at)]); n < len(p) {
		return f.fail(n)
	}
	return len(p), nil
}

func (f flaky) WriteAt(p []byte, off int64) (int, error) {
	if n := copy(f.data[off:max(int(off), f.at)], p); n < len(p) {
		return f.fail(n)
	}
	return len(p), nil
}

func TestReadersAndWritersThatFail(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 3})
	const n = 4*mib + 9
	want := bytesOf(8, n)
	mem := r.device(n)
	for _, at := range []int{0, 1, 512*kib - 1, 512 * kib, 2*mib + 1, n - 1} {
		for how, is := range map[string]error{"error": errFlaky, "panic": nil, "end": io.ErrUnexpectedEOF, "nothing": io.ErrNoProgress} {
			what := fmt.Sprintf("%s at %d", how, at)
			r.fill(mem, make([]byte, n))
			done, err := r.c.UploadFrom(t.Context(), mem, flaky{want, at, how}, 0, n)
			require.Error(t, err, what)
			if is != nil {
				require.ErrorIs(t, err, is, what)
				require.Equal(t, at, done, what)
			} else {
				require.ErrorContains(t, err, "panic: the disk is on fire", what)
				require.LessOrEqual(t, done, at, what)
			}
			require.ErrorContains(t, err, fmt.Sprintf("at byte %d of %d", done, n), what)
			require.True(t, bytes.Equal(want[:done], r.onDevice(mem, done)), what)

			got := make([]byte, n)
			r.fill(mem, want)
			done, err = r.c.DownloadTo(t.Context(), flaky{got, at, how}, 0, mem, n)
			require.Error(t, err, what)
			switch how {
			case "panic":
				require.ErrorContains(t, err, "panic: the disk is on fire", what)
			case "nothing":
				require.ErrorIs(t, err, io.ErrShortWrite, what)
			}
			if how == "panic" {
				require.LessOrEqual(t, done, at, what)
			} else {
				require.Equal(t, at, done, what)
			}
			require.True(t, bytes.Equal(want[:done], got[:done]), what)
			require.Zero(t, sim.PendingCopies(), what)
		}
	}
}

func TestFilesThatShrink(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	ring := r.c.Stats().RingBytes
	n, remaining := ring+8*mib, ring+3*mib+1
	want := bytesOf(5, n)
	mem := r.device(n)
	for where, dir := range directories(t) {
		f, err := os.Create(filepath.Join(dir, "shrinks"))
		require.NoError(t, err)
		_, err = f.Write(want)
		require.NoError(t, err)
		before := sim.Calls("cudaMemcpyAsync")
		sim.Hold() // no more is read than fits the ring
		var done int
		var group sync.WaitGroup
		group.Go(func() { done, err = r.c.UploadFrom(t.Context(), mem, f, 0, n) })
		for sim.Calls("cudaMemcpyAsync") == before {
			runtime.Gosched()
		}
		assert.NoError(t, f.Truncate(int64(remaining)))
		sim.Release()
		group.Wait()
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, where)
		require.Equal(t, remaining, done, where)
		require.True(t, bytes.Equal(want[:done], r.onDevice(mem, done)), where)

		// It grows again: only what was asked for is read.
		require.NoError(t, f.Truncate(int64(n)))
		done, err = r.c.With(Call{Progress: func(int, int) { assert.NoError(t, f.Truncate(int64(2*n))) }}).UploadFrom(t.Context(), mem, f, 0, n)
		require.NoError(t, err, where)
		require.Equal(t, n, done, where)
		require.NoError(t, f.Close())

		// Nothing in it, nothing asked for.
		empty, err := os.Create(filepath.Join(dir, "empty"))
		require.NoError(t, err)
		_, err = r.c.UploadFrom(t.Context(), mem, empty, 0, 0)
		require.NoError(t, err)
		done, err = r.c.UploadFrom(t.Context(), mem, empty, 0, 1)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.Zero(t, done)
		require.NoError(t, empty.Close())
	}
	closed, err := os.Create(filepath.Join(t.TempDir(), "closed"))
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	_, err = r.c.UploadFrom(t.Context(), mem, closed, 0, 1)
	require.ErrorIs(t, err, os.ErrClosed)
	_, err = r.c.DownloadTo(t.Context(), closed, 0, mem, 1)
	require.ErrorIs(t, err, os.ErrClosed)
}
