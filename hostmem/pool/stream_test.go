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
	"github.com/gopinned/pinned/internal/testgpu"
)

// How the pool learns of the work on a block: from the lease's own copies, or
// from the streams that Release is given.
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

func TestBlocksAreNotLentWhileCopied(t *testing.T) {
	t.Parallel()
	for name, release := range releases {
		for _, n := range []int{500, 100_000, 3 * mib} {
			t.Run(fmt.Sprint(name, n), func(t *testing.T) {
				t.Parallel()
				g := newSimRig(t, cudasim.Config{})
				p := g.pool(PoolOptions{})
				dst := g.device(n)
				first := get(t, p, n)
				fill(first.Bytes(), 1)
				want, at := bytes.Clone(first.Bytes()), first.Pointer()
				g.sim.Hold()
				require.NoError(t, release(first, g.stream, dst))
				assert.NotZero(t, p.Stats().PendingBytes)
				var others []Lease
				for i := range 20 {
					l := get(t, p, n)
					require.NotEqual(t, at, l.Pointer(), "lent while a copy reads it")
					fill(l.Bytes(), byte(2+i))
					others = append(others, l)
				}
				freed, err := p.Trim(0)
				require.NoError(t, err)
				assert.Zero(t, freed, "given back while a copy reads it")
				g.sim.Release()
				g.synchronize()
				assert.Equal(t, want, g.download(dst, n))
				again := get(t, p, n)
				assert.Equal(t, at, again.Pointer(), "lent again when it is done")
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
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	other, err := rt.Device(1)
	require.NoError(t, err)
	g := (&rig{TB: t, sim: sim, dev: dev}).withStream()
	foreign := (&rig{TB: t, sim: sim, dev: other}).withStream().stream
	streams := []*cudart.Stream{g.stream, g.newStream(), foreign}
	p := g.pool(PoolOptions{})
	for last := range streams {
		l := get(t, p, mib)
		at := l.Pointer()
		var open []func()
		for _, s := range streams {
			open = append(open, stall(t, s))
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
		_, err := p.Trim(0)
		require.NoError(t, err)
	}
	assert.Empty(t, sim.Misuses())
}

// A stream that is not done must not hide the blocks of others.
func TestBusyStreamHidesNoOther(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{0, 4 * 3 * mib} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			t.Parallel()
			g := newSimRig(t, cudasim.Config{})
			p := g.pool(PoolOptions{MaxBytes: limit})
			slow, fast := g.newStream(), g.newStream()
			open := stall(t, slow)
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

// One record and one query a cycle, however many blocks are out.
func TestStreamReleaseTakesTwoCalls(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	cycle := func() {
		l := get(t, p, mib)
		require.NoError(t, l.Release(g.stream))
		g.synchronize()
	}
	cycle()
	before, calls := g.sim.Calls("cudaEventQuery"), g.sim.Calls("cudaEventRecord")
	created := g.sim.Calls("cudaEventCreateWithFlags")
	synced := 0
	for range 100 {
		l := get(t, p, mib)
		require.NoError(t, l.Release(g.stream))
		q, r := g.sim.Calls("cudaEventQuery"), g.sim.Calls("cudaEventRecord")
		g.synchronize()
		synced += g.sim.Calls("cudaEventQuery") - q + g.sim.Calls("cudaEventRecord") - r
	}
	made := g.sim.Calls("cudaEventQuery") - before + g.sim.Calls("cudaEventRecord") - calls - synced
	assert.Equal(t, 200, made)
	assert.LessOrEqual(t, g.sim.Calls("cudaEventCreateWithFlags")-created, 1, "events are used again; one may be the wait's")
	assert.Equal(t, 1, p.Stats().Misses)
}

func TestStreamClosedBeforeRelease(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{MaxBytes: 4 * mib})
	dst := g.device(4 * mib)
	s, err := g.dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	l := get(t, p, 4*mib)
	fill(l.Bytes(), 1)
	want := bytes.Clone(l.Bytes())
	open := stall(t, s)
	require.NoError(t, l.CopyToDevice(s, dst, 0, 4*mib))
	require.NoError(t, s.Close())
	err = l.Release()
	require.ErrorIs(t, err, cudart.ErrClosed)
	require.ErrorContains(t, err, "stays unused until device 0")
	require.ErrorIs(t, l.Release(), ErrReleased)

	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { _, err := p.Get(ctx, 4*mib); failed <- err }()
	eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == 1 })
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)

	lent := make(chan Lease)
	go func() {
		l, err := p.Get(t.Context(), 4*mib)
		assert.NoError(t, err)
		fill(l.Bytes(), 2)
		lent <- l
	}()
	eventually(t, "the Get waits", func() bool { return p.Stats().Waiting == 1 })
	open()
	require.NoError(t, (<-lent).Release())
	assert.Equal(t, want, g.download(dst, 4*mib))
	assert.Equal(t, 1, p.Stats().Failures)
}

// An error is no proof that the memory is not in use any more.
func TestFailedQueryKeepsTheBlock(t *testing.T) {
	t.Parallel()
	g := newSimRig(t, cudasim.Config{})
	p := g.pool(PoolOptions{})
	dst := g.device(4 * mib)
	l := get(t, p, 4*mib)
	fill(l.Bytes(), 1)
	want, at := bytes.Clone(l.Bytes()), l.Pointer()
	open := stall(t, g.stream)
	require.NoError(t, l.CopyToDevice(g.stream, dst, 0, 4*mib))
	require.NoError(t, l.Release())
	g.sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrUnknown})
	l = get(t, p, 4*mib)
	require.NotEqual(t, at, l.Pointer())
	fill(l.Bytes(), 2)
	require.NoError(t, l.Release())
	open()
	require.NoError(t, p.Close(), "Close waits for the device then")
	assert.Zero(t, g.registrations())
	assert.Equal(t, want, g.download(dst, 4*mib))
}

// What a device that fell off the bus was doing nobody can tell.
func TestBrokenDeviceKeepsItsMemory(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(cudasim.Config{})
	require.NoError(t, err)
	rt, err := cudart.Open(cudart.Options{Source: sim})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(t, err)
	p, err := NewPool(dev, PoolOptions{MaxBytes: 4 * mib})
	require.NoError(t, err)
	sim.Hold()
	require.NoError(t, get(t, p, 4*mib).Release(s))
	require.NoError(t, sim.LoseDevice(0))
	sim.Release()
	_, err = p.Get(t.Context(), 4*mib)
	require.ErrorIs(t, err, cudart.ErrLaunchFailure)
	require.ErrorIs(t, p.Close(), cudart.ErrLaunchFailure)
	assert.Equal(t, 1, sim.Outstanding().Registrations, "it stays mapped")
	assert.Equal(t, 4*mib, p.Stats().PendingBytes, "and on the books")
	_ = s.Close()
	_ = rt.Close()
	_ = sim.Close() // tells of all this
}

// Many goroutines on many streams copy from and to leases that they release at
// once. If a block were lent too early, somebody's bytes would be somebody
// else's.
func TestPoolHammer(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]PoolOptions{
		"no limit": {IdleTime: 1000},
		"limit":    {MaxBytes: 6 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newSimRig(t, cudasim.Config{})
			p := g.pool(o)
			streams := []*cudart.Stream{g.stream, g.newStream(), g.newStream(), g.newStream()}
			const goroutines, rounds, most = 8, 120, 3 * mib
			var group sync.WaitGroup
			for i := range goroutines {
				dst := g.device(most)
				group.Go(func() {
					if err := hammer(t.Context(), p, streams, dst, most, rounds, uint64(i)); err != nil {
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
			assert.Zero(t, st.AskedBytes)
			assert.Equal(t, st.Hits+st.Misses, 2*goroutines*rounds)
			if o.MaxBytes > 0 {
				assert.LessOrEqual(t, st.PeakKeptBytes, o.MaxBytes)
				assert.Positive(t, st.Waits)
			}
		})
	}
}

// hammer sends bytes to the device and fetches them again, and synchronises
// only before it compares.
func hammer(ctx context.Context, p *Pool, streams []*cudart.Stream, dst cudart.DevPtr, most, rounds int, seed uint64) error {
	random := rand.New(rand.NewPCG(11, seed))
	want := make([]byte, most)
	for range rounds {
		n := 1 + random.IntN(1<<random.IntN(22))%most
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
		if err := down.CopyFromDevice(s, 0, dst, n); err != nil {
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

// pattern is fill, cheaper.
func pattern(mem []byte, stamp uint64) {
	for i := range mem {
		mem[i] = byte(stamp >> (8 * (i % 8)))
	}
}
