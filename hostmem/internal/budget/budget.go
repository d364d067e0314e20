// Package budget decides how much memory the process may pin: by a limit, for
// which requests wait in order, and by a guard, which refuses what the host or the
// process's cgroup has no room for.
//
// # The guard
//
// Pinned memory cannot be swapped out or reclaimed, and a host or cgroup without
// any left kills processes. The kernel's figures lag behind: memory that was
// granted and is being made resident is not in them yet. So what was granted
// counts as taken from what is available, until a reading of the figures that was
// made after its pages were resident. In any order, and however many ask at
// once, a grant that takes n bytes needs
//
//	taken + n <= share x (taken + available)   and   n <= available - reserve
//
// where taken is what all grants have taken, and available what the kernel reports
// less what it does not show yet. The share applies to all that is pinned together:
// many small requests end where one large one would. What is left has to serve the
// rest of the process too, whose Go heap grows until the garbage collector runs:
// that growth is the larger part of the reserve.
//
// A grant takes only what the kernel still reports as available. Anonymous and
// shared memory that is resident before it is pinned is not among that: pinning it
// takes nothing, and is never refused for want of room. The page cache of a file is,
// resident or not, and stays among it when it is pinned, so that readings have to be
// corrected for it. Hugetlb pages come out of a reserve of their own.
package budget

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gopinned/pinned/internal/linux"
)

var (
	// ErrLimit is the error of requests that a limit forbids.
	ErrLimit = errors.New("limit on pinned memory")

	// ErrTooLarge is the error of requests that can never be granted, so that
	// waiting would not help.
	ErrTooLarge = errors.New("larger than the limit")
)

// A Budget is what one process may pin.
type Budget struct {
	read func(pinnedFiles int) (linux.Headroom, error)
	heap func() int // bytes that the Go heap may still grow by

	mu     sync.Mutex
	limit  limit
	guard  guard
	relief relief
}

// New returns a budget without a limit. read returns the kernel's figures, corrected
// for page cache that is pinned, which the kernel counts as reclaimable.
func New(read func(pinnedFiles int) (linux.Headroom, error)) *Budget {
	return &Budget{
		read: read, heap: heapGrowth,
		guard:  guard{share: DefaultShare},
		relief: relief{all: make(map[*reliever]struct{}), more: make(chan struct{}, 1)},
	}
}

// Set changes the limits: max is in bytes, 0 for none, and a share of more than 1
// switches the guard off. What is granted stays so; requests that wait and can never
// be granted any more fail.
func (b *Budget) Set(max int, share float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit.max, b.guard.share = max, share
	b.limit.refuse()
	b.limit.serve()
}

// Used returns the bytes that count for the limit.
func (b *Budget) Used() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.limit.used
}

// A Need is what a request is for.
type Need struct {
	Bytes int
	// File says that the bytes are page cache of a file on a disk or the network:
	// not of shared memory, as the files of a tmpfs are.
	File bool
	// Reserved says that they come out of a reserve of hugetlb pages.
	Reserved bool
	// InUse returns how many of the bytes the kernel does not report as available any
	// more, because they are resident. It is called only before a request is refused.
	// Nil stands for none. Page cache is always available.
	InUse func() int
}

// A Grant is a request for memory, and then the right to it. Release it, granted or
// not.
type Grant struct {
	b    *Budget
	n    int
	done chan struct{} // closed when it is decided
	err  error         // then

	// Guarded by b.mu.
	prev, next *Grant
	waiting    bool
	held       bool // it counts for the limit
	claimed    bool // an Acquire has it

	// For the guard.
	passed   bool
	taken    int // bytes
	file     bool
	resident bool
	reading  uint64 // the last one when it became resident
}

// Ask requests n bytes under the limit. The request waits in order while the limit
// is reached: see Done. The guard is asked by Acquire.
func (b *Budget) Ask(n int) *Grant {
	g := &Grant{b: b, n: n, done: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.limit.never(n); err != nil {
		g.decide(err)
		return g
	}
	b.limit.push(g)
	b.limit.serve()
	if g.waiting {
		b.startRelief()
	}
	return g
}

// Done returns a channel that is closed when the request is decided.
func (g *Grant) Done() <-chan struct{} { return g.done }

// Err returns why the request was refused, nil if it was granted. Call it when Done
// is closed.
func (g *Grant) Err() error { return g.err }

func (g *Grant) decide(err error) {
	g.err = err
	close(g.done)
}

// Acquire requests memory, waits until the limit allows it, and asks the guard. An
// error is ctx's, or wraps ErrLimit. A grant that ctx has ([Grant.With]) is used in
// place of a new one.
func (b *Budget) Acquire(ctx context.Context, need Need) (*Grant, error) {
	g, ok := ctx.Value(grantKey{}).(*Grant)
	if ok && g.b == b {
		if err := g.claim(need.Bytes); err != nil {
			return nil, err
		}
	} else {
		g = b.Ask(need.Bytes)
		if err := g.wait(ctx); err != nil {
			return nil, err
		}
	}
	if err := b.admit(ctx, g, need); err != nil {
		g.Release()
		return nil, err
	}
	return g, nil
}

func (g *Grant) wait(ctx context.Context) error {
	select {
	case <-g.done: // even if ctx has ended
		return g.err
	default:
	}
	select {
	case <-g.done:
		return g.err
	case <-ctx.Done():
	}
	b := g.b
	b.mu.Lock()
	ahead, used, max := b.limit.ahead(g), b.limit.used, b.limit.max
	b.mu.Unlock()
	g.Release()
	return fmt.Errorf("%w: wait for %d bytes: %d of %d are pinned, %d requests came before: %w", ErrLimit, g.n, used, max, ahead, ctx.Err())
}

type grantKey struct{}

// With returns a context with which Acquire uses this grant, which is decided: the
// caller has waited for it. If no Acquire does, the caller has to release it: see
// Withdraw.
func (g *Grant) With(ctx context.Context) context.Context {
	return context.WithValue(ctx, grantKey{}, g)
}

// claim takes over a grant, and returns what is not needed of it.
func (g *Grant) claim(n int) error {
	b := g.b
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !g.held || g.claimed:
		return fmt.Errorf("%w: the grant is not available", ErrLimit)
	case g.n < n:
		return fmt.Errorf("%w: %d bytes were granted, not %d", ErrLimit, g.n, n)
	}
	g.claimed = true
	b.limit.used += n - g.n
	g.n = n
	b.limit.serve()
	return nil
}

// Withdraw releases a grant that no Acquire has used.
func (g *Grant) Withdraw() {
	g.b.mu.Lock()
	defer g.b.mu.Unlock()
	if !g.claimed {
		g.release()
	}
}

// Release returns the bytes, or withdraws a request that waits. A second Release
// does nothing.
func (g *Grant) Release() {
	g.b.mu.Lock()
	defer g.b.mu.Unlock()
	g.release()
}

func (g *Grant) release() {
	b := g.b
	switch {
	case g.waiting:
		b.limit.remove(g)
		g.decide(context.Canceled)
	case g.held:
		g.held = false
		b.limit.used -= g.n
		b.guard.remove(g)
	default:
		return
	}
	b.limit.serve()
}

// A limit bounds the bytes of all grants. Its methods need Budget.mu.
type limit struct {
	max  int // bytes, 0 for none
	used int

	// first and last are the requests that wait, in the order of asking: a large
	// one is not overtaken by small ones for ever.
	first, last *Grant
}

// never returns the error of a request that cannot be granted under the limit.
func (l *limit) never(n int) error {
	if l.max == 0 || n <= l.max {
		return nil
	}
	return fmt.Errorf("%w of the process: %w: %d bytes, of %d in all", ErrLimit, ErrTooLarge, n, l.max)
}

// room returns the bytes that are left.
func (l *limit) room() int { return l.max - l.used }

// serve grants requests in order, as far as there is room.
func (l *limit) serve() {
	for g := l.first; g != nil && (l.max == 0 || g.n <= l.room()); g = l.first {
		l.remove(g)
		g.held = true
		l.used += g.n
		g.decide(nil)
	}
}

// refuse decides the requests that wait and can never be granted.
func (l *limit) refuse() {
	for g := l.first; g != nil; {
		next := g.next
		if err := l.never(g.n); err != nil {
			l.remove(g)
			g.decide(err)
		}
		g = next
	}
}

// ahead returns how many requests wait before g.
func (l *limit) ahead(g *Grant) (n int) {
	for at := l.first; at != nil && at != g; at = at.next {
		n++
	}
	return n
}

func (l *limit) push(g *Grant) {
	g.waiting, g.prev = true, l.last
	if l.last == nil {
		l.first = g
	} else {
		l.last.next = g
	}
	l.last = g
}

func (l *limit) remove(g *Grant) {
	if g.prev == nil {
		l.first = g.next
	} else {
		g.prev.next = g.next
	}
	if g.next == nil {
		l.last = g.prev
	} else {
		g.next.prev = g.prev
	}
	g.waiting, g.prev, g.next = false, nil, nil
}

// A reliever can unmap pinned memory that nothing uses.
type reliever struct {
	relieve func(need int) (freed int)
	running bool // a call of it has not returned
}

type relief struct {
	all     map[*reliever]struct{}
	running bool          // a goroutine calls the relievers for requests that wait
	more    chan struct{} // sent to when another request waits
}

// Relief registers a function that unmaps unused memory: at least need bytes, if it
// has them. It is called without any lock, now and then while requests wait for the
// limit, and before the guard refuses one. A call that does not return keeps no other
// reliever from being called. stop ends that.
func (b *Budget) Relief(relieve func(need int) (freed int)) (stop func()) {
	r := &reliever{relieve: relieve}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.relief.all[r] = struct{}{}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.relief.all, r)
	}
}

const (
	reliefEvery    = 100 * time.Millisecond
	reliefPatience = time.Second // for one reliever
)

// startRelief needs b.mu.
func (b *Budget) startRelief() {
	if len(b.relief.all) == 0 {
		return
	}
	if b.relief.running {
		select {
		case b.relief.more <- struct{}{}:
		default:
		}
		return
	}
	b.relief.running = true
	go b.relieveWaiting()
}

// relieveWaiting calls the relievers for as long as requests wait for the limit.
func (b *Budget) relieveWaiting() {
	for {
		b.mu.Lock()
		if b.limit.first == nil || len(b.relief.all) == 0 {
			b.relief.running = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		b.relieve(context.Background(), func(int) int {
			if b.limit.first == nil {
				return 0
			}
			return b.limit.first.n - b.limit.room()
		})
		select {
		case <-b.relief.more:
		case <-time.After(reliefEvery): // what was in use may be idle by now
		}
	}
}

// relieve calls one reliever after the other until need returns 0 or less, and
// returns the bytes that they have unmapped. need is called with b.mu.
func (b *Budget) relieve(ctx context.Context, need func(freed int) int) (freed int) {
	b.mu.Lock()
	var all []*reliever
	for r := range b.relief.all {
		all = append(all, r)
	}
	b.mu.Unlock()
	for _, r := range all {
		b.mu.Lock()
		n := need(freed)
		skip := n <= 0 || r.running
		r.running = r.running || !skip
		b.mu.Unlock()
		if skip {
			continue
		}
		done := make(chan int, 1)
		go func() {
			n := r.relieve(n)
			b.mu.Lock()
			r.running = false
			b.mu.Unlock()
			done <- n
		}()
		patience := time.NewTimer(reliefPatience)
		select {
		case n := <-done:
			freed += n
		case <-patience.C:
		case <-ctx.Done():
		}
		patience.Stop()
	}
	return freed
}
