package managed

import (
	"cmp"
	"fmt"
)

// Mode is how a step accesses a range.
type Mode int

// The modes.
const (
	ReadWrite Mode = iota // it may write there: the bytes are copied back when they leave the card
	ReadOnly              // it only reads there: the host keeps its copy, and nothing is copied back
	// Overwrite: it writes all of the range, and reads nothing there before. What was there
	// is moved nowhere, with CUDA 13.0 and later, as far as whole chunks are overwritten;
	// otherwise it is as ReadWrite.
	Overwrite
	// InPlace: it reads or writes there over the link, while the memory stays on the host.
	// Nothing is moved, and nothing counts for the budget, but for pages that have bytes of
	// memory that moves as well. That is the quickest for what a step reads or writes once, in
	// order; each further access of the same bytes goes over the link again, and atomic or
	// scattered ones are slow. All steps must use such memory so.
	InPlace
)

// A Use is a range that a step accesses, and how.
type Use struct {
	Range
	Mode Mode
}

// Read is the use of a range that is only read.
func (r Range) Read() Use { return Use{Range: r, Mode: ReadOnly} }

// Write is the use of a range that is written, and may be read.
func (r Range) Write() Use { return Use{Range: r, Mode: ReadWrite} }

// A Step is what one piece of work accesses: a kernel, or several.
type Step []Use

// Overwrite is the use of a range of which all is written, and nothing read before.
func (r Range) Overwrite() Use { return Use{Range: r, Mode: Overwrite} }

// PlanOptions shape a Plan.
type PlanOptions struct {
	// Budget is the number of bytes of the card that the plan's memory may have at a time.
	// It must hold what any two steps in a row access, to move the one's memory while the
	// other works: more is better. It must be positive.
	Budget int
	// Chunk is the number of bytes that move at once, a multiple of 2 MiB; 0 means
	// DefaultChunk.
	Chunk int
	// In and Out are the numbers of moves to the card and to the host that are in flight at
	// a time, at most 64; 0 means DefaultIn and DefaultOut. Each occupies an OS thread while
	// CUDA works on it; at most 16 do so at a time.
	In, Out int
}

// Defaults of PlanOptions. Moves to the host take several threads, because the driver
// allocates the host's pages on the calling thread.
const (
	DefaultChunk = 32 << 20
	DefaultIn    = 2
	DefaultOut   = 4

	blockSize = 2 << 20 // in which the driver moves and maps memory
	maxMoves  = 64
)

// A Plan moves managed memory through the card for work whose accesses are known before:
// while the device works on one step, the plan prefetches what the next ones access, and
// takes away what is needed last. So work over more data than the card has, or than a
// budget, waits for copies, and not for page faults.
//
// Memory that is only read while it is on the card keeps its copy on the host, and is
// dropped (advice ReadMostly); the rest is prefetched back. Memory that steps use in place
// ([InPlace]) stays on the host (advice PreferredLocation and AccessedBy).
type Plan struct {
	a       *Allocator
	o       PlanOptions
	steps   int
	inPlace []Range
	schedule

	running chan struct{} // a value while one Run is in progress
	held    bool          // inPlace was moved to the host and advised; guarded by running
}

// NewPlan plans the steps, which run in this order. It moves nothing yet. The memory must
// be of the allocator, and open until the last Run has returned.
//
// Errors are [ErrNotConcurrent], invalid options and ranges, and for a step that
// accesses more than the budget one that wraps [ErrOversubscribed]. Memory that one step
// uses in place and another one moves is an error, too.
func (a *Allocator) NewPlan(steps []Step, o PlanOptions) (*Plan, error) {
	p, err := a.newPlan(steps, o)
	switch {
	case !a.made():
		return nil, fmt.Errorf("managed: new plan: %w", err)
	case err != nil:
		return nil, fmt.Errorf("managed: new plan for %v: %w", a.dev, err)
	}
	return p, nil
}

func (a *Allocator) newPlan(steps []Step, o PlanOptions) (*Plan, error) {
	o.Chunk, o.In, o.Out = cmp.Or(o.Chunk, DefaultChunk), cmp.Or(o.In, DefaultIn), cmp.Or(o.Out, DefaultOut)
	switch {
	case !a.made():
		return nil, errNotMade
	case !a.concurrent:
		return nil, ErrNotConcurrent
	case o.Budget <= 0:
		return nil, fmt.Errorf("PlanOptions.Budget of %d: must be positive", o.Budget)
	case o.Chunk < 0 || o.Chunk%blockSize != 0:
		return nil, fmt.Errorf("PlanOptions.Chunk of %d: must be a multiple of 2 MiB", o.Chunk)
	case o.In < 0 || o.In > maxMoves:
		return nil, fmt.Errorf("PlanOptions.In of %d: must be from 0 to %d", o.In, maxMoves)
	case o.Out < 0 || o.Out > maxMoves:
		return nil, fmt.Errorf("PlanOptions.Out of %d: must be from 0 to %d", o.Out, maxMoves)
	}
	for i, step := range steps {
		for _, u := range step {
			if err := u.check(); err != nil {
				return nil, fmt.Errorf("step %d: %w", i, err)
			}
			if u.Memory.a != a {
				return nil, fmt.Errorf("step %d: %v: is of another allocator", i, u.Memory)
			}
			if u.Mode < ReadWrite || u.Mode > InPlace {
				return nil, fmt.Errorf("step %d: the mode %d is unknown", i, u.Mode)
			}
		}
	}
	held, accessed, err := findInPlace(steps)
	if err != nil {
		return nil, err
	}
	s, err := newSchedule(steps, o, held, a.dev.Runtime().CanDiscard())
	if err != nil {
		return nil, err
	}
	s.traffic.InPlace = accessed
	return &Plan{a: a, o: o, steps: len(steps), inPlace: held, schedule: s, running: make(chan struct{}, 1)}, nil
}

// Traffic is what one Run moves, and what its steps access in place, in bytes.
type Traffic struct {
	In      int // to the card
	Back    int // to the host: copied back
	Dropped int // dropped on the card, as the host has a copy
	Spared  int // not copied to the card or back, as it is overwritten
	InPlace int // not moved: accessed on the host, each byte once in each step that uses it
}

// Traffic returns what one Run moves and accesses in place.
func (p *Plan) Traffic() Traffic {
	if !p.made() {
		return Traffic{}
	}
	return p.traffic
}

// made reports whether NewPlan has made the Plan.
func (p *Plan) made() bool { return p != nil && p.a != nil }
