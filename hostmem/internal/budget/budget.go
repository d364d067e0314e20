// Package budget decides how much memory the process may pin: by a limit that
// requests wait for, and by a guard that refuses what the host, or the
// process's cgroup, has no room for.
//
// # The guard
//
// Pinned memory cannot be swapped out or reclaimed, and a host or cgroup without
// any left kills processes. The kernel's figures lag behind: memory that was
// granted and is being made resident is not in them yet. So what was granted
// counts as used until a reading that was made after its pages were resident.
// Whatever the order, and however many ask at once, a grant of n bytes needs
//
//	used + n <= share x (used + available)   and   n <= available - reserve
//
// where used is all that was granted, and available what the kernel reports
// less what it does not show yet. The share applies to all that is pinned
// together: many small requests end where one large one would. What is left has
// to serve the rest of the process too, whose Go heap grows until the garbage
// collector runs: that growth is the larger part of the reserve.
package budget

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/metrics"
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

	mu    sync.Mutex
	max   int     // bytes, 0 for no limit
	share float64 // more than 1 switches the guard off

	used       int // bytes granted
	files      int // of these, resident and page cache of files
	unresident int // of these, not yet resident
	unseen     int // of these, resident since the last reading

	// first and last are the requests that wait, in the order of asking: a large
	// one is not overtaken by small ones for ever.
	first, last *Grant

	reading  linux.Headroom
	readings uint64    // number of the last one, 0 for none
	readAt   time.Time // its time
	since    int       // bytes granted since then
	reserve  int       // by the last reading

	relief    map[*reliever]struct{}
	relieving bool
}

// DefaultShare is the share that pinned memory may have.
const DefaultShare = 0.9

// New returns a budget without a limit. read returns the kernel's figures,
// corrected for page cache that is pinned: the kernel takes it for reclaimable.
func New(read func(pinnedFiles int) (linux.Headroom, error)) *Budget {
	return &Budget{read: read, heap: heapGrowth, share: DefaultShare, relief: make(map[*reliever]struct{})}
}

// Set changes the limits. What is granted stays so; requests that wait and can
// never be granted any more fail.
func (b *Budget) Set(maxBytes int, share float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.max, b.share = maxBytes, share
	for g := b.first; g != nil; {
		next := g.next
		if err := b.never(g.n); err != nil {
			b.leave(g)
			g.decide(err)
		}
		g = next
	}
	b.serve()
}

// A Grant is a request for memory, and then the right to it.
type Grant struct {
	b    *Budget
	n    int
	file bool
	done chan struct{} // closed when it is decided
	err  error         // then

	// Guarded by b.mu.
	prev, next *Grant
	waiting    bool
	held       bool   // granted and not released
	resident   bool   // the pages are there
	reading    uint64 // the last one when they were
}

// Ask requests n bytes; file says that they are the page cache of a file. The
// request waits while the limit is reached: see Done. It must be released
// whatever becomes of it.
func (b *Budget) Ask(n int, file bool) *Grant {
	g := &Grant{b: b, n: n, file: file, done: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.never(n); err != nil {
		g.decide(err)
		return g
	}
	b.enter(g)
	b.serve()
	if g.waiting {
		b.startRelief()
	}
	return g
}

// Done is closed when the request is decided.
func (g *Grant) Done() <-chan struct{} { return g.done }

// Err returns why the request was refused, nil if it was granted. It may be
// called when Done is closed.
func (g *Grant) Err() error { return g.err }

// Bytes returns how many bytes the grant is for.
func (g *Grant) Bytes() int { return g.n }

// Resident records that the pages are there.
func (g *Grant) Resident() {
	b := g.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if !g.held || g.resident {
		return
	}
	g.resident, g.reading = true, b.readings
	b.unresident -= g.n
	b.unseen += g.n
	if g.file {
		b.files += g.n
	}
}

// Shrink returns what is not needed of a grant.
func (g *Grant) Shrink(n int) {
	b := g.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if !g.held || n >= g.n {
		return
	}
	b.take(g, n-g.n)
	g.n = n
	b.serve()
}

// Release returns the bytes, or withdraws a request that waits. A second Release
// does nothing.
func (g *Grant) Release() {
	b := g.b
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case g.waiting:
		b.leave(g)
		g.decide(context.Canceled)
	case g.held:
		b.take(g, -g.n)
		g.held = false
	default:
		return
	}
	b.serve()
}

// take adds n bytes, which may be negative, to the account of a grant.
func (b *Budget) take(g *Grant, n int) {
	b.used += n
	switch {
	case !g.resident:
		b.unresident += n
	case g.reading == b.readings:
		b.unseen += n
	}
	if g.resident && g.file {
		b.files += n
	}
}

// Acquire requests n bytes and waits for them. An error is ctx's, or wraps
// ErrLimit.
func (b *Budget) Acquire(ctx context.Context, n int, file bool) (*Grant, error) {
	if g, ok := ctx.Value(key{}).(*Grant); ok && g.b == b {
		g.Shrink(n)
		if g.n < n {
			return nil, fmt.Errorf("%d bytes were granted, not %d: %w", g.n, n, ErrLimit)
		}
		return g, nil
	}
	g := b.Ask(n, file)
	select {
	case <-g.done:
	case <-ctx.Done():
		ahead, used, limit := b.state(g)
		g.Release()
		return nil, fmt.Errorf("%w: wait for %d bytes: %d of %d are pinned, %d requests came before: %w", ErrLimit, n, used, limit, ahead, ctx.Err())
	}
	return g, g.err
}

// key is the context key of a grant.
type key struct{}

// With returns a context with which Acquire takes this grant, which is already
// decided, in place of a new one: what has waited for it then allocates.
func With(ctx context.Context, g *Grant) context.Context { return context.WithValue(ctx, key{}, g) }

// state returns how many requests wait before g, and the limit.
func (b *Budget) state(g *Grant) (ahead, used, limit int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for at := b.first; at != nil && at != g; at = at.next {
		ahead++
	}
	return ahead, b.used, b.max
}

func (g *Grant) decide(err error) {
	g.err = err
	close(g.done)
}

// never is the error of a request that cannot be granted under the limit.
func (b *Budget) never(n int) error {
	if b.max == 0 || n <= b.max {
		return nil
	}
	return fmt.Errorf("%w of the process: %w: %d bytes, of %d in all", ErrLimit, ErrTooLarge, n, b.max)
}

// serve decides requests in order, as far as there is room.
func (b *Budget) serve() {
	for g := b.first; g != nil && (b.max == 0 || g.n <= b.max-b.used); g = b.first {
		b.leave(g)
		err := b.guard(g.n)
		if err == nil {
			g.held = true
			b.take(g, g.n)
			b.since += g.n
		}
		g.decide(err)
	}
}

func (b *Budget) enter(g *Grant) {
	g.waiting, g.prev = true, b.last
	if b.last == nil {
		b.first = g
	} else {
		b.last.next = g
	}
	b.last = g
}

func (b *Budget) leave(g *Grant) {
	if g.prev == nil {
		b.first = g.next
	} else {
		g.prev.next = g.next
	}
	if g.next == nil {
		b.last = g.prev
	} else {
		g.next.prev = g.prev
	}
	g.waiting, g.prev, g.next = false, nil, nil
}

// A reading serves for so long, and so many bytes: making one takes as long as
// pinning 64 KiB.
const (
	freshFor   = time.Second
	freshBytes = 64 << 20
)

// guard refuses what host or cgroup has no room for.
func (b *Budget) guard(n int) error {
	if b.share > 1 {
		return nil
	}
	fresh := false
	if b.readings == 0 || b.since+n > freshBytes || time.Since(b.readAt) > freshFor {
		if fresh = b.look(); !fresh {
			return nil // nothing to compare with: the kernel decides
		}
	}
	// Memory may have been released since the last reading.
	if n > b.allowed() && !fresh && !b.look() {
		return nil
	}
	if n <= b.allowed() {
		return nil
	}
	return fmt.Errorf("%w: %d bytes: %v are available, of which %s are being populated, %s are kept for the Go heap and others, and all pinned memory together (%s now) may take a share of %.2f: close buffers, or raise Limits.MaxShare",
		ErrLimit, n, b.reading, mib(b.unresident+b.unseen), mib(b.reserve), mib(b.used), b.share)
}

func mib(n int) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// look makes a reading.
func (b *Budget) look() bool {
	reading, err := b.read(b.files)
	if err != nil {
		return false
	}
	b.reading, b.readAt, b.since, b.unseen = reading, time.Now(), 0, 0
	b.readings++
	b.reserve = min(leastReserve, reading.Total/8) + b.heap()
	return true
}

// leastReserve is left to the process besides the growth of its heap: stacks,
// what C libraries allocate, page tables.
const leastReserve = 64 << 20

// allowed is the most that may be granted now.
func (b *Budget) allowed() int {
	available := max(0, b.reading.Available-b.unresident-b.unseen)
	total := b.share * (float64(b.used) + float64(available))
	return min(int(total)-b.used, available-b.reserve)
}

// heapGrowth is how much memory the Go heap may take from the kernel until the
// next garbage collection ends.
func heapGrowth() int {
	samples := []metrics.Sample{
		{Name: "/gc/heap/goal:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(samples)
	value := func(i int) int {
		if samples[i].Value.Kind() != metrics.KindUint64 || samples[i].Value.Uint64() > math.MaxInt/2 {
			return 0
		}
		return int(samples[i].Value.Uint64())
	}
	return max(0, value(0)-value(1)-value(2)-value(3))
}

// A reliever can return memory that it holds without need.
type reliever struct{ relieve func(need int) }

// Relief registers a function that returns unused memory to the budget when
// requests wait: at least need bytes, if it has them. It is called now and then
// for as long as they wait, without any lock. stop ends that.
func (b *Budget) Relief(relieve func(need int)) (stop func()) {
	r := &reliever{relieve}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.relief[r] = struct{}{}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.relief, r)
	}
}

const reliefEvery = 100 * time.Millisecond

func (b *Budget) startRelief() {
	if len(b.relief) > 0 && !b.relieving {
		b.relieving = true
		go b.relieveAll()
	}
}

func (b *Budget) relieveAll() {
	for {
		b.mu.Lock()
		if b.first == nil || len(b.relief) == 0 {
			b.relieving = false
			b.mu.Unlock()
			return
		}
		need := b.first.n - (b.max - b.used)
		var all []*reliever
		for r := range b.relief {
			all = append(all, r)
		}
		b.mu.Unlock()
		for _, r := range all {
			r.relieve(need)
		}
		time.Sleep(reliefEvery)
	}
}
