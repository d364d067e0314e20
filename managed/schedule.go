package managed

import (
	"cmp"
	"container/heap"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/gopinned/pinned/internal/units"
)

// A schedule is the order in which chunks move to the device and back. It is made before anything
// moves, so that a move needs no decision.
type schedule struct {
	chunks  []Range // ranges that move as a whole
	fetches []fetch // in the order of the steps that need them
	evicts  []evict // in the order in which they free capacity
	traffic Traffic
}

// A fetch moves a chunk to the device.
type fetch struct {
	chunk   int
	step    int  // first step that uses the chunk
	after   int  // number of evicts that must have completed before
	copy    bool // the host keeps its bytes: nothing writes the chunk until its evict
	discard bool // the bytes are not moved: the step overwrites them
}

// An evict moves a chunk to the host.
type evict struct {
	chunk   int
	step    int  // last step that used the chunk
	drop    bool // the fetch was a copy, which is dropped
	discard bool // the bytes are not moved: the next step that uses the chunk overwrites them
}

// An access is the use of a chunk by a step.
type access struct {
	chunk      int
	write      bool
	from, to   int  // all uses of the chunk overwrite these bytes of its memory; none if to is less
	overwrites bool // all of the chunk is overwritten
}

// newSchedule makes a schedule. inPlace is the memory that stays on the host. discards reports
// whether CUDA can discard bytes.
func newSchedule(steps []Step, o PlanOptions, inPlace []Range, discards bool) (schedule, error) {
	p, err := newPlanner(steps, o, inPlace, discards)
	if err != nil {
		return schedule{}, err
	}
	for i := range p.uses {
		p.fetchAhead(i)
		p.runStep(i)
	}
	p.finish()
	return *p.schedule, nil
}

func newPlanner(steps []Step, o PlanOptions, inPlace []Range, discards bool) (*planner, error) {
	var s schedule
	uses := s.cut(steps, o.Chunk, inPlace)
	p := &planner{schedule: &s, uses: uses, budget: o.Budget, future: make([][]futureUse, len(s.chunks)), resident: make(map[int]*residentChunk)}
	for i, step := range uses {
		total := 0
		for k := range step {
			u := &step[k]
			c := s.chunks[u.chunk]
			u.overwrites = discards && u.from <= c.Off && c.Off+c.Len <= u.to // other parts must not be lost
			total += c.Len
			p.future[u.chunk] = append(p.future[u.chunk], futureUse{i, u.overwrites})
		}
		if total > o.Budget {
			return nil, fmt.Errorf("step %d accesses %s in chunks of %s, and PlanOptions.Budget is %s: %w (cut the step into smaller ones, make the chunks smaller, or raise the budget)",
				i, units.ExactBytes(total), units.ExactBytes(o.Chunk), units.ExactBytes(o.Budget), ErrOversubscribed)
		}
	}
	p.window = min(o.Budget/2, max((o.In+o.Out)*o.Chunk, o.Budget/8))
	return p, nil
}

// cut makes the chunks, on a grid of addresses. A chunk has the parts of its cell of the grid that
// any step uses, and no memory that is used in place. cut returns the chunks that each step
// moves, each chunk once.
func (s *schedule) cut(steps []Step, grid int, inPlace []Range) [][]access {
	type cell struct {
		memory *Memory
		row    int // number of the cell
		before int // number of ranges in place at lower addresses
	}
	ids := make(map[cell]int)
	uses := make([][]access, len(steps))
	for i, step := range steps {
		index := make(map[int]int) // of chunks in uses[i]
		for _, u := range step {
			if u.Mode == InPlace {
				continue
			}
			base, before := int(u.Range.Memory.ptr()), firstPast(inPlace, u.Range.ptr())
			for at := u.Range.Off; at < u.Range.Off+u.Range.Len; {
				row := (base + at) / grid
				end := min((row+1)*grid-base, u.Range.Off+u.Range.Len)
				key := cell{u.Range.Memory, row, before}
				id, ok := ids[key]
				if !ok {
					id = len(s.chunks)
					ids[key] = id
					s.chunks = append(s.chunks, u.Range.Memory.Range(at, end-at))
				}
				c := &s.chunks[id]
				c.Off, c.Len = min(c.Off, at), max(c.Off+c.Len, end)-min(c.Off, at)
				k, ok := index[id]
				if !ok {
					k = len(uses[i])
					index[id] = k
					uses[i] = append(uses[i], access{chunk: id, to: math.MaxInt})
				}
				a := &uses[i][k]
				a.write = a.write || u.Mode != ReadOnly
				if a.from, a.to = max(a.from, u.Range.Off), min(a.to, u.Range.Off+u.Range.Len); u.Mode != Overwrite {
					a.to = 0
				}
				at = end
			}
		}
	}
	return uses
}

// A planner makes a schedule by simulating the steps. Before each step it fetches the chunks of
// later steps, in their order: as long as there is capacity, and then instead of the chunk whose
// next use is the latest, if that is later than the fetched chunk's. So as few bytes as possible
// move, and each fetch waits for work of the earliest possible step.
type planner struct {
	*schedule
	uses   [][]access
	future [][]futureUse // by chunk: the steps that use it, from the current one on
	budget int           // bytes
	window int           // bytes that may be ahead instead of chunks that are not the best to evict

	resident map[int]*residentChunk // by chunk
	used     int                    // bytes of resident chunks
	ahead    int                    // bytes of resident chunks that no step has used yet
	step     int                    // first step whose chunks may not all be resident
	nth      int                    // first such access of that step

	// Resident chunks by their next use, which saves a search among all of them: evictable has
	// each chunk after its last use; upcoming has each chunk that a step before p.step will use,
	// with its next use from p.step on. An older entry of a chunk that was used again stays in
	// evictable, below all that may be evicted.
	evictable, upcoming nexts
}

// A futureUse is a step that uses a chunk.
type futureUse struct {
	step       int
	overwrites bool // it overwrites all of the chunk
}

// from returns the first step from a given one on that uses a chunk, math.MaxInt for none.
func from(uses []futureUse, step int) int {
	k, _ := slices.BinarySearchFunc(uses, step, func(u futureUse, step int) int { return cmp.Compare(u.step, step) })
	if k == len(uses) {
		return math.MaxInt
	}
	return uses[k].step
}

// minDistance is how many times as far away as the fetched chunk's step the next use of a chunk
// must be, for its eviction before a better one can be evicted.
const minDistance = 4

// A residentChunk is a chunk on the device.
type residentChunk struct {
	fetch int // number of its fetch
	last  int // last step that used it, or -1
	dirty bool
}

// fetchAhead fetches the chunks of step i, which runs next, and then the chunks of later steps.
func (p *planner) fetchAhead(i int) {
	for ; p.step < len(p.uses); p.step, p.nth = p.step+1, 0 {
		for ; p.nth < len(p.uses[p.step]); p.nth++ {
			u := p.uses[p.step][p.nth]
			if p.resident[u.chunk] != nil {
				continue
			}
			n := p.chunks[u.chunk].Len
			for p.used+n > p.budget {
				id, next, best := p.nextEvict()
				// It may pay to wait for a better chunk to evict, but not for the step that runs
				// next: its chunks fit.
				wait := p.step > i && !best && (p.ahead+n > p.window || (next-i)/minDistance < p.step-i)
				if id < 0 || wait {
					return
				}
				heap.Pop(&p.evictable)
				p.evict(id)
			}
			p.resident[u.chunk] = &residentChunk{fetch: len(p.fetches), last: -1}
			p.used += n
			p.ahead += n
			p.fetches = append(p.fetches, fetch{chunk: u.chunk, step: p.step, after: len(p.evicts), copy: true, discard: u.overwrites})
			if u.overwrites {
				p.traffic.Spared += n
			} else {
				p.traffic.In += n
			}
		}
		for _, u := range p.uses[p.step] {
			heap.Push(&p.upcoming, needed{chunk: u.chunk, next: from(p.future[u.chunk], p.step+1)})
		}
	}
}

// runStep simulates step i.
func (p *planner) runStep(i int) {
	for _, u := range p.uses[i] {
		c := p.resident[u.chunk]
		if c.last < 0 {
			p.ahead -= p.chunks[u.chunk].Len
		}
		c.last = i
		c.dirty = c.dirty || u.write
		p.future[u.chunk] = p.future[u.chunk][1:]
		heap.Push(&p.evictable, needed{chunk: u.chunk, next: from(p.future[u.chunk], 0), last: i})
	}
}

// nextEvict returns the chunk whose next use is the latest, with the step of that use, or -1 if no
// chunk is used later than the step to be fetched. Of several chunks it is the one that was used
// longest ago. best reports that no better chunk can follow: the chunks that are used until then
// are used again sooner.
func (p *planner) nextEvict() (chunk, next int, best bool) {
	if len(p.evictable) == 0 || p.evictable[0].next <= p.step {
		return -1, 0, false
	}
	for len(p.upcoming) > 0 && from(p.future[p.upcoming[0].chunk], 0) >= p.step {
		heap.Pop(&p.upcoming) // it was used
	}
	v := p.evictable[0]
	return v.chunk, v.next, len(p.upcoming) == 0 || v.next >= p.upcoming[0].next
}

// overwrittenNext reports whether the next step that uses a chunk overwrites all of it.
func (p *planner) overwrittenNext(id int) bool {
	return len(p.future[id]) > 0 && p.future[id][0].overwrites
}

// evict moves a chunk to the host.
func (p *planner) evict(id int) {
	c := p.resident[id]
	delete(p.resident, id)
	n := p.chunks[id].Len
	p.used -= n
	p.fetches[c.fetch].copy = !c.dirty
	e := evict{chunk: id, step: c.last, drop: !c.dirty, discard: c.dirty && p.overwrittenNext(id)}
	switch {
	case e.drop:
		p.traffic.Dropped += n
	case e.discard:
		p.traffic.Spared += n
	default:
		p.traffic.Out += n
	}
	p.evicts = append(p.evicts, e)
}

// finish evicts all chunks, the least recently used first.
func (p *planner) finish() {
	byUse := func(x, y int) int {
		return cmp.Or(cmp.Compare(p.resident[x].last, p.resident[y].last), cmp.Compare(x, y))
	}
	for _, id := range slices.SortedFunc(maps.Keys(p.resident), byUse) {
		p.evict(id)
	}
}

// A needed is a chunk with the step that uses it next, and the step that used it last.
type needed struct{ chunk, next, last int }

// before reports whether x is evicted before y.
func (x needed) before(y needed) bool {
	return cmp.Or(cmp.Compare(y.next, x.next), cmp.Compare(x.last, y.last), cmp.Compare(x.chunk, y.chunk)) < 0
}

// nexts is a heap ([container/heap]) whose first chunk is evicted first.
type nexts []needed

func (h nexts) Len() int           { return len(h) }
func (h nexts) Less(i, j int) bool { return h[i].before(h[j]) }
func (h nexts) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *nexts) Push(x any)        { *h = append(*h, x.(needed)) }
func (h *nexts) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
