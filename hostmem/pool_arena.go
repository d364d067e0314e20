package hostmem

import "unsafe"

// Small blocks are cut from runs of pages, a run for blocks of one class, and
// runs from arenas, each one registration. So a small block costs neither a
// registration nor a huge page, and none crosses from one registration to the
// next. All of this is guarded by poolCore.mu.
const (
	smallLimit = 2 << 20 // blocks of less are cut from arenas
	minArena   = 2 << 20 // a huge page
	maxArena   = 32 << 20
	runUnit    = 4096
	singleRun  = 32 << 10 // blocks of that and more are a run each
	maxRun     = 128 << 10
)

// isSmall tells whether blocks of the class are cut from arenas.
func isSmall(class int) bool { return classSize(class) < smallLimit }

// runSize returns the bytes that blocks of a small class are cut from: all of
// them but a thirty-second at most become blocks.
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
	buf   *Buffer
	used  []bool // by unit
	free  int    // units
	slabs map[*slab]struct{}
}

// A slab is a run and the blocks that were cut from it.
type slab struct {
	arena  *arena
	first  int // unit
	units  int
	total  int // blocks that fit
	blocks []*block
}

func newArena(buf *Buffer) *arena {
	units := buf.Len() / runUnit
	return &arena{buf: buf, used: make([]bool, units), free: units, slabs: make(map[*slab]struct{})}
}

// cut takes a run, the first that is long enough; nil if there is none.
func (a *arena) cut(class int) *slab {
	units := runSize(class) / runUnit
	if a.free < units {
		return nil
	}
	length := 0
	for i, used := range a.used {
		if length++; used {
			length = 0
		}
		if length < units {
			continue
		}
		s := &slab{arena: a, first: i + 1 - units, units: units, total: runSize(class) / classSize(class)}
		a.mark(s, true)
		a.slabs[s] = struct{}{}
		return s
	}
	return nil
}

// join gives a run back.
func (a *arena) join(s *slab) {
	a.mark(s, false)
	delete(a.slabs, s)
}

func (a *arena) mark(s *slab, used bool) {
	for i := s.first; i < s.first+s.units; i++ {
		a.used[i] = used
	}
	if used {
		a.free -= s.units
	} else {
		a.free += s.units
	}
}

// carve makes a new block of a small class; nil if no arena has room.
func (p *poolCore) carve(class int) *block {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.partial[class]
	for i := 0; s == nil && i < len(p.arenas); i++ {
		s = p.arenas[i].cut(class)
	}
	if s == nil {
		return nil
	}
	size := classSize(class)
	base := unsafe.Add(s.arena.buf.Pointer(), s.first*runUnit+len(s.blocks)*size)
	b := &block{pool: p, base: base, size: size, class: class, slab: s}
	s.blocks = append(s.blocks, b)
	p.partial[class] = s
	if len(s.blocks) == s.total {
		p.partial[class] = nil
	}
	return b
}

// dissolve gives a run back whose blocks are all idle and in the caller's
// hands; false if some are not.
func (p *poolCore) dissolve(s *slab, idle []*block) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(idle) < len(s.blocks) {
		return false
	}
	class := idle[0].class
	if p.partial[class] == s {
		p.partial[class] = nil
	}
	s.arena.join(s)
	return true
}
