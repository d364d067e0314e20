package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/internal/pending"
)

var (
	// ErrClosed is returned by methods of a pool that was closed. errors.Is
	// reports that it is [os.ErrClosed].
	ErrClosed = hostmem.ErrClosed

	// ErrTooLarge is returned for requests that are larger than a limit.
	ErrTooLarge = hostmem.ErrTooLarge

	// ErrLeased is returned by Close of a pool with leases that are not released.
	ErrLeased = errors.New("leases are not released")

	errBlockSize  = errors.New("size must be positive and fit the address space")
	errNilDevice  = errors.New("the device is nil")
	errNilContext = errors.New("the context is nil")
)

// DefaultIdleTime is the Options.IdleTime of pools that set none.
const DefaultIdleTime = time.Minute

// Options shape a pool. The zero value has no limit.
type Options struct {
	// MaxBytes is the most that the pool has pinned, in bytes; 0 means no limit.
	// Get waits when it is reached.
	MaxBytes int
	// IdleTime after which idle memory is unmapped, a little later at most by
	// half. 0 means DefaultIdleTime, less means never.
	IdleTime time.Duration
	// Buffer shapes the memory itself. Its Label names the pool, "pool" if
	// empty. Its Chunk must be 0. With reserved huge pages all that the pool pins comes
	// in whole ones: at least 1 GiB for anything with HugeTLB1G. All memory of a pool is
	// of one NUMA node, that of its device unless Buffer.Node says otherwise: use one
	// pool a node.
	Buffer hostmem.Options
}

// A Pool keeps pinned memory for reuse. Its methods may be called from any
// goroutine.
//
// A pool that is garbage collected without Close is closed then: idle memory
// cannot be in use. Memory of leases that are not released by then is unmapped
// when they are.
type Pool struct {
	core    *core
	cleanup runtime.Cleanup
}

// core is a pool without its handle, so that a lost handle can be noticed while
// leases and the timer refer to the rest.
type core struct {
	dev    *cudart.Device
	o      Options
	debug  bool
	unit   int // bytes that memory comes in
	budget *budget.Budget
	shards []shard
	local  sync.Pool // of *shard, only as a way to find the near one
	next   atomic.Uint32

	gate    atomic.Int64 // the Gets that wait for memory, plus gateClosed
	epoch   atomic.Uint32
	ticking atomic.Bool
	timer   *time.Timer

	_ [64]byte // what is above is read by every Get and Release, and rarely written

	peakInUse int // guarded by the locks of all shards, to read by any

	pending                        *pending.Queue[block]
	reserved                       gauge
	trimmed, waits, failures, lost atomic.Int64

	turn    chan struct{} // of the Get that waits and is next to have memory
	wake    chan struct{} // for it
	making  chan struct{} // of the Get that makes an arena
	closing chan struct{} // closed by Close
	relief  func()        // ends the calls of relieve
	moving  moving

	planning sync.Mutex // of the one that goes through all lists

	mu        sync.Mutex
	arenas    []*arena
	partial   [classes]*slab // that has blocks left to cut
	large     map[*block]struct{}
	victims   []victim          // to be unmapped
	unmappers int               // goroutines that unmap them
	failed    []*hostmem.Buffer // could not be unmapped
	flushing  flushing
}

// gateClosed in core.gate means that the pool is closed.
const gateClosed = 1 << 40

// New makes a pool. It pins nothing yet. Close it. Errors are of invalid options,
// of a nil device, and of one whose Runtime was closed ([cudart.ErrClosed]).
func New(dev *cudart.Device, o Options) (*Pool, error) {
	c, err := newCore(dev, o)
	if err != nil {
		return nil, fmt.Errorf("pool: new: %w", err)
	}
	p := &Pool{core: c}
	p.cleanup = runtime.AddCleanup(p, func(c *core) { go func() { _ = c.close(context.Background()) }() }, c)
	return p, nil
}

func newCore(dev *cudart.Device, o Options) (*core, error) {
	switch {
	case dev == nil:
		return nil, errNilDevice
	case dev.Runtime().Closed():
		return nil, fmt.Errorf("the Runtime of %v: %w", dev, cudart.ErrClosed)
	case o.MaxBytes < 0:
		return nil, fmt.Errorf("Options.MaxBytes of %d: must not be negative", o.MaxBytes)
	case o.Buffer.Chunk != 0:
		return nil, errors.New("Options.Buffer.Chunk: must be 0, as a block is one registration")
	}
	if err := o.Buffer.Validate(); err != nil {
		return nil, fmt.Errorf("Options.Buffer: %w", err)
	}
	if o.IdleTime == 0 {
		o.IdleTime = DefaultIdleTime
	}
	if o.Buffer.Label == "" {
		o.Buffer.Label = "pool"
	}
	c := &core{
		dev: dev, o: o, debug: dev.Runtime().Debug(), unit: max(os.Getpagesize(), o.Buffer.HugePages.PageSize()),
		budget:   budget.Process(),
		shards:   make([]shard, runtime.GOMAXPROCS(0)),
		turn:     make(chan struct{}, 1),
		wake:     make(chan struct{}, 1),
		making:   make(chan struct{}, 1),
		closing:  make(chan struct{}),
		moving:   moving{none: make(chan struct{}, 1)},
		large:    make(map[*block]struct{}),
		flushing: flushing{awaited: make(map[*cudart.Timeline]bool)},
	}
	c.pending = pending.New(c.putIdle)
	c.local.New = func() any { return &c.shards[int(c.next.Add(1))%len(c.shards)] }
	c.timer = time.AfterFunc(time.Hour, c.tick)
	c.timer.Stop()
	c.relief = c.budget.Reclaim(c.relieve)
	return c, nil
}

// Get returns n bytes. It waits when a limit is reached, in the order of the
// calls, until leases are released or the GPU is done with memory, or ctx ends;
// the error then says what is in use, and wraps ctx's. n must be positive and at most
// 64 TiB.
//
// A request that is larger than a limit returns [ErrTooLarge]. When the host has no
// memory left, Get unmaps what the pool has idle and tries once more; the error then
// wraps [hostmem.ErrLimit], the system's or CUDA's. Other errors are [ErrClosed], and
// those of [hostmem.Alloc].
//
// While a Get waits, all others queue behind it: a large request is not
// overtaken by small ones for ever. So a goroutine that has one lease and
// requests another can wait for itself: use ctx.
//
// A call into CUDA that does not return keeps a Get for a second or so, past the end of
// its context or before it goes on otherwise, and no other Get. That is so for contexts
// that can end: with one that cannot, calls are made on the caller's goroutine.
func (p *Pool) Get(ctx context.Context, n int) (Lease, error) { return p.get(ctx, n, true) }

// TryGet is Get that does not wait: if a limit is reached, or another Get waits, the
// error wraps [hostmem.ErrLimit]. It may pin memory, as Get does.
func (p *Pool) TryGet(ctx context.Context, n int) (Lease, error) { return p.get(ctx, n, false) }

func (p *Pool) get(ctx context.Context, n int, wait bool) (Lease, error) {
	l, err := p.core.get(ctx, n, wait)
	runtime.KeepAlive(p)
	if err != nil {
		err = fmt.Errorf("pool: get %d bytes from %v: %w", n, p, err)
	}
	return l, err
}

func (p *core) get(ctx context.Context, n int, wait bool) (Lease, error) {
	switch {
	case n <= 0 || n > maxBlock:
		return Lease{}, errBlockSize
	case ctx == nil:
		return Lease{}, errNilContext
	case ctx.Err() != nil:
		return Lease{}, ctx.Err()
	case p.dev.Runtime().Closed():
		return Lease{}, fmt.Errorf("the Runtime of %v: %w", p.dev, cudart.ErrClosed)
	}
	class := classOf(n)
	var b *block
	if p.gate.Load() == 0 {
		b = p.near(class, n)
	}
	if b == nil {
		var err error
		if b, err = p.miss(ctx, class, n, wait); err != nil {
			return Lease{}, err
		}
	}
	l := Lease{b: b, gen: b.generation(), n: n}
	// Close raises the gate before it counts leases: one of the two sees the
	// other.
	if p.closed() {
		return Lease{}, errors.Join(ErrClosed, l.Release())
	}
	if p.debug {
		l.watch()
	}
	return l, nil
}

// near takes an idle block of the nearest shard.
func (p *core) near(class, n int) *block {
	s := p.shard()
	s.mu.Lock()
	b := s.popFree(class, n)
	if b == nil {
		s.mu.Unlock()
		return nil
	}
	s.hits++
	inPeak := s.acquire(b, n)
	s.mu.Unlock()
	if !inPeak {
		p.raisePeak(b.Size)
	}
	return b
}

// acquired makes the near shard a block's home, and counts the lease.
func (p *core) acquired(b *block, n int, hit bool) {
	s := p.shard()
	s.mu.Lock()
	if hit {
		s.hits++
	} else {
		s.misses++
	}
	inPeak := s.acquire(b, n)
	s.mu.Unlock()
	if !inPeak {
		p.raisePeak(b.Size)
	}
}

// put takes a block whose lease is over. It returns to the shard that it came
// from, where the same goroutine makes its next request.
func (p *core) put(b *block) {
	b.epoch = p.epoch.Load()
	b.Fence.Record()
	at, busy := b.Fence.Next()
	s := b.home
	s.mu.Lock()
	s.release(b)
	// Under the lock, so that the block is never neither leased nor in a list.
	if busy {
		p.pending.Add(&b.Block, at)
	} else {
		s.pushFree(b)
	}
	s.mu.Unlock()
	p.returned()
}

// putIdle takes a block whose work is done. Who looks for such blocks of a pool that was
// closed unmaps them, too.
func (p *core) putIdle(b *block) {
	b.home.put(b)
	if !p.closed() {
		p.returned()
	}
}

// returned is called after blocks were put into a list. A Get that waits, or
// Close, raised the gate before looking at the lists: either it sees the block
// there, or the gate is seen here.
func (p *core) returned() {
	if !p.ticking.Load() {
		p.startTicking()
	}
	switch g := p.gate.Load(); {
	case g == 0:
	case g >= gateClosed:
		p.flushLater()
	default:
		p.wakeUp()
	}
}

// wakeUp wakes the Get whose turn it is to wait, if there is one.
func (p *core) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// String names the pool in messages.
func (p *core) String() string { return fmt.Sprintf("%q of %v", p.o.Buffer.Label, p.dev) }

// String names the pool in messages.
func (p *Pool) String() string { return p.core.String() }
