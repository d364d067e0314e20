package pool

import (
	"bytes"
	"slices"
	"unsafe"

	"github.com/gopinned/pinned/hostmem"
)

// Small blocks are cut from runs of pages, a run for blocks of one class. Runs are cut from
// arenas, each one registration. So a small block costs neither a registration nor a huge
// page, and none crosses from one registration to the next. memory.mu guards all of it.
const (
	smallLimit = 2 << 20 // blocks of less are cut from arenas
	minArena   = 2 << 20 // a huge page
	maxArena   = 32 << 20
	runUnit    = 4096
	singleRun  = 32 << 10 // blocks of that and more are a run each
	maxRun     = 128 << 10
)

// isSmall reports whether blocks of the class are cut from arenas.
func isSmall(class int) bool { return classSize(class) < smallLimit }

// runSize returns the size in bytes of a run for blocks of a small class. At most a
// thirty-second of it does not become blocks.
func runSize(class int) int {
	size := classSize(class)
	if size >= singleRun {
		return size
	}
	run := singleRun
	for run < maxRun && run%size > run/32 {
		run += runUnit
	}
	return run
}

// An arena is a registration that runs are cut from.
type arena struct {
	buf   *hostmem.Buffer
	used  []byte // for each runUnit, 1 if a slab has it
	slabs map[*slab]struct{}
	fits  int // units; no free run is longer
}

// A slab is a run and the blocks that were cut from it.
type slab struct {
	arena  *arena
	run    []byte // of arena.used
	first  int    // unit
	total  int    // blocks that fit
	blocks []*block
}

func newArena(buf *hostmem.Buffer) *arena {
	units := buf.Len() / runUnit
	return &arena{buf: buf, used: make([]byte, units), fits: units, slabs: make(map[*slab]struct{})}
}

// cut takes a run, the first that is long enough; nil if there is none.
func (a *arena) cut(class int) *slab {
	units := runSize(class) / runUnit
	first := a.find(units)
	if first < 0 {
		return nil
	}
	s := &slab{arena: a, run: a.used[first:][:units], first: first, total: runSize(class) / classSize(class)}
	copy(s.run, bytes.Repeat([]byte{1}, units))
	a.slabs[s] = struct{}{}
	return s
}

var freeRun [smallLimit / runUnit]byte

// find returns the first unit of the first free run of so many units, or -1.
func (a *arena) find(units int) int {
	if a.fits < units {
		return -1
	}
	first := bytes.Index(a.used, freeRun[:units])
	if first < 0 {
		a.fits = units - 1
	}
	return first
}

// join makes a run free again.
func (a *arena) join(s *slab) {
	clear(s.run)
	delete(a.slabs, s)
	a.fits = len(a.used)
}

// cut makes a new block of a small class; nil if no arena has a free run for it.
func (p *core) cut(class int) *block {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cutLocked(class)
}

func (p *core) cutLocked(class int) *block {
	s := p.partial[class]
	for i := 0; s == nil && i < len(p.arenas); i++ {
		s = p.arenas[i].cut(class)
	}
	if s == nil {
		return nil
	}
	size := classSize(class)
	base := unsafe.Add(s.arena.buf.Pointer(), s.first*runUnit+len(s.blocks)*size)
	b := p.newBlock(base, size, class)
	b.slab = s
	s.blocks = append(s.blocks, b)
	p.partial[class] = s
	if len(s.blocks) == s.total {
		p.partial[class] = nil
	}
	return b
}

// hasRun reports whether an arena has a free run for blocks of a class. It needs mu.
func (p *memory) hasRun(class int) bool {
	return slices.ContainsFunc(p.arenas, func(a *arena) bool { return a.find(runSize(class)/runUnit) >= 0 })
}

// dissolve frees a run if the caller has all of its blocks, which are idle, and reports
// whether it has. It needs mu.
func (p *memory) dissolve(s *slab, idle []*block) bool {
	if len(idle) < len(s.blocks) {
		return false
	}
	class := idle[0].Class
	if p.partial[class] == s {
		p.partial[class] = nil
	}
	s.arena.join(s)
	return true
}
