package stage

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
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
)

// simulated acquires the stage of a simulated device, until the test ends.
func simulated(t *testing.T, cfg cudasim.Config) (*Stage, *cudasim.Sim) {
	t.Helper()
	sim, rt := testgpu.Sim(t, cfg)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := Acquire(t.Context(), dev)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Release(context.Background())) })
	return s, sim
}

var errTest = errors.New("the disk is on fire")

// Of several errors the one with the least offset is reported, and the first of those.
// What is before it is copied still.
func TestTheErrorWithTheLowestOffsetIsReported(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	j := s.newJob(Copy{N: 100})
	late, first, second := errors.New("late"), errors.New("first"), errors.New("second")
	j.Cut(50, late)
	j.Cut(20, first)
	j.Cut(20, second)
	j.Cut(30, late)
	require.False(t, j.PastEnd(19))
	require.True(t, j.PastEnd(20))
	j.Pass(0, 10)
	j.Pass(30, 70)
	require.False(t, j.over())
	j.Pass(10, 20)
	require.True(t, j.over())
	done, err := j.result()
	require.Equal(t, 20, done)
	require.ErrorIs(t, err, first)
	require.ErrorContains(t, err, "at byte 20 of 100")
	j.abort(5, late)
	require.True(t, j.PastEnd(0), "nothing more is begun")
	done, err = j.result()
	require.Equal(t, 5, done)
	require.ErrorIs(t, err, late)
}

func TestDefaultWorkers(t *testing.T) {
	t.Parallel()
	for procs, want := range map[int]int{1: 1, 2: 2, 4: 4, 5: 4, 8: 7, 16: 14, 22: 19, 64: 56} {
		assert.Equal(t, want, defaultWorkers(procs), "%d cores", procs)
	}
	for workers, maxN := range map[int32]int{2: 8 * mib, 48: 38 * mib} {
		assert.LessOrEqual(t, sizeOf(workers).ring, maxN)
	}
}

// A scatter feeds a copy in parts that are ready in any order, some of which it refuses
// at first.
type scatter struct {
	*Job
	parts   []Part
	refuse  map[int]bool // offsets
	stopped atomic.Bool

	mu     sync.Mutex
	filled map[int]int // bytes at offsets
}

func newScatter(n, part int, r *rand.Rand, refuse bool) *scatter {
	s := &scatter{refuse: make(map[int]bool), filled: make(map[int]int)}
	for off := 0; off < n; off += part {
		s.parts = append(s.parts, Part{Off: off, N: min(part, n-off)})
		s.refuse[off] = refuse && r.IntN(3) == 0
	}
	r.Shuffle(len(s.parts), func(i, j int) { s.parts[i], s.parts[j] = s.parts[j], s.parts[i] })
	return s
}

func (s *scatter) Start(j *Job)       { s.Job = j }
func (s *scatter) Stop()              { s.stopped.Store(true) }
func (*scatter) Wait(context.Context) {}

func (s *scatter) Ready() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.parts) == 0 {
		return 0
	}
	return s.parts[0].N
}

func (s *scatter) Take(_, n int) Part {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.parts[0]
	seg := Part{Off: p.Off, N: n}
	if p.Off, p.N = p.Off+n, p.N-n; p.N == 0 {
		s.parts = s.parts[1:]
	}
	refused := s.refuse[seg.Off]
	delete(s.refuse, seg.Off)
	seg.Copy = func(to []byte, off int) error {
		if refused {
			return ErrNotReady
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.filled[off] += len(to)
		return nil
	}
	seg.End = func(filled bool) {
		if refused == filled {
			return
		}
		if !filled {
			s.mu.Lock()
			s.parts = append(s.parts, seg)
			s.mu.Unlock()
			s.Wake()
		}
	}
	return seg
}

// covered is how many bytes, from the first on, ranges cover once.
func covered(t *testing.T, ranges map[int]int) int {
	at := 0
	for n, ok := ranges[at]; ok; n, ok = ranges[at] {
		delete(ranges, at)
		at += n
	}
	return at
}

// Chunks and pieces of all sizes cover all bytes once, whatever is ready when.
func TestChunksCoverEverything(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		n := 1 + r.IntN(100*mib)
		if r.IntN(2) == 0 {
			n = 1 + r.IntN(mib)
		}
		feed := newScatter(n, 1+r.IntN(n)/(1+r.IntN(50))+n/200, r, r.IntN(2) == 0)
		var mu sync.Mutex
		queued := make(map[int]int)
		c := Copy{N: n, Host: feed, Workers: r.IntN(4), MaxChunk: r.IntN(3) * mib, Piece: r.IntN(2) * 200_000,
			Queue: func(_ *cudart.Stream, _ int, mem []byte, off int) error {
				mu.Lock()
				defer mu.Unlock()
				queued[off] += len(mem)
				return nil
			}}
		done, err := s.Run(t.Context(), c)
		require.NoError(t, err)
		require.Equal(t, n, done)
		require.True(t, feed.stopped.Load())
		require.Equal(t, n, covered(t, queued))
		require.Empty(t, queued)
		require.Equal(t, n, covered(t, feed.filled))
		require.Empty(t, feed.filled)
	}
}

// A failure at a byte ends the copy there, though what is behind may have been read
// before what is in front.
func TestBytesBeforeAFailureAreCopied(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		n := 1 + r.IntN(20*mib)
		at := r.IntN(n)
		feed := newScatter(n, 1+n/(1+r.IntN(20)), r, false)
		var mu sync.Mutex
		queued := make(map[int]int)
		cut := sync.OnceFunc(func() { feed.Cut(at, errTest) })
		c := Copy{N: n, Host: feed, Queue: func(_ *cudart.Stream, _ int, mem []byte, off int) error {
			cut()
			mu.Lock()
			defer mu.Unlock()
			queued[off] += len(mem)
			return nil
		}}
		done, err := s.Run(t.Context(), c)
		require.ErrorIs(t, err, errTest)
		require.Equal(t, at, done)
		require.GreaterOrEqual(t, covered(t, queued), at)
	}
}

// An error of Part.Copy leaves out what is behind its piece, and nothing before.
func TestFailedPiecesEndTheCopyThere(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	const n = 12*mib + 5
	mem, other := device(t, s.dev, n), device(t, s.dev, n)
	want := random(n, 1)
	for _, at := range []int{0, 1, mib, 5*mib + 7, n - 1} {
		_, err := upload(t.Context(), s, mem, make([]byte, n))
		require.NoError(t, err)
		_, err = upload(t.Context(), s, other, bytes.Repeat([]byte{9}, n)) // is in the ring now
		require.NoError(t, err)
		fill := func(to []byte, off int) error {
			if off <= at && at < off+len(to) {
				return errTest
			}
			copy(to, want[off:])
			return nil
		}
		done, err := s.Run(t.Context(), Copy{N: n, Host: Memory(fill), Queue: queueUp(mem)})
		require.ErrorIs(t, err, errTest)
		require.LessOrEqual(t, done, at)
		require.Greater(t, done, at-maxPiece)
		back := make([]byte, n)
		_, err = download(t.Context(), s, back, mem)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want[:done], back[:done]))
		for i, b := range back {
			if b != 0 && b != want[i] {
				t.Fatalf("byte %d is one that the ring held before", i)
			}
		}

		_, err = upload(t.Context(), s, mem, want)
		require.NoError(t, err)
		back = make([]byte, n)
		drain := func(from []byte, off int) error {
			if off <= at && at < off+len(from) {
				panic(errTest)
			}
			copy(back[off:], from)
			return nil
		}
		done, err = s.Run(t.Context(), Copy{N: n, Down: true, Host: Memory(drain), Queue: queueDown(mem)})
		require.ErrorContains(t, err, "panic: the disk is on fire")
		require.LessOrEqual(t, done, at)
		require.True(t, bytes.Equal(want[:done], back[:done]))
	}
}

func queueUp(dst cudart.DevPtr) func(*cudart.Stream, int, []byte, int) error {
	return func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&mem[0]), len(mem))
	}
}

func queueDown(src cudart.DevPtr) func(*cudart.Stream, int, []byte, int) error {
	return func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToHost(unsafe.Pointer(&mem[0]), src+cudart.DevPtr(off), len(mem))
	}
}

// stuck is a feed that has nothing ready.
type stuck struct{}

func (stuck) Start(*Job)           {}
func (stuck) Stop()                {}
func (stuck) Wait(context.Context) {}
func (stuck) Ready() int           { return 0 }
func (stuck) Take(int, int) Part   { panic("nothing was ready") }

// inUse is how many units of a ring are in use.
func (r *ring) inUse() (units int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.used {
		units += n
	}
	return units
}

// Copies that wait for what they are to copy have no memory of the ring, and are no
// workers.
func TestHostsThatAreNotReadyHoldNoResources(t *testing.T) {
	t.Parallel()
	s, _ := simulated(t, cudasim.Config{})
	s.workers = newWorkerPool(8, cores{}, newConcurrency(8)) // of its own: others copy too
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range 40 {
		group.Go(func() {
			_, err := s.Run(ctx, Copy{N: 100 * mib, Host: stuck{}, Queue: queueUp(0)})
			assert.ErrorIs(t, err, context.Canceled)
		})
	}
	for len(*s.workers.jobs.Load()) < 40 || s.workers.copying.Load() > 0 {
		runtime.Gosched()
	}
	require.Zero(t, s.ring.inUse())
	require.Zero(t, s.smallRing.inUse())
	const n = 30 * mib
	mem := device(t, s.dev, n)
	want, back := random(n, 1), make([]byte, n)
	_, err := upload(t.Context(), s, mem, want)
	require.NoError(t, err)
	_, err = download(t.Context(), s, back, mem)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, back))
	cancel()
	group.Wait()
	require.Zero(t, s.workers.copying.Load())
}

// A wait for memory of the ring ends with the context.
func TestCanceledWhileTheRingIsFull(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	n := s.Bytes() + 16*mib
	mem := device(t, s.dev, n)
	src := make([]byte, n)
	sim.Hold()
	held, stop := context.WithCancel(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() {
		_, err := upload(held, s, mem, src)
		assert.NoError(t, err)
	})
	waiters := func() int {
		s.ring.mu.Lock()
		defer s.ring.mu.Unlock()
		return len(s.ring.waiters)
	}
	for waiters() == 0 {
		runtime.Gosched()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		done, err := upload(ctx, s, mem, src)
		assert.ErrorIs(t, err, context.Canceled)
		assert.Zero(t, done)
	}()
	for waiters() < 2 {
		runtime.Gosched()
	}
	cancel()
	<-ended
	require.Equal(t, 1, waiters())
	sim.Release()
	group.Wait()
	stop()
}

// A download that is canceled while its copy is about to be queued, by a goroutine that
// is stuck in the library, leaves the memory to that.
func TestCanceledWhileItsCopyIsQueued(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	const n = 4 * mib
	mem := device(t, s.dev, n)
	unblock := sim.Block("cudaMemcpyAsync", cudasim.Fault{})
	var group sync.WaitGroup
	group.Go(func() {
		_, err := download(context.Background(), s, make([]byte, n), mem)
		assert.NoError(t, err)
	})
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaMemcpyAsync", 1))
	ctx, cancel := context.WithCancel(t.Context())
	dst := random(n, 1)
	before := bytes.Clone(dst)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := download(ctx, s, dst, mem)
		assert.ErrorIs(t, err, context.Canceled)
		assert.ErrorIs(t, err, ErrUnderWay)
	}()
	queued := func() int {
		l := s.link(toHost, false)
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.submitted)
	}
	for queued() < 2 { // the first one's second chunk, and one of the second
		runtime.Gosched()
	}
	cancel()
	<-ended
	units := 0
	l := s.link(toHost, false)
	l.mu.Lock()
	for _, c := range l.submitted {
		units += c.x.units
	}
	l.mu.Unlock()
	require.GreaterOrEqual(t, s.ring.inUse(), units+1, "all that may be queued still")
	unblock()
	group.Wait()
	for s.ring.inUse() > 0 {
		s.ring.mu.Lock()
		s.ring.poll()
		s.ring.mu.Unlock()
		runtime.Gosched()
	}
	require.True(t, bytes.Equal(before, dst), "nothing is written any more")
}

// Copies fail, and do not wait for ever, when CUDA cannot say whether they are done.
func TestPointsThatCannotBeKnown(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	const n = 4 * mib
	mem := device(t, s.dev, n)
	for _, fns := range [][]string{{"cudaEventRecord", "cudaDeviceSynchronize"}, {"cudaEventQuery", "cudaDeviceSynchronize"}} {
		for _, fn := range fns {
			sim.Fail(fn, cudasim.Fault{Times: -1, Code: cudart.ErrLaunchFailure})
		}
		for range 3 { // until the ring is full of such
			_, err := upload(context.Background(), s, mem, make([]byte, n))
			require.ErrorIs(t, err, cudart.ErrLaunchFailure)
			require.ErrorIs(t, err, ErrUnderWay)
			_, err = download(context.Background(), s, make([]byte, n), mem)
			require.ErrorIs(t, err, cudart.ErrLaunchFailure)
		}
		sim.ResetFaults()
		_, err := upload(context.Background(), s, mem, make([]byte, n))
		require.NoError(t, err, "the memory is found to be free")
	}
}

// All who use a device share one stage; the last one releases it.
func TestAStageIsShared(t *testing.T) {
	before := hostmem.ReadStats().ReservedBytes
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
	for range 10 {
		var group sync.WaitGroup
		for i := range 12 {
			dev, err := rt.Device(i % 3)
			require.NoError(t, err)
			group.Go(func() {
				s, err := Acquire(t.Context(), dev)
				if assert.NoError(t, err) {
					assert.Same(t, dev, s.dev)
					assert.NoError(t, s.Release(t.Context()))
				}
			})
		}
		group.Wait()
		require.Equal(t, before, hostmem.ReadStats().ReservedBytes)
	}
	dev, err := rt.Device(0)
	require.NoError(t, err)
	first, err := Acquire(t.Context(), dev)
	require.NoError(t, err)
	require.Equal(t, before+first.Bytes(), hostmem.ReadStats().ReservedBytes)
	again, err := Acquire(t.Context(), dev)
	require.NoError(t, err)
	require.Same(t, first, again)
	require.NoError(t, first.Release(t.Context()))
	require.Equal(t, before+first.Bytes(), hostmem.ReadStats().ReservedBytes)
	require.NoError(t, again.Release(t.Context()))
	require.Equal(t, before, hostmem.ReadStats().ReservedBytes)
}

// A ring that cannot be pinned, in whichever way, is an error, of which nothing is left;
// the next use tries anew, also one that waited for the first.
func TestARingThatCannotBePinned(t *testing.T) {
	before := hostmem.ReadStats().ReservedBytes
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	for nth := 1; nth <= 4; nth++ {
		sim.Fail("cudaHostRegister", cudasim.Fault{Nth: nth, Times: -1, Code: cudart.ErrMemoryAllocation})
		sim.Fail("cudaHostAlloc", cudasim.Fault{Times: -1, Code: cudart.ErrMemoryAllocation})
		_, err = Acquire(t.Context(), dev)
		require.ErrorIs(t, err, cudart.ErrMemoryAllocation)
		require.ErrorContains(t, err, "cudaHostRegister")
		require.Equal(t, before, hostmem.ReadStats().ReservedBytes)
		sim.ResetFaults()
	}
	sim.Fail("cudaHostAlloc", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	unblock := sim.Block("cudaHostRegister", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	var group sync.WaitGroup
	group.Go(func() {
		_, err := Acquire(t.Context(), dev)
		assert.ErrorIs(t, err, cudart.ErrMemoryAllocation)
	})
	require.NoError(t, sim.AwaitBlocked(t.Context(), "cudaHostRegister", 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Acquire(ctx, dev)
	require.ErrorIs(t, err, context.Canceled, "it waits no longer than its own context")
	group.Go(func() {
		s, err := Acquire(t.Context(), dev)
		if assert.NoError(t, err) {
			assert.NoError(t, s.Release(t.Context()))
		}
	})
	unblock()
	group.Wait()
	require.Equal(t, before, hostmem.ReadStats().ReservedBytes)
}

// halves is memory whose second half is ready when more is called.
type halves struct {
	memory
	job  *Job
	half atomic.Int64 // bytes that are ready
}

func (h *halves) Start(j *Job) { h.job = j }
func (h *halves) Ready() int   { return int(h.half.Load()) - h.next }

func (h *halves) more() {
	h.half.Store(int64(len(h.mem)))
	h.job.Wake()
}

// An error that CUDA reports once, while an early chunk is on its way, is of the copy,
// although later chunks arrive without one.
func TestAnErrorOfAnEarlyChunk(t *testing.T) {
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s, err := Acquire(t.Context(), dev)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Release(context.Background())) }()
	const n = 2 * mib
	dst := device(t, dev, n)
	feed := &halves{memory: memory{mem: random(n, 1)}}
	feed.half.Store(n / 2)
	sim.Hold()
	defer sim.Release()
	outcome := make(chan error, 1)
	go func() {
		_, err := s.Run(t.Context(), Copy{N: n, Host: feed, Queue: func(on *cudart.Stream, _ int, mem []byte, off int) error {
			return on.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&mem[0]), len(mem))
		}})
		outcome <- err
	}()
	inFlight := func() int {
		s.ring.mu.Lock()
		defer s.ring.mu.Unlock()
		n := 0
		for _, x := range s.ring.inFlight {
			n += len(x.mem)
		}
		return n
	}
	require.Eventually(t, func() bool { return inFlight() == n/2 }, 20*time.Second, time.Millisecond)
	sim.Fail("cudaEventQuery", cudasim.Fault{Code: cudart.ErrLaunchFailure})
	calls := sim.Calls("cudaEventQuery")
	require.Eventually(t, func() bool {
		s.ring.mu.Lock()
		defer s.ring.mu.Unlock()
		s.ring.poll()
		return sim.Calls("cudaEventQuery") > calls
	}, 20*time.Second, time.Millisecond)
	feed.more()
	require.Eventually(t, func() bool { return inFlight() == n }, 20*time.Second, time.Millisecond)
	sim.Release()
	require.ErrorIs(t, <-outcome, cudart.ErrLaunchFailure)
}

// A download that has failed returns when the GPU is done with the memory that it copies
// to, or with ErrUnderWay.
func TestAFailedDownloadWaitsForCopiesInFlight(t *testing.T) {
	t.Parallel()
	s, sim := simulated(t, cudasim.Config{})
	const n = 4 * mib
	mem := device(t, s.dev, n)
	sim.Hold()
	jobs := make(chan *Job, 1)
	outcome := make(chan error, 1)
	go func() {
		_, err := s.Run(context.Background(), Copy{N: n, Down: true, Host: watched{into(make([]byte, n)), jobs}, Queue: queueDown(mem)})
		outcome <- err
	}()
	j := <-jobs
	for sim.PendingCopies() == 0 {
		runtime.Gosched()
	}
	j.abort(0, errTest)
	err := <-outcome
	require.ErrorIs(t, err, errTest)
	require.ErrorIs(t, err, ErrUnderWay, "its copies cannot end")
	sim.Release()
}
