package transfer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

func TestACopierThatWasClosed(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	c, err := NewCopier(t.Context(), dev, Options{Workers: 2})
	require.NoError(t, err)
	r := &fixture{TB: t, dev: dev, c: c}
	mem, host := r.device(100), make([]byte, 100)
	view := c.With(Call{})
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() { assert.NoError(t, c.Close()) })
	}
	group.Wait()
	require.NoError(t, c.Close())
	require.NoError(t, c.CloseContext(t.Context()))
	for _, v := range []*Copier{c, view, view.With(Call{})} {
		err := v.Upload(t.Context(), mem, host)
		require.ErrorIs(t, err, cudart.ErrClosed)
		require.ErrorIs(t, err, os.ErrClosed)
		require.EqualError(t, err, "transfer: upload 100 bytes: already closed")
		require.ErrorIs(t, v.Upload(t.Context(), mem, nil), cudart.ErrClosed)
		require.ErrorIs(t, v.Download(t.Context(), host, mem), cudart.ErrClosed)
		require.ErrorIs(t, v.UploadAll(t.Context(), []Part{{mem, host}}), cudart.ErrClosed)
	}
}

// stuck is a reader that reads nothing until it is freed.
type stuck struct {
	entered chan struct{} // gets a value when it is called
	free    chan struct{}
}

func newStuck() *stuck { return &stuck{entered: make(chan struct{}, 1), free: make(chan struct{})} }

func (s *stuck) Read(p []byte) (int, error) {
	select {
	case s.entered <- struct{}{}:
	default:
	}
	<-s.free
	return len(p), nil
}

// Readers that do not return keep nothing else from copying, and no context from
// ending the call.
func TestBlockedReadersDoNotBlockOtherCopies(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 1})
	const n, readers = mib, 40
	mem := r.device(n)
	s := newStuck()
	var group sync.WaitGroup
	defer group.Wait()
	defer close(s.free)
	for range readers {
		group.Go(func() {
			_, err := r.c.UploadReader(t.Context(), mem, s, n)
			assert.NoError(t, err, "what runs is not disturbed")
		})
		<-s.entered
	}
	soon := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	want := bytesOf(1, n)
	for _, size := range []int{100, n} {
		require.NoError(t, r.c.Upload(t.Context(), mem, want[:size]))
		require.Equal(t, want[:size], r.onDevice(mem, size))
		require.NoError(t, r.c.Download(t.Context(), make([]byte, size), mem))
	}
	_, err := r.c.UploadReader(soon(), mem, s, n)
	require.ErrorIs(t, err, context.DeadlineExceeded, "though the Read does not return")
	require.ErrorIs(t, r.c.CloseContext(soon()), context.DeadlineExceeded)
	require.ErrorIs(t, r.c.Upload(t.Context(), mem, want), cudart.ErrClosed)
	require.ErrorIs(t, r.c.CloseContext(soon()), context.DeadlineExceeded)
	require.ErrorContains(t, r.c.CloseContext(soon()), fmt.Sprintf("still copying (calls: %d)", readers))
	require.ErrorContains(t, r.c.Close(), fmt.Sprintf("still copying (calls: %d)", readers))
}

// Close by a callback of a copy is an error, and refuses copies from then on.
// The one that runs goes on, and Close works after it.
func TestCloseInACallback(t *testing.T) {
	t.Parallel()
	const n = 3 * mib
	want := bytesOf(1, n)
	for name, call := range map[string]func(r *fixture, hook func()) error{
		"progress": func(r *fixture, hook func()) error {
			return r.c.With(Call{Progress: func(int, int) { hook() }}).Upload(t.Context(), r.device(n), want)
		},
		"reader": func(r *fixture, hook func()) error {
			_, err := r.c.UploadReader(t.Context(), r.device(n), &hookedStream{hooked{want, hook}, 0}, n)
			return err
		},
		"writerAt": func(r *fixture, hook func()) error {
			_, err := r.c.DownloadTo(t.Context(), hooked{make([]byte, n), hook}, 0, r.device(n), n)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFixture(t, Options{Workers: 2})
			mem := r.device(1)
			var calls sync.Once
			require.NoError(t, call(r, func() {
				calls.Do(func() {
					assert.NoError(t, r.c.Upload(t.Context(), mem, []byte{1}), "a callback may use the copier")
					assert.ErrorContains(t, r.c.Close(), "still copying (calls: 1)")
					assert.ErrorIs(t, r.c.Upload(t.Context(), mem, []byte{1}), cudart.ErrClosed)
				})
			}))
			require.NoError(t, r.c.Close())
		})
	}
}

func TestCloseContextWaitsForCopies(t *testing.T) {
	t.Parallel()
	r := newFixture(t, Options{Workers: 2})
	const n = 4 * mib
	mem, want := r.device(n), bytesOf(1, n)
	var once sync.Once
	closed := make(chan error)
	err := r.c.With(Call{Progress: func(int, int) {
		once.Do(func() { go func() { closed <- r.c.CloseContext(t.Context()) }() })
	}}).Upload(t.Context(), mem, want)
	require.NoError(t, err, "a copy that runs is not disturbed")
	require.NoError(t, <-closed)
	require.True(t, bytes.Equal(want, r.onDevice(mem, n)))
}

// Memory that a caller's stream still copies from stays registered and mapped.
func TestCloseWaitsForStreamsOfCallers(t *testing.T) {
	t.Parallel()
	for _, n := range []int{100, mib} {
		r := newSimFixture(t, Options{Workers: 2})
		s := r.stream()
		mem, want := r.device(n), bytesOf(1, n)
		open := blocked(t, s)
		require.NoError(t, r.c.With(Call{Stream: s}).Upload(t.Context(), mem, want))
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, r.c.CloseContext(ctx), context.DeadlineExceeded)
		require.NotZero(t, r.c.queued.Stats().ReservedBytes, "%d bytes", n)
		open()
		require.NoError(t, r.c.Close())
		require.NoError(t, s.Synchronize(t.Context()))
		require.True(t, bytes.Equal(want, r.onDevice(mem, n)))
	}
}

// A call into CUDA that does not return keeps Close no longer than its context, and what it
// was to release stays. When it returns, that is released.
func TestCloseWithACallThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	r := fixtureOn(t, dev, Options{Workers: 2})
	unblock := sim.Block("cudaHostUnregister", cudasim.Fault{})
	defer unblock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- r.c.CloseContext(ctx) }()
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaHostUnregister", 1))
	require.ErrorIs(t, r.c.Upload(t.Context(), 0, nil), cudart.ErrClosed)
	cancel()
	err = <-closed
	require.ErrorIs(t, err, ErrUnderWay)
	require.ErrorIs(t, err, context.Canceled)
	err = r.c.CloseContext(ctx)
	require.ErrorContains(t, err, fmt.Sprintf("transfer: close copier on %v: ", dev))
	require.ErrorContains(t, err, "another Close is in progress: context canceled", "of the copier, or of its memory")
	require.NotZero(t, sim.Outstanding().Registrations)
	unblock()
	require.NoError(t, r.c.Close())
	require.Zero(t, sim.Outstanding().Registrations)
}

// What was made before opening failed is released, also if CUDA refuses that once: nobody
// else can.
func TestFailedConstructorsReleaseEverything(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	first, err := rt.Device(0)
	require.NoError(t, err)
	second, err := rt.Device(1)
	require.NoError(t, err)
	for name, open := range map[string]func() (io.Closer, error){
		"copier": func() (io.Closer, error) { return NewCopier(t.Context(), first, Options{}) },
		"fanout": func() (io.Closer, error) { return NewFanout(t.Context(), []*cudart.Device{first, second}, Options{}) },
	} {
		const fn = "cudaStreamCreateWithPriority"
		for nth := 1; ; nth++ {
			what := fmt.Sprintf("%s, stream %d", name, nth)
			before := sim.Calls(fn)
			sim.Fail(fn, cudasim.Fault{Nth: nth, Code: cudart.ErrMemoryAllocation})
			sim.Fail("cudaHostUnregister", cudasim.Fault{Nth: 1, Times: 1, Code: cudart.ErrUnknown})
			c, err := open()
			sim.ResetFaults()
			if sim.Calls(fn)-before < nth {
				require.NoError(t, err, what)
				require.Greater(t, nth, 5, name)
				require.NoError(t, c.Close())
				break
			}
			require.ErrorIs(t, err, cudart.ErrMemoryAllocation, what)
			require.NotErrorIs(t, err, cudart.ErrUnknown, what)
			require.Zero(t, sim.Outstanding().Registrations, what)
			require.Zero(t, sim.Outstanding().Streams, what)
		}
	}
}

// Calls into CUDA that do not return keep neither the making of a Copier or Fanout nor its
// Close beyond their contexts. When they return, all is released.
func TestOpenAndCloseWithCallsThatDoNotReturn(t *testing.T) {
	t.Parallel()
	type closer interface{ CloseContext(context.Context) error }
	var cells []cell
	makers := map[string]func(context.Context, []*cudart.Device) (closer, error){
		"copier": func(ctx context.Context, devs []*cudart.Device) (closer, error) {
			return NewCopier(ctx, devs[0], Options{})
		},
		"fanout": func(ctx context.Context, devs []*cudart.Device) (closer, error) {
			return NewFanout(ctx, devs, Options{})
		},
	}
	for _, name := range slices.Sorted(maps.Keys(makers)) {
		make := makers[name]
		var probe callCounter
		sim, rt := testgpu.Sim(t, twoDevices)
		c, err := make(t.Context(), probe.count(sim, rt.Devices()))
		require.NoError(t, err)
		opening := probe.names()
		require.NoError(t, c.CloseContext(t.Context()))
		closing := probe.names()
		// Only an error is followed by it, such as that work is not complete yet: not of every run.
		isLastError := func(fn string) bool { return fn == "cudaGetLastError" }
		opening, closing = slices.DeleteFunc(opening, isLastError), slices.DeleteFunc(closing, isLastError)
		require.Contains(t, opening, "cudaStreamCreateWithPriority")
		require.Contains(t, opening, "cudaHostRegister")
		require.Contains(t, closing, "cudaStreamDestroy")
		for _, fn := range opening {
			cells = append(cells, cell{[]string{name + " opens", "opens " + fn}, func(t *testing.T) {
				sim, rt := testgpu.Sim(t, twoDevices)
				ctx, cancel := context.WithCancelCause(t.Context())
				unblock := sim.Block(fn, cudasim.Fault{})
				defer unblock()
				go func() {
					assert.NoError(t, sim.AwaitBlocked(t.Context(), fn, 1))
					cancel(assert.AnError)
				}()
				_, err := make(ctx, rt.Devices())
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, err, assert.AnError)
				require.NotErrorIs(t, err, ErrUnderWay, "nothing is copied")
				unblock()
				for o := sim.Outstanding(); o.Registrations > 0 || o.Streams > 0 || o.PeerAccesses > 0 || o.DeviceAllocs > 0; o = sim.Outstanding() {
					runtime.Gosched()
				}
				c, err := make(t.Context(), rt.Devices())
				require.NoError(t, err)
				require.NoError(t, c.CloseContext(t.Context()))
			}})
		}
		for _, fn := range closing {
			cells = append(cells, cell{[]string{name + " closes", "closes " + fn}, func(t *testing.T) {
				sim, rt := testgpu.Sim(t, twoDevices)
				c, err := make(t.Context(), rt.Devices())
				require.NoError(t, err)
				ctx, cancel := context.WithCancelCause(t.Context())
				unblock := sim.Block(fn, cudasim.Fault{})
				defer unblock()
				go func() {
					assert.NoError(t, sim.AwaitBlocked(t.Context(), fn, 1))
					cancel(assert.AnError)
				}()
				if err := c.CloseContext(ctx); err != nil { // it may close without the call
					require.ErrorIs(t, err, context.Canceled)
					require.ErrorIs(t, err, assert.AnError)
				}
				unblock()
				require.NoError(t, c.CloseContext(t.Context()))
			}})
		}
	}
	atOnce(t, thin(cells))
}

var twoDevices = cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)}

// A callCounter collects the C functions that are called.
type callCounter struct {
	mu    sync.Mutex
	calls map[string]bool
}

func (c *callCounter) count(sim *cudasim.Sim, devs []*cudart.Device) []*cudart.Device {
	c.calls = make(map[string]bool)
	sim.OnCall(func(fn string, _ int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls[fn] = true
	})
	return devs
}

// names returns the functions that were called since the last call of names.
func (c *callCounter) names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := slices.Sorted(maps.Keys(c.calls))
	clear(c.calls)
	return names
}

// A device that cannot say when it is done keeps its memory: Close fails, as
// often as it is called, and copies too.
func TestADeviceThatIsLost(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	if err != nil {
		t.Skip(err)
	}
	dev, _ := openSim(t, sim)
	c, err := NewCopier(t.Context(), dev, Options{Workers: 2})
	require.NoError(t, err)
	const n = 4 * mib
	mem, err := dev.Malloc(n)
	require.NoError(t, err)
	host := make([]byte, n)
	require.NoError(t, c.Upload(t.Context(), mem, host))
	require.NoError(t, sim.LoseDevice(0))
	require.Error(t, c.Upload(t.Context(), mem, host))
	require.Error(t, c.Upload(t.Context(), mem, host[:100]))
	require.Error(t, c.Download(t.Context(), host, mem))
	_, err = c.DownloadWriter(t.Context(), io.Discard, mem, n)
	require.Error(t, err)
	for range 2 {
		require.ErrorContains(t, c.Close(), "transfer: close copier on device 0")
	}
	require.ErrorIs(t, c.Upload(t.Context(), mem, host), cudart.ErrClosed)
}
