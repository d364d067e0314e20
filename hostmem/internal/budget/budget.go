// Package budget decides how much memory the process may pin: by a limit, for
// which requests wait in order, and by a guard, which refuses requests for memory that the
// host or the process's cgroup does not have.
//
// # The guard
//
// Pinned memory cannot be swapped out or reclaimed, and a host or cgroup without available
// memory kills processes. The kernel's figures lag behind: memory that was reserved and is
// being made resident is not in them yet. So reserved bytes count as taken from the available
// ones, until a reading of the figures that was made after the pages were resident. In any
// order, and however many requests there are at once, a reservation of n bytes requires
//
//	taken + n <= share x (taken + available)   and   n <= available - reserve
//
// where taken is the bytes that all reservations have taken, and available the bytes that the
// kernel reports, less the taken ones that it does not show yet. The share applies to all
// pinned memory together: many small requests end where one large one would. The rest serves
// the process, too, whose Go heap grows until the garbage collector runs: that growth is the
// larger part of the reserve.
//
// A reservation takes only bytes that the kernel still reports as available. Anonymous and
// shared memory that is resident before it is pinned is not available: pinning it takes
// nothing, and the guard never refuses it. The page cache of a file is reported as available,
// resident or not, and also when it is pinned, so that readings have to be corrected for it.
// Hugetlb pages come out of a reserve of their own.
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

	// ErrTooLarge is the error of requests that exceed the limit, so that
	// waiting would not help.
	ErrTooLarge = errors.New("larger than the limit")
)

// A Budget is the memory that one process may pin.
type Budget struct {
	read func(pinnedFiles int) (linux.Headroom, error)
	heap func() int // bytes that the Go heap may still grow by

	mu    sync.Mutex
	max   int            // bytes, 0 for no limit
	used  int            // bytes of reservations
	queue []*Reservation // waiting requests, in the order of arrival
	guard guard
	reclaiming
}

// New returns a budget without a limit. read returns the kernel's figures, corrected
// for page cache that is pinned, which the kernel counts as reclaimable.
func New(read func(pinnedFiles int) (linux.Headroom, error)) *Budget {
	return &Budget{
		read: read, heap: heapGrowth,
		guard:      guard{share: DefaultShare},
		reclaiming: reclaiming{more: make(chan struct{}, 1)},
	}
}

// Set changes the limits: max is in bytes, 0 for none, and a share of more than 1
// switches the guard off. Reservations stay; waiting requests that exceed the new limit
// fail.
func (b *Budget) Set(max int, share float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.max, b.guard.share = max, share
	b.queue = slices.DeleteFunc(b.queue, func(r *Reservation) bool {
		err := b.never(r.n)
		if err != nil {
			r.decide(over, err)
		}
		return err != nil
	})
	b.serve()
}

// Used returns the bytes of reservations, which count for the limit.
func (b *Budget) Used() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// A Request is for memory that is to be pinned.
type Request struct {
	Bytes int
	// File is set for page cache of a file on a disk or the network, not for shared
	// memory, as the files of a tmpfs are.
	File bool
	// Reserved is set for hugetlb pages.
	Reserved bool
	// InUse returns how many of the bytes the kernel does not report as available any
	// more, because they are resident. It is called before a request is refused.
	// Nil stands for none. Page cache is always available.
	InUse func() int
}

// A Reservation is a request for memory, and then the right to it. Release it in any case.
//
//	state    entered by                  | counts for the limit | next
//	waiting  Reserve                     | no                   | held, over
//	held     the limit allows it, in the | yes                  | claimed, over
//	         order of arrival            |                      |
//	claimed  Acquire, for its memory     | yes                  | over
//	over     Release; Withdraw unless    | no                   |
//	         claimed; Set, if it exceeds |                      |
//	         the limit                   |                      |
//
// Changes need Budget.mu.
type Reservation struct {
	b    *Budget
	done chan struct{} // closed at the end of waiting
	err  error         // then

	// Guarded by b.mu.
	n       int // bytes
	state   state
	guarded // what the guard has admitted
}

type state int

const (
	waiting state = iota
	held
	claimed
	over
)

// Reserve requests n bytes under the limit. The request waits in order while the limit
// is reached: see Done. Acquire checks the guard.
func (b *Budget) Reserve(n int) *Reservation {
	r := &Reservation{b: b, n: n, done: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.never(n); err != nil {
		r.decide(over, err)
		return r
	}
	b.queue = append(b.queue, r)
	b.serve()
	if r.state == waiting {
		b.startReclaiming()
	}
	return r
}

// Done returns a channel that is closed when the request is decided.
func (r *Reservation) Done() <-chan struct{} { return r.done }

// Err returns why the request was refused, nil if it is held. Call it when Done
// is closed.
func (r *Reservation) Err() error { return r.err }

func (r *Reservation) decide(s state, err error) {
	r.state, r.err = s, err
	close(r.done)
}

// Acquire requests memory, waits until the limit allows it, and checks the guard. An
// error wraps ErrLimit, and ctx's if that has ended. If ctx has a reservation
// ([Reservation.With]), Acquire claims it and makes no new one.
func (b *Budget) Acquire(ctx context.Context, request Request) (*Reservation, error) {
	r, ok := ctx.Value(reservationKey{}).(*Reservation)
	if !ok || r.b != b {
		r = b.Reserve(request.Bytes)
		if err := r.wait(ctx); err != nil {
			return nil, err
		}
	}
	if err := r.claim(request.Bytes); err != nil {
		return nil, err
	}
	if err := b.admit(ctx, r, request); err != nil {
		r.Release()
		return nil, err
	}
	return r, nil
}

// wait waits until the request is decided.
func (r *Reservation) wait(ctx context.Context) error {
	select {
	case <-r.done: // even if ctx has ended
		return r.err
	default:
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
	}
	b := r.b
	b.mu.Lock()
	ahead, used, limit := max(0, slices.Index(b.queue, r)), b.used, b.max
	b.mu.Unlock()
	r.Release()
	return fmt.Errorf("%w: wait for %d bytes: %d of %d are pinned, %d requests came before: %w", ErrLimit, r.n, used, limit, ahead, bounded.Ended(ctx))
}

type reservationKey struct{}

// With returns a context with which Acquire claims this reservation, for which the caller
// has waited. If no Acquire has claimed it, the caller has to withdraw it.
func (r *Reservation) With(ctx context.Context) context.Context {
	return context.WithValue(ctx, reservationKey{}, r)
}

// claim uses a reservation for n bytes of memory, and releases the rest of it.
func (r *Reservation) claim(n int) error {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	switch {
	case r.state != held:
		return fmt.Errorf("%w: the reservation is not available", ErrLimit)
	case r.n < n:
		return fmt.Errorf("%w: %d bytes are reserved, not %d", ErrLimit, r.n, n)
	}
	r.state = claimed
	r.resize(n)
	return nil
}

// resize changes the bytes of a reservation that counts for the limit. It needs b.mu.
func (r *Reservation) resize(n int) {
	r.b.used += n - r.n
	r.n = n
	r.b.serve()
}

// Change makes an acquired reservation serve other memory, whose pages are not resident yet:
// the old memory was unmapped. It does not wait: more bytes than the limit allows now are an
// error. After an error the reservation is still to be released.
func (r *Reservation) Change(ctx context.Context, request Request) error {
	b := r.b
	b.mu.Lock()
	if more := request.Bytes - r.n; b.max > 0 && more > max(0, b.remaining()) {
		defer b.mu.Unlock()
		return fmt.Errorf("%w of the process: %d more bytes, of which %d are left", ErrLimit, more, b.remaining())
	}
	b.guard.remove(r)
	r.guarded = guarded{}
	r.resize(request.Bytes)
	b.mu.Unlock()
	return b.admit(ctx, r, request)
}

// Withdraw releases a reservation that no Acquire has claimed.
func (r *Reservation) Withdraw() { r.end(claimed) }

// Release returns the bytes, or withdraws a waiting request. A second Release
// does nothing.
func (r *Reservation) Release() { r.end(over) }

// end ends a reservation whose state comes before the given one.
func (r *Reservation) end(before state) {
	b := r.b
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case r.state >= before:
		return
	case r.state == waiting:
		b.queue = slices.DeleteFunc(b.queue, func(q *Reservation) bool { return q == r })
		r.decide(over, context.Canceled)
	default:
		r.state = over
		b.used -= r.n
		b.guard.remove(r)
	}
	b.serve()
}

// never returns the error of a request that exceeds the limit.
func (b *Budget) never(n int) error {
	if b.max == 0 || n <= b.max {
		return nil
	}
	return fmt.Errorf("%w of the process: %w: %d bytes, of %d in all", ErrLimit, ErrTooLarge, n, b.max)
}

// remaining returns the bytes that the limit still allows.
func (b *Budget) remaining() int { return b.max - b.used }

// serve reserves for waiting requests in order, as far as the limit allows: small requests do
// not overtake a large one. It needs b.mu.
func (b *Budget) serve() {
	for len(b.queue) > 0 && (b.max == 0 || b.queue[0].n <= b.remaining()) {
		r := b.queue[0]
		b.queue = slices.Delete(b.queue, 0, 1)
		b.used += r.n
		r.decide(held, nil)
	}
}

// reclaiming is the state of reclaiming unused memory for requests, as the kernel's shrinkers
// do. Budget.mu guards it.
type reclaiming struct {
	callbacks []*func(ctx context.Context, bytes int) (freed int)
	running   bool          // a goroutine reclaims for waiting requests
	more      chan struct{} // receives when another request waits
}

// reclaimEvery is the interval of reclaiming for waiting requests: memory may have become idle.
const reclaimEvery = 100 * time.Millisecond

// Reclaim registers a callback that unmaps at least the given number of bytes of unused memory, if
// there is that much. It is called without a lock, every reclaimEvery while requests wait for the
// limit, and before the guard refuses a request. It must return soon even if calls into CUDA do
// not. stop removes the callback.
func (b *Budget) Reclaim(reclaim func(ctx context.Context, bytes int) (freed int)) (stop func()) {
	r := &reclaim
	b.mu.Lock()
	defer b.mu.Unlock()
	b.callbacks = append(b.callbacks, r)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.callbacks = slices.DeleteFunc(b.callbacks, func(other *func(context.Context, int) int) bool { return other == r })
	}
}

// startReclaiming has a goroutine reclaim memory for waiting requests. It needs b.mu.
func (b *Budget) startReclaiming() {
	switch {
	case b.running:
		select {
		case b.more <- struct{}{}:
		default:
		}
	case len(b.callbacks) > 0:
		b.running = true
		go b.reclaimWaiting()
	}
}

// reclaimWaiting reclaims memory for as long as requests wait for the limit.
func (b *Budget) reclaimWaiting() {
	for {
		b.mu.Lock()
		b.running = len(b.queue) > 0 && len(b.callbacks) > 0
		running := b.running
		b.mu.Unlock()
		if !running {
			return
		}
		b.reclaimFor(context.Background(), func(int) int {
			if len(b.queue) == 0 {
				return 0
			}
			return b.queue[0].n - b.remaining()
		})
		select {
		case <-b.more:
		case <-time.After(reclaimEvery):
		}
	}
}

// reclaimFor calls one callback after the other until missing returns 0 or less, and
// returns the bytes that they have unmapped. missing is called with b.mu.
func (b *Budget) reclaimFor(ctx context.Context, missing func(freed int) int) (freed int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range slices.Clone(b.callbacks) {
		n := missing(freed)
		if n <= 0 || ctx.Err() != nil {
			break
		}
		b.mu.Unlock()
		freed += (*r)(ctx, n)
		b.mu.Lock()
	}
	return freed
}
