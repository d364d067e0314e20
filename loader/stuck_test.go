package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/testgpu"
)

var errGone = errors.New("gone")

// A life is a loader on one of two devices, in which one CUDA call does not return.
type life struct {
	testing.TB
	sim   *cudasim.Sim
	dev   *cudart.Device
	s     *cudart.Stream
	other *Loader      // on the other device
	calls atomic.Int32 // that the consumer makes by itself are in progress
	doing atomic.Pointer[string]
}

func newLife(t testing.TB) *life {
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{Link: cudasim.Link{HostToDevice: late(20 * time.Microsecond)}}, {}}})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	second, err := rt.Device(1)
	require.NoError(t, err)
	return &life{TB: t, sim: sim, dev: dev, s: stream(t, dev), other: newLoaderFor(t, second, numbered(20, 8), Options{BatchSize: 4, Prefetch: 2})}
}

// live makes a loader, loops over parts of two epochs, and closes it. It returns what ended
// it, and the loader if it has to be closed again.
func (f *life) live(ctx context.Context) (l *Loader, err error) {
	f.step("New")
	l, err = New(ctx, f.dev, numbered(18, 5, 300), Options{BatchSize: 1, Workers: 2, Prefetch: 9})
	if err != nil {
		return nil, err
	}
	for _, turns := range []int{5, 100, 3} {
		f.step("Batches")
		for b, err := range l.Batches(ctx) {
			if err != nil {
				return l, err
			}
			f.calls.Add(1) // those of the consumer have no context
			err = errors.Join(b.Use(f.s), f.s.Memset(b.Field(0), 1, 5))
			f.calls.Add(-1)
			if err != nil {
				return l, err
			}
			if turns--; turns == 0 {
				break
			}
		}
	}
	f.step("EndEpoch")
	if err := l.EndEpoch(); err != nil {
		return l, err
	}
	f.step("Close")
	return l, l.CloseContext(ctx)
}

func (f *life) step(name string) { f.doing.Store(&name) }

// Each CUDA call of a loader may not return: New, Batches and Close end with their context
// all the same, and the loader of another device goes on. When the call returns, all is
// released. With PINNED_SOAK every position of every call is tried, else the first and the
// last.
func TestCallsThatDoNotReturn(t *testing.T) {
	t.Parallel()
	calls := make(map[string]int)
	var mu sync.Mutex
	f := newLife(t)
	f.sim.OnCall(func(fn string, _ int) {
		mu.Lock()
		defer mu.Unlock()
		calls[fn]++
	})
	_, err := f.live(t.Context())
	require.NoError(t, err)
	f.sim.OnCall(nil)

	var met sync.Map // calls that were blocked, with their steps
	cases := make(chan func())
	var all sync.WaitGroup
	for range 10 { // there are 16 simulators
		all.Go(func() {
			for c := range cases {
				c()
			}
		})
	}
	for fn, n := range calls {
		if strings.HasPrefix(fn, "cudaGetLastError") {
			continue // it makes no call into the driver
		}
		for nth := 1; nth <= n; nth++ {
			if nth > 1 && nth < n && os.Getenv("PINNED_SOAK") == "" {
				continue
			}
			cases <- func() {
				t.Run(fmt.Sprintf("%s #%d", fn, nth), func(t *testing.T) { newLife(t).stick(fn, nth, &met) })
			}
		}
	}
	close(cases)
	all.Wait()
	for _, name := range []string{
		"New/cudaHostRegister", "New/cudaMalloc", "New/cudaStreamCreateWithPriority", "New/cudaEventCreateWithFlags",
		"Batches/cudaMemcpyAsync", "Batches/cudaEventRecord",
		"Close/cudaFree", "Close/cudaHostUnregister", "Close/cudaStreamDestroy",
	} {
		_, ok := met.Load(name)
		assert.True(t, ok, "%s was not blocked", name)
	}
}

// stick has a call not return.
func (f *life) stick(fn string, nth int, met *sync.Map) {
	before := f.sim.Outstanding()
	unblock := f.sim.Block(fn, cudasim.Fault{Nth: nth})
	defer unblock()
	ctx, cancel := context.WithCancelCause(f.Context())
	defer cancel(nil)
	type end struct {
		l   *Loader
		err error
	}
	ended := make(chan end, 1)
	go func() {
		l, err := f.live(ctx)
		ended <- end{l, err}
	}()
	blocked := make(chan error, 1)
	awaiting, stop := context.WithTimeout(f.Context(), timeout)
	defer stop()
	go func() { blocked <- f.sim.AwaitBlocked(awaiting, fn, 1) }()
	var e end
	select {
	case e = <-ended: // fewer calls were made this time
		stop()
		<-blocked
		assert.NoError(f, e.err)
		return
	case err := <-blocked:
		if !assert.NoError(f, err) {
			return
		}
	}
	step := *f.doing.Load()
	own := f.calls.Load() > 0
	n := 0
	for _, err := range f.other.Batches(f.Context()) {
		assert.NoError(f, err)
		n++
	}
	assert.Equal(f, 5, n, "the other device's batches")
	cancel(errGone)
	if own {
		unblock()
	}
	select {
	case e = <-ended:
	case <-time.After(timeout):
		assert.Fail(f, "it hangs", "in %s", step)
		unblock()
		e = <-ended
	}
	if !own {
		met.Store(step+"/"+fn, true)
		if e.err != nil { // in Close the call may be one that nobody waits for
			assert.ErrorIs(f, e.err, context.Canceled, "in %s", step)
			assert.Regexp(f, "^loader: ", e.err)
		}
		switch fn {
		case "cudaMemcpyAsync", "cudaEventQuery", "cudaEventRecord":
			assert.ErrorIs(f, e.err, errGone)
		case "cudaMalloc", "cudaFree", "cudaStreamCreateWithPriority", "cudaStreamDestroy":
			assert.ErrorIs(f, e.err, errGone)
			assert.ErrorIs(f, e.err, bounded.ErrStuck)
		}
	}
	if fn == "cudaMemcpyAsync" {
		err := e.l.CloseContext(ctx)
		assert.ErrorIs(f, err, bounded.ErrStuck, "the copy's memory is released")
		assert.ErrorIs(f, err, errGone)
	}
	unblock()
	if e.l != nil {
		assert.NoError(f, e.l.Close(), "in %s", step)
	}
	assert.Eventually(f, func() bool {
		after := f.sim.Outstanding()
		after.Events, after.PendingOps = before.Events, before.PendingOps // a runtime keeps some for the next wait
		return after == before
	}, timeout, time.Millisecond, "in %s: not all is released: %+v", step, f.sim.Outstanding())
}
