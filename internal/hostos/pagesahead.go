package hostos

import (
	"runtime"
	"sync"
	"unsafe"
)

const (
	// aheadBytes is the number of bytes whose pages one call makes: MADV_COLLAPSE begins with work of all cores.
	aheadBytes = 4 * HugePage
	// maxMakers is the number of goroutines that make pages, if there are as many cores besides those that copy. On 32
	// cores 20 make 38 GB/s, 12 make 30, and more than 24 no more (H200, 2026-11-29).
	maxMakers = 20
)

// A PagesAhead is a mapping whose pages are made, from the first one on, ahead of the goroutines that write them. These
// hold no pinned memory while they wait for pages.
type PagesAhead struct {
	*FileMapping
	wanted func(off int) bool // nil before Start
	made   func()
	makers sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond // of ready and stopped
	stopped bool
	next    int         // from here on nobody makes pages yet
	ready   int         // up to here all pages are made, or the kernel has refused them
	behind  map[int]int // ranges with pages behind ready: start and end
}

// NewPagesAhead returns the PagesAhead of a mapping, which makes none yet.
func NewPagesAhead(m *FileMapping) *PagesAhead {
	a := &PagesAhead{FileMapping: m, behind: map[int]int{}}
	a.changed = sync.NewCond(&a.mu)
	return a
}

// Start begins to make all pages, unless it was called before, or Stop was. They end early when wanted returns false for
// an offset. made is called each time after pages were made. Several goroutines call both.
func (a *PagesAhead) Start(wanted func(off int) bool, made func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wanted != nil || a.stopped {
		return
	}
	a.wanted, a.made = wanted, made
	for range min(maxMakers, (3*runtime.GOMAXPROCS(0)+3)/4) {
		a.makers.Go(a.make)
	}
}

func (a *PagesAhead) make() {
	for from, to := a.claim(); from < to; from, to = a.claim() {
		if !a.wanted(from) {
			a.Stop()
			return
		}
		a.MakePages(from, to-from)
		a.mu.Lock()
		a.behind[from] = to
		for end, ok := a.behind[a.ready]; ok; end, ok = a.behind[a.ready] {
			delete(a.behind, a.ready)
			a.ready = end
		}
		a.changed.Broadcast()
		a.mu.Unlock()
		a.made()
	}
}

// claim returns a range whose pages are to be made, which ends at a multiple of a huge page. It is empty if there are no
// more.
func (a *PagesAhead) claim() (from, to int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopped || a.next == len(a.Bytes) {
		return 0, 0
	}
	from = a.next
	a.next = min(len(a.Bytes), from+aheadBytes-int(uintptr(unsafe.Pointer(&a.Bytes[from])))&(HugePage-1))
	return from, a.next
}

// Ready returns the number of bytes, from the first one on, whose pages are made.
func (a *PagesAhead) Ready() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ready
}

// Wait waits until the pages of the bytes before an offset are made, or no more pages are.
func (a *PagesAhead) Wait(off int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.ready < off && !a.stopped {
		a.changed.Wait()
	}
}

// Stop begins no more pages. It does not block.
func (a *PagesAhead) Stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped = true
	a.changed.Broadcast()
}

// Unmap stops, and unmaps the file when nobody makes pages any more.
func (a *PagesAhead) Unmap() error {
	a.Stop()
	a.makers.Wait()
	return a.FileMapping.Unmap()
}
