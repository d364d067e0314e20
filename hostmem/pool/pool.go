package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/pending"
	"github.com/gopinned/pinned/internal/raw"
	"github.com/gopinned/pinned/internal/sentinel"
)

var (
	errLeased     = sentinel.New("leases are not released", cudart.ErrInUse)
	errBlockSize  = errors.New("size must be positive and fit the address space")
	errNilDevice  = errors.New("the device is nil")
	errNilContext = errors.New("the context is nil")
	errNoPool     = errors.New("the zero Pool (make one with New)")
)

const defaultIdleTime = time.Minute

// Options shape a pool. The zero value has no limit.
type Options struct {
	// MaxBytes is the maximum of pinned memory in bytes; 0 means no limit. Get waits
	// when it is reached.
	MaxBytes int
	// IdleTime after which idle memory is unmapped, at most half of it later. 0 means
	// a minute, less than 0 never.
	IdleTime time.Duration
	// Buffer shapes the memory itself. Its Label names the pool, "pool" if
	// empty. Its Chunk must be 0. With reserved huge pages the pool pins whole ones: at
	// least 1 GiB with HugeTLB1G. All memory of a pool is of one NUMA node, that of its
	// device unless Buffer.Node is set: use one pool a node.
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
// leases and the timer refer to the rest. A block is in one of these states:
//
//	state    entered by               | belongs to
//	leased   Get                      | its Users: the lease and calls that use it
//	pending  put by the last of them, | pending
//	         if the GPU may use it    |
//	idle     put, if the GPU does not | a shard
//	         use it; a query later    |
//	taken    the goroutine that       | that goroutine, which core.life counts
//	         takes it from a list, or |
//	         makes it                 |
//
// Memory without blocks belongs to an arena, or is unwanted. Locks are taken in the order
// memory.mu, shard.mu, pending's; none is held during calls into CUDA.
type core struct {
	dev    *cudart.Device
	o      Options
	debug  bool
	unit   int // bytes that memory comes in
	budget *budget.Budget
	cache
	idleTime
	queue

	_ [64]byte // Get and Release read the fields above, which are rarely written

	pending *pending.Queue[block]
	memory
	counts
	closing
}

// counts are figures for Stats.
type counts struct {
	trimmed, waits, failures, lost atomic.Int64
}

// impl returns the pool, nil for a nil handle and for the zero Pool.
func (p *Pool) impl() *core {
	if p == nil {
		return nil
	}
	return p.core
}

// New makes a pool. It pins nothing yet, and does not block. Close it. The error reports invalid
// options, a nil device, or a closed Runtime ([cudart.ErrClosed]).
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
	case raw.Closed(dev.Runtime()):
		return nil, fmt.Errorf("the Runtime of %v: %w", dev, cudart.ErrClosed)
	case o.MaxBytes < 0:
		return nil, fmt.Errorf("Options.MaxBytes of %d: must not be negative", o.MaxBytes)
	case o.Buffer.Chunk != 0:
		return nil, errors.New("Options.Buffer.Chunk: must be 0, as a block is one registration")
	}
	pageSize, err := raw.CheckBuffer(o.Buffer)
	if err != nil {
		return nil, fmt.Errorf("Options.Buffer: %w", err)
	}
	if o.IdleTime == 0 {
		o.IdleTime = defaultIdleTime
	}
	if o.Buffer.Label == "" {
		o.Buffer.Label = "pool"
	}
	c := &core{
		dev: dev, o: o, debug: raw.Debug(dev.Runtime()), unit: max(os.Getpagesize(), pageSize),
		budget:  budget.Process(),
		cache:   cache{shards: make([]shard, runtime.GOMAXPROCS(0))},
		queue:   queue{admission: make(chan struct{}, 1), wake: make(chan struct{}, 1), retry: retryAfter},
		memory:  memory{large: make(map[*block]struct{}), making: make(chan struct{}, 1)},
		closing: closing{began: make(chan struct{}), flushing: make(map[fence.Timeline]bool)},
	}
	c.pending = pending.New(c.putIdle)
	c.local.New = func() any { return &c.shards[int(c.next.Add(1))%len(c.shards)] }
	c.timer = time.AfterFunc(time.Hour, c.tick)
	c.timer.Stop()
	c.unregister = c.budget.Reclaim(c.reclaim)
	return c, nil
}

// Get returns n bytes. When a limit is reached it waits, in the order of the calls, until
// leases are released or the GPU is done with memory, or ctx ends: then the error has the
// bytes in use, and wraps ctx's. n must be positive and at most 64 TiB. New memory is pinned
// as by [hostmem.Alloc] (cudaHostRegister).
//
// A request that is larger than a limit returns [hostmem.ErrTooLarge]. When the host has no
// memory left, Get unmaps the pool's idle memory and tries once more; the error then
// wraps [hostmem.ErrLimit], the system's or CUDA's. Other errors are [cudart.ErrClosed], and
// those of [hostmem.Alloc].
//
// While a Get waits, all others queue behind it: small requests do not overtake a large one.
// So a goroutine that has one lease and requests another can wait for itself: use ctx.
//
// A call into CUDA that does not return delays its Get by a second at most, and no other Get.
// With a context that cannot end, calls are made on the caller's goroutine, and delay it for
// as long as they take.
func (p *Pool) Get(ctx context.Context, n int) (Lease, error) { return p.get(ctx, n, true) }

// TryGet is Get that does not wait: if a limit is reached, or another Get waits, the
// error wraps [hostmem.ErrLimit]. It may pin memory, as Get does, so it takes a context.
func (p *Pool) TryGet(ctx context.Context, n int) (Lease, error) { return p.get(ctx, n, false) }

func (p *Pool) get(ctx context.Context, n int, wait bool) (Lease, error) {
	l, err := p.impl().get(ctx, n, wait)
	runtime.KeepAlive(p)
	if err != nil {
		err = fmt.Errorf("pool: get %d bytes from %v: %w", n, p, err)
	}
	return l, err
}

func (p *core) get(ctx context.Context, n int, wait bool) (Lease, error) {
	switch {
	case p == nil:
		return Lease{}, errNoPool
	case n <= 0 || n > maxBlock:
		return Lease{}, errBlockSize
	case ctx == nil:
		return Lease{}, errNilContext
	case ctx.Err() != nil:
		return Lease{}, bounded.Ended(ctx)
	case raw.Closed(p.dev.Runtime()):
		return Lease{}, fmt.Errorf("the Runtime of %v: %w", p.dev, cudart.ErrClosed)
	}
	class := classOf(n)
	var b *block
	if p.waiting.Load() == 0 {
		b = p.takeLocal(class, n)
	}
	if b == nil {
		var err error
		if b, err = p.miss(ctx, class, n, wait); err != nil {
			return Lease{}, err
		}
	}
	l := Lease{b: b, generation: b.users.Generation(), n: n}
	// Close counts as waiting before it counts leases: one of the two sees the other.
	if p.waiting.Load() > 0 && p.closed() {
		return Lease{}, errors.Join(cudart.ErrClosed, l.Release())
	}
	if p.debug {
		l.watch()
	}
	return l, nil
}

// takeLocal takes an idle block of the local shard.
func (p *core) takeLocal(class, n int) *block {
	s := p.shard()
	s.mu.Lock()
	b := s.popFree(class, n)
	if b == nil {
		s.mu.Unlock()
		return nil
	}
	p.leased(s, b, n)
	return b
}

// leased counts a lease in a shard, which is locked, makes it the block's home and unlocks it.
func (p *core) leased(s *shard, b *block, n int) {
	if b.home != nil {
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

// put returns a block from the last of its users to the shard that it came from, where the
// same goroutine makes its next request.
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

// putIdle returns a block that the GPU is done with. In a closed pool the goroutine that
// searched for it unmaps it.
func (p *core) putIdle(b *block) {
	b.home.put(b)
	if !p.closed() {
		p.returned()
	}
}

// returned is called after blocks were put into a list. A waiting Get, or Close, has counted
// itself before it searches the lists: either it finds the block there, or waiting is not 0
// here.
func (p *core) returned() {
	if !p.ticking.Load() {
		p.startTicking()
	}
	switch {
	case p.waiting.Load() == 0:
	case p.closed():
		p.flushLater()
	default:
		p.wakeUp()
	}
}

// String names the pool in messages: its label and device.
func (p *Pool) String() string { return p.impl().String() }

func (p *core) String() string {
	if p == nil {
		return "no pool"
	}
	return fmt.Sprintf("%q of %v", p.o.Buffer.Label, p.dev)
}
