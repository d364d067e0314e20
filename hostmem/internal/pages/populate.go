package pages

import (
	"context"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/units"
)

// Populate makes the region resident and leaves its bytes alone. Where the kernel has no
// huge page, base pages take its place. When ctx ends, Populate
// stops within a page or so and returns its error and cause; what is resident stays so.
func (r *Region) Populate(ctx context.Context, p Populate) error {
	if !r.life.Begin() {
		return errUnmapped
	}
	defer r.life.End()
	threads, size, before := defaultThreads(p.Threads), p.Item, 0
	if size <= 0 {
		// Enough items for all threads, also in a small region, which end where huge pages do.
		size = min(maxItem, r.mapped/(4*threads))
		before = int(uintptr(r.base) & uintptr(r.block()-1))
	}
	size = roundUp(max(size, 1), r.block())
	err := bounded.ForEach(ctx, roundUp(before+r.mapped, r.page), size, threads, func(ctx context.Context, off, n int) error {
		end := off + n - before
		off = max(off-before, 0)
		n = end - off
		if err := r.fill(ctx, off, n); err != nil {
			return err
		}
		if p.Done != nil {
			return p.Done(off, n)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("populate %d bytes: %w", r.mapped, err)
	}
	r.checkNode()
	return nil
}

// maxItem is the largest piece of work by default. Pieces of 2 to 64 MiB are
// equally fast, and with small ones all threads end together.
const maxItem = 4 << 20

// block returns the number of bytes that are made resident between two checks of the context:
// a huge page.
func (r *Region) block() int { return max(r.page, r.sys.HugePage, 2<<20) }

// fill makes [off, off+n) resident.
func (r *Region) fill(ctx context.Context, off, n int) error {
	unit := r.block()
	for end := off + n; off < end; {
		if ctx.Err() != nil {
			return bounded.Ended(ctx)
		}
		// Blocks end where huge pages do.
		p := unsafe.Add(r.base, off)
		size := min(unit-int(uintptr(p)&uintptr(unit-1)), end-off)
		start := time.Now()
		if err := r.fault(p, size); err != nil {
			return fmt.Errorf("%d bytes at offset %d: %w", size, off, err)
		}
		if r.thp && size == r.sys.HugePage && !r.small.Load() {
			r.watch(size, time.Since(start))
		}
		off += size
	}
	return nil
}

// fault makes one block resident: by madvise with MADV_POPULATE_WRITE, during which the
// garbage collector does not wait for the page, and on kernels that do not have it
// (before 5.14) by touching each page.
func (r *Region) fault(p unsafe.Pointer, n int) error {
	if r.external != nil {
		return r.faultExternal(p, n)
	}
	if r.sys.Calls.Advise(p, n, AdvisePopulate) == nil {
		return nil
	}
	return r.sys.Calls.Touch(p, n, r.page)
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

// stalls is the state of watch. Region.mu guards it.
type stalls struct {
	score   int
	seen    bool // a slow page
	count   int  // compaction stalls of the host at the first slow page
	stopped bool // no huge pages are requested any more
}

// watch records the time of a huge page, and stops requesting huge pages if they take too long.
func (r *Region) watch(n int, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.stalls
	if s.stopped {
		return
	}
	if took < time.Duration(n)*slowByte {
		s.score = max(0, s.score-1)
		return
	}
	count := r.sys.compactionStalls()
	if !s.seen {
		s.seen, s.count = true, count
	}
	if s.score += slowScore; s.score < slowLimit {
		return
	}
	if count == s.count {
		s.score = 0
		return
	}
	s.stopped = true
	outcome := ": the rest has base pages"
	if err := r.sys.Calls.Advise(r.base, r.mapped, AdviseNoHuge); err != nil {
		outcome = fmt.Sprintf(", and going on without them failed: %v", err)
	}
	r.notes = append(r.notes, fmt.Sprintf("huge pages come too slowly (the last took %s, compaction stalls: %d, /sys/kernel/mm/transparent_hugepage/defrag is %q)%s",
		units.Duration(took), count-s.count, r.sys.Defrag, outcome))
}

// compactionStalls returns how often, on the whole host, a request for memory in one
// piece had to wait for the kernel to move other memory away.
func (s *System) compactionStalls() int {
	counters, _ := linux.ReadVMStat(s.files) // none where it cannot be read
	return counters["compact_stall"]
}

// maxThreads bounds the threads that make pages resident, one for each core that the
// process may use (GOMAXPROCS, which follows affinity and the cgroup's quota). With more of
// them registering takes longer than populating. In pieces of a huge page more threads were
// never slower, so nothing here searches for the best number: see RATIONALE.md.
const maxThreads = 16

// defaultThreads returns the number of threads where 0 were requested.
func defaultThreads(requested int) int {
	if requested > 0 {
		return requested
	}
	return min(runtime.GOMAXPROCS(0), maxThreads)
}
