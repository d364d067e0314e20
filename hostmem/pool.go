package hostmem

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
)

// ErrLeased is returned by Close of a pool whose memory is not all back.
var ErrLeased = errors.New("hostmem: leases are outstanding")

var errBlockSize = errors.New("size must be positive and fit the address space")

// DefaultIdleTime is the PoolOptions.IdleTime of pools that set none.
const DefaultIdleTime = time.Minute

// PoolOptions shape a pool. The zero value has no limit.
type PoolOptions struct {
	// MaxBytes is the most that the pool keeps pinned; 0 means no limit. Get
	// waits when it is reached.
	MaxBytes int
	// IdleTime after which memory that nobody leased is given back to the
	// system, a little later at most by half. 0 means DefaultIdleTime, less
	// means never.
	IdleTime time.Duration
	// Buffer shapes the memory itself. Its Label names the pool, "pool" if
	// empty. All memory of a pool is of one NUMA node, that of its device
	// unless Buffer.Node says otherwise: use one pool a node.
	Buffer Options
}

// A Pool lends pinned memory and takes it back without asking the system each
// time. Its methods may be called from any goroutine.
//
// Blocks below 2 MiB are carved from shared registrations of 2 to 32 MiB; n
// bytes take less than 64 bytes or an eighth more. From 2 MiB on a block is a
// registration of its own, made as large as asked, to a page, and lent again
// for requests that leave less than an eighth of what they ask unused.
//
// A pool that is lost is closed by the garbage collector, because memory that
// nobody leased cannot be in use; leases that are out then free theirs when
// they are released.
type Pool struct {
	core    *poolCore
	cleanup runtime.Cleanup
}

// poolCore is a pool without its handle, so that a lost handle can be noticed
// while leases and the timer hold on to the rest.
type poolCore struct {
	dev    *cudart.Device
	o      PoolOptions
	debug  bool
	page   int
	limit  *quota // of bytes that are kept
	shards []shard
	local  sync.Pool // of *shard, only as a way to learn which is near
	next   atomic.Uint32

	gate    atomic.Int64 // how many wait for memory, plus gateClosed
	epoch   atomic.Uint32
	ticking atomic.Bool
	timer   *time.Timer

	_ [64]byte // what is above is read by every Get and Release, and rarely written

	peakInUse int // guarded by the locks of all shards, to read by any

	kept                           gauge
	trimmed, waits, failures, lost atomic.Int64

	turn   *quota     // of 1: who waits for memory and is next to have it
	making *quota     // of 1: who makes an arena
	sweep  sync.Mutex // who goes through all lists; a Get that finds memory at once does not

	mu      sync.Mutex
	arenas  []*arena
	partial [classes]*slab // that has blocks left to carve
	large   map[*block]struct{}
	stuck   []*Buffer // could not be closed
	wake    func()    // of the one whose turn it is to wait
}

// gateClosed in poolCore.gate means that the pool is closed.
const gateClosed = 1 << 40

// NewPool makes a pool. It pins nothing yet. Close it.
func NewPool(dev *cudart.Device, o PoolOptions) (*Pool, error) {
	if o.MaxBytes < 0 {
		return nil, fmt.Errorf("hostmem: new pool: PoolOptions.MaxBytes of %d: must not be negative", o.MaxBytes)
	}
	if err := o.Buffer.check(); err != nil {
		return nil, fmt.Errorf("hostmem: new pool: %w", err)
	}
	if o.Buffer.Chunk != 0 {
		return nil, errors.New("hostmem: new pool: a block is one registration: PoolOptions.Buffer.Chunk must be 0")
	}
	if o.IdleTime == 0 {
		o.IdleTime = DefaultIdleTime
	}
	if o.Buffer.Label == "" {
		o.Buffer.Label = "pool"
	}
	c := &poolCore{
		dev: dev, o: o, debug: dev.Runtime().Debug(), page: os.Getpagesize(),
		limit:  newQuota(o.MaxBytes),
		turn:   newQuota(1),
		making: newQuota(1),
		shards: make([]shard, runtime.GOMAXPROCS(0)),
		large:  make(map[*block]struct{}),
	}
	c.local.New = func() any { return &c.shards[int(c.next.Add(1))%len(c.shards)] }
	c.timer = time.AfterFunc(time.Hour, c.tick)
	c.timer.Stop()
	p := &Pool{core: c}
	p.cleanup = runtime.AddCleanup(p, func(c *poolCore) { go func() { _ = c.close(context.Background()) }() }, c)
	return p, nil
}

// Get lends n bytes. It waits when the pool is at its limit, in the order of
// the calls, until others release enough or ctx ends; the error then tells
// what is in use, and wraps ctx's. A request that is larger than the limit
// gives [ErrTooLarge]. When the system has no memory left, Get gives back what
// the pool keeps idle and tries once more.
//
// While one waits, all others queue behind it: a large request is not
// overtaken by small ones for ever. So a goroutine that holds one lease and
// asks for another can wait for itself; use ctx.
func (p *Pool) Get(ctx context.Context, n int) (Lease, error) {
	l, err := p.core.get(ctx, n)
	runtime.KeepAlive(p)
	return l, err
}

func (p *poolCore) get(ctx context.Context, n int) (Lease, error) {
	if n <= 0 || n > maxBlock {
		return Lease{}, fmt.Errorf("hostmem: get %d bytes from %v: %w", n, p, errBlockSize)
	}
	if err := ctx.Err(); err != nil {
		return Lease{}, fmt.Errorf("hostmem: get %d bytes from %v: %w", n, p, err)
	}
	class := classOf(n)
	var b *block
	if p.gate.Load() == 0 {
		b = p.hit(class, n)
	}
	if b == nil {
		var err error
		if b, err = p.miss(ctx, class, n); err != nil {
			return Lease{}, fmt.Errorf("hostmem: get %d bytes from %v: %w", n, p, err)
		}
	}
	l := Lease{b: b, gen: b.generation(), n: n}
	if p.debug {
		l.watch()
	}
	return l, nil
}

// hit looks at the nearest shard only: for an idle block, and for the oldest
// one that waits for the GPU.
func (p *poolCore) hit(class, n int) *block {
	s := p.shard()
	s.mu.Lock()
	b := s.popFree(class, n)
	if b != nil {
		s.hits++
		reserved := s.lend(b, n)
		s.mu.Unlock()
		if !reserved {
			p.reserve(b.size)
		}
		return b
	}
	b = s.popPending(class, n, nil)
	s.mu.Unlock()
	if b == nil {
		return nil
	}
	if b.settled() {
		p.lent(b, n, true)
		return b
	}
	p.unpop(s, b)
	return nil
}

// lent makes the near shard a block's home, and counts the lease.
func (p *poolCore) lent(b *block, n int, hit bool) {
	s := p.shard()
	s.mu.Lock()
	if hit {
		s.hits++
	} else {
		s.misses++
	}
	reserved := s.lend(b, n)
	s.mu.Unlock()
	if !reserved {
		p.reserve(b.size)
	}
}

// put takes a block back that nothing uses any more. It goes where it came
// from: who asks there asks again, whoever released it.
func (p *poolCore) put(b *block, n int) error {
	b.epoch = p.epoch.Load()
	s := b.home
	s.mu.Lock()
	s.takeBack(b, n)
	s.pushFree(b)
	s.mu.Unlock()
	return p.returned()
}

// putMarked takes a block back that queued work may use.
func (p *poolCore) putMarked(b *block, n int, err error) error {
	if err != nil {
		p.failures.Add(1)
		err = fmt.Errorf("hostmem: release to %v: %w", p, err)
	}
	b.epoch = p.epoch.Load()
	s := b.home
	s.mu.Lock()
	s.takeBack(b, n)
	s.pushPending(b)
	s.mu.Unlock()
	if after := p.returned(); after != nil {
		return errors.Join(err, after)
	}
	return err
}

func (p *poolCore) unpop(s *shard, b *block) {
	s.mu.Lock()
	s.unpop(b)
	s.mu.Unlock()
	_ = p.returned() // the one who closes learns of failures himself
}

// returned is called after blocks were put into a list. Whoever waits, or
// closes, raised the gate before looking at the lists: either it sees the
// block there, or the gate is seen here.
func (p *poolCore) returned() error {
	if !p.ticking.Load() && p.o.IdleTime > 0 {
		p.startTicking()
	}
	switch g := p.gate.Load(); {
	case g == 0:
		return nil
	case g >= gateClosed:
		return p.flush(context.Background())
	}
	p.wakeFirst()
	return nil
}

func (p *poolCore) closed() bool { return p.gate.Load() >= gateClosed }

// String names the pool in messages.
func (p *poolCore) String() string {
	return fmt.Sprintf("pool %q of %v", p.o.Buffer.Label, p.dev)
}

// String names the pool in messages.
func (p *Pool) String() string { return p.core.String() }

// Close waits for the work of released blocks and gives all idle memory back.
// Get fails with [ErrClosed] from then on, those that wait included. While
// leases are outstanding, Close returns an error that counts them and wraps
// [ErrLeased]: they stay valid, and free their memory when they are released.
// Close may be called again.
func (p *Pool) Close() error { return p.CloseContext(context.Background()) }

// CloseContext is Close that gives up waiting for work when ctx ends; the pool
// is closed all the same, and Close may be called again for the rest.
func (p *Pool) CloseContext(ctx context.Context) error {
	p.cleanup.Stop()
	err := p.core.close(ctx)
	runtime.KeepAlive(p)
	return err
}

func (p *poolCore) close(ctx context.Context) error {
	for {
		g := p.gate.Load()
		if g >= gateClosed || p.gate.CompareAndSwap(g, g+gateClosed) {
			break
		}
	}
	p.timer.Stop()
	p.wakeFirst()
	if err := p.flush(ctx); err != nil {
		return fmt.Errorf("hostmem: close %v: %w", p, err)
	}
	if st := p.stats(); st.Leases > 0 {
		return fmt.Errorf("hostmem: close %v: %w: %d with %d bytes%s", p, ErrLeased, st.Leases, st.InUseBytes, p.whose())
	}
	return nil
}

// flush gives everything back that is not leased.
func (p *poolCore) flush(ctx context.Context) error {
	if err := p.settleAll(ctx); err != nil {
		return err
	}
	_, err := p.trim(func(*block) bool { return true }, func(int) bool { return false })
	return errors.Join(err, p.closeEvents())
}
