// Feeds of the experiment loader: a data set whose samples wait, compute or are in memory, and the two ways to
// bring its batches to a device or to host memory: package loader, and a plain reader, as DataLoader has it: goroutines
// and a channel, or the loop itself.

package bench

import (
	"context"
	"errors"
	"iter"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/loader"
)

const (
	features  = 1024 // float32 of a sample
	oneSample = 4 * features
)

// samples is a data set in memory, of which each sample may take a while to arrive. It
// goes on from the start after its end.
type samples struct {
	data  []float32
	delay time.Duration
}

func (s *samples) Len() int      { return math.MaxInt32 }
func (s *samples) Fields() []int { return []int{oneSample} }

// Read waits as for a disk or a network, and copies the sample.
func (s *samples) Read(_ context.Context, i int, sample [][]byte) error {
	time.Sleep(s.delay)
	s.copy(i, sample[0])
	return nil
}

func (s *samples) copy(i int, to []byte) {
	at := i * features % len(s.data)
	copy(floats(to), s.data[at:at+features])
}

// A transform computes a sample in place.
type transform func(ctx context.Context, i int, sample [][]byte) error

// normalise is some computing for each sample.
func normalise(_ context.Context, _ int, sample [][]byte) error {
	x := floats(sample[0])
	var sum, squares float32
	for _, v := range x {
		sum += v
	}
	mean := sum / features
	for _, v := range x {
		squares += (v - mean) * (v - mean)
	}
	scale := 1.1 / (float32(math.Sqrt(float64(squares/(features-1)))) + 1e-6)
	for i, v := range x {
		x[i] = (v-mean)*scale + 0.1
	}
	return nil
}

func floats(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// A feed brings batches of samples to the device, or to host memory alone.
type feed interface {
	// next brings the next batch to the device, for work that is queued on the stream
	// from now on, and returns how long the caller waited for it. The batch before
	// the last one must be done with.
	next(ctx context.Context) (time.Duration, error)
	// read copies the last batch from where it was brought, and returns its samples.
	read(to []byte) (indices []int, err error)
	// waited counts time in which the caller waited for copies that next had queued.
	waited(time.Duration)
	// bound returns the stage that the others wait for, and the share of the time so
	// far for which it accounts.
	bound() (loader.Stage, float64)
	close(ctx context.Context) error
}

// A loaderFeed is a loader.
type loaderFeed struct {
	resources // the memory of a loader without a device
	l         *loader.Loader
	pull      func() (*loader.Batch, error, bool)
	stop      func()
	stream    *cudart.Stream
	copies    string
	batch     *loader.Batch
	copying   time.Duration // in which the caller waited for copies
}

// newLoaderFeed starts a loader, until ctx ends or the feed is closed.
func newLoaderFeed(ctx context.Context, w *resources, src loader.Source, compute transform, stream *cudart.Stream, s setting, batch int) (feed, error) {
	var err error
	f := &loaderFeed{resources: resources{dev: w.dev, now: w.now}, stream: stream, copies: s.copies}
	o := loader.Options{BatchSize: batch, Workers: s.workers, Prefetch: s.prefetch, Transform: compute, Label: "bench"}
	if s.copies == noCopies {
		f.l, err = loader.NewHost(src, o, func(n int) ([]byte, error) { return f.pageable(n) })
	} else {
		f.l, err = loader.New(ctx, w.dev, src, o)
	}
	if err != nil {
		return nil, errors.Join(err, f.resources.close())
	}
	f.pull, f.stop = iter.Pull2(f.l.Batches(ctx))
	return f, nil
}

// defaultPrefetch is the number of batches that a loader fills ahead of the loop, as many as it does by
// itself for batches of a MiB.
const defaultPrefetch = 64

func (f *loaderFeed) next(ctx context.Context) (time.Duration, error) {
	began := f.now()
	b, err, ok := f.pull()
	switch {
	case err != nil:
		return 0, err
	case !ok:
		return 0, errors.New("the loader has no more batches")
	}
	f.batch = b
	if f.copies == noCopies {
		return f.now() - began, nil
	}
	if err := b.Use(f.stream); err != nil {
		return 0, err
	}
	if f.copies == blockingText {
		requestedAt := f.now()
		if err := b.Wait(ctx); err != nil {
			return 0, err
		}
		f.copying += f.now() - requestedAt
	}
	return f.now() - began, nil
}

func (f *loaderFeed) read(to []byte) ([]int, error) {
	if f.copies == noCopies {
		copy(to, f.batch.Host(0))
		return f.batch.Indices(), nil
	}
	return f.batch.Indices(), f.dev.CopyToHost(unsafe.Pointer(&to[0]), f.batch.Field(0), len(to))
}

func (f *loaderFeed) waited(d time.Duration) { f.copying += d }

// bound is the loader's bottleneck, except that the loop's body is not the consumer while
// it waits for copies.
func (f *loaderFeed) bound() (loader.Stage, float64) {
	st := f.l.Stats()
	share := func(d time.Duration) float64 {
		return min(d.Seconds()/max(st.Elapsed, 1).Seconds(), 1)
	}
	switch stage := st.Bottleneck(); {
	case stage == loader.StageConsumer && f.copying > st.Consuming/2:
		return loader.StageCopy, share(f.copying)
	case stage == loader.StageConsumer:
		return stage, share(max(st.Consuming, st.CopyWaits))
	case stage == loader.StageCopy:
		return stage, share(st.Copying)
	default:
		return stage, share(st.BatchWaits)
	}
}

func (f *loaderFeed) close(ctx context.Context) error {
	f.stop()
	if err := f.l.CloseContext(ctx); err != nil {
		return err
	}
	return f.resources.close()
}

// A plainFeed is what programs do without a loader: goroutines fill batches, a channel brings them
// to the loop, and the loop copies them. Without goroutines the loop fills them, too.
type plainFeed struct {
	resources
	setting
	filler
	stream     *cudart.Stream
	free, full chan *plainBatch
	running    sync.WaitGroup
	cancel     context.CancelFunc

	halves  [2]turn // in turn
	at      int     // of turns, the last one
	began   time.Duration
	waiting time.Duration // for samples
	copying time.Duration
}

// A filler reads and transforms samples into batches.
type filler struct {
	src                   loader.Source
	compute               transform       // or nil
	batch                 int             // samples
	mem                   hostkind.Memory // of all batches
	claimed               atomic.Int64    // samples
	reading, transforming atomic.Int64    // ns
}

// A plainBatch is a part of the host memory.
type plainBatch struct {
	off  int // bytes
	from int // its first sample
}

// A turn is a batch on the device.
type turn struct {
	mem   cudart.DevPtr // nil without copies
	batch *plainBatch   // that it was copied from, or nil
}

// newPlainFeed starts the workers. After an error the feed is closed.
func newPlainFeed(ctx context.Context, w *resources, src loader.Source, compute transform, stream *cudart.Stream, s setting, batch int) (feed, error) {
	count := plainBatches(s.workers)
	f := &plainFeed{
		resources: resources{dev: w.dev, now: w.now}, setting: s, filler: filler{src: src, compute: compute, batch: batch}, stream: stream,
		free: make(chan *plainBatch, count), full: make(chan *plainBatch, ahead(s.workers)), cancel: func() {}, began: w.now(),
	}
	n := batch * oneSample
	var err error
	f.mem, err = s.kind().open(ctx, &f.resources, count*n)
	for i := range f.halves {
		if err == nil && s.copies != noCopies {
			f.halves[i].mem, err = f.device(n)
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.resources.close())
	}
	for i := range count {
		f.free <- &plainBatch{off: i * n}
	}
	ctx, f.cancel = context.WithCancel(ctx)
	for range s.workers {
		f.running.Go(func() { f.work(ctx) })
	}
	return f, nil
}

// ahead is the number of batches that wait in the channel, as in DataLoader.
func ahead(workers int) int { return 2 * workers }

// plainBatches is the number of batches in host memory: ahead of the loop, in the
// hands of workers, and being copied.
func plainBatches(workers int) int { return ahead(workers) + workers + 2 }

// work fills batches until ctx ends.
func (f *plainFeed) work(ctx context.Context) {
	for {
		var b *plainBatch
		select {
		case b = <-f.free:
		case <-ctx.Done():
			return
		}
		if f.fill(ctx, b) != nil {
			return
		}
		select {
		case f.full <- b:
		case <-ctx.Done():
			return
		}
	}
}

// fill reads the next samples, and transforms them.
func (f *filler) fill(ctx context.Context, b *plainBatch) error {
	b.from = int(f.claimed.Add(int64(f.batch))) - f.batch
	began := time.Now()
	if err := f.each(ctx, b, f.src.Read); err != nil {
		return err
	}
	read := time.Now()
	f.reading.Add(int64(read.Sub(began)))
	if f.compute == nil {
		return nil
	}
	err := f.each(ctx, b, f.compute)
	f.transforming.Add(int64(time.Since(read)))
	return err
}

// each calls do for each sample of a batch, until ctx ends.
func (f *filler) each(ctx context.Context, b *plainBatch, do func(context.Context, int, [][]byte) error) error {
	var sample [1][]byte
	for i := range f.batch {
		if err := bounded.Ended(ctx); err != nil {
			return err
		}
		sample[0] = f.bytes(b)[i*oneSample : (i+1)*oneSample]
		if err := do(ctx, b.from+i, sample[:]); err != nil {
			return err
		}
	}
	return nil
}

func (f *filler) bytes(b *plainBatch) []byte { return f.mem.Bytes()[b.off:][:f.batch*oneSample] }

func (f *plainFeed) next(ctx context.Context) (time.Duration, error) {
	f.at = 1 - f.at
	t := &f.halves[f.at]
	if t.batch != nil { // that is done with
		f.free <- t.batch
		t.batch = nil
	}
	began := f.now()
	if f.workers == 0 {
		t.batch = <-f.free
		if err := f.fill(ctx, t.batch); err != nil {
			return 0, err
		}
	} else {
		select {
		case t.batch = <-f.full:
		case <-ctx.Done():
			return 0, bounded.Ended(ctx)
		}
	}
	got := f.now()
	var err error
	if f.copies != noCopies {
		err = f.mem.CopyToDevice(ctx, f.stream, t.mem, t.batch.off, f.batch*oneSample)
	}
	if err == nil && f.copies == blockingText {
		err = f.stream.SynchronizeBlocking()
	}
	done := f.now()
	f.waiting += got - began
	f.copying += done - got
	return done - began, err
}

func (f *plainFeed) read(to []byte) ([]int, error) {
	t := f.halves[f.at]
	indices := make([]int, f.batch)
	for i := range indices {
		indices[i] = t.batch.from + i
	}
	if f.copies == noCopies {
		copy(to, f.bytes(t.batch))
		return indices, nil
	}
	return indices, f.dev.CopyToHost(unsafe.Pointer(&to[0]), t.mem, len(to))
}

func (f *plainFeed) waited(d time.Duration) { f.copying += d }

// bound goes by what the loop did most of the time.
func (f *plainFeed) bound() (loader.Stage, float64) {
	all := max(f.now()-f.began, 1)
	stage, largest := loader.StageConsumer, all-f.waiting-f.copying
	if f.copying > largest {
		stage, largest = loader.StageCopy, f.copying
	}
	if f.waiting > largest {
		stage, largest = loader.StageSource, f.waiting
		if f.transforming.Load() > f.reading.Load() {
			stage = loader.StageTransform
		}
	}
	return stage, largest.Seconds() / all.Seconds()
}

// close ends the workers. The stream must be done with the copies.
func (f *plainFeed) close(context.Context) error {
	f.cancel()
	f.running.Wait()
	return f.resources.close()
}

var (
	_ feed = (*loaderFeed)(nil)
	_ feed = (*plainFeed)(nil)
)
