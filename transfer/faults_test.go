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
	for range 200 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	buf := make([]byte, 1<<16)
	t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
}

// TestEveryCallCanFail makes each CUDA call of each operation fail in turn. The
// operation fails with an error that names the call, or works all the same;
// nothing is in flight, the next one works, and all can be released. Not
// parallel: it counts goroutines and what is pinned.
func TestEveryCallCanFail(t *testing.T) {
	const n = 2*mib + 5
	dir := t.TempDir()
	want := bytesOf(3, n)
	file := filepath.Join(dir, "from")
	require.NoError(t, os.WriteFile(file, want, 0o600))
	type bench struct {
		c     *Copier
		dev   *cudart.Device
		mem   cudart.DevPtr
		buf   *hostmem.Buffer
		strm  *cudart.Stream
		bytes []byte
	}
	operations := map[string]func(ctx context.Context, b *bench) ([]byte, error){
		"upload": func(ctx context.Context, b *bench) ([]byte, error) {
			return nil, b.c.Upload(ctx, b.mem, b.bytes)
		},
		"small upload": func(ctx context.Context, b *bench) ([]byte, error) {
			return nil, b.c.Upload(ctx, b.mem, b.bytes[:100])
		},
		"upload pinned": func(ctx context.Context, b *bench) ([]byte, error) {
			return nil, b.c.Upload(ctx, b.mem, b.buf.Bytes())
		},
		"upload on a stream": func(ctx context.Context, b *bench) ([]byte, error) {
			return nil, errors.Join(b.c.With(Call{Stream: b.strm}).Upload(ctx, b.mem, b.bytes), b.strm.Synchronize(ctx))
		},
		"upload parts": func(ctx context.Context, b *bench) ([]byte, error) {
			return nil, b.c.UploadAll(ctx, cutUp(b.bytes, b.mem, 0, 5000))
		},
		"upload file": func(ctx context.Context, b *bench) ([]byte, error) {
			f, err := os.Open(file)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			_, err = b.c.With(Call{DirectIO: true}).UploadFrom(ctx, b.mem, f, 0, n)
			return nil, err
		},
		"download": func(ctx context.Context, b *bench) ([]byte, error) {
			got := make([]byte, n)
			return got, b.c.Download(ctx, got, b.mem)
		},
		"download pinned": func(ctx context.Context, b *bench) ([]byte, error) {
			clear(b.buf.Bytes())
			err := b.c.Download(ctx, b.buf.Bytes(), b.mem)
			return b.buf.Bytes(), err
		},
		"download new": func(ctx context.Context, b *bench) ([]byte, error) {
			m, err := b.c.DownloadNew(ctx, b.mem, n)
			if err != nil {
				return nil, err
			}
			return bytes.Clone(m.Bytes()), m.Close()
		},
		"download parts": func(ctx context.Context, b *bench) ([]byte, error) {
			got := make([]byte, n)
			return got, b.c.DownloadAll(ctx, cutUp(got, b.mem, 0, 5000))
		},
		"download file": func(ctx context.Context, b *bench) ([]byte, error) {
			f, err := os.CreateTemp(dir, "to")
			if err != nil {
				return nil, err
			}
			defer os.Remove(f.Name())
			defer f.Close()
			if _, err := b.c.DownloadTo(ctx, f, 0, b.mem, n); err != nil {
				return nil, err
			}
			return os.ReadFile(f.Name())
		},
		"download writer": func(ctx context.Context, b *bench) ([]byte, error) {
			var w bytes.Buffer
			_, err := b.c.DownloadWriter(ctx, &w, b.mem, n)
			return w.Bytes(), err
		},
	}

	before, pinned := runtime.NumGoroutine(), hostmem.ReadStats().ReservedBytes
	positions, failed := 0, 0
	for _, version := range []cudart.Version{12040, 13000} {
		for name, operation := range operations {
			// trial runs the operation with a fault, and returns the calls that it made.
			trial := func(fn string, nth int) map[string]int {
				sim, err := cudasim.New(cudasim.Config{Version: version})
				require.NoError(t, err)
				rt, err := cudart.Open(cudart.Options{Source: sim})
				require.NoError(t, err)
				dev, err := rt.Device(0)
				require.NoError(t, err)
				b := &bench{dev: dev, bytes: bytes.Clone(want)}
				b.c, err = NewCopier(t.Context(), dev, Options{Workers: 2, Chunk: 512 * kib})
				require.NoError(t, err)
				b.mem, err = dev.Malloc(n)
				require.NoError(t, err)
				b.buf, err = hostmem.Alloc(t.Context(), dev, n, hostmem.Options{})
				require.NoError(t, err)
				copy(b.buf.Bytes(), want)
				b.strm, err = dev.NewStream(cudart.StreamOptions{})
				require.NoError(t, err)
				require.NoError(t, b.c.Upload(t.Context(), b.mem, want))

				var mu sync.Mutex
				calls := make(map[string]int)
				sim.OnCall(func(fn string, _ int) {
					mu.Lock()
					defer mu.Unlock()
					calls[fn]++
				})
				if fn != "" {
					sim.Fail(fn, cudasim.Fault{Nth: nth, Code: cudart.ErrInvalidResourceHandle})
				}
				got, err := operation(t.Context(), b)
				sim.OnCall(nil)
				mu.Lock()
				reached := calls[fn] >= nth
				mu.Unlock()
				what := fmt.Sprintf("%s, CUDA %v: %s, call %d", name, version, fn, nth)
				sim.ResetFaults()
				switch {
				case fn == "":
					require.NoError(t, err, what)
				case err != nil:
					failed++
					require.True(t, reached, what)
					require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle, what)
					require.ErrorContains(t, err, fn, what)
				}
				if err == nil && got != nil {
					require.True(t, bytes.Equal(want, got), what)
				}
				if !strings.HasPrefix(name, "upload on") {
					require.Zero(t, sim.Outstanding().PendingOps, what)
				}

				_, err = operation(t.Context(), b) // the next one works
				require.NoError(t, err, what)
				after := make([]byte, n)
				require.NoError(t, b.c.Download(t.Context(), after, b.mem), what)
				require.True(t, bytes.Equal(want, after), what)
				require.NoError(t, b.strm.Close())
				require.NoError(t, b.c.Close(), what)
				require.NoError(t, b.buf.Close())
				require.NoError(t, dev.Free(b.mem))
				require.NoError(t, rt.Close())
				require.NoError(t, sim.Check(), what)
				require.NoError(t, sim.Close(), what)
				return calls
			}
			calls := trial("", 0)
			delete(calls, "cudaGetLastError") // cannot fail
			for _, fn := range slices.Sorted(maps.Keys(calls)) {
				times := calls[fn]
				if strings.HasSuffix(fn, "Query") { // as often as the wait happens to ask
					times = min(times, 2)
				}
				for nth := 1; nth <= times; nth++ {
					positions++
					trial(fn, nth)
				}
			}
		}
	}
	requireEnded(t, before)
	require.Equal(t, pinned, hostmem.ReadStats().ReservedBytes)
	require.NotZero(t, failed)
	t.Logf("%d faults: %d copies failed, %d worked all the same", positions, failed, positions-failed)
}

// Making and closing a copier, with each call failing in turn.
func TestMakingAndClosingCanFail(t *testing.T) {
	pinned := hostmem.ReadStats().ReservedBytes
	positions := 0
	for nth := 1; ; nth++ {
		sim, err := cudasim.New(cudasim.Config{})
		require.NoError(t, err)
		rt, err := cudart.Open(cudart.Options{Source: sim})
		require.NoError(t, err)
		dev, err := rt.Device(0)
		require.NoError(t, err)
		start := sim.TotalCalls()
		sim.FailCall(start+nth, cudart.ErrInvalidResourceHandle)
		c, err := NewCopier(t.Context(), dev, Options{Workers: 1, Chunk: 512 * kib})
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
			require.ErrorIs(t, c.Upload(t.Context(), 1, []byte{1}), ErrClosed)
		}
		calls := sim.TotalCalls() - start
		require.NoError(t, rt.Close())
		require.NoError(t, sim.Check(), "call %d", nth)
		require.NoError(t, sim.Close())
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
	r := rigOn(t, dev, Options{Workers: 3, Chunk: 512 * kib})
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
			require.Zero(t, sim.Outstanding().PendingOps, what)
		}
	}
}

func TestFilesThatShrink(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{Workers: 2, Chunk: 512 * kib})
	const n = 8 * mib
	want := bytesOf(5, n)
	mem := r.device(n)
	for where, dir := range directories(t) {
		f, err := os.Create(filepath.Join(dir, "shrinks"))
		require.NoError(t, err)
		_, err = f.Write(want)
		require.NoError(t, err)
		var once sync.Once
		done, err := r.c.With(Call{Progress: func(int, int) {
			once.Do(func() { assert.NoError(t, f.Truncate(3*mib+1)) })
		}}).UploadFrom(t.Context(), mem, f, 0, n)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, where)
		require.GreaterOrEqual(t, done, 3*mib+1, where)
		require.True(t, bytes.Equal(want[:done], r.onDevice(mem, done)), where)

		// It grows again: only what was asked for is read.
		require.NoError(t, f.Truncate(n))
		done, err = r.c.With(Call{Progress: func(int, int) { assert.NoError(t, f.Truncate(2*n)) }}).UploadFrom(t.Context(), mem, f, 0, n)
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
