package fence_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/testgpu"
)

var steps = flag.Int("steps", 30_000, "steps of the model test")

// The model: memory blocks, each with a fence, which streams copy into. The
// oracle is the memory itself: a copy writes the number of the block's latest
// use, so that a block is in use as long as it does not hold that number. Calls
// fail, block and never return at random; streams are closed and lost.
//
// What must hold at each step: a fence that says done has all its copies done
// (safety), and no look or wait takes longer than its context. At the end, when
// calls work again, every fence gets done (it forgets nothing).
func TestFenceModel(t *testing.T) {
	const workers = 4
	var count atomic.Int64
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for round := uint64(0); count.Load() < int64(*steps); round++ {
				newModel(t, rand.New(rand.NewPCG(uint64(w), round))).run(&count)
				if t.Failed() {
					t.Logf("worker %d, round %d", w, round)
					return
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d steps", count.Load())
}

type model struct {
	testing.TB
	random *rand.Rand
	sim    *cudasim.Sim
	rt     *cudart.Runtime
	dev    *cudart.Device
	mem    cudart.DevPtr // number n is at 8n
	pinned unsafe.Pointer

	streams []*modelStream
	blocks  []*modelBlock
	unblock []func()
	used    uint64
}

type modelStream struct {
	*cudart.Stream
	gate chan struct{} // what it waits for, nil if nothing
	uses int           // since then
}

type modelBlock struct {
	fence.Fence
	at    *uint64 // in pinned memory
	last  uint64  // number of the latest use
	index int
}

const (
	modelBlocks  = 12
	modelStreams = 6
	modelSteps   = 2_000 // of a round
	modelLook    = 20 * time.Millisecond
	// A call that was queued behind others' steps on a slow machine is no failure.
	modelPatience = 20 * time.Second
)

func newModel(t *testing.T, random *rand.Rand) *model {
	m := &model{TB: t, random: random}
	var err error
	m.sim, err = cudasim.New(testgpu.Config(cudasim.Config{QueueDepth: 64}))
	require.NoError(t, err)
	m.rt, err = cudart.Open(context.Background(), cudart.Options{Source: m.sim})
	require.NoError(t, err)
	m.dev, err = m.rt.Device(0)
	require.NoError(t, err)
	// Numbers to copy from, written once.
	const numbers = modelSteps + 1
	m.mem, err = m.dev.Malloc(8 * numbers)
	require.NoError(t, err)
	table := make([]uint64, numbers)
	for i := range table {
		table[i] = uint64(i)
	}
	testgpu.CopyToDevice(t, m.dev, m.mem, table)
	m.pinned, err = m.dev.HostAlloc(8*modelBlocks, 0)
	require.NoError(t, err)
	for i := range modelBlocks {
		at := (*uint64)(unsafe.Add(m.pinned, 8*i))
		*at = 0
		m.blocks = append(m.blocks, &modelBlock{at: at, index: i})
	}
	for range modelStreams {
		m.streams = append(m.streams, m.newStream())
	}
	return m
}

func (m *model) newStream() *modelStream {
	s, err := m.dev.NewStream(cudart.StreamOptions{})
	require.NoError(m, err)
	return &modelStream{Stream: s}
}

func (m *model) run(count *atomic.Int64) {
	for i := 0; i < modelSteps && !m.Failed(); i++ {
		m.step()
		count.Add(1)
	}
	m.end()
}

// bounded fails the test when f takes longer than a call with that context may.
func (m *model) bounded(what string, f func(ctx context.Context)) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(m.random.IntN(2000))*time.Microsecond)
	defer cancel()
	done := make(chan struct{})
	go func() { defer close(done); f(ctx) }()
	select {
	case <-done:
	case <-time.After(modelPatience):
		m.Errorf("%s takes longer than its context: %v", what, m.rt.Stuck(context.Background(), 0))
	}
}

func (m *model) step() {
	b := m.blocks[m.random.IntN(len(m.blocks))]
	i := m.random.IntN(len(m.streams))
	s := m.streams[i]
	switch k := m.random.IntN(100); {
	case k < 35:
		m.use(b, s)
	case k < 45:
		if !m.blocked() { // Record makes its call itself
			b.Record()
		}
	case k < 65:
		m.bounded("Done", func(ctx context.Context) { m.check(b, b.Done(ctx), "Done") })
	case k < 75:
		m.bounded("Wait", func(ctx context.Context) { m.check(b, b.Wait(ctx) == nil, "Wait") })
	case k < 80:
		m.check(b, b.Completed(), "Known")
	case k < 84: // the stream stops for a while
		if s.gate == nil && !m.blocked() {
			gate := make(chan struct{})
			if s.LaunchHostFunc(func() { <-gate }) == nil {
				s.gate, s.uses = gate, 0
			}
		}
	case k < 90:
		s.open()
	case k < 92: // closed, or lost
		if m.blocked() {
			break
		}
		s.open()
		if m.random.IntN(2) == 0 {
			_ = s.Close()
		}
		m.streams[i] = m.newStreamIfPossible(s)
	case k < 96:
		m.fail(s)
	case k < 98:
		m.block(s)
	default:
		m.unblockAll()
		m.sim.ResetFaults()
	}
}

func (m *model) newStreamIfPossible(old *modelStream) *modelStream {
	s, err := m.dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		return old
	}
	return &modelStream{Stream: s}
}

func (s *modelStream) open() {
	if s.gate != nil {
		close(s.gate)
		s.gate = nil
	}
}

// use queues a copy of a new number into the block. Only one may be queued at a
// time: the block's owner waits for the GPU before it uses the memory anew.
func (m *model) use(b *modelBlock, s *modelStream) {
	if m.blocked() || !b.Completed() {
		return
	}
	// The model itself must not be kept by a full queue.
	if s.uses++; s.uses == 16 {
		s.open()
	}
	m.used++
	err := s.CopyToHost(unsafe.Pointer(b.at), m.mem+cudart.DevPtr(8*m.used), 8)
	if err == nil {
		b.last = m.used
	}
	b.Add(s.Stream)
}

// check compares an answer with the memory.
func (m *model) check(b *modelBlock, done bool, by string) {
	if done {
		if got := atomic.LoadUint64(b.at); got != b.last {
			m.Errorf("%s says that block %d is done, and copy %d is not: it holds %d", by, b.index, b.last, got)
		}
	}
}

var modelCalls = []string{"cudaEventRecord", "cudaEventQuery", "cudaEventCreateWithFlags", "cudaStreamQuery", "cudaDeviceSynchronize"}

func (m *model) fault(s *modelStream) (fn string, f cudasim.Fault) {
	fn = modelCalls[m.random.IntN(len(modelCalls))]
	f = cudasim.Fault{Nth: 1 + m.random.IntN(3), Times: 1 + m.random.IntN(4)}
	if m.random.IntN(4) == 0 {
		f.Times = -1
	}
	return fn, f
}

func (m *model) fail(s *modelStream) {
	fn, f := m.fault(s)
	f.Code = []cudart.Code{cudart.ErrUnknown, cudart.ErrMemoryAllocation, cudart.ErrOperatingSystem}[m.random.IntN(3)]
	m.sim.Fail(fn, f)
}

// block makes calls block. Steps whose calls the fence does not make itself are
// left out meanwhile.
func (m *model) block(s *modelStream) {
	if len(m.unblock) < 3 {
		fn, f := m.fault(s)
		m.unblock = append(m.unblock, m.sim.Block(fn, f))
	}
}

func (m *model) blocked() bool { return len(m.unblock) > 0 }

func (m *model) unblockAll() {
	for _, unblock := range m.unblock {
		unblock()
	}
	m.unblock = nil
}

// end lets everything work again: every fence must get done, and all be
// released.
func (m *model) end() {
	m.unblockAll()
	m.sim.ResetFaults()
	for _, s := range m.streams {
		s.open()
	}
	ctx, cancel := context.WithTimeout(context.Background(), modelPatience)
	defer cancel()
	for _, b := range m.blocks {
		if err := b.Wait(ctx); err != nil {
			// An answer that was lost to a fault is asked for anew.
			err = b.Wait(ctx)
			assert.NoError(m, err, "block %d is never done", b.index)
		}
		m.check(b, b.Completed(), "the end")
		assert.True(m, b.Empty(), "block %d", b.index)
	}
	for _, s := range m.streams {
		_ = s.Close()
	}
	assert.NoError(m, m.dev.Free(m.mem))
	assert.NoError(m, m.dev.FreeHost(m.pinned))
	for _, misuse := range m.sim.Misuses() {
		m.Error(misuse)
	}
	assert.NoError(m, m.rt.Close())
	_ = m.sim.Close() // lost streams may still be there
}
