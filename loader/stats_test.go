package loader

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A fakeClock is a time that tests move.
type fakeClock struct{ ns atomic.Int64 }

func (c *fakeClock) now() time.Time          { return time.Unix(0, c.ns.Load()) }
func (c *fakeClock) advance(d time.Duration) { c.ns.Add(int64(d)) }

func TestStopwatch(t *testing.T) {
	t.Parallel()
	var clock fakeClock
	w := stopwatch{clock: clock.now, since: clock.now()}
	for _, step := range []struct {
		in   phase
		took time.Duration
	}{{noLoop, 7}, {starting, 1}, {consuming, 2}, {waiting, 3}, {consuming, 4}, {ending, 5}, {noLoop, 100}, {starting, 10}} {
		w.setPhase(step.in)
		clock.advance(step.took)
	}
	want := [phases]time.Duration{noLoop: 107, starting: 11, waiting: 3, consuming: 6, ending: 5}
	require.Equal(t, want, w.read(), "also of the phase that it is in")
	require.Equal(t, want, w.read())
}

// The time of loops is theirs to the nanosecond: also of one that is running, and
// of one that was left and waits for its source.
func TestElapsedIsTheLoopsTime(t *testing.T) {
	t.Parallel()
	var clock fakeClock
	const first, late, last = 3 * time.Second, 5 * time.Second, 11 * time.Second
	var l *Loader
	leaving := make(chan struct{})
	in := func(p phase) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.watch.phase == p
	}
	src := Func(16, []int{8}, func(ctx context.Context, i int, _ [][]byte) error {
		switch i {
		case 0: // the loop waits for its first batch
			clock.advance(first)
		case 8: // of batch 2, for which the loop waits
			for !in(waiting) {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				runtime.Gosched()
			}
			clock.advance(late)
		case 12: // of batch 3, for which it does not
			close(leaving)
			<-ctx.Done()
			clock.advance(last)
		}
		return nil
	})
	l = newLoaderFor(t, testgpu.Device(t), src, Options{BatchSize: 4, Workers: 1, Prefetch: 3})
	l.watch = stopwatch{clock: clock.now, since: clock.now()}
	n := 0
	for _, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		st := l.Stats()
		require.Equal(t, first, st.FirstWaits)
		require.Equal(t, time.Duration(n)*time.Minute, st.Consuming)
		clock.advance(time.Minute)
		st = l.Stats()
		n++
		require.Equal(t, time.Duration(n)*time.Minute, st.Consuming, "in the loop's body")
		require.Equal(t, st.BatchWaits+st.Consuming, st.Elapsed)
		if n == 3 {
			<-leaving
			break
		}
	}
	st := l.Stats()
	require.Equal(t, first, st.FirstWaits)
	require.Equal(t, first+late, st.BatchWaits)
	require.Equal(t, 3*time.Minute, st.Consuming)
	require.Equal(t, first+late+3*time.Minute+last, st.Elapsed)
	clock.advance(time.Hour) // in no loop
	require.Equal(t, st.Elapsed, l.Stats().Elapsed)
}

// Waiting although all batches are retained is the consumer's time.
func TestTimeWithAllBatchesRetainedIsConsuming(t *testing.T) {
	t.Parallel()
	var clock fakeClock
	l := newLoaderFor(t, testgpu.Device(t), numbered(12, 8), Options{BatchSize: 4, Workers: 1, Prefetch: 1})
	l.watch = stopwatch{clock: clock.now, since: clock.now()}
	var retained []*Batch
	for b, err := range l.Batches(t.Context()) {
		require.NoError(t, err)
		if len(retained) == 2 {
			break
		}
		b.Retain()
		if retained = append(retained, b); len(retained) == 2 {
			go func() {
				clock.advance(time.Minute)
				for _, b := range retained {
					assert.NoError(t, b.Release())
				}
			}()
		}
	}
	require.Equal(t, time.Minute, l.Stats().Consuming)
	require.Zero(t, l.Stats().BatchWaits)
}

// The device's clock of the simulated GPU knows the link only, so that it is
// known what all copies take: in short epochs and in long ones, full batches and
// short ones.
func TestCopyingIsTheTimeOfTheCopies(t *testing.T) {
	t.Parallel()
	const latency = 50 * time.Microsecond
	_, dev := simulated(t, cudasim.Link{HostToDevice: cudasim.Speed{Rate: 1, Latency: latency}})
	const batch, width = 4, 2500 // 10 µs at 1 GB/s
	for _, batches := range []int{1, 2, 3, 7, 8, 9, 16, 17, 40} {
		for _, workers := range []int{1, 3} {
			// Each batch is complete after the copy of the one before, so that none
			// are copied together.
			turns := make([]chan struct{}, batches)
			for i := range turns {
				turns[i] = make(chan struct{}, 1)
			}
			src := numbered(batches*batch, width)
			l := newLoaderFor(t, dev, Func(src.Len(), src.Fields(), func(ctx context.Context, i int, sample [][]byte) error {
				if i%batch == 0 {
					<-turns[i/batch]
				}
				return src.Read(ctx, i, sample)
			}), Options{BatchSize: batch, Workers: workers, Prefetch: 3})
			for epoch := range 2 {
				turns[0] <- struct{}{}
				for b, err := range l.Batches(t.Context()) {
					require.NoError(t, err)
					require.NoError(t, b.Wait(t.Context()))
					if next := b.Number() + 1; next < batches {
						turns[next] <- struct{}{}
					}
				}
				st := l.Stats()
				require.Equal(t, (epoch+1)*batches*batch*width, st.Bytes)
				want := time.Duration((epoch+1)*batches) * 60 * time.Microsecond
				require.InEpsilon(t, want, st.Copying, 0.05, "%d batches, %d workers, epoch %d", batches, workers, epoch)
			}
		}
	}
}

// Of the first copies none stands for more than itself, and a later one for those since the
// one before.
func TestMeasuredCopiesAreScaledToAll(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	var m meter
	m.create(dev)
	defer func() { require.NoError(t, m.close()) }()
	s := stream(t, dev)
	measures := func(batch int) bool {
		c := m.begin(s, batch)
		c.record(s, began)
		c.record(s, ended)
		m.end(c, 100, s.Point())
		return c != nil
	}
	require.True(t, measures(0))
	require.NoError(t, s.Point().Wait(t.Context()))
	m.collect()
	copying, waiting := m.copying.Swap(0), m.waiting.Swap(0) // of one copy
	require.Positive(t, waiting, "events take time, too")
	m.sinceMeasured = 0
	m.measured.Store(0)
	for batch := range 20 {
		require.Equal(t, batch < 8 || batch == 15, measures(batch), "batch %d", batch)
		require.NoError(t, s.Point().Wait(t.Context()))
	}
	m.collect()
	require.EqualValues(t, 16*100, m.measured.Load(), "8, and 1 for 8")
	require.EqualValues(t, 4*100, m.unmeasured.Load())
	require.EqualValues(t, 16*copying, m.copying.Load())
	require.EqualValues(t, 16*waiting, m.waiting.Load())

	// Copies count, however many batches they take.
	var measured []int
	for batch := 20; batch < 200; batch += 10 {
		if measures(batch) {
			measured = append(measured, batch)
		}
		require.NoError(t, s.Point().Wait(t.Context()))
	}
	require.Equal(t, []int{50, 130}, measured)

	// As many are measured at a time as there are events.
	m.collect()
	sim.Hold()
	for batch := range 2 * measuredFirst {
		require.True(t, measures(batch%measuredFirst))
	}
	require.False(t, measures(0))
	sim.Release()
	require.NoError(t, s.Point().Wait(t.Context()))
	require.True(t, measures(0))

	// A copy whose time CUDA does not report is not measured.
	bytes, unmeasured := m.measured.Load(), m.unmeasured.Load()
	require.NoError(t, s.Point().Wait(t.Context()))
	sim.Fail("cudaEventElapsedTime", cudasim.Fault{Times: -1, Code: cudart.ErrUnknown})
	m.collect()
	sim.ResetFaults()
	require.EqualValues(t, bytes, m.measured.Load())
	require.Greater(t, m.unmeasured.Load(), unmeasured)

	// What was not measured takes as long as the rest, byte by byte.
	m.copying.Store(0)
	m.copying.Store(int64(time.Second))
	m.waiting.Store(int64(time.Minute))
	m.measured.Store(100)
	m.unmeasured.Store(50)
	allCopying, allWaiting := m.times()
	require.Equal(t, 1500*time.Millisecond, allCopying)
	require.Equal(t, 90*time.Second, allWaiting)
	m.measured.Store(0)
	allCopying, _ = m.times()
	require.Zero(t, allCopying)
}

// Copies wait for the consumer's streams, and that is not the copies' time.
func TestCopyWaits(t *testing.T) {
	t.Parallel()
	const slow, copying = 2 * time.Millisecond, 100 * time.Microsecond
	f := newDrivenOn(t, cudasim.Link{OnDevice: late(slow), HostToDevice: late(copying)}, numbered(4, 64), Options{BatchSize: 4, Prefetch: 1}, nil)
	l, sim := f.l, f.sim
	all := newLog(t, stream(t, l.dev), 1, 4*64)
	slot := l.slots[0]
	slot.begin(0, 0, 4)
	for uses := range 4 {
		before := l.Stats()
		sim.Hold() // what the consumer's stream does is not done before the upload
		for range uses {
			require.NoError(t, all.s.CopyOnDevice(all.mem, slot.mem, 4*64))
			slot.using.Add(all.s)
			slot.using.Record()
		}
		require.True(t, f.d.copy(f.p, l.slots[:1]))
		f.next()
		sim.Release()
		require.NoError(t, slot.wait(t.Context()))
		f.d.meter.collect()
		require.InDelta(t, copying, l.Stats().Copying-before.Copying, float64(10*time.Microsecond))
		require.InDelta(t, time.Duration(uses)*slow, l.Stats().CopyWaits-before.CopyWaits, float64(10*time.Microsecond))
	}
}

// A loader works without events for the statistics.
func TestWithoutTimingEvents(t *testing.T) {
	t.Parallel()
	sim, dev := simulated(t, cudasim.Link{})
	s := stream(t, dev)
	l := newLoaderFor(t, dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 2})
	require.NoError(t, l.driver.meter.close())
	require.Len(t, epochOf(t, l, s, 8), 25)
	require.Zero(t, l.Stats().Copying)

	sim.Fail("cudaEventCreateWithFlags", cudasim.Fault{Nth: 2, Times: -1, Code: 2})
	l, err := New(t.Context(), dev, numbered(100, 8), Options{BatchSize: 4, Prefetch: 2})
	require.NoError(t, err)
	require.Nil(t, l.driver.meter.timings[0].events[began])
	sim.ResetFaults()
	require.Len(t, epochOf(t, l, s, 8), 25)
	require.Zero(t, l.Stats().Copying)
	require.NoError(t, l.Close())
}

// A pipeline is a loader with its source and consumer whose times are known. It
// computes what the loader would measure, and how long all would take.
type pipeline struct {
	name                          string
	epochs, batches, batch        int
	workers, maxTransforms, slots int
	read, transform               time.Duration // of a sample
	copying, body, device         time.Duration // of a batch
	sync                          bool          // the body waits for the device
}

func (p pipeline) run() (s Stats, total time.Duration) {
	s.maxTransforms = p.maxTransforms
	released, copied, used := make([]time.Duration, p.slots), make([]time.Duration, p.slots), make([]time.Duration, p.slots)
	var now, engine, stream time.Duration // the loop's, and when these are free
	least := func(times []time.Duration) *time.Duration { return &times[slices.Index(times, slices.Min(times))] }
	grain := max(1, p.batch/(2*p.workers))
	for i := range p.epochs * p.batches {
		if i%p.batches == 0 {
			begin := now
			workers, turns := slices.Repeat([]time.Duration{now}, p.workers), slices.Repeat([]time.Duration{now}, p.maxTransforms)
			for i := i; i < i+p.batches; i++ {
				slot := i % p.slots
				// Workers claim grains in order, and each goes through both stages.
				var filled time.Duration
				for from := 0; from < p.batch; from += grain {
					n := time.Duration(min(grain, p.batch-from))
					w := least(workers)
					*w = max(*w, released[slot], copied[slot]) + n*p.read
					s.Reading += n * p.read
					if p.transform > 0 {
						turn := least(turns)
						s.TransformWaits += max(0, *turn-*w)
						s.Transforming += n * p.transform
						*turn = max(*turn, *w) + n*p.transform
						*w = *turn
					}
					filled = max(filled, *w)
				}
				asked := max(filled, engine)
				s.CopyWaits += max(0, used[slot]-asked)
				s.Copying += p.copying
				engine = max(asked, used[slot]) + p.copying
				copied[slot] = engine
				got := max(now, filled)
				s.BatchWaits += got - now
				if i%p.batches == 0 {
					s.FirstWaits += got - now
				}
				stream = max(stream, copied[slot], got) + p.device
				used[slot] = stream
				now = got + p.body
				if p.sync {
					now = max(now, stream)
				}
				s.Consuming += now - got
				released[slot] = now
				if i%p.batches == p.batches-1 {
					break
				}
			}
			now = max(now, engine)
			s.Elapsed += now - begin
		}
	}
	return s, max(now, stream)
}

// gains are what each stage would save if it took half as long.
func (p pipeline) gains() map[Stage]time.Duration {
	_, total := p.run()
	gains := make(map[Stage]time.Duration)
	for stage, faster := range map[Stage]func(*pipeline){
		StageSource:    func(p *pipeline) { p.read /= 2 },
		StageTransform: func(p *pipeline) { p.transform /= 2 },
		StageCopy:      func(p *pipeline) { p.copying /= 2 },
		StageConsumer:  func(p *pipeline) { p.body /= 2; p.device /= 2 },
	} {
		p := p
		faster(&p)
		_, less := p.run()
		gains[stage] = total - less
	}
	return gains
}

const ms = time.Millisecond

// The stage that is named is the one that is worth most to make faster.
func TestBottleneck(t *testing.T) {
	t.Parallel()
	for want, pipelines := range map[Stage][]pipeline{
		StageSource: {
			{name: "few workers", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 4, read: 10 * ms, copying: 1 * ms},
			{name: "many workers, and little memory", epochs: 1, batches: 50, batch: 2, workers: 30, slots: 2, read: 20 * ms, copying: 1 * ms},
			{name: "many workers, a busy link", epochs: 1, batches: 50, batch: 2, workers: 10, slots: 8, read: 40 * ms, copying: 6 * ms},
			{name: "that also transforms", epochs: 1, batches: 50, batch: 2, workers: 4, slots: 4, read: 10 * ms, transform: 1 * ms, maxTransforms: 4},
			{name: "one batch", epochs: 1, batches: 1, batch: 4, workers: 4, slots: 4, read: 100 * ms, copying: 60 * ms, body: 1 * ms},
			{name: "one batch, whose copy the body waits for", epochs: 1, batches: 1, batch: 4, workers: 4, slots: 4, read: 100 * ms, copying: 60 * ms, sync: true},
			{name: "two batches, read at once", epochs: 1, batches: 2, batch: 4, workers: 8, slots: 4, read: 100 * ms, copying: 1 * ms, body: 10 * ms},
			{name: "many short epochs", epochs: 30, batches: 1, batch: 4, workers: 4, slots: 4, read: 50 * ms, copying: 2 * ms, body: 20 * ms},
			{name: "with a slow consumer", epochs: 1, batches: 50, batch: 4, workers: 2, slots: 4, read: 10 * ms, body: 12 * ms},
		},
		StageTransform: {
			{name: "one at a time", epochs: 1, batches: 50, batch: 2, workers: 4, slots: 4, transform: 5 * ms, maxTransforms: 1},
			{name: "all at once", epochs: 1, batches: 50, batch: 2, workers: 3, slots: 4, read: 1 * ms, transform: 10 * ms, maxTransforms: 3},
			{name: "that many reads wait for", epochs: 1, batches: 50, batch: 2, workers: 16, slots: 10, read: 10 * ms, transform: 5 * ms, maxTransforms: 1},
			{name: "one batch", epochs: 1, batches: 1, batch: 8, workers: 8, slots: 2, read: 10 * ms, transform: 10 * ms, maxTransforms: 1, copying: 5 * ms},
			{name: "with hundreds of workers", epochs: 1, batches: 50, batch: 64, workers: 256, slots: 8, read: 100 * ms, transform: 2 * ms, maxTransforms: 4},
		},
		StageCopy: {
			{name: "that the body does not wait for", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 3, read: 1 * ms, copying: 10 * ms},
			{name: "that the body waits for", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 3, read: 1 * ms, copying: 10 * ms, sync: true},
			{name: "with a source nearly as slow", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 3, read: 6 * ms, copying: 10 * ms},
			{name: "one batch", epochs: 1, batches: 1, batch: 2, workers: 2, slots: 3, read: 30 * ms, copying: 100 * ms},
			{name: "three batches", epochs: 1, batches: 3, batch: 2, workers: 2, slots: 4, read: 10 * ms, copying: 50 * ms, body: 5 * ms},
			{name: "many short epochs", epochs: 20, batches: 3, batch: 2, workers: 2, slots: 4, read: 5 * ms, copying: 30 * ms, body: 5 * ms},
			{name: "with work on the device", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 4, read: 1 * ms, copying: 10 * ms, device: 5 * ms, sync: true},
		},
		StageConsumer: {
			{name: "its body", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 4, copying: 1 * ms, body: 10 * ms},
			{name: "its body, with a source that could be faster", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 4, read: 5 * ms, copying: 1 * ms, body: 10 * ms},
			{name: "its body, which waits for the device", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 4, read: 1 * ms, copying: 6 * ms, device: 10 * ms, sync: true},
			{name: "its streams", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 3, read: 1 * ms, copying: 1 * ms, device: 10 * ms},
			{name: "its streams, with a busy link", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 3, read: 1 * ms, copying: 7 * ms, device: 10 * ms},
			{name: "its streams, with a source half as slow", epochs: 1, batches: 50, batch: 2, workers: 2, slots: 4, read: 6 * ms, copying: 1 * ms, device: 10 * ms},
			{name: "one batch", epochs: 1, batches: 1, batch: 2, workers: 2, slots: 4, read: 10 * ms, copying: 10 * ms, body: 50 * ms},
			{name: "two batches, the first of which takes long to come", epochs: 1, batches: 2, batch: 2, workers: 2, slots: 4, read: 10 * ms, copying: 1 * ms, body: 30 * ms},
			{name: "many short epochs", epochs: 20, batches: 2, batch: 2, workers: 2, slots: 4, read: 10 * ms, copying: 1 * ms, body: 30 * ms},
		},
	} {
		for _, p := range pipelines {
			t.Run(fmt.Sprintf("%s: %s", want, p.name), func(t *testing.T) {
				s, total := p.run()
				gains := p.gains()
				for stage, gain := range gains {
					assert.LessOrEqual(t, gain, gains[want], "the case is wrong: making %s faster saves more, of %v", stage, total)
				}
				assert.Equal(t, want, s.Bottleneck(), "%+v", s)
			})
		}
	}
}

// In any pipeline the stage that is named is worth more than half of what the
// best one is, to make it faster.
func TestBottleneckOfAnyPipeline(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(7, 7))
	upTo := func(most time.Duration) time.Duration { return time.Duration(random.Int64N(int64(most))) }
	wrong := 0
	const runs = 3000
	for range runs {
		p := pipeline{
			epochs: 1 + random.IntN(3), batches: 1 + random.IntN(60), batch: 1 + random.IntN(16),
			workers: 1 + random.IntN(32), maxTransforms: 1 + random.IntN(4), slots: 4 + random.IntN(12),
			read: upTo(20 * ms), transform: upTo(5*ms) * time.Duration(random.IntN(2)),
			copying: upTo(20 * ms), body: upTo(20 * ms), device: upTo(20*ms) * time.Duration(random.IntN(2)),
			sync: random.IntN(2) == 0,
		}
		s, total := p.run()
		gains := p.gains()
		best := time.Duration(0)
		for _, gain := range gains {
			best = max(best, gain)
		}
		if named := gains[s.Bottleneck()]; named < best/2 && best > total/10 {
			wrong++
			if wrong < 10 {
				t.Logf("%s saves %v of %v, not %v: %+v: %+v", s.Bottleneck(), named, total, gains, p, s)
			}
		}
	}
	t.Logf("%d of %d", wrong, runs)
	assert.LessOrEqual(t, wrong, runs/20)
}
