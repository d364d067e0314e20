//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
)

// How the pool is given the streams that use a block: by the lease's own copies, or
// by Release.
var releases = map[string]func(l Lease, s *cudart.Stream, dst cudart.DevPtr) error{
	"own copies": func(l Lease, s *cudart.Stream, dst cudart.DevPtr) error {
		if err := l.CopyToDevice(s, dst, 0, l.Len()); err != nil {
			return err
		}
		return l.Release()
	},
	"given stream": func(l Lease, s *cudart.Stream, dst cudart.DevPtr) error {
		if err := s.CopyToDevice(dst, l.Pointer(), l.Len()); err != nil {
			return err
		}
		return l.Release(s)
	},
	"both": func(l Lease, s *cudart.Stream, dst cudart.DevPtr) error {
		if err := l.CopyToDevice(s, dst, 0, l.Len()); err != nil {
			return err
		}
		return l.Release(s, s)
	},
}

func TestBlocksAreNotReusedWhileCopied(t *testing.T) {
	t.Parallel()
	for name, release := range releases {
		for _, n := range []int{500, 100_000, 3 * mib} {
			t.Run(fmt.Sprint(name, n), func(t *testing.T) {
				t.Parallel()
				g := newSimFixture(t, cudasim.Config{})
				p := g.pool(Options{})
				dst := g.Device(n)
				first := get(t, p, n)
				fill(first.Bytes(), 1)
				want, at := bytes.Clone(first.Bytes()), first.Pointer()
				g.Hold()
				require.NoError(t, release(first, g.Stream, dst))
				assert.NotZero(t, p.Stats().PendingBytes)
				var others []Lease
				for i := range 20 {
					l := get(t, p, n)
					require.NotEqual(t, at, l.Pointer(), "reused while a copy reads it")
					fill(l.Bytes(), byte(2+i))
					others = append(others, l)
				}
				freed, err := p.Trim(context.Background(), 0)
				require.NoError(t, err)
				assert.Zero(t, freed, "unmapped while a copy reads it")
				g.Sim.Release()
				g.Synchronize()
				assert.Equal(t, want, g.Download(dst, n))
				again := get(t, p, n)
				assert.Equal(t, at, again.Pointer(), "reused when it is done")
				for _, l := range append(others, again) {
					require.NoError(t, l.Release())
				}
				balanced(t, p)
			})
		}
	}
}

func TestReleaseWaitsForAllStreams(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	other, err := g.Dev.Runtime().Device(1)
	require.NoError(t, err)
	streams := []*cudart.Stream{g.Stream, g.NewStream(), g.On(other).Stream}
	p := g.pool(Options{})
	for last := range streams {
		l := get(t, p, mib)
		at := l.Pointer()
		var open []func()
		for _, s := range streams {
			open = append(open, g.Stall(s))
			dst, err := s.Device().Malloc(mib)
			require.NoError(t, err)
			defer func() { assert.NoError(t, s.Device().Free(dst)) }()
			require.NoError(t, l.CopyToDevice(s, dst, 0, mib))
		}
		require.NoError(t, l.Release())
		for i, f := range open {
			if i != last {
				f()
				require.NoError(t, streams[i].Synchronize(t.Context()))
			}
		}
		l = get(t, p, mib)
		assert.NotEqual(t, at, l.Pointer(), "stream %d is not done", last)
		open[last]()
		require.NoError(t, streams[last].Synchronize(t.Context()))
		again := get(t, p, mib)
		assert.Equal(t, at, again.Pointer())
		require.NoError(t, l.Release())
		require.NoError(t, again.Release())
		_, err := p.Trim(context.Background(), 0)
		require.NoError(t, err)
	}
	assert.Empty(t, g.Sim.Misuses())
}

// A stream that is not done must not hide the blocks of others.
func TestBusyStreamHidesNoOther(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{0, 4 * 3 * mib} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.pool(Options{MaxBytes: limit})
			slow, fast := g.NewStream(), g.NewStream()
			open := g.Stall(slow)
			leases := []Lease{get(t, p, 3*mib), get(t, p, 3*mib), get(t, p, 3*mib), get(t, p, 3*mib)}
			at := leases[3].Pointer()
			for i, l := range leases {
				require.NoError(t, l.Release([]*cudart.Stream{slow, slow, slow, fast}[i]))
			}
			require.NoError(t, fast.Synchronize(t.Context()))
			l := get(t, p, 3*mib)
			assert.Equal(t, at, l.Pointer())
			require.NoError(t, l.Release())
			assert.Equal(t, 4, p.Stats().Misses)
			open()
			require.NoError(t, slow.Synchronize(t.Context()))
		})
	}
}

// One record and one query a round, however many blocks there are. One event stands
// for all leases that were released since work was queued last, and nothing is
// recorded when nothing was.
func TestCallsOfAStreamRelease(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	dst := g.Device(mib)
	functions := []string{"cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery", "cudaStreamQuery", "cudaDeviceSynchronize"}
	calls := func() (n [5]int) {
		for i, fn := range functions {
			n[i] = g.Sim.Calls(fn)
		}
		return n
	}
	ctx := context.Background() // with which nothing is queried twice
	copied := make(chan struct{})
	round := func(leases int, queue bool) (made [5]int) {
		var all []Lease
		before := calls()
		for range leases {
			l, err := p.Get(ctx, mib)
			require.NoError(t, err)
			if queue {
				queueCopy(t, l, g.Stream, dst, 64)
			}
			all = append(all, l)
		}
		for _, l := range all {
			require.NoError(t, l.Release(g.Stream))
		}
		after := calls()
		if queue { // wait without a call that the pool makes
			require.NoError(t, g.Stream.LaunchHostFunc(func() { copied <- struct{}{} }))
			<-copied
		}
		for i := range made {
			made[i] = after[i] - before[i]
		}
		return made
	}
	for _, leases := range []int{1, 10} {
		round(leases, true)
		round(leases, true)
		misses := p.Stats().Misses
		for range 50 {
			require.Equal(t, [5]int{0, 1, 1, 0, 0}, round(leases, true), "%v for %d leases with work queued in between", functions, leases)
		}
		assert.Equal(t, misses, p.Stats().Misses)
		eventually(t, "the host function is done", func() bool { return round(leases, false) == [5]int{} })
		for range 50 {
			require.Zero(t, round(leases, false), "%v for %d leases with nothing queued in between", functions, leases)
		}
	}
}

// What was queued on a stream is done although the stream is closed before its lease
// is released.
func TestStreamClosedBeforeRelease(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{MaxBytes: 4 * mib})
	dst := g.Device(4 * mib)
	s, err := g.Dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	l := get(t, p, 4*mib)
	fill(l.Bytes(), 1)
	want := bytes.Clone(l.Bytes())
	open := g.Stall(s)
	require.NoError(t, l.CopyToDevice(s, dst, 0, 4*mib))
	require.NoError(t, s.Close())
	require.NoError(t, l.Release())
	require.ErrorIs(t, l.Release(), errReleased)

	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { _, err := p.Get(ctx, 4*mib); failed <- err }()
	eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == 1 })
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)

	got := make(chan Lease)
	go func() {
		l, err := p.Get(t.Context(), 4*mib)
		assert.NoError(t, err)
		fill(l.Bytes(), 2)
		got <- l
	}()
	eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == 1 })
	open()
	require.NoError(t, (<-got).Release())
	assert.Equal(t, want, g.Download(dst, 4*mib))
	assert.Zero(t, p.Stats().Failures, "nothing has failed, and a Get that was canceled is no failure")
}

// An error does not show that the memory is not in use any more.
func TestFailedQueryKeepsTheBlock(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	p := g.pool(Options{})
	dst := g.Device(4 * mib)
	l := get(t, p, 4*mib)
	fill(l.Bytes(), 1)
	want, at := bytes.Clone(l.Bytes()), l.Pointer()
	open := g.Stall(g.Stream)
	require.NoError(t, l.CopyToDevice(g.Stream, dst, 0, 4*mib))
	require.NoError(t, l.Release())
	g.Sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown})
	l = get(t, p, 4*mib)
	require.NotEqual(t, at, l.Pointer())
	fill(l.Bytes(), 2)
	require.NoError(t, l.Release())
	open()
	require.NoError(t, p.Close(), "Close waits for the device then")
	assert.Zero(t, g.Registrations())
	assert.Equal(t, want, g.Download(dst, 4*mib))
}

// What a device that fell off the bus was doing cannot be known.
func TestBrokenDeviceKeepsItsMemory(t *testing.T) {
	t.Parallel()
	g := &fixture{hostmemtest.Loose(t, cudasim.Config{})}
	p, err := New(g.Dev, Options{MaxBytes: 4 * mib})
	require.NoError(t, err)
	g.Hold()
	dst, err := g.Dev.Malloc(1)
	require.NoError(t, err)
	l := get(t, p, 4*mib)
	queueCopy(t, l, g.Stream, dst, 1)
	require.NoError(t, l.Release())
	require.NoError(t, g.Sim.LoseDevice(0))
	g.Sim.Release()
	_, err = p.Get(t.Context(), 4*mib)
	require.ErrorIs(t, err, cudart.ErrLaunchFailure, "there is nothing to wait for")
	require.ErrorIs(t, p.Close(), cudart.ErrLaunchFailure)
	assert.Equal(t, 1, g.Registrations(), "it stays mapped")
	assert.Equal(t, 4*mib, p.Stats().PendingBytes, "and is counted")
}

// Many goroutines on many streams copy from and to leases that they release at
// once. If a block were reused too early, one would find another's bytes.
func TestPoolHammer(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{
		"no limit": {IdleTime: 1000},
		"limit":    {MaxBytes: 6 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimFixture(t, cudasim.Config{})
			p := g.pool(o)
			streams := []*cudart.Stream{g.Stream, g.NewStream(), g.NewStream(), g.NewStream()}
			const goroutines, rounds, maxSize = 8, 120, 3 * mib
			var group sync.WaitGroup
			for i := range goroutines {
				dst := g.Device(maxSize)
				group.Go(func() {
					if err := hammer(t.Context(), p, streams, dst, maxSize, rounds, uint64(i)); err != nil {
						t.Errorf("goroutine %d: %v", i, err)
					}
				})
			}
			group.Wait()
			for _, s := range streams {
				require.NoError(t, s.Synchronize(t.Context()))
			}
			balanced(t, p)
			st := p.Stats()
			assert.Zero(t, st.Leases)
			assert.Zero(t, st.RequestedBytes)
			assert.Equal(t, st.Hits+st.Misses, 2*goroutines*rounds)
			if o.MaxBytes > 0 {
				assert.LessOrEqual(t, st.PeakReservedBytes, o.MaxBytes)
				assert.Positive(t, st.Waits)
			}
		})
	}
}

// hammer sends bytes to the device and fetches them again, and synchronises
// only before it compares.
func hammer(ctx context.Context, p *Pool, streams []*cudart.Stream, dst cudart.DevPtr, maxSize, rounds int, seed uint64) error {
	random := rand.New(rand.NewPCG(11, seed))
	want := make([]byte, maxSize)
	for range rounds {
		n := 1 + random.IntN(1<<random.IntN(22))%maxSize
		s := streams[random.IntN(len(streams))]
		up, err := p.Get(ctx, n)
		if err != nil {
			return err
		}
		stamp := random.Uint64()
		pattern(want[:n], stamp)
		copy(up.Bytes(), want[:n])
		if random.IntN(2) == 0 {
			err = up.CopyToDevice(s, dst, 0, n)
			if err == nil {
				err = up.Release()
			}
		} else {
			err = s.CopyToDevice(dst, up.Pointer(), n)
			if err == nil {
				err = up.Release(streams...)
			}
		}
		if err != nil {
			return err
		}
		down, err := p.Get(ctx, n)
		if err != nil {
			return err
		}
		if err := down.CopyFromDevice(s, dst, 0, n); err != nil {
			return err
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		if !bytes.Equal(down.Bytes(), want[:n]) {
			return fmt.Errorf("%d bytes came back changed", n)
		}
		if err := down.Release(); err != nil {
			return err
		}
	}
	return nil
}
