package managed

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/pending"
	"github.com/gopinned/pinned/internal/sentinel"
)

// ErrReleased is returned by methods of a lease that was released. errors.Is reports that
// it is [os.ErrClosed].
var ErrReleased = sentinel.New("lease already released", os.ErrClosed)

var errNoLease = errors.New("the zero Lease")

// PoolOptions shape a pool. The zero value has no limit but that of the card.
type PoolOptions struct {
	// MaxBytes is the most that the pool has allocated, in bytes; 0 means no limit.
	MaxBytes int
	// Label is counted for the pool's memory; "" means "pool".
	Label string
}

// A Pool keeps managed memory for reuse. cudaMallocManaged and cudaFree take tens of
// microseconds and more, and cudaFree waits for the device; Get and Release take a tenth of
// one, and wait for nothing. Its methods may be called from any goroutine.
//
// Requests are rounded up to 64 KiB, and larger ones to an eighth of a power of two, and
// memory is reused for requests that are rounded to the same.
type Pool struct {
	a       *Allocator
	o       PoolOptions
	pending *pending.Lines[poolBlock] // the device may not be done with it

	mu       sync.Mutex           // not held during calls into the library
	idle     map[int][]*poolBlock // by size; last in, first out
	closed   bool
	inUse    int // leases, and Gets that run
	used     int // bytes of leases, as rounded
	bytes    int // allocated
	hits     int
	misses   int
	unclosed []*Memory // whose Close failed
}

// A poolBlock is memory of a pool. It is in use, idle, pending, or the one goroutine's
// that moves it.
type poolBlock struct {
	pending.Block[poolBlock] // its class is its size
	m                        *Memory
	pool                     *Pool
	gen                      atomic.Uint64 // of the lease that has it, or has it next
}

// NewPool makes a pool. It allocates nothing yet. Close it before the allocator. The error
// is of a negative MaxBytes, or [ErrClosed].
func (a *Allocator) NewPool(o PoolOptions) (*Pool, error) {
	a.mu.Lock()
	closed := a.closed
	a.mu.Unlock()
	switch {
	case o.MaxBytes < 0:
		return nil, fmt.Errorf("managed: new pool: PoolOptions.MaxBytes of %d: must not be negative", o.MaxBytes)
	case closed:
		return nil, fmt.Errorf("managed: new pool: the allocator: %w", ErrClosed)
	}
	if o.Label == "" {
		o.Label = "pool"
	}
	p := &Pool{a: a, o: o, idle: make(map[int][]*poolBlock)}
	p.pending = pending.New(p.putIdle)
	return p, nil
}

const (
	poolGranule = 64 << 10
	poolMost    = 1 << 46 // more than an address space has
)

// classSize rounds a size up: to 64 KiB, or to an eighth of the power of two below it.
func classSize(n int) int {
	unit := max(poolGranule, 1<<max(bits.Len(uint(n-1))-4, 0))
	return (n + unit - 1) &^ (unit - 1)
}

// Get returns n bytes that no device uses. They hold what earlier leases have left, and
// advice that was given for all of [Lease.Range] stays, too. n must be positive and at most
// 64 TiB.
//
// Where the card or MaxBytes has no room, Get frees what the pool has idle, then waits for
// memory that was released while the device works on it, and frees that; it does not wait
// for leases. The errors are those of [Allocator.Alloc], [ErrOversubscribed] with the
// pool's figures for MaxBytes, [ErrClosed], and ctx's, if that ends first.
func (p *Pool) Get(ctx context.Context, n int) (Lease, error) { return p.get(ctx, nil, n) }

// GetFor is Get for memory that work on a stream uses, and nothing else until the stream
// is synchronised: it also returns memory that only earlier work of the same stream uses,
// as cudaMallocAsync does. A CPU must not access it before. A nil stream is an error.
func (p *Pool) GetFor(ctx context.Context, s *cudart.Stream, n int) (Lease, error) {
	if s == nil {
		return Lease{}, fmt.Errorf("managed: get %d bytes from %v: %w", n, p, errNilStream)
	}
	return p.get(ctx, s.Timeline(), n)
}

func (p *Pool) get(ctx context.Context, on *cudart.Timeline, n int) (Lease, error) {
	b, err := p.take(ctx, on, n)
	if err != nil {
		return Lease{}, fmt.Errorf("managed: get %d bytes from %v: %w", n, p, err)
	}
	return Lease{b: b, gen: b.gen.Load(), n: n}, nil
}

func (p *Pool) take(ctx context.Context, on *cudart.Timeline, n int) (*poolBlock, error) {
	switch {
	case n <= 0 || n > poolMost:
		return nil, errSize
	case ctx == nil:
		return nil, errNilContext
	}
	size := classSize(n)
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	p.inUse++
	p.used += size
	b := p.pop(size)
	p.mu.Unlock()
	if b != nil {
		return b, nil
	}
	if on != nil {
		b = p.pending.TakeOn(on, size)
	}
	if b == nil {
		b = p.pending.Find(ctx, size, size, nil)
	}
	hit := b != nil
	var err error
	if !hit {
		b, err = p.grow(ctx, size)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err != nil:
		p.inUse--
		p.used -= size
	case hit:
		p.hits++
	default:
		p.misses++
	}
	return b, err
}

// pop takes an idle block, nil if there is none. p.mu is locked.
func (p *Pool) pop(size int) *poolBlock {
	list := p.idle[size]
	last := len(list) - 1
	if last < 0 {
		return nil
	}
	b := list[last]
	list[last] = nil
	p.idle[size] = list[:last]
	p.hits++
	return b
}

func (p *Pool) putIdle(b *poolBlock) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle[b.Size] = append(p.idle[b.Size], b)
}

// grow allocates a block. Where there is no room, it frees what is idle, and then what
// becomes idle.
func (p *Pool) grow(ctx context.Context, size int) (*poolBlock, error) {
	for {
		m, err := p.alloc(size)
		if err == nil {
			b := &poolBlock{m: m, pool: p}
			b.Of, b.Size, b.Class = b, size, size
			return b, nil
		}
		if !errors.Is(err, ErrOversubscribed) && !errors.Is(err, cudart.ErrMemoryAllocation) {
			return nil, err
		}
		freed, failed := p.trim(ctx)
		more := freed > 0
		if !more && failed == nil {
			more, failed = p.drain(ctx)
		}
		switch {
		case failed != nil:
			return nil, errors.Join(err, failed)
		case !more:
			return nil, err
		}
	}
}

// alloc allocates memory within MaxBytes.
func (p *Pool) alloc(size int) (*Memory, error) {
	p.mu.Lock()
	if most := p.o.MaxBytes; most > 0 && p.bytes+size > most {
		defer p.mu.Unlock()
		return nil, fmt.Errorf("%w: PoolOptions.MaxBytes is %d, and %d are allocated, of which leases have %d (release some, or raise it)", ErrOversubscribed, most, p.bytes, p.used)
	}
	p.bytes += size
	p.mu.Unlock()
	m, err := p.a.AllocLabel(p.o.Label, size)
	if err != nil {
		p.mu.Lock()
		p.bytes -= size
		p.mu.Unlock()
	}
	return m, err
}

// Trim frees the memory that the pool has idle, and returns how many bytes that were. An
// error of CUDA leaves the rest as it is.
func (p *Pool) Trim() (freed int, err error) {
	freed, err = p.trim(context.Background())
	if err != nil {
		err = fmt.Errorf("managed: trim %v: %w", p, err)
	}
	return freed, err
}

// trim frees what the devices are done with.
func (p *Pool) trim(ctx context.Context) (freed int, err error) {
	ctx, cancel := context.WithTimeout(ctx, pending.Patience) // no stream keeps it then
	defer cancel()
	p.pending.Reclaim(ctx)
	return p.free()
}

// drain waits until the devices are done with what is pending, and frees all that is idle.
// waited is false if nothing was pending.
func (p *Pool) drain(ctx context.Context) (waited bool, err error) {
	free := func() error {
		_, err := p.free()
		return err
	}
	waited, err = p.pending.Drain(ctx, free)
	return waited, errors.Join(err, free())
}

// free frees what is idle.
func (p *Pool) free() (freed int, err error) {
	p.mu.Lock()
	var idle []*poolBlock
	for _, list := range p.idle {
		idle = append(idle, list...)
	}
	clear(p.idle)
	p.mu.Unlock()
	for i, b := range idle {
		if err := p.closeMemory(b.m); err != nil {
			for _, b := range idle[i+1:] {
				p.putIdle(b)
			}
			return freed, err
		}
		freed += b.Size
	}
	return freed, nil
}

// closeMemory frees memory. If that fails, it is closed for all but another Close.
func (p *Pool) closeMemory(m *Memory) error {
	err := m.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.unclosed = append(p.unclosed, m)
	} else {
		p.bytes -= m.n
	}
	return err
}

// Close frees all memory that is not in use; leases that are not released are an error
// that wraps [ErrInUse]: release them, and call Close again. From its first call on Get
// returns [ErrClosed]. It waits for the device's work, until ctx ends. After an error it may
// be called again; once it has returned nil it does nothing.
func (p *Pool) Close(ctx context.Context) error {
	if err := p.close(ctx); err != nil {
		return fmt.Errorf("managed: close %v: %w", p, err)
	}
	return nil
}

func (p *Pool) close(ctx context.Context) error {
	if ctx == nil {
		return errNilContext
	}
	p.mu.Lock()
	p.closed = true
	unclosed := p.unclosed
	p.unclosed = nil
	p.mu.Unlock()
	var errs []error
	for _, m := range unclosed {
		errs = append(errs, p.closeMemory(m))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if _, err := p.drain(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inUse > 0 {
		return fmt.Errorf("%d leases with %d bytes are not released: %w", p.inUse, p.used, ErrInUse)
	}
	return nil
}

// PoolStats are the figures of a Pool.
type PoolStats struct {
	Leases    int // in use now
	InUse     int // bytes of them, as rounded
	Allocated int // bytes that the pool has
	Idle      int // bytes that no device uses
	Pending   int // bytes that were released while a device may use them
	Hits      int // Gets that reused memory, so far
	Misses    int // Gets that allocated it
}

// Stats returns the figures. They are of one moment.
func (p *Pool) Stats() PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := PoolStats{Leases: p.inUse, InUse: p.used, Allocated: p.bytes, Pending: p.pending.Bytes(), Hits: p.hits, Misses: p.misses}
	for size, list := range p.idle {
		s.Idle += size * len(list)
	}
	return s
}

// String names the pool in messages.
func (p *Pool) String() string { return fmt.Sprintf("pool %q of %v", p.o.Label, p.a.dev) }

// A Lease is memory of a [Pool], in use until Release. It is a handle: copies of it are the
// same lease. Its methods may be called from any goroutine, but none while Release runs.
type Lease struct {
	b   *poolBlock
	gen uint64
	n   int
}

func (l Lease) ok() bool { return l.b != nil && l.b.gen.Load() == l.gen }

// Len returns the bytes requested.
func (l Lease) Len() int { return l.n }

// Bytes returns the CPU's view, exactly as long as requested, and nil after Release. When
// the CPU may access it says "Coherence" in the package's documentation.
func (l Lease) Bytes() []byte {
	if !l.ok() {
		return nil
	}
	return unsafe.Slice((*byte)(l.b.m.p), l.n)
}

// DevPtr returns the address of the first byte for devices, which is the CPU's too; 0 after
// Release.
func (l Lease) DevPtr() cudart.DevPtr {
	if !l.ok() {
		return 0
	}
	return l.b.m.ptr()
}

// Range returns the bytes as a range of the pool's memory: for advice, and for a [Plan]. It
// must not be used after Release. The zero Range is that of a lease which was released.
func (l Lease) Range() Range {
	if !l.ok() {
		return Range{}
	}
	return l.b.m.Range(0, l.n)
}

// Prefetch queues the move of the bytes to a place, as [Memory.Prefetch] does. The lease
// may be released at once. Errors are those of Memory.Prefetch, and [ErrReleased].
func (l Lease) Prefetch(s *cudart.Stream, to cudart.Location) error {
	switch {
	case l.b == nil:
		return fmt.Errorf("managed: prefetch: %w", errNoLease)
	case !l.ok():
		return fmt.Errorf("managed: prefetch: %v: %w", l, ErrReleased)
	}
	err := l.b.m.PrefetchRange(s, 0, l.n, to)
	if s != nil {
		l.b.Fence.Add(s)
	}
	return err
}

// Release returns the memory to its pool. It is reused when the devices have done all that
// was queued so far on the streams given (cudaEventRecord on each), and the lease's own
// prefetches: give every stream on which work on the memory was queued. They may be of any
// device. Release waits for nothing.
//
// A second Release returns [ErrReleased]. A nil stream is an error that leaves the lease as
// it is.
func (l Lease) Release(streams ...*cudart.Stream) error {
	if err := l.release(streams); err != nil {
		return fmt.Errorf("managed: release: %v: %w", l, err)
	}
	return nil
}

func (l Lease) release(streams []*cudart.Stream) error {
	if l.b == nil {
		return errNoLease
	}
	for _, s := range streams {
		if s == nil {
			return errNilStream
		}
	}
	b := l.b
	if !b.gen.CompareAndSwap(l.gen, l.gen+1) {
		return ErrReleased
	}
	for _, s := range streams {
		b.Fence.Add(s)
	}
	b.Fence.Record()
	at, busy := b.Fence.Next()
	p := b.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inUse--
	p.used -= b.Size
	if busy {
		p.pending.Add(&b.Block, at)
	} else {
		p.idle[b.Size] = append(p.idle[b.Size], b)
	}
	return nil
}

// String names the lease in messages.
func (l Lease) String() string {
	if l.b == nil {
		return "no lease"
	}
	return fmt.Sprintf("lease of %d bytes from %v", l.n, l.b.pool)
}
