//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// sleepingGets returns how many Gets are blocked in the queue, or wait for their turn to search
// to be woken.
func sleepingGets(p *Pool) int {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	n := 0
	for stack := range bytes.SplitSeq(stacks, []byte("\n\n")) {
		state, frames, _ := bytes.Cut(stack, []byte("\n"))
		if bytes.Contains(state, []byte("[select")) && bytes.Contains(frames, fmt.Appendf(nil, "(*core).wait(%p", p.core)) {
			n++
		}
	}
	return n
}

func TestPoolServesInOrder(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 8 * mib})
	held := []Lease{get(t, p, 4*mib), get(t, p, 4*mib)}
	sizes := []int{8 * mib, 5 * mib, 8 * mib, 1, 8 * mib, 5 * mib}
	var order []int
	var group sync.WaitGroup
	for i, n := range sizes {
		group.Go(func() {
			l, err := p.Get(t.Context(), n)
			if !assert.NoError(t, err) {
				return
			}
			order = append(order, i) // no two fit into the limit together
			assert.NoError(t, l.Release())
		})
		// The first has the turn, the others queue for it.
		eventually(t, "the request queues", func() bool { return sleepingGets(p) == i+1 })
	}
	require.NoError(t, held[0].Release())
	assert.Equal(t, len(sizes), p.Stats().Waiting, "the first needs all of it, and is not overtaken")
	require.NoError(t, held[1].Release())
	group.Wait()
	assert.Equal(t, []int{0, 1, 2, 3, 4, 5}, order)
	assert.LessOrEqual(t, p.Stats().PeakReservedBytes, 8*mib)
	assert.Equal(t, len(sizes), p.Stats().Waits)
}

// A Get at the limit ends when the GPU is done, whichever stream is first, although
// nothing is released then.
func TestPoolWaitsForTheGPU(t *testing.T) {
	t.Parallel()
	for first := range 3 {
		t.Run(fmt.Sprint(first), func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.pool(Options{MaxBytes: 12 * mib})
			var open []func()
			var streams []*cudart.Stream
			var leases []Lease
			for range 3 {
				s := g.NewStream()
				streams = append(streams, s)
				open = append(open, g.Stall(s))
				leases = append(leases, get(t, p, 4*mib))
			}
			at := leases[first].Pointer()
			for i, l := range leases {
				require.NoError(t, l.Release(streams[i]))
			}
			got := make(chan Lease)
			go func() {
				l, err := p.Get(t.Context(), 4*mib)
				assert.NoError(t, err)
				got <- l
			}()
			eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == 1 })
			open[first]()
			l := <-got
			assert.Equal(t, at, l.Pointer())
			for i, f := range open {
				if i != first {
					f()
				}
			}
			require.NoError(t, l.Release())
		})
	}
}

// Small blocks of one size that the GPU is done with are unmapped for another.
func TestPoolWaitsForTheGPUAtItsLimit(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 2 * mib})
	open := g.Stall(g.Stream)
	for range 32 {
		require.NoError(t, get(t, p, 64*kib).Release(g.Stream))
	}
	assert.Equal(t, 2*mib, p.Stats().PendingBytes)
	got := make(chan Lease)
	go func() {
		l, err := p.Get(t.Context(), mib)
		assert.NoError(t, err)
		got <- l
	}()
	eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == 1 })
	open()
	require.NoError(t, (<-got).Release())
	balanced(t, p)
}

func TestPoolGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 8 * mib})
	busy, held := get(t, p, 4*mib), get(t, p, 4*mib-8*kib)
	open := g.Stall(g.Stream)
	require.NoError(t, busy.Release(g.Stream))

	type result struct {
		who int
		err error
	}
	results := make(chan result)
	var cancels []context.CancelCauseFunc
	cause := errors.New("cause")
	for i := range 3 {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancels = append(cancels, cancel)
		go func() {
			_, err := p.Get(ctx, 8*mib)
			results <- result{i, err}
		}()
		eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == i+1 })
	}
	for _, i := range []int{1, 0, 2} { // in the queue; with the turn; with the turn after another
		cancels[i](cause)
		r := <-results
		assert.Equal(t, i, r.who)
		assert.ErrorIs(t, r.err, context.Canceled)
		assert.ErrorIs(t, r.err, cause)
		assert.ErrorContains(t, r.err, "limit of 8388608 bytes reached: 4186112 in use by 1 lease, 4194304 released but waiting for the GPU, 0 cached")
	}
	assert.Zero(t, p.Stats().Waiting)
	open()
	require.NoError(t, held.Release())
	require.NoError(t, get(t, p, 8*mib).Release())
}

// A search that was skipped, because the one before went through all that is idle in
// vain, is made up for.
func TestASearchThatWasSkippedIsMadeUpFor(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 8 * mib})
	var leases []Lease
	for range 8 * mib / kib {
		leases = append(leases, get(t, p, kib))
	}
	held := make(map[*arena]Lease) // one block of each arena
	for _, l := range leases {
		if _, ok := held[l.b.slab.arena]; ok {
			require.NoError(t, l.Release())
		} else {
			held[l.b.slab.arena] = l
		}
	}
	waits := waiting(t, p, t.Context(), minArena)
	eventually(t, "the Get has searched in vain", func() bool { return sleepingGets(p) == 1 })
	for _, l := range held {
		require.NoError(t, l.Release())
	}
	within(t, "the Get", func() {
		r := <-waits
		assert.NoError(t, r.err)
		assert.NoError(t, r.l.Release())
	})
}

// Queries that failed are made again, although nothing else happens.
func TestQueriesThatFailedAreMadeAgain(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{IdleTime: -1, MaxBytes: 4 * mib})
	dst := g.Device(1)
	held, pending := get(t, p, 2*mib), get(t, p, 2*mib)
	open := g.Stall(g.Stream)
	queueCopy(t, pending, g.Stream, dst, 1)
	require.NoError(t, pending.Release())
	for _, fn := range []string{"cudaEventQuery", "cudaEventRecord", "cudaDeviceSynchronize"} {
		g.Sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	}
	waits := waiting(t, p, t.Context(), 2*mib)
	eventually(t, "the device is queried again", func() bool { return g.Sim.Calls("cudaDeviceSynchronize") > 3 })
	g.Sim.ResetFaults()
	open()
	within(t, "the Get", func() {
		r := <-waits
		assert.NoError(t, r.err)
		assert.NoError(t, r.l.Release())
	})
	require.NoError(t, held.Release())
}

// While memory is pinned a context can end, too.
func TestPoolGivesUpPinningWithItsContext(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	p.core.making <- struct{}{} // another makes an arena
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { _, err := p.Get(ctx, 100); failed <- err }()
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	<-p.core.making

	ctx, cancel = context.WithCancel(t.Context())
	g.Sim.OnCall(func(fn string, _ int) {
		if fn == "cudaHostRegister" {
			cancel()
		}
	})
	l, err := p.Get(ctx, 4*mib)
	g.Sim.OnCall(nil)
	if err == nil { // it was too late
		require.NoError(t, l.Release())
	}
	balanced(t, p)
}

func TestCloseEndsWaits(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 4 * mib})
	l := get(t, p, 4*mib)
	failed := make(chan error)
	for i := range 3 {
		go func() { _, err := p.Get(t.Context(), 4*mib); failed <- err }()
		eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == i+1 })
	}
	require.ErrorIs(t, p.Close(), errLeased)
	for range 3 {
		require.ErrorIs(t, <-failed, cudart.ErrClosed)
	}
	require.NoError(t, l.Release())
	require.NoError(t, p.Close())
}

// short makes a number of attempts to pin memory fail.
func (g *fixture) short(times int) {
	for _, fn := range []string{"cudaHostRegister", "cudaHostAlloc"} {
		g.Sim.Fail(fn, cudasim.Fault{Code: cudart.ErrMemoryAllocation, Times: times})
	}
}

// A Get that the host has no memory for has idle memory unmapped, and tries once more.
func TestPoolUnmapsIdleMemoryWhenTheSystemIsLowOnMemory(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	var leases []Lease
	for range 3 {
		leases = append(leases, get(t, p, 4*mib))
	}
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	g.short(1)
	l := get(t, p, 16*mib)
	assert.Equal(t, 1, g.Registrations(), "all that was idle is unmapped")
	require.NoError(t, l.Release())

	g.short(2)
	_, err := p.Get(t.Context(), 32*mib)
	assert.ErrorIs(t, err, cudart.ErrMemoryAllocation, "once only")
	assert.Zero(t, p.Stats().ReservedBytes)
}

// An arena is smaller where there is no memory for a large one.
func TestArenasShrinkWhenTheSystemIsShort(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	var leases []Lease
	for range 8 * mib / minArena * 2 { // two blocks of an arena that small
		leases = append(leases, get(t, p, mib))
	}
	held := p.Stats().ReservedBytes
	require.Equal(t, 8*mib, held)
	g.short(2)
	leases = append(leases, get(t, p, mib))
	assert.Equal(t, held+minArena, p.Stats().ReservedBytes, "8 and 4 MiB were refused")
	for _, l := range leases {
		require.NoError(t, l.Release())
	}
	balanced(t, p)
}

// A call that fails, whichever it is, leaves the pool whole: the next Get
// works, and Close unmaps everything.
func TestPoolFaultSweep(t *testing.T) {
	t.Parallel()
	scenario := func(g *fixture, p *Pool, dst cudart.DevPtr) error {
		var errs []error
		note := func(err error) { errs = append(errs, err) }
		for _, n := range []int{100, 2 * mib, 64 * kib, 3 * mib, 2*mib + 100_000, 3 * mib} {
			l, err := p.Get(g.Context(), n)
			if err != nil {
				note(err)
				continue
			}
			note(l.CopyToDevice(g.Stream, dst, 0, n))
			note(l.Release())
		}
		_, err := p.Trim(context.Background(), 0)
		note(err)
		note(p.Close())
		return errors.Join(errs...)
	}
	functions := []string{
		"cudaHostRegister", "cudaHostUnregister", "cudaMemcpyAsync", "cudaEventCreateWithFlags",
		"cudaEventRecord", "cudaEventQuery", "cudaEventDestroy", "cudaDeviceSynchronize",
	}
	run := func(t *testing.T, fn string, fault cudasim.Fault) (calls map[string]int) {
		g := newSimFixture(t, cudasim.Config{})
		dst := g.Device(3 * mib)
		p, err := New(g.Dev, Options{MaxBytes: 5 * mib})
		require.NoError(t, err)
		if fn != "" {
			g.Sim.Fail(fn, fault)
		}
		err = scenario(g, p, dst)
		if fn == "" {
			require.NoError(t, err)
		}
		g.Sim.ResetFaults()
		require.NoError(t, p.Close(), "the next try works; before: %v", err)
		assert.Zero(t, g.Registrations())
		st := p.Stats()
		assert.Zero(t, [5]int{st.Leases, st.InUseBytes, st.PendingBytes, st.CachedBytes, st.ReservedBytes}, "%+v after %v", st, err)
		calls = make(map[string]int)
		for _, f := range functions {
			calls[f] = g.Sim.Calls(f)
		}
		return calls
	}
	calls := run(t, "", cudasim.Fault{})
	t.Log(calls)
	for _, code := range []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrUnknown} {
		for _, fn := range functions {
			for nth := 1; nth <= min(calls[fn]+1, 15); nth++ { // queries are repeated as often as time passes
				t.Run(fmt.Sprintf("%s %d %s", fn, nth, code.Name()), func(t *testing.T) {
					t.Parallel()
					run(t, fn, cudasim.Fault{Nth: nth, Code: code})
				})
			}
		}
	}
}
