//go:build linux && !android && (amd64 || arm64)

package pool

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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
	"github.com/gopinned/pinned/hostmem/internal/hostmemtest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Many goroutines do at random all that a pool and its streams can do, while calls fail
// at random. What they know of each other is checked at every step: a block is one
// lease's, the bytes of a lease are its holder's, and what was copied is what was there
// when the copy was queued. The simulated GPU notes memory that is unregistered or
// unmapped while copies use it.
func TestPoolModel(t *testing.T) {
	t.Parallel()
	steps := 24_000
	if hostmemtest.Soak() {
		steps *= 50
	}
	if testgpu.Race || hostmemtest.Emulated(t) {
		steps = 10_000
	}
	for name, o := range map[string]Options{
		"no limit": {IdleTime: 2 * time.Millisecond},
		"limit":    {MaxBytes: 9 * mib, IdleTime: -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newModel(t, o)
			var group sync.WaitGroup
			const workers = 8
			for i := range workers {
				w := m.worker(uint64(i))
				group.Go(func() {
					for range steps / workers / 2 {
						if !w.step() {
							return
						}
					}
					w.releaseAll()
				})
			}
			group.Wait()
			m.end()
		})
	}
}

const modelArea = 4 * kib // device memory of a worker, and the bytes of a lease that are checked

type model struct {
	*fixture
	ctx     context.Context
	p       *Pool
	streams [6]atomic.Pointer[cudart.Stream]

	mu     sync.Mutex
	leased map[unsafe.Pointer]bool // blocks that a worker has

	counts [8]atomic.Int64
}

var modelCounts = [8]string{"leases", "uploads compared", "downloads", "errors", "streams closed", "trims", "gets canceled", "faults"}

const (
	countLeases = iota
	countUploads
	countDownloads
	countErrors
	countClosed
	countTrims
	countCanceled
	countFaults
)

func newModel(t *testing.T, o Options) *model {
	g := newSimFixture(t, cudasim.Config{})
	sys := hostmemtest.NewSystem()
	sys.Unpopulated()
	o.Buffer = hostmem.Options{Workers: 1}
	p, err := New(g.Dev, o)
	require.NoError(t, err)
	m := &model{fixture: g, ctx: sys.Context(t), p: p, leased: make(map[unsafe.Pointer]bool)}
	for i := range m.streams {
		m.streams[i].Store(m.newStream())
	}
	return m
}

func (m *model) newStream() *cudart.Stream {
	s, err := m.Dev.NewStream(cudart.StreamOptions{})
	if !assert.NoError(m, err) {
		m.FailNow()
	}
	return s
}

// end requires that all comes to rest.
func (m *model) end() {
	m.Sim.ResetFaults()
	for i := range m.streams {
		s := m.streams[i].Load()
		m.wait(s)
		assert.NoError(m, s.Close())
	}
	if err := m.p.Close(); err != nil { // a result of a query that failed
		require.NoError(m, m.p.Close(), "after %v", err)
	}
	requireEmpty(m, m.p)
	assert.Empty(m, m.leased)
	assert.Zero(m, m.Registrations())
	for _, misuse := range m.Sim.Misuses() {
		m.Error(misuse)
	}
	if limit := m.p.Stats().MaxBytes; limit > 0 {
		assert.LessOrEqual(m, m.p.Stats().PeakReservedBytes, limit)
	}
	eventually(m, "all is done, and lost streams are collected", func() bool {
		left := m.Sim.Outstanding()
		if left.Streams > 1 {
			runtime.GC()
		}
		return left.PendingOps == 0 && left.Streams == 1
	})
	for i, what := range modelCounts {
		m.Logf("%d %s", m.counts[i].Load(), what)
		assert.Positive(m, m.counts[i].Load(), what)
	}
}

// wait waits for a stream, also a closed one, and past errors that were made.
func (m *model) wait(s *cudart.Stream) {
	for range 1000 {
		err := s.Synchronize(context.Background())
		if errors.Is(err, cudart.ErrClosed) {
			err = m.Dev.Synchronize(context.Background())
		}
		if err == nil {
			return
		}
	}
	m.Error("a stream does not come to rest")
}

// A worker is a goroutine of the model.
type worker struct {
	*model
	random *rand.Rand
	held   []heldLease
	area   cudart.DevPtr // of which the first bytes have a known pattern:
	known  int           // so many
	stamp  uint64
	next   uint64 // odd, so that no pattern repeats within a lease
}

type heldLease struct {
	l     Lease
	n     int
	stamp uint64
}

func (m *model) worker(i uint64) *worker {
	return &worker{model: m, random: rand.New(rand.NewPCG(23, i)), area: m.Device(modelArea), next: i<<32 + 1}
}

// pattern fills mem with what no other stamp gives.
func pattern(mem []byte, stamp uint64) {
	word := stamp * 0x9e3779b97f4a7c15
	for len(mem) >= 8 {
		binary.LittleEndian.PutUint64(mem, word)
		mem = mem[8:]
		word += stamp
	}
	for i := range mem {
		mem[i] = byte(word >> (8 * i))
	}
}

func patternOf(n int, stamp uint64) []byte {
	mem := make([]byte, n)
	pattern(mem, stamp)
	return mem
}

// expected reports whether an error is one that the model has made.
func (w *worker) expected(err error) bool {
	w.counts[countErrors].Add(1)
	var call *cudart.Error
	return assert.True(w, errors.As(err, &call) || errors.Is(err, cudart.ErrClosed), "%v", err)
}

// step does one thing; false ends the worker.
func (w *worker) step() bool {
	switch k := w.random.IntN(100); {
	case k < 30:
		return w.acquire()
	case k < 60:
		return len(w.held) == 0 || w.release(w.random.IntN(len(w.held)))
	case k < 75:
		return w.upload()
	case k < 90:
		return w.download()
	case k < 93:
		w.counts[countTrims].Add(1)
		switch w.random.IntN(3) {
		case 0:
			w.p.core.tick()
		case 1:
			w.p.core.reclaim(context.Background(), w.random.IntN(4*mib))
		default:
			if _, err := w.p.Trim(context.Background(), w.random.IntN(4*mib)); err != nil {
				return w.expected(err)
			}
		}
	case k < 95:
		w.counts[countClosed].Add(1)
		fresh := w.newStream()
		old := w.streams[w.random.IntN(len(w.streams))].Swap(fresh)
		if w.random.IntN(3) > 0 { // else it is left to the garbage collector
			if err := old.Close(); err != nil {
				return w.expected(err)
			}
		}
	case k < 97:
		w.fault()
	default:
		st := w.p.Stats()
		return assert.GreaterOrEqual(w, st.ReservedBytes, 0) && assert.GreaterOrEqual(w, st.Leases, 0)
	}
	return true
}

func (w *worker) fault() {
	w.counts[countFaults].Add(1)
	fns := []string{"cudaEventRecord", "cudaEventQuery", "cudaEventCreateWithFlags", "cudaHostRegister", "cudaHostUnregister", "cudaMemcpyAsync", "cudaStreamQuery", "cudaDeviceSynchronize"}
	codes := []cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrUnknown, cudart.ErrInvalidValue}
	fn := fns[w.random.IntN(len(fns))]
	w.Sim.Fail(fn, cudasim.Fault{
		Nth: 1 + w.random.IntN(3), Times: 1 + w.random.IntN(2), Code: codes[w.random.IntN(len(codes))],
		Late: fn == "cudaHostUnregister" && w.random.IntN(2) == 0,
	})
}

func (w *worker) size() int {
	switch k := w.random.IntN(20); {
	case k < 12:
		return 1 + w.random.IntN(4*kib)
	case k < 18:
		return 1 + w.random.IntN(256*kib)
	default:
		return 1 + w.random.IntN(3*mib)
	}
}

func (w *worker) stream() *cudart.Stream { return w.streams[w.random.IntN(len(w.streams))].Load() }

// get acquires a lease, fills it, and checks that it is no other's.
func (w *worker) get() (h heldLease, ok bool) {
	ctx, cancel := context.WithTimeout(w.ctx, time.Duration(w.random.IntN(2000))*time.Microsecond)
	defer cancel()
	l, err := w.p.Get(ctx, w.size())
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			w.counts[countCanceled].Add(1)
			return h, true
		}
		return h, w.expected(err)
	}
	w.counts[countLeases].Add(1)
	w.mu.Lock()
	taken := w.leased[l.Pointer()]
	w.leased[l.Pointer()] = true
	w.mu.Unlock()
	if !assert.False(w, taken, "a block of two leases") {
		return h, false
	}
	w.next += 2
	h = heldLease{l, min(l.Len(), modelArea), w.next}
	pattern(l.Bytes()[:h.n], h.stamp)
	return h, true
}

// intact requires that the bytes are the holder's.
func (w *worker) intact(h heldLease) bool {
	runtime.Gosched()
	return assert.True(w, bytes.Equal(patternOf(h.n, h.stamp), h.l.Bytes()[:h.n]), "another wrote to a lease of %d bytes", h.l.Len())
}

// finish releases a lease, which may have copies that are not done.
func (w *worker) finish(h heldLease, streams ...*cudart.Stream) bool {
	w.mu.Lock()
	delete(w.leased, h.l.Pointer())
	w.mu.Unlock()
	return assert.NoError(w, h.l.Release(streams...))
}

func (w *worker) acquire() bool {
	if len(w.held) == 3 {
		return w.release(0)
	}
	h, ok := w.get()
	if h.n > 0 {
		w.held = append(w.held, h)
	}
	return ok
}

func (w *worker) release(i int) bool {
	h := w.held[i]
	w.held = append(w.held[:i], w.held[i+1:]...)
	return w.intact(h) && w.finish(h)
}

func (w *worker) releaseAll() {
	for len(w.held) > 0 && w.release(0) {
	}
}

// upload copies a lease to the device, releases it at once, and compares later what
// has arrived.
func (w *worker) upload() bool {
	h, ok := w.get()
	if h.n == 0 {
		return ok
	}
	s := w.stream()
	var err error
	var given []*cudart.Stream
	if w.random.IntN(2) == 0 {
		err = h.l.CopyToDevice(s, w.area, 0, h.n)
	} else {
		err = s.CopyToDevice(w.area, h.l.Pointer(), h.n)
		given = []*cudart.Stream{s}
	}
	if !w.finish(h, given...) {
		return false
	}
	if err != nil {
		w.known = 0
		return w.expected(err)
	}
	for range w.random.IntN(3) {
		if w.random.IntN(2) == 0 && !w.acquire() {
			return false
		}
	}
	w.wait(s)
	w.known, w.stamp = h.n, h.stamp
	w.counts[countUploads].Add(1)
	there := make([]byte, h.n)
	if err := w.Dev.CopyToHost(unsafe.Pointer(&there[0]), w.area, h.n); err != nil {
		return w.expected(err)
	}
	return assert.True(w, bytes.Equal(patternOf(h.n, h.stamp), there), "%d bytes arrived changed", h.n)
}

// download copies from the device into a lease, and releases it at once, while the
// device may still write there; or waits and compares.
func (w *worker) download() bool {
	if w.known == 0 {
		return true
	}
	h, ok := w.get()
	if h.n == 0 {
		return ok
	}
	s := w.stream()
	n := min(h.n, w.known)
	if err := h.l.CopyFromDevice(s, w.area, 0, n); err != nil {
		return w.finish(h) && w.expected(err)
	}
	w.counts[countDownloads].Add(1)
	if w.random.IntN(2) == 0 {
		if !w.finish(h) {
			return false
		}
		w.wait(s) // before the area changes
		return true
	}
	w.wait(s)
	return assert.True(w, bytes.Equal(patternOf(n, w.stamp), h.l.Bytes()[:n]), fmt.Sprintf("%d bytes came back changed", n)) && w.finish(h)
}
