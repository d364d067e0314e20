package managed

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"

	"github.com/gopinned/pinned/internal/units"
)

// A schedule is which chunks come to the card and leave it, in which order. It is made
// before anything moves, so that moves need no decisions.
type schedule struct {
	chunks  []Range // parts of memory that move as a whole
	fetches []fetch // in the order of the steps that need them
	evicts  []evict // in the order in which they make room
	traffic Traffic
}

// A fetch brings a chunk to the card.
type fetch struct {
	chunk int
	step  int  // the first that needs it
	after int  // evicts that must be over: the first so many
	copy  bool // the host keeps its bytes: nothing writes the chunk until it leaves
	fresh bool // its bytes do not matter: the step overwrites them
}

// An evict takes a chunk away.
type evict struct {
	chunk int
	step  int  // the last that used it
	drop  bool // the fetch was a copy
	waste bool // its bytes do not matter: the next step that uses it overwrites them
}

// An access is a chunk that a step uses.
type access struct {
	chunk    int
	write    bool
	from, to int  // all uses of it overwrite these bytes of its memory; none if to is less
	fresh    bool // all of it is overwritten
}

// newSchedule makes a schedule. held is what stays on the host; discards is whether bytes
// that do not matter can be discarded.
func newSchedule(steps []Step, o PlanOptions, held []Range, discards bool) (schedule, error) {
	p, err := newPlanner(steps, o, held, discards)
	if err != nil {
		return schedule{}, err
	}
	for i := range p.uses {
		p.bring(i)
		p.use(i)
	}
	p.finish()
	return *p.schedule, nil
}

func newPlanner(steps []Step, o PlanOptions, held []Range, discards bool) (*planner, error) {
	var s schedule
	uses := s.cut(steps, o.Chunk, held)
	p := &planner{schedule: &s, uses: uses, budget: o.Budget, next: make([][]turn, len(s.chunks)), card: make(map[int]*onCard)}
	for i, step := range uses {
		total := 0
		for k := range step {
			u := &step[k]
			c := s.chunks[u.chunk]
			u.fresh = discards && u.from <= c.Off && c.Off+c.Len <= u.to // other parts must not be lost
			total += c.Len
			p.next[u.chunk] = append(p.next[u.chunk], turn{i, u.fresh})
		}
		if total > o.Budget {
			return nil, fmt.Errorf("step %d accesses %s in chunks of %s, and PlanOptions.Budget is %s: %w (cut the step into smaller ones, make the chunks smaller, or raise the budget)",
				i, units.ExactBytes(total), units.ExactBytes(o.Chunk), units.ExactBytes(o.Budget), ErrOversubscribed)
		}
	}
	p.window = min(o.Budget/2, max((o.In+o.Out)*o.Chunk, o.Budget/8))
	return p, nil
}

// cut makes the chunks, on a grid of addresses. A chunk is as long as the parts of it that
// are used by any step, and has nothing of what is held on the host. It returns what each
// step moves, each chunk once.
func (s *schedule) cut(steps []Step, grid int, held []Range) [][]access {
	type cell struct {
		memory *Memory
		index  int
		before int // ranges that are held and lie before it
	}
	of := make(map[cell]int)
	uses := make([][]access, len(steps))
	for i, step := range steps {
		in := make(map[int]int) // chunk to its place in uses[i]
		for _, u := range step {
			if u.Mode == InPlace {
				continue
			}
			base, before := int(u.Memory.ptr()), firstPast(held, u.ptr())
			for at := u.Off; at < u.Off+u.Len; {
				index := (base + at) / grid
				end := min((index+1)*grid-base, u.Off+u.Len)
				place := cell{u.Memory, index, before}
				id, ok := of[place]
				if !ok {
					id = len(s.chunks)
					of[place] = id
					s.chunks = append(s.chunks, u.Memory.Range(at, end-at))
				}
				c := &s.chunks[id]
				c.Off, c.Len = min(c.Off, at), max(c.Off+c.Len, end)-min(c.Off, at)
				k, ok := in[id]
				if !ok {
					k = len(uses[i])
					in[id] = k
					uses[i] = append(uses[i], access{chunk: id, to: math.MaxInt})
				}
				a := &uses[i][k]
				a.write = a.write || u.Mode != ReadOnly
				if a.from, a.to = max(a.from, u.Off), min(a.to, u.Off+u.Len); u.Mode != Overwrite {
					a.to = 0
				}
				at = end
			}
		}
	}
	return uses
}

// A planner makes a schedule by playing the steps. Before each it brings what later steps
// use, in their order: as long as there is room, and then in place of what is needed last
// and later than that. So as little as possible moves, and each fetch waits for work that is
// as old as possible.
type planner struct {
	*schedule
	uses   [][]access
	next   [][]turn // by chunk: the steps that use it, from the current one on
	budget int
	window int // how many bytes may be ahead in place of others that are not the best to leave

	card  map[int]*onCard // chunks that are there
	used  int             // bytes of them
	ahead int             // bytes of those that no step has used yet
	step  int             // the first whose chunks may not all be on the card
	nth   int             // the first of its accesses of which that holds

	// Chunks on the card by when they are needed next, which saves a search among all of
	// them: after their last use, and, of those that will be used before step, from step on.
	// One that was used again is there with an earlier step, too, below all that may leave.
	leave, stay nexts
}

// A turn is a step that uses a chunk.
type turn struct {
	step  int
	fresh bool // it overwrites all of it
}

// from returns the first of a chunk's turns in a step or a later one, math.MaxInt for none.
func from(turns []turn, step int) int {
	k, _ := slices.BinarySearchFunc(turns, step, func(t turn, step int) int { return cmp.Compare(t.step, step) })
	if k == len(turns) {
		return math.MaxInt
	}
	return turns[k].step
}

// farther is how many times as far away as the step for which there must be room a chunk is
// needed at least, to leave before a better one may.
const farther = 4

// onCard is a chunk that is on the card.
type onCard struct {
	fetch int // that brought it
	last  int // step that used it, or -1
	dirty bool
}

// bring brings what step i uses, which runs next, and then what later steps use.
func (p *planner) bring(i int) {
	for ; p.step < len(p.uses); p.step, p.nth = p.step+1, 0 {
		for ; p.nth < len(p.uses[p.step]); p.nth++ {
			u := p.uses[p.step][p.nth]
			if p.card[u.chunk] != nil {
				continue
			}
			n := p.chunks[u.chunk].Len
			for p.used+n > p.budget {
				id, next, best := p.victim()
				// To wait for a better one may be worth it, but not for the step that runs next:
				// its chunks fit.
				wait := p.step > i && !best && (p.ahead+n > p.window || (next-i)/farther < p.step-i)
				if id < 0 || wait {
					return
				}
				heap.Pop(&p.leave)
				p.evict(id)
			}
			p.card[u.chunk] = &onCard{fetch: len(p.fetches), last: -1}
			p.used += n
			p.ahead += n
			p.fetches = append(p.fetches, fetch{chunk: u.chunk, step: p.step, after: len(p.evicts), copy: true, fresh: u.fresh})
			if u.fresh {
				p.traffic.Spared += n
			} else {
				p.traffic.In += n
			}
		}
		for _, u := range p.uses[p.step] {
			heap.Push(&p.stay, needed{chunk: u.chunk, next: from(p.next[u.chunk], p.step+1)})
		}
	}
}

// use makes step i use its chunks.
func (p *planner) use(i int) {
	for _, u := range p.uses[i] {
		c := p.card[u.chunk]
		if c.last < 0 {
			p.ahead -= p.chunks[u.chunk].Len
		}
		c.last = i
		c.dirty = c.dirty || u.write
		p.next[u.chunk] = p.next[u.chunk][1:]
		heap.Push(&p.leave, needed{chunk: u.chunk, next: from(p.next[u.chunk], 0), last: i})
	}
}

// victim is the chunk that is needed last, if that is later than the step for which there
// must be room, or -1. Of several it is the one that was used longest ago. best reports that
// there will be no better one: what is used until then is needed sooner afterwards.
func (p *planner) victim() (victim, last int, best bool) {
	if len(p.leave) == 0 || p.leave[0].next <= p.step {
		return -1, 0, false
	}
	for len(p.stay) > 0 && from(p.next[p.stay[0].chunk], 0) >= p.step {
		heap.Pop(&p.stay) // it was used
	}
	v := p.leave[0]
	return v.chunk, v.next, len(p.stay) == 0 || v.next >= p.stay[0].next
}

// wasted reports whether the next step that uses a chunk overwrites it.
func (p *planner) wasted(id int) bool { return len(p.next[id]) > 0 && p.next[id][0].fresh }

// evict takes a chunk away.
func (p *planner) evict(id int) {
	c := p.card[id]
	delete(p.card, id)
	n := p.chunks[id].Len
	p.used -= n
	p.fetches[c.fetch].copy = !c.dirty
	e := evict{chunk: id, step: c.last, drop: !c.dirty, waste: c.dirty && p.wasted(id)}
	switch {
	case e.drop:
		p.traffic.Dropped += n
	case e.waste:
		p.traffic.Spared += n
	default:
		p.traffic.Back += n
	}
	p.evicts = append(p.evicts, e)
}

// finish takes all chunks away, that used longest ago first.
func (p *planner) finish() {
	var left []int
	for id := range p.card {
		left = append(left, id)
	}
	slices.SortFunc(left, func(x, y int) int { return cmp.Or(cmp.Compare(p.card[x].last, p.card[y].last), cmp.Compare(x, y)) })
	for _, id := range left {
		p.evict(id)
	}
}

// A needed chunk is one with the step that uses it next, and the one that used it last.
type needed struct{ chunk, next, last int }

// before reports whether x leaves before y.
func (x needed) before(y needed) bool {
	return cmp.Or(cmp.Compare(y.next, x.next), cmp.Compare(x.last, y.last), cmp.Compare(x.chunk, y.chunk)) < 0
}

// nexts is a heap ([container/heap]): the first one leaves before all others.
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
