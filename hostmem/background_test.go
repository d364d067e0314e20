//go:build linux && !android && (amd64 || arm64)

package hostmem

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/raw"
)

// sharedMemory is a shared mapping of n bytes.
func sharedMemory(tb testing.TB, n int) []byte {
	tb.Helper()
	mem, err := unix.Mmap(memfd(tb, n), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, unix.Munmap(mem)) })
	return mem
}

func (g *fixture) registerInBackground(mem []byte) *Buffer {
	g.Helper()
	return g.register(mem, RegisterOptions{Background: true, Chunk: 2 * mib})
}

func TestRegisterInTheBackground(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 4096, 2 * mib, 2*mib + 1, 7*mib - 5} {
		g := newFixture(t)
		m := g.registerInBackground(sharedMemory(t, n))
		require.NoError(t, m.Registered(t.Context()))
		assert.Len(t, slices.Collect(m.Spans(0, n)), (n+2*mib-1)/(2*mib))
		p, off, ok := Find(m.Bytes())
		require.True(t, ok)
		require.Zero(t, off)
		require.Equal(t, RegisteredInSpans, p.Info().Method)
		g.requireCopies(m)
		require.NoError(t, m.Close())
		require.NoError(t, m.Close())
	}
}

// While a piece is being registered, those behind it are pinned and those before it are not.
func TestPiecesAreRegisteredFromTheLast(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	mem := sharedMemory(t, 6*mib)
	unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{Nth: 2})
	m := g.registerInBackground(mem)
	g.AwaitBlocked("cudaHostRegister", 1)
	assert.Equal(t, []Span{{4 * mib, 2 * mib}}, slices.Collect(m.Spans(0, 6*mib)))
	_, _, ok := Find(mem[4*mib-1:])
	assert.False(t, ok)
	_, off, ok := Find(mem[4*mib:])
	assert.True(t, ok)
	assert.Equal(t, 4*mib, off)
	assert.Nil(t, raw.BeginPartly(mem[4*mib:]), "it is all registered")
	assert.Nil(t, raw.BeginPartly(make([]byte, 10)))
	p := raw.BeginPartly(mem[mib:])
	for _, want := range []struct {
		off, n, bytes int
		registered    bool
	}{{0, 5 * mib, 3 * mib, false}, {0, mib, mib, false}, {0, 3 * mib, 3 * mib, false}, {3 * mib, 2 * mib, 2 * mib, true}, {4 * mib, 3, 3, true}} {
		n, registered := p.Prefix(want.off, want.n)
		assert.Equal(t, want.bytes, n)
		assert.Equal(t, want.registered, registered)
	}
	p.End()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, m.Registered(ctx), context.Canceled)

	// A copy of what is registered does not wait; the others do.
	dst := g.Device(6 * mib)
	require.NoError(t, m.CopyToDevice(g.Stream, dst, 4*mib, 2*mib))
	copied := make(chan error, 2)
	go func() { copied <- m.CopyToDevice(g.Stream, dst, 0, 4*mib) }()
	go func() { copied <- m.Use(g.Stream, true, func() error { return nil }) }()
	unblock()
	require.NoError(t, <-copied)
	require.NoError(t, <-copied)
	require.NoError(t, m.Registered(t.Context()))
	assert.Nil(t, raw.BeginPartly(mem))
	g.Synchronize()
}

// Close ends registering, and waits for the call in progress. Nothing stays registered.
func TestCloseEndsRegistering(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	unblock := g.Sim.Block("cudaHostRegister", cudasim.Fault{Nth: 2})
	m := g.registerInBackground(sharedMemory(t, 8*mib))
	g.AwaitBlocked("cudaHostRegister", 1)
	waiting := make(chan error, 1)
	dst := g.Device(8)
	go func() { waiting <- m.CopyToDevice(g.Stream, dst, 0, 8) }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, m.CloseContext(ctx), context.Canceled)
	unblock()
	require.ErrorIs(t, <-waiting, cudart.ErrClosed)
	require.NoError(t, m.Close())
	assert.Zero(t, g.Registrations())
	assert.LessOrEqual(t, g.Sim.Calls("cudaHostRegister"), 2)
}

// What a refused piece leaves: the pieces before it stay pinned, the others are not, and the error is reported.
func TestRegisteringInTheBackgroundFails(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	g.Sim.Fail("cudaHostRegister", cudasim.Fault{Nth: 3, Times: -1, Code: cudart.ErrNotSupported})
	mem := sharedMemory(t, 8*mib)
	m := g.registerInBackground(mem)
	err := m.Registered(t.Context())
	require.ErrorIs(t, err, cudart.ErrNotSupported)
	require.ErrorContains(t, err, "package transfer")
	dst := g.Device(8 * mib)
	require.NoError(t, m.CopyToDevice(g.Stream, dst, 4*mib, 4*mib))
	require.ErrorIs(t, m.CopyToDevice(g.Stream, dst, 0, 8*mib), cudart.ErrNotSupported)
	_, _, ok := Find(mem)
	assert.False(t, ok)
	require.NoError(t, m.Close())
	assert.Zero(t, g.Registrations())
}

// Where the GPU uses the host's page tables there is nothing to wait for.
func TestNothingIsRegisteredInTheBackgroundWherePageTablesAreShared(t *testing.T) {
	t.Parallel()
	g := withAttribute(t, cudart.AttrPageableMemoryAccessUsesHostPageTables, 1)
	m := g.registerInBackground(sharedMemory(t, 4*mib))
	require.Equal(t, SharedPageTables, m.Info().Method)
	g.requireCopies(m)
}

// Copies, queries and a Close at any moment: no race, no wrong byte, and nothing stays registered.
func TestBackgroundHammer(t *testing.T) {
	t.Parallel()
	g := newSimFixture(t, cudasim.Config{})
	random := rand.New(rand.NewPCG(1, 1))
	mem := sharedMemory(t, 16*mib)
	fill(mem, 3)
	dst := g.Device(16 * mib)
	for range 8 {
		m := g.registerInBackground(mem)
		var all sync.WaitGroup
		for range 4 {
			off := random.IntN(15 * mib)
			n := 1 + random.IntN(mib)
			all.Go(func() {
				_ = m.Info()
				_, _, _ = Find(mem[off:])
				if err := m.CopyToDevice(g.Stream, dst+cudart.DevPtr(off), off, n); err != nil {
					assert.ErrorIs(t, err, cudart.ErrClosed)
				}
			})
		}
		if random.IntN(2) == 0 {
			all.Wait()
		}
		require.NoError(t, m.Close())
		all.Wait()
		require.Zero(t, g.Registrations())
	}
}

// A copy that has begun goes first, until the memory was copied many times.
func TestCopiesGoBeforeRegistering(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &background{m: &Buffer{n: 100}, ctx: t.Context(), stopped: func(error) {}, settled: -1, piece: 30}
		begin := func(n int) partly {
			b.copies++
			return partly{b, 0, n}
		}
		start := time.Now()
		require.NoError(t, b.waitForCopies())
		assert.Equal(t, idleTime, time.Since(start), "a copy may begin at once")
		start = time.Now()
		b.m.life.Hold()
		b.m.life.Hold()
		first, second := begin(40), begin(40)
		passed := make(chan time.Duration)
		go func() {
			assert.NoError(t, b.waitForCopies())
			passed <- time.Since(start)
		}()
		time.Sleep(time.Second)
		first.End()
		time.Sleep(time.Second)
		second.End()
		assert.Equal(t, 2*time.Second+idleTime, <-passed)
		start = time.Now()
		require.NoError(t, b.waitForCopies())
		assert.Zero(t, time.Since(start), "nothing was copied since")
		b.m.life.Hold()
		b.m.life.Hold()
		begin(100*patience - 80).End()
		last := begin(20)
		require.NoError(t, b.waitForCopies())
		assert.Zero(t, time.Since(start), "the memory was copied many times")
		n, _ := last.Prefix(0, 20)
		assert.Equal(t, 20, n)
		n, _ = last.Prefix(0, 50)
		assert.Equal(t, 30, n, "it becomes registered meanwhile")
		last.End()
	})
}
