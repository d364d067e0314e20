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
	"slices"
	"sync"
	"time"

	"github.com/gopinned/pinned/internal/bounded"
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

	mu    sync.Mutex
	max   int      // bytes, 0 for no limit
	used  int      // bytes of grants that are held
	queue []*Grant // requests that wait, in the order of asking
	guard guard
	relief
}

// New returns a budget without a limit. read returns the kernel's figures, corrected
// for page cache that is pinned, which the kernel counts as reclaimable.
func New(read func(pinnedFiles int) (linux.Headroom, error)) *Budget {
	return &Budget{
		read: read, heap: heapGrowth,
		guard:  guard{share: DefaultShare},
		relief: relief{every: reliefEvery, more: make(chan struct{}, 1)},
	}
}

// Set changes the limits: max is in bytes, 0 for none, and a share of more than 1
// switches the guard off. What is granted stays so; requests that wait and can never
// be granted any more fail.
func (b *Budget) Set(max int, share float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.max, b.guard.share = max, share
	b.queue = slices.DeleteFunc(b.queue, func(g *Grant) bool {
		err := b.never(g.n)
		if err != nil {
			g.decide(grantOver, err)
		}
		return err != nil
	})
	b.serve()
}

// Used returns the bytes that count for the limit.
func (b *Budget) Used() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
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
//
//	state    entered by                  | counts for the limit | next
//	waiting  Ask                         | no                   | held, over
//	held     room for it, in the order   | yes                  | claimed, over
//	         of asking                   |                      |
//	claimed  Acquire, for its memory     | yes                  | over
//	over     Release; Withdraw unless    | no                   |
//	         claimed; Set, if it can     |                      |
//	         never be granted            |                      |
//
// Changes need Budget.mu.
type Grant struct {
	b    *Budget
	done chan struct{} // closed at the end of waiting
	err  error         // then

	// Guarded by b.mu.
	n       int // bytes
	state   grantState
	guarded // what the guard has admitted
}

type grantState int

const (
	grantWaiting grantState = iota
	grantHeld
	grantClaimed
	grantOver
)

// Ask requests n bytes under the limit. The request waits in order while the limit
// is reached: see Done. The guard is asked by Acquire.
func (b *Budget) Ask(n int) *Grant {
	g := &Grant{b: b, n: n, done: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.never(n); err != nil {
		g.decide(grantOver, err)
		return g
	}
	b.queue = append(b.queue, g)
	b.serve()
	if g.state == grantWaiting {
		b.startRelief()
	}
	return g
}

// Done returns a channel that is closed when the request is decided.
func (g *Grant) Done() <-chan struct{} { return g.done }

// Err returns why the request was refused, nil if it was granted. Call it when Done
// is closed.
func (g *Grant) Err() error { return g.err }

func (g *Grant) decide(s grantState, err error) {
	g.state, g.err = s, err
	close(g.done)
}

// Acquire requests memory, waits until the limit allows it, and asks the guard. An
// error wraps ErrLimit, and ctx's if that has ended. A grant that ctx has ([Grant.With])
// is used in place of a new one.
func (b *Budget) Acquire(ctx context.Context, need Need) (*Grant, error) {
	g, ok := ctx.Value(grantKey{}).(*Grant)
	if !ok || g.b != b {
		g = b.Ask(need.Bytes)
		if err := g.wait(ctx); err != nil {
			return nil, err
		}
	}
	if err := g.claim(need.Bytes); err != nil {
		return nil, err
	}
	if err := b.admit(ctx, g, need); err != nil {
		g.Release()
		return nil, err
	}
	return g, nil
}

// wait waits until the request is decided.
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
	ahead, used, max := slices.Index(b.queue, g), b.used, b.max
	b.mu.Unlock()
	g.Release()
	return fmt.Errorf("%w: wait for %d bytes: %d of %d are pinned, %d requests came before: %w", ErrLimit, g.n, used, max, ahead, bounded.Ended(ctx))
}

type grantKey struct{}

// With returns a context with which Acquire uses this grant, which is decided: the
// caller has waited for it. If no Acquire does, the caller has to release it: see
// Withdraw.
func (g *Grant) With(ctx context.Context) context.Context {
	return context.WithValue(ctx, grantKey{}, g)
}

// claim makes a grant one for n bytes of memory.
func (g *Grant) claim(n int) error {
	g.b.mu.Lock()
	defer g.b.mu.Unlock()
	switch {
	case g.state != grantHeld:
		return fmt.Errorf("%w: the grant is not available", ErrLimit)
	case g.n < n:
		return fmt.Errorf("%w: %d bytes were granted, not %d", ErrLimit, g.n, n)
	}
	g.state = grantClaimed
	g.resize(n)
	return nil
}

// resize changes the bytes of a grant that counts for the limit. It needs b.mu.
func (g *Grant) resize(n int) {
	g.b.used += n - g.n
	g.n = n
	g.b.serve()
}

// Change makes a grant that was acquired one for other memory, whose pages are not
// resident yet: the old memory is unmapped. It does not wait: more than the limit has
// room for is refused. After an error the grant is still to be released.
func (g *Grant) Change(ctx context.Context, need Need) error {
	b := g.b
	b.mu.Lock()
	if more := need.Bytes - g.n; b.max > 0 && more > max(0, b.room()) {
		defer b.mu.Unlock()
		return fmt.Errorf("%w of the process: %d more bytes, of which %d are left", ErrLimit, more, b.room())
	}
	b.guard.remove(g)
	g.guarded = guarded{}
	g.resize(need.Bytes)
	b.mu.Unlock()
	return b.admit(ctx, g, need)
}

// Withdraw releases a grant that no Acquire has used.
func (g *Grant) Withdraw() { g.end(grantClaimed) }

// Release returns the bytes, or withdraws a request that waits. A second Release
// does nothing.
func (g *Grant) Release() { g.end(grantOver) }

// end ends a grant whose state comes before one.
func (g *Grant) end(before grantState) {
	b := g.b
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case g.state >= before:
		return
	case g.state == grantWaiting:
		b.queue = slices.DeleteFunc(b.queue, func(q *Grant) bool { return q == g })
		g.decide(grantOver, context.Canceled)
	default:
		g.state = grantOver
		b.used -= g.n
		b.guard.remove(g)
	}
	b.serve()
}

// never returns the error of a request that cannot be granted under the limit.
func (b *Budget) never(n int) error {
	if b.max == 0 || n <= b.max {
		return nil
	}
	return fmt.Errorf("%w of the process: %w: %d bytes, of %d in all", ErrLimit, ErrTooLarge, n, b.max)
}

// room returns the bytes that are left.
func (b *Budget) room() int { return b.max - b.used }

// serve grants requests in order, as far as there is room: a large one is not overtaken
// by small ones for ever. It needs b.mu.
func (b *Budget) serve() {
	for len(b.queue) > 0 && (b.max == 0 || b.queue[0].n <= b.room()) {
		g := b.queue[0]
		b.queue = slices.Delete(b.queue, 0, 1)
		b.used += g.n
		g.decide(grantHeld, nil)
	}
}

// relief is how memory that nothing uses is reclaimed for requests. It is guarded by
// Budget.mu.
type relief struct {
	reclaim []*func(ctx context.Context, need int) (freed int)
	running bool          // a goroutine reclaims for requests that wait
	more    chan struct{} // sent to when another request waits
	every   time.Duration // between its attempts
}

// reliefEvery is when requests that wait try again: memory that was in use may be idle.
const reliefEvery = 100 * time.Millisecond

// Reclaim registers a function that unmaps unused memory: at least need bytes, if it
// has them, and as fast as it can. It is called without any lock, now and then while
// requests wait for the limit, and before the guard refuses one. It must return soon,
// although calls into CUDA do not. stop ends that.
func (b *Budget) Reclaim(reclaim func(ctx context.Context, need int) (freed int)) (stop func()) {
	r := &reclaim
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reclaim = append(b.reclaim, r)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.reclaim = slices.DeleteFunc(b.reclaim, func(other *func(context.Context, int) int) bool { return other == r })
	}
}

// startRelief needs b.mu.
func (b *Budget) startRelief() {
	switch {
	case b.running:
		select {
		case b.more <- struct{}{}:
		default:
		}
	case len(b.reclaim) > 0:
		b.running = true
		go b.relieveWaiting()
	}
}

// relieveWaiting reclaims memory for as long as requests wait for the limit.
func (b *Budget) relieveWaiting() {
	for {
		b.mu.Lock()
		b.running = len(b.queue) > 0 && len(b.reclaim) > 0
		running := b.running
		b.mu.Unlock()
		if !running {
			return
		}
		b.relieve(context.Background(), func(int) int {
			if len(b.queue) == 0 {
				return 0
			}
			return b.queue[0].n - b.room()
		})
		select {
		case <-b.more:
		case <-time.After(b.every):
		}
	}
}

// relieve calls one reclaimer after the other until need returns 0 or less, and
// returns the bytes that they have unmapped. need is called with b.mu.
func (b *Budget) relieve(ctx context.Context, need func(freed int) int) (freed int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range slices.Clone(b.reclaim) {
		n := need(freed)
		if n <= 0 || ctx.Err() != nil {
			break
		}
		b.mu.Unlock()
		freed += (*r)(ctx, n)
		b.mu.Lock()
	}
	return freed
}
