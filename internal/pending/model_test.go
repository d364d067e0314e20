package pending_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
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
	"github.com/gopinned/pinned/internal/pending"
	"github.com/gopinned/pinned/internal/testgpu"
)

var steps = flag.Int("steps", 40_000, "steps of the model test")

// The model: several goroutines are a pool. They lease blocks, copy into them on random
// streams, and release them, while calls fail and block, and streams are stalled, closed
// and lost. The oracle is the memory itself: each copy writes a number of its own into a
// word of its own, so that a device is done with a block when all its words are as expected.
//
// What must hold at each step: a block that is found is done, fits, and was pending, and
// one for the same stream's work was used there only. At the end of a round without faults
// all that no stalled stream uses is found, and with faults, when calls work again and
// nothing is stalled, everything is.
func TestModel(t *testing.T) {
	const rounds, workers = 20, 4
	for round := range uint64(rounds) {
		m := newModel(t, rand.New(rand.NewPCG(7, round)), round%2 == 1)
		var all sync.WaitGroup
		for w := range uint64(workers) {
			all.Go(func() {
				w := &worker{m, rand.New(rand.NewPCG(w, round)), nil}
				for range *steps / rounds / workers {
					if w.step(); t.Failed() {
						break
					}
				}
				for len(w.held) > 0 {
					w.release()
				}
			})
		}
		all.Wait()
		m.end()
		if t.Failed() {
			t.Logf("round %d", round)
			return
		}
	}
}

const (
	modelBlocks  = 24
	modelStreams = 6
	modelWords   = 4 // of a block: copies of a lease
	modelDepth   = 16
)

type model struct {
	testing.TB
	faults  bool
	sim     *cudasim.Sim
	rt      *cudart.Runtime
	dev     *cudart.Device
	numbers cudart.DevPtr // number n is at 8n
	pinned  unsafe.Pointer
	queue   *pending.Queue[modelBlock]
	all     []*modelBlock
	copies  atomic.Int64
	streams [modelStreams]modelStream

	mu   sync.Mutex
	idle []*modelBlock
}

// A modelStream may be replaced, with its lock held.
type modelStream struct {
	mu   sync.RWMutex
	s    *cudart.Stream
	gate chan struct{} // what it waits for, nil if nothing
	uses atomic.Int32  // since then
}

// A modelBlock is leased, idle or pending.
type modelBlock struct {
	pending.Block[modelBlock]
	index int
	state atomic.Int32
	words *[modelWords]uint64 // in pinned memory

	// The holder's.
	want [modelWords]uint64
	used int              // words of this lease
	on   []fence.Timeline // streams that were used since it was done last
}

const (
	leased int32 = iota
	isIdle
	isPending
)

func newModel(t *testing.T, random *rand.Rand, faults bool) *model {
	m := &model{TB: t, faults: faults}
	var err error
	m.sim, err = cudasim.New(testgpu.Config(cudasim.Config{QueueDepth: 4 * modelDepth * modelBlocks}))
	require.NoError(t, err)
	m.rt, err = cudart.Open(context.Background(), cudart.Options{Source: m.sim})
	require.NoError(t, err)
	m.dev, err = m.rt.Device(0)
	require.NoError(t, err)
	table := make([]uint64, *steps+1)
	for i := range table {
		table[i] = uint64(i)
	}
	m.numbers, err = m.dev.Malloc(8 * len(table))
	require.NoError(t, err)
	testgpu.CopyToDevice(t, m.dev, m.numbers, table)
	const size = int(unsafe.Sizeof([modelWords]uint64{}))
	m.pinned, err = m.dev.HostAlloc(size*modelBlocks, 0)
	require.NoError(t, err)
	m.queue = pending.New(m.putIdle)
	for i := range modelBlocks {
		b := &modelBlock{index: i, words: (*[modelWords]uint64)(unsafe.Add(m.pinned, size*i))}
		*b.words = [modelWords]uint64{}
		b.Outer, b.Class, b.Size = b, random.IntN(3), 1+random.IntN(3)
		b.state.Store(isIdle)
		m.all, m.idle = append(m.all, b), append(m.idle, b)
	}
	for i := range m.streams {
		m.streams[i].s, err = m.dev.NewStream(cudart.StreamOptions{})
		require.NoError(t, err)
	}
	return m
}

// written reports whether all copies into a block are done.
func (b *modelBlock) written() bool {
	for i := range b.want {
		if atomic.LoadUint64(&b.words[i]) != b.want[i] {
			return false
		}
	}
	return true
}

// found checks a block that was pending, and is done.
func (m *model) found(b *modelBlock, to int32) {
	if !b.state.CompareAndSwap(isPending, to) {
		m.Errorf("block %d was found, and was not pending", b.index)
	}
	if !b.written() {
		m.Errorf("block %d was found, and is not done: it holds %v, not %v", b.index, *b.words, b.want)
	}
}

func (m *model) putIdle(b *modelBlock) {
	m.found(b, isIdle)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle = append(m.idle, b)
}

type worker struct {
	*model
	random *rand.Rand
	held   []*modelBlock
}

func (w *worker) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Duration(w.random.IntN(2000))*time.Microsecond)
}

func (w *worker) stream() *modelStream { return &w.streams[w.random.IntN(modelStreams)] }

func (w *worker) step() {
	ctx, cancel := w.context()
	defer cancel()
	switch k := w.random.IntN(100); {
	case k < 30:
		w.lease(ctx)
	case k < 55:
		if len(w.held) > 0 {
			w.use(w.held[w.random.IntN(len(w.held))])
		}
	case k < 80:
		w.release()
	case k < 84:
		w.queue.Reclaim(ctx)
	case k < 86:
		_ = w.queue.Wait(ctx, w.timeline(w.stream()))
	case k < 87:
		_, _ = w.queue.Drain(ctx, func() error { return nil })
	case k < 90:
		w.stream().stall()
	case k < 95:
		w.stream().open()
	case k < 97:
		w.replace(w.stream())
	case w.faults:
		w.fault()
	}
}

func (w *worker) timeline(s *modelStream) fence.Timeline {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return fence.TimelineOf(s.s)
}

// lease gets a block in one of the ways that there are.
func (w *worker) lease(ctx context.Context) {
	if len(w.held) == 4 {
		w.release()
	}
	class, size := w.random.IntN(3), 1+w.random.IntN(3)
	var b *modelBlock
	switch w.random.IntN(2) {
	case 0:
		w.mu.Lock()
		if n := len(w.idle); n > 0 {
			b, w.idle = w.idle[n-1], w.idle[:n-1]
			b.state.Store(leased)
		}
		w.mu.Unlock()
		if b == nil {
			return
		}
		size = 0 // any
	case 1:
		if b = w.queue.Find(ctx, class, size, func() *modelBlock { return nil }); b != nil {
			w.found(b, leased)
		}
	}
	if b == nil {
		return
	}
	if size > 0 && (b.Class != class || b.Size < size) {
		w.Errorf("block %d of class %d and %d bytes was found for class %d and %d", b.index, b.Class, b.Size, class, size)
	}
	b.used, b.on = 0, nil
	w.held = append(w.held, b)
}

// use queues a copy into a word of the block's.
func (w *worker) use(b *modelBlock) {
	s := w.stream()
	s.mu.RLock()
	defer s.mu.RUnlock()
	w.copy(b, s)
}

// copy is use with the stream's lock held.
func (w *worker) copy(b *modelBlock, s *modelStream) {
	if b.used == modelWords {
		return
	}
	if s.uses.Add(1) > modelDepth && s.gate != nil {
		return // a full queue would keep the model itself
	}
	n := w.copies.Add(1)
	if err := s.s.CopyToHost(unsafe.Pointer(&b.words[b.used]), w.numbers+cudart.DevPtr(8*n), 8); err == nil {
		b.want[b.used] = uint64(n)
		b.used++
	}
	b.Fence.Add(s.s)
	b.on = append(b.on, fence.TimelineOf(s.s))
}

func (w *worker) release() {
	if len(w.held) > 0 {
		b := w.held[0]
		w.held = w.held[1:]
		w.put(b)
	}
}

func (w *worker) put(b *modelBlock) {
	b.Fence.Record()
	at, busy := b.Fence.Next()
	if busy {
		b.state.Store(isPending)
		w.queue.Add(&b.Block, at)
		return
	}
	b.state.Store(isPending)
	w.putIdle(b)
}

// stall makes a stream wait for a while.
func (s *modelStream) stall() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate == nil {
		gate := make(chan struct{})
		if s.s.LaunchHostFunc(func() { <-gate }) == nil {
			s.gate = gate
			s.uses.Store(0)
		}
	}
}

func (s *modelStream) open() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gate != nil {
		close(s.gate)
		s.gate = nil
	}
}

// replace closes a stream, or leaves it to the garbage collector.
func (w *worker) replace(s *modelStream) {
	s.open()
	s.mu.Lock()
	defer s.mu.Unlock()
	fresh, err := w.dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		return
	}
	if w.random.IntN(2) == 0 {
		_ = s.s.Close()
	}
	s.s = fresh
}

func (w *worker) fault() {
	fns := []string{"cudaEventRecord", "cudaEventQuery", "cudaEventCreateWithFlags", "cudaDeviceSynchronize"}
	f := cudasim.Fault{Nth: 1 + w.random.IntN(3), Times: 1 + w.random.IntN(4)}
	if w.random.IntN(4) == 0 {
		f.Times = -1
	}
	fn := fns[w.random.IntN(len(fns))]
	switch w.random.IntN(3) {
	case 0:
		w.sim.ResetFaults()
	case 1:
		unblock := w.sim.Block(fn, f)
		time.AfterFunc(time.Duration(w.random.IntN(1000))*time.Microsecond, unblock)
	default:
		f.Code = []cudart.Code{cudart.ErrUnknown, cudart.ErrMemoryAllocation}[w.random.IntN(2)]
		w.sim.Fail(fn, f)
	}
}

// end finds everything again.
func (m *model) end() {
	m.sim.ResetFaults()
	if !m.faults && !m.Failed() {
		m.findBesideStalled()
	}
	for i := range m.streams {
		m.streams[i].open()
	}
	m.poll("all blocks are found", func() bool {
		// A result that was lost to a fault is queried again.
		_, _ = m.queue.Drain(m.Context(), func() error { return nil })
		return len(m.queue.Streams()) == 0
	})
	assert.Zero(m, m.queue.Bytes())
	assert.Empty(m, m.queue.Oldest())
	assert.Len(m, m.idle, modelBlocks)
	for _, b := range m.all {
		assert.Equal(m, isIdle, b.state.Load(), "block %d", b.index)
		b.on = nil
	}
	for i := range m.streams {
		assert.NoError(m, m.streams[i].s.Close())
	}
	m.poll("lost streams are collected", func() bool { // none is kept
		runtime.GC()
		return m.sim.Outstanding().Streams == 0
	})
	assert.NoError(m, m.dev.Free(m.numbers))
	assert.NoError(m, m.dev.FreeHost(m.pinned))
	assert.NoError(m, m.rt.Close())
	testgpu.End(m, m.sim) // also after queries that their steps have not waited for
}

// poll calls a function until it returns true. It counts calls, not time, in which the process
// may stand still.
func (m *model) poll(what string, do func() bool) {
	const polls = 20_000
	for range polls {
		if do() {
			return
		}
		time.Sleep(time.Millisecond) // others are to run
	}
	m.Errorf("%s: not after %d polls", what, polls)
}

// findBesideStalled looks until it has found all blocks that no stalled stream uses.
func (m *model) findBesideStalled() {
	stalled := make(map[fence.Timeline]bool)
	for i := range m.streams {
		if s := &m.streams[i]; s.gate != nil {
			stalled[fence.TimelineOf(s.s)] = true
		}
	}
	for _, b := range m.all {
		if slices.ContainsFunc(b.on, func(on fence.Timeline) bool { return stalled[on] }) {
			continue
		}
		m.poll(fmt.Sprintf("block %d is found beside stalled streams", b.index), func() bool {
			m.queue.Reclaim(context.Background())
			return b.state.Load() == isIdle
		})
	}
}
