package loader

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	errRunning    = sentinel.New("a loop over its batches is running", cudart.ErrInUse)
	errNilContext = errors.New("the context is nil")
	errNotNew     = errors.New("the loader is nil or zero: New makes loaders")
	errNoDevice   = errors.New("the loader has no device: NewHost has made it")
)

// A Loader fills batches with samples and copies them to a device, unless [NewHost] has made it.
// Its methods may be called from any goroutine.
//
//	state    entered by                    | Batches                | EndEpoch       | Close
//	idle     New, the end of an epoch      | begins the next epoch  | –              | releases
//	running  Batches                       | ErrInUse               | ErrInUse       | ends the loop, ErrInUse
//	left     a loop that was left before   | continues the epoch    | ends the epoch | releases
//	         the end of its epoch          |                        |                |
//	closed   Close                         | ErrClosed              | ErrClosed      | releases what an error
//	                                       |                        |                | has left allocated
type Loader struct {
	spec
	resources
	workers    []worker
	transforms semaphore
	driver     driver
	counters   counters
	created    time.Time
	life       lifetime.Lifetime // of the resources: loops and the goroutine that drives use them

	epoch      atomic.Pointer[epoch] // the epoch that runs or was left; changed under mu
	unrecorded atomic.Pointer[Batch] // the batch that the loop released last: the next Use records its ends

	mu      sync.Mutex // not held during calls into CUDA or to the source
	next    int        // number of the epoch after epoch
	done    batchSet   // batches of that epoch before Options.Start
	running *loop      // or nil
	watch   stopwatch
}

// A spec has the arguments of New.
type spec struct {
	dev    *cudart.Device // nil for NewHost
	src    Source
	n      int         // number of samples
	batch  BatchSource // src, or nil
	shards *shards     // src, or nil
	o      Options
	layout layout // of a batch on the device
	host   layout // of what workers write: the batch, or a gatherer's list of indices
	plain  bool   // workers write batches for a device with plain stores
	order  string // see Position.Order
}

// batches returns the number of batches of an epoch.
func (sp *spec) batches() int {
	n := sp.n / sp.o.BatchSize
	if sp.n%sp.o.BatchSize > 0 && !sp.o.DropLast {
		n++
	}
	return n
}

// sizeOf returns the number of samples of a batch.
func (sp *spec) sizeOf(batch int) int {
	return min(sp.o.BatchSize, sp.n-batch*sp.o.BatchSize)
}

// resources are the memory and streams that New allocates. With NewHost there are only slots, in
// memory of the caller.
type resources struct {
	buf     *hostmem.Buffer
	gather  *gatherer // nil unless the GPU gathers the samples
	windows *windows  // nil unless it gathers them from Shards
	mem     cudart.DevPtr
	stream  *cudart.Stream // for all copies
	slots   []*slot        // in memory order
}

// New allocates all memory that the loader uses: pinned memory (cudaHostRegister) and device
// memory (cudaMalloc) for (Prefetch + 1) batches each, and a stream. Where the GPU gathers ([InMemory], [Shards]) the pinned memory
// has lists of indices, and New loads a kernel. The context bounds New
// only. Errors are those of [hostmem.Alloc] and [cudart.Device.Malloc], or name an argument, an
// option or a field of the source. After an error nothing stays allocated, unless the error
// contains that. If ctx ends while a call into CUDA does not return, the memory is
// released when the call returns.
func New(ctx context.Context, dev *cudart.Device, src Source, o Options) (l *Loader, err error) {
	defer func() { err = failed("new", err) }()
	switch {
	case ctx == nil:
		return nil, errNilContext
	case dev == nil || dev.Runtime() == nil:
		return nil, errors.New("the device is nil or zero")
	}
	return bounded.Do(ctx, bounded.Call[*Loader]{
		Run: func() (*Loader, error) {
			l, err := prepare(dev, src, o)
			if err != nil {
				return nil, err
			}
			if err := l.allocate(ctx); err != nil {
				return nil, errors.Join(err, lifetime.Undo(ctx, l.release))
			}
			return l, nil
		},
		Late: func(l *Loader, err error) {
			if err == nil {
				_ = lifetime.Undo(ctx, l.release) // hostmem lists what stays
			}
		},
	})
}

// failed adds the name of the operation to an error, if err is not nil.
func failed(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("loader: %s: %w", what, err)
}

// NewHost returns a loader without a device: order, workers, batches and positions are those of
// [New], and batches stay in host memory, for another process or another library. It opens no CUDA.
//
// memory is called once, with the number of bytes of (Prefetch + 1) batches. It returns that many
// bytes, such as a mapped file that other processes map too, and the loader writes to them until it
// is closed. The caller releases them after Close. [Batch.Host] has the bytes of a batch, and
// [Batch.Offset] their place in memory. The consumer owns a batch until its release. The loader
// does not track a GPU that reads the memory: [Batch.Use] and [Batch.Field] do not apply.
//
// Errors are those of memory, or name an argument, an option or a field of the source.
func NewHost(src Source, o Options, memory func(n int) ([]byte, error)) (l *Loader, err error) {
	defer func() { err = failed("new host", err) }()
	switch {
	case memory == nil:
		return nil, errors.New("the function for memory is nil")
	case o.OnDevice != nil:
		return nil, fmt.Errorf("Options.OnDevice: %w", errNoDevice)
	}
	if l, err = prepare(nil, src, o); err != nil {
		return nil, err
	}
	n := l.o.slots() * l.layout.bytes
	host, err := memory(n)
	if err == nil && len(host) != n {
		err = fmt.Errorf("the function for memory returned %d bytes", len(host))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", l.size(), err)
	}
	l.divide(host)
	return l, nil
}

// prepare returns a loader without memory.
func prepare(dev *cudart.Device, src Source, o Options) (*Loader, error) {
	if src == nil {
		return nil, errors.New("the source is nil")
	}
	if _, ok := src.(interface {
		Transform(ctx context.Context, i int, sample [][]byte) error
	}); ok {
		return nil, errors.New("the source has a method Transform, which no loader calls: give it to Options.Transform")
	}
	l := &Loader{spec: spec{dev: dev, src: src}, created: time.Now()}
	lists, err := l.gatherLists(o)
	if err != nil {
		return nil, err
	}
	o, layout, err := o.resolve(src, lists)
	if err != nil {
		return nil, err
	}
	l.n, l.o, l.layout, l.host, l.workers = src.Len(), o, layout, layout, make([]worker, o.Workers)
	l.transforms.init(o.MaxTransforms, o.Workers)
	l.batch, _ = src.(BatchSource)
	l.shards, _ = src.(*shards)
	if err := l.chooseGather(lists); err != nil {
		return nil, err
	}
	m, inMemory := l.batch.(memory)
	l.plain = dev != nil && (l.batch == nil || inMemory && !m.gpuOnly)
	l.order = o.order(l.n)
	if l.shards != nil && o.Shuffle {
		l.order += fmt.Sprintf(" within windows of %d of %d shards", l.shards.window, len(l.shards.paths))
	}
	if l.next, l.done, err = o.Start.resolve(l.order, l.batches()); err != nil {
		return nil, err
	}
	l.driver.l, l.driver.maxHold = l, maxHold
	for i := range l.workers {
		l.workers[i].init(l)
	}
	return l, nil
}

// chooseGather chooses what fills batches on the GPU: a gatherer by lists of indices, copies of
// memory, or nothing.
func (l *Loader) chooseGather(lists int) error {
	m, inMemory := l.src.(memory)
	switch {
	case lists > 0:
		l.layout.block = l.layout.blockOf(maxGathered, l.o.slots())
		l.host = l.layout.ofIndices()
		if inMemory {
			l.batch = indexLists{m}
			return nil
		}
		l.gather, l.batch = new(gatherer), noLists{l.shards}
		return l.shards.check(l.o.BatchSize)
	case inMemory && l.dev != nil && l.layout.bytes <= maxGPUOnly && l.o.Transform == nil && !l.o.HostBatches:
		m.gpuOnly = true
		l.batch = m
		l.layout.block = l.layout.blockOf(maxCopy, l.o.slots()) // neighbours go in one copy
	}
	return nil
}

// size describes the loader's memory in messages.
func (l *Loader) size() string {
	return fmt.Sprintf("%d batches of %d bytes", l.o.slots(), l.layout.bytes)
}

func (l *Loader) allocate(ctx context.Context) (err error) {
	if l.buf, err = hostmem.Alloc(ctx, l.dev, l.o.slots()*l.host.bytes, hostmem.Options{Label: l.o.Label}); err != nil {
		return fmt.Errorf("%s: %w", l.size(), err)
	}
	if l.gather != nil {
		if l.shards != nil {
			l.windows = newWindows(ctx, l)
		}
		if l.gather.kernel, err = gpukernels.NewBlocks(ctx, l.dev); err != nil {
			return fmt.Errorf("gather by the GPU: %w", err)
		}
	}
	if l.mem, err = l.dev.Malloc(l.o.slots() * l.layout.bytes); err != nil {
		return fmt.Errorf("%s: %w", l.size(), err)
	}
	if l.stream, err = l.dev.NewStream(cudart.StreamOptions{}); err != nil {
		return err
	}
	l.driver.meter.create(l.dev)
	l.divide(l.buf.Bytes())
	return nil
}

// divide divides the memory into slots.
func (l *Loader) divide(host []byte) {
	for i := range l.o.slots() {
		from, off := i*l.host.bytes, i*l.layout.bytes
		l.slots = append(l.slots, &slot{
			at: i, host: host[from : from+l.host.bytes], off: off, mem: l.mem + cudart.DevPtr(off),
			indices: make([]int, l.layout.samples), skipped: make([]bool, l.layout.samples),
		})
	}
	l.driver.released = make([]atomic.Uint64, (len(l.slots)+63)/64)
}

// Close is [Loader.CloseContext] without an end.
func (l *Loader) Close() error { return l.CloseContext(context.Background()) }

// CloseContext waits for the copies, and for work of the consumer's streams that uses batches. Then
// it releases all memory (cudaFree, cudaHostUnregister, cudaStreamDestroy, cudaEventDestroy). A
// second call does nothing. When ctx ends, a call into CUDA that does not return gets another
// second. After an error, also ctx's, it may be called again; memory that the
// GPU may be using is still allocated then, and the loader is closed to loops. While a loop over
// Batches runs, CloseContext ends the loop and returns [cudart.ErrInUse]. While batches are retained,
// it returns an error with their number.
func (l *Loader) CloseContext(ctx context.Context) error {
	err := l.check(ctx)
	if err == nil {
		err = l.shut()
	}
	if err == nil {
		if err = l.life.Wait(ctx); err != nil { // only for the goroutine that drives
			err = fmt.Errorf("%w: %w", bounded.ErrStuck, err)
		} else {
			err = l.life.Close(ctx, l.release)
		}
	}
	return failed("close", err)
}

// check returns an error for a loader or context that is nil or zero.
func (l *Loader) check(ctx context.Context) error {
	switch {
	case l == nil || l.src == nil:
		return errNotNew
	case ctx == nil:
		return errNilContext
	}
	return nil
}

// shut refuses loops from now on. It returns an error if a loop or the consumer uses the memory.
func (l *Loader) shut() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.life.Seal()
	defer l.windows.shut()
	if l.running != nil {
		l.running.cancel(cudart.ErrClosed)
		return fmt.Errorf("%w: it ends now, Close again when it has", errRunning)
	}
	if retained := l.counters.retained.Load(); retained > 0 {
		return fmt.Errorf("%d batches are retained: Close again when they are released", retained)
	}
	return nil
}

// release undoes allocate, which may have failed. It may be called again.
func (l *Loader) release(ctx context.Context) error {
	for _, s := range l.slots {
		if err := s.wait(ctx); err != nil {
			return fmt.Errorf("all memory stays allocated, the GPU may be using it: %w", err)
		}
	}
	var errs []error
	if l.mem != 0 {
		err := l.dev.Free(l.mem)
		if err == nil {
			l.mem = 0
		}
		errs = append(errs, err)
	}
	errs = append(errs, l.driver.meter.close(), l.gather.close(ctx), l.windows.close(ctx))
	if l.stream != nil {
		errs = append(errs, l.stream.Close())
	}
	if l.buf != nil {
		errs = append(errs, l.buf.CloseContext(ctx))
	}
	return errors.Join(errs...)
}

// Batches returns the batches of an epoch. A loop that ends by break, return or a panic keeps its
// epoch and the filled batches: the next loop continues with the next batch. After the last batch
// the next loop begins the next epoch. [Loader.EndEpoch] skips the rest of an epoch. The first
// epoch begins at Options.Start. A batch belongs to the loop's body for one turn, unless it is
// retained. An error ends the loop and its epoch.
//
// The error is the error of a sample or of a copy; ctx's error and cause when ctx ends;
// [cudart.ErrClosed]; or [cudart.ErrInUse], because one loop runs at a time.
//
// Whatever ends the loop, it waits until all calls of the source have returned. The next loop reads
// the samples of failed calls again. Copies of batches that were not delivered may continue: Close
// waits for them.
//
// If all batches are retained when the loop needs another, it waits, because other goroutines may
// release one. The wait ends with ctx, or when another goroutine calls Close, and the error reports
// that all batches are retained. [Stats].Retained is their number.
func (l *Loader) Batches(ctx context.Context) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		for l.loop(ctx, yield) {
		}
	}
}

// loop runs a loop over the rest of an epoch. If there is no rest, because the loop before was left
// at the last batch, it returns true, and the next epoch follows.
func (l *Loader) loop(ctx context.Context, yield func(*Batch, error) bool) (empty bool) {
	p, err := l.begin(ctx)
	if err != nil {
		yield(nil, failed("batches", err))
		return false
	}
	defer p.end()
	empty = p.e.finished()
	for {
		s, err := p.nextSlot()
		switch {
		case err != nil:
			p.endsEpoch = true
			yield(nil, err)
			return false
		case s == nil:
			p.endsEpoch = true
			return empty
		case !p.deliver(s, yield):
			return false
		}
	}
}

// Epochs returns the numbers of the epochs below n, from Options.Start on. It returns the number of
// an epoch again as long as loops over Batches have left a rest of the epoch:
//
//	for epoch := range l.Epochs(10) {
//		for batch, err := range l.Batches(ctx) {
//			…
//		}
//	}
//
// It ends when the loader is closed. It does not block.
func (l *Loader) Epochs(n int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for {
			epoch, ok := l.epochAhead()
			if !ok || epoch >= n || !yield(epoch) {
				return
			}
		}
	}
}

// epochAhead returns the number of the epoch of the next loop, or of the one that runs. It
// returns false if the loader is closed.
func (l *Loader) epochAhead() (epoch int, ok bool) {
	if l.check(context.Background()) != nil {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.epoch.Load()
	switch {
	case l.life.Sealed():
		return 0, false
	case e == nil || l.running == nil && e.finished():
		return l.next, true
	}
	return e.number, true
}

// EndEpoch skips the rest of the epoch that a loop has left: the next loop begins the next
// epoch. Batches that are filled are dropped. Between epochs it does nothing. While a loop
// runs, it returns [cudart.ErrInUse]. It does not block.
func (l *Loader) EndEpoch() error {
	err := l.check(context.Background())
	if err != nil {
		return failed("end epoch", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.life.Sealed():
		err = cudart.ErrClosed
	case l.running != nil:
		err = errRunning
	case l.epoch.Load() != nil:
		l.epoch.Store(nil)
	case l.done != nil: // Options.Start is within the epoch, which no loop has begun
		l.next, l.done = l.next+1, nil
	}
	return failed("end epoch", err)
}
