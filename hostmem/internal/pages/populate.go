package pages

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/units"
)

// Populate makes the bytes [from, to) of the mapped region resident, rounded out
// to whole pages, and leaves their values alone. Where the kernel has no huge page,
// base pages take its place, so nothing is left out. When ctx ends, it
// stops within a page or so and returns the cause; what is resident stays so.
func (r *Region) Populate(ctx context.Context, from, to int, p Populate) error {
	r.life.RLock()
	defer r.life.RUnlock()
	if r.gone.Load() {
		return ErrUnmapped
	}
	if from < 0 || to < from || to > r.mapped {
		return fmt.Errorf("populate [%d, %d) of %d bytes: out of range", from, to, r.mapped)
	}
	unit, threads := r.block(), p.Threads
	if threads <= 0 {
		threads = min(runtime.GOMAXPROCS(0), mostThreads)
	}
	size := p.Item
	if size <= 0 {
		// Enough items for all threads, also in a small region.
		size = min(maxItem, (to-from)/(4*threads))
	}
	size = roundUp(max(size, 1), unit)
	w := &workers{
		from: roundDown(from, r.plan.page), to: roundUp(to, r.plan.page), size: size,
		threads: threads,
		work: func(ctx context.Context, off, n int) error {
			if err := r.fill(ctx, off, n, p.Method); err != nil {
				return err
			}
			if p.Done != nil {
				return p.Done(off, n)
			}
			return nil
		},
	}
	if err := w.run(ctx); err != nil {
		return fmt.Errorf("populate %d bytes: %w", to-from, err)
	}
	if n := r.holes.Swap(0); n > 0 {
		r.note("base pages took the place of %d of %d huge pages, which the kernel did not have", n, r.mapped/r.sys.HugePage)
	}
	r.checkNode()
	return nil
}

// maxItem is the largest piece of work by default. Pieces of 2 to 64 MiB are
// equally fast, and with small ones all threads end together.
const maxItem = 4 << 20

// block is what populating does between two looks at the context: a huge page's
// worth.
func (r *Region) block() int { return max(r.plan.page, r.sys.HugePage, 2<<20) }

// longFault is the page size from which a fault would hold up a stop of the
// world too long for touching: a page of 1 GiB takes 100 ms.
const longFault = 32 << 20

// errFault is a page that the kernel could not supply: no hugetlb page left on the
// node that the memory is bound to, or broken memory.
var errFault = errors.New("the kernel has no page for it (SIGBUS)")

// fill makes [off, off+n) resident.
func (r *Region) fill(ctx context.Context, off, n int, m Method) error {
	if r.plan.page >= longFault {
		m = Advise
	}
	unit := r.block()
	var vec []byte
	if r.plan.thp {
		vec = make([]byte, unit/r.sys.Page)
	}
	for end := off + n; off < end; {
		if err := ended(ctx); err != nil {
			return err
		}
		// Blocks end where huge pages do.
		p := unsafe.Add(r.base, off)
		size := min(unit-int(uintptr(p)&uintptr(unit-1)), end-off)
		huge := r.plan.thp && size == r.sys.HugePage && !r.stalls.stopped.Load()
		start := time.Now()
		if err := r.fault(p, size, m, huge, vec); err != nil {
			return fmt.Errorf("%d bytes at offset %d: %w", size, off, err)
		}
		if huge {
			r.watch(size, time.Since(start))
		}
		off += size
	}
	return nil
}

// fault makes one block resident.
func (r *Region) fault(p unsafe.Pointer, n int, m Method, huge bool, vec []byte) error {
	if !huge || m != Touch {
		return r.faultEach(p, n, m)
	}
	if err := r.sys.Calls.Touch(p, n, n); err != nil {
		return err
	}
	// One touch brought a huge page, or else a single base page.
	err := r.sys.Calls.Resident(p, n, vec)
	if err == nil && allResident(vec) {
		return nil
	}
	if err == nil {
		r.holes.Add(1)
	}
	return r.faultEach(p, n, m)
}

// faultEach makes every page of a block resident, huge or not.
func (r *Region) faultEach(p unsafe.Pointer, n int, m Method) error {
	if r.external != nil {
		return r.external.fault(r, p, n)
	}
	// Kernels before 5.14 do not have the advice; touch finds out about any other trouble.
	if m != Touch && r.sys.Calls.Advise(p, n, AdvisePopulate) == nil {
		return nil
	}
	return r.sys.Calls.Touch(p, n, r.plan.page)
}

func allResident(vec []byte) bool {
	for _, page := range vec {
		if page&1 == 0 {
			return false
		}
	}
	return true
}

// A huge page can take the kernel seconds when memory is fragmented and it has to
// move pages to make one. So each huge page is timed: 10 ns a byte (100 MB/s for a
// thread, 20 ms for 2 MiB) is slow. One slow page means nothing, because the thread
// may have been preempted. When slow ones outweigh the fast ones, and the kernel has
// counted stalls for compaction meanwhile, the rest gets base pages. Without such
// stalls the memory itself is slow to come, as in a virtual machine whose host has
// none ready, and base pages would be slower still.
const (
	slowByte  = 10 * time.Nanosecond
	slowScore = 4  // a slow huge page weighs as much as this many fast ones
	slowLimit = 16 // four slow ones in a row
)

// stalls is the state of watch.
type stalls struct {
	score   atomic.Int32
	stopped atomic.Bool // no huge pages are requested any more

	mu    sync.Mutex
	seen  bool // a slow page
	count int  // the kernel's stalls when the first slow page was seen
}

func (r *Region) watch(n int, took time.Duration) {
	s := &r.stalls
	if took < time.Duration(n)*slowByte {
		if s.score.Load() > 0 {
			s.score.Add(-1)
		}
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	count := r.sys.compactionStalls()
	if !s.seen {
		s.seen, s.count = true, count
	}
	if s.score.Add(slowScore) < slowLimit || s.stopped.Load() {
		return
	}
	if count == s.count {
		s.score.Store(0)
		return
	}
	s.stopped.Store(true)
	state := fmt.Sprintf("huge pages come too slowly (the last took %s, compaction stalls: %d, /sys/kernel/mm/transparent_hugepage/defrag is %q)",
		units.Duration(took), count-s.count, r.sys.Defrag)
	if err := r.sys.Calls.Advise(r.base, r.mapped, AdviseNoHuge); err != nil {
		r.note("%s, and going on without them failed: %v", state, err)
		return
	}
	r.note("%s: the rest has base pages", state)
}

// compactionStalls returns how often, on the whole host, a request for memory in one
// piece had to wait for the kernel to move other memory away.
func (s *System) compactionStalls() int {
	counters, _ := linux.ReadVMStat(s.files) // none where it cannot be read
	return counters["compact_stall"]
}
