package transfer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// openSim opens a simulated GPU whose device gets lost: nothing can be released
// at the end, and nothing checks that.
func openSim(t *testing.T, sim *cudasim.Sim) (*cudart.Device, *cudart.Runtime) {
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = rt.Close(), sim.Close() })
	dev, err := rt.Device(0)
	require.NoError(t, err)
	return dev, rt
}

// Work that fails on the device, after the call that queued it succeeded, fails
// the copy. Bytes of it are not written.
func TestCopiesThatFailOnTheDevice(t *testing.T) {
	t.Parallel()
	const n = 4 * mib
	want := bytesOf(1, n)
	for nth := 1; nth <= 3; nth++ {
		for name, copies := range map[string]func(ctx context.Context, c *Copier, mem cudart.DevPtr) error{
			"upload": func(ctx context.Context, c *Copier, mem cudart.DevPtr) error { return c.Upload(ctx, mem, want) },
			"upload parts": func(ctx context.Context, c *Copier, mem cudart.DevPtr) error {
				return c.UploadAll(ctx, cutUp(want, mem, 0, mib))
			},
			"download": func(ctx context.Context, c *Copier, mem cudart.DevPtr) error {
				return c.Download(ctx, make([]byte, n), mem)
			},
			"writer": func(ctx context.Context, c *Copier, mem cudart.DevPtr) error {
				var w bytes.Buffer
				done, err := c.DownloadWriter(ctx, struct{ io.Writer }{&w}, mem, n)
				require.Equal(t, done, w.Len())
				require.LessOrEqual(t, done, []int{0, 512 * kib, 1536 * kib}[nth-1], "chunks before it")
				require.True(t, bytes.Equal(want[:done], w.Bytes()), "nothing of the copy that failed")
				return err
			},
		} {
			t.Run(fmt.Sprintf("%s, copy %d", name, nth), func(t *testing.T) {
				sim, err := cudasim.New(testgpu.Config(cudasim.Config{Version: 12040}))
				if err != nil {
					t.Skip(err)
				}
				dev, _ := openSim(t, sim)
				c, err := NewCopier(t.Context(), dev, Options{Workers: 2})
				require.NoError(t, err)
				mem, err := dev.Malloc(n)
				require.NoError(t, err)
				require.NoError(t, dev.CopyToDevice(mem, unsafe.Pointer(&want[0]), n))
				sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: nth, Code: cudart.ErrECCUncorrectable, Async: true})
				require.ErrorIs(t, copies(t.Context(), c, mem), cudart.ErrECCUncorrectable)
			})
		}
	}
}

// What a writer takes counts, also after the copy was abandoned: the GPU does not
// answer any more, while a Write runs.
func TestAWriteCountsAfterTheCopyWasAbandoned(t *testing.T) {
	t.Parallel()
	const n = 4 * mib
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{Version: 12040}))
	if err != nil {
		t.Skip(err)
	}
	dev, _ := openSim(t, sim)
	c, err := NewCopier(t.Context(), dev, Options{Workers: 2})
	require.NoError(t, err)
	mem, err := dev.Malloc(n)
	require.NoError(t, err)

	// The third copy fails once a Write runs, of what the first has brought.
	sim.OnCall(func(fn string, nth int) {
		if fn == "cudaMemcpyAsync" && nth == 3 {
			for sim.Outstanding().PendingOps > 0 {
				time.Sleep(time.Millisecond)
			}
			sim.Hold()
		}
	})
	took := 0
	w := writerFunc(func(p []byte) (int, error) {
		if took == 0 {
			sim.Release()
			// It is asked what has happened, and does not answer.
			assert.Eventually(t, func() bool { return sim.Calls("cudaDeviceSynchronize") > 0 }, 20*time.Second, time.Millisecond)
			time.Sleep(10 * time.Millisecond)
		}
		took += len(p)
		return len(p), nil
	})
	sim.Fail("cudaMemcpyAsync", cudasim.Fault{Nth: 3, Code: cudart.ErrECCUncorrectable, Async: true})
	done, err := c.DownloadWriter(t.Context(), w, mem, n)
	require.ErrorIs(t, err, cudart.ErrECCUncorrectable)
	require.Positive(t, took)
	require.Equal(t, took, done)
}

// An error that CUDA reports once, when it is asked whether a copy is done, may
// be that copy's: it fails.
func TestErrorsThatAreReportedOnce(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 1})
	const large = 13 * stage.MaxSmall
	mem, want := r.device(large), bytesOf(1, large)
	r.fill(mem, want)
	fault := cudasim.Fault{Code: cudart.ErrLaunchFailure}
	for _, tt := range []struct {
		fn string
		n  int
	}{{"cudaStreamSynchronize", 100}, {"cudaEventRecord", large}, {"cudaEventQuery", large}} {
		sim.Fail(tt.fn, fault)
		require.ErrorIs(t, r.c.Upload(t.Context(), mem, want[:tt.n]), cudart.ErrLaunchFailure, tt.fn)
		sim.Fail(tt.fn, fault)
		require.ErrorIs(t, r.c.Download(t.Context(), make([]byte, tt.n), mem), cudart.ErrLaunchFailure, tt.fn)
		require.NoError(t, r.c.Upload(t.Context(), mem, want[:tt.n]), tt.fn)
	}
	for _, fn := range []string{"cudaEventRecord", "cudaEventQuery"} {
		sim.Fail(fn, fault)
		var w bytes.Buffer
		done, err := r.c.DownloadWriter(t.Context(), struct{ io.Writer }{&w}, mem, 100)
		require.ErrorIs(t, err, cudart.ErrLaunchFailure, fn)
		require.Zero(t, done, fn)
		require.Zero(t, w.Len(), fn)
		sim.Fail(fn, fault)
		require.ErrorIs(t, r.c.DownloadAll(t.Context(), cutUp(make([]byte, 100), mem, 0, 10)), cudart.ErrLaunchFailure, fn)
		require.NoError(t, r.c.UploadAll(t.Context(), cutUp(want, mem, 0, 10)), fn)
	}
}

// When queueing fails half way, the half that was queued is waited for: nothing
// is in flight when the copy returns, and no slot is used again before.
func TestPartlyQueuedCopiesAreWaitedFor(t *testing.T) {
	t.Parallel()
	const parts = 1500 // in one chunk: two batches, of a thousand and the rest
	type operation func(v *Copier, r *fixture, mem cudart.DevPtr) error
	all := func(upload bool) operation {
		return func(v *Copier, r *fixture, mem cudart.DevPtr) error {
			if upload {
				return v.UploadAll(r.Context(), cutUp(make([]byte, parts*64), mem, 64, 64))
			}
			return v.DownloadAll(r.Context(), cutUp(make([]byte, parts*64), mem, 64, 64))
		}
	}
	pinned := func(upload bool) operation {
		return func(v *Copier, r *fixture, mem cudart.DevPtr) error {
			// Registered in pieces, each of which is copied by itself.
			buf, err := hostmem.Alloc(r.Context(), r.dev, 4*mib, hostmem.Options{Chunk: 2 * mib})
			require.NoError(r, err)
			r.Cleanup(func() { require.NoError(r, buf.Close()) })
			if upload {
				return v.Upload(r.Context(), mem, buf.Bytes())
			}
			return v.Download(r.Context(), buf.Bytes(), mem)
		}
	}
	for _, upload := range []bool{false, true} {
		for name, tt := range map[string]struct {
			version cudart.Version
			fn      string
			do      operation
		}{
			"batches":    {13000, "cudaMemcpyBatchAsync", all(upload)},
			"one by one": {12040, "cudaMemcpyAsync", all(upload)},
			"pinned":     {13000, "cudaMemcpyAsync", pinned(upload)},
		} {
			if upload {
				name = "upload " + name
			} else {
				name = "download " + name
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				sim, rt := testgpu.Sim(t, cudasim.Config{Version: tt.version})
				dev, err := rt.Device(0)
				require.NoError(t, err)
				r := fixtureOn(t, dev, Options{Workers: 1})
				r.c.engine.sameAddress = false // no kernel copies
				mem := r.device(4 * mib)
				// The GPU begins when the failure is known, and CUDA is asked.
				sim.Hold()
				var failed, released atomic.Bool
				release := func() {
					if !released.Swap(true) {
						go sim.Release()
					}
				}
				defer release()
				sim.Fail(tt.fn, cudasim.Fault{Nth: 2, Code: cudart.ErrInvalidResourceHandle, After: func() { failed.Store(true) }})
				sim.OnCall(func(fn string, _ int) {
					if (fn == "cudaEventQuery" || fn == "cudaDeviceSynchronize") && failed.Load() {
						release()
					}
				})
				err = tt.do(r.c, r, mem)
				require.ErrorIs(t, err, cudart.ErrInvalidResourceHandle)
				require.Zero(t, sim.PendingCopies())
				sim.OnCall(nil)
			})
		}
	}
}
