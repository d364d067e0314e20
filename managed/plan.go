package managed

import (
	"cmp"
	"fmt"
)

// A Mode is a kind of access of a step to a range.
type Mode int

const (
	// ReadWrite: the step may read and write the range. Its bytes move back to the host.
	ReadWrite Mode = iota
	// ReadOnly: the step only reads the range. The host keeps its copy, and nothing moves back.
	ReadOnly
	// Overwrite: the step writes all of the range, and reads nothing there before. Whole chunks
	// that are overwritten are not moved to the device, with CUDA 13.0 and later; otherwise it
	// is as ReadWrite.
	Overwrite
	// InPlace: the step reads or writes the range over the link, and the memory stays on the
	// host. The range does not move, and does not count for the budget, except for its pages
	// that have bytes of memory that moves. This is the fastest mode for bytes that a step reads
	// or writes once, in order. Each further access of the same bytes goes over the link again,
	// and atomic or scattered accesses are slow. All steps must use such memory in place.
	InPlace
)

// A Use is a range with the mode in which a step accesses it.
type Use struct {
	Range Range
	Mode  Mode
}

// A Step has the accesses of a unit of work: of a kernel, or of several.
type Step []Use

// As returns the use of the range in a mode.
func (r Range) As(m Mode) Use { return Use{Range: r, Mode: m} }

// PlanOptions configure a Plan.
type PlanOptions struct {
	// Budget is the maximum number of bytes of device memory that the plan's memory occupies.
	// It must be positive. For moves while steps work it must hold the memory of any two
	// consecutive steps; a larger budget moves fewer bytes.
	Budget int
	// Chunk is the number of bytes that move at once, a multiple of 2 MiB. 0 means
	// 32 MiB.
	Chunk int
	// In and Out are the maximum numbers of moves in flight to the device and to the host, at
	// most 64. 0 means 2 and 4. Each move occupies an OS thread while it is
	// inside CUDA; at most 16 are inside at a time.
	In, Out int
}

// Defaults of PlanOptions. Moves to the host take several threads, because the driver
// allocates the host's pages on the calling thread.
const (
	defaultChunk = 32 << 20
	defaultIn    = 2
	defaultOut   = 4

	blockSize = 2 << 20 // bytes; the unit in which the driver moves and maps memory
	maxMoves  = 64
)

// A Plan moves managed memory to the device and back for work whose accesses are known before.
// While the device works on one step, the plan prefetches the memory of the next steps, and moves
// the memory whose next use is the latest to the host. So work on more data than the device
// memory, or a budget, holds waits for copies, and not for page faults.
//
// Memory that is only read while it is on the device keeps its copy on the host, and the copy on
// the device is dropped (advice ReadMostly). Other memory is prefetched back. Memory that steps
// use in place ([InPlace]) stays on the host (advice PreferredLocation and AccessedBy).
type Plan struct {
	a       *Allocator
	o       PlanOptions
	steps   int
	inPlace []Range
	schedule

	running chan struct{} // a value while one Run is in progress
	advised bool          // inPlace was moved to the host and advised; guarded by running
}

// NewPlan makes a plan for the steps, which run in this order. It does not block, and moves nothing.
// The memory must belong to the allocator, and must not be closed before the last Run has
// returned.
//
// Errors are [ErrNotConcurrent]; invalid options and ranges; an error that wraps
// [ErrOversubscribed] for a step that accesses more than the budget; and memory that one step
// uses in place and another one moves.
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
	o.Chunk, o.In, o.Out = cmp.Or(o.Chunk, defaultChunk), cmp.Or(o.In, defaultIn), cmp.Or(o.Out, defaultOut)
	switch {
	case !a.made():
		return nil, errNotMade
	case !a.concurrent:
		return nil, ErrNotConcurrent
	}
	if err := cmp.Or(o.check(), a.checkSteps(steps)); err != nil {
		return nil, err
	}
	inPlace, accessed, err := findInPlace(steps)
	if err != nil {
		return nil, err
	}
	s, err := newSchedule(steps, o, inPlace, a.dev.Runtime().Library().Discard)
	if err != nil {
		return nil, err
	}
	s.traffic.InPlace = accessed
	return &Plan{a: a, o: o, steps: len(steps), inPlace: inPlace, schedule: s, running: make(chan struct{}, 1)}, nil
}

func (o PlanOptions) check() error {
	switch {
	case o.Budget <= 0:
		return fmt.Errorf("PlanOptions.Budget of %d: must be positive", o.Budget)
	case o.Chunk < 0 || o.Chunk%blockSize != 0:
		return fmt.Errorf("PlanOptions.Chunk of %d: must be a multiple of 2 MiB", o.Chunk)
	case o.In < 0 || o.In > maxMoves:
		return fmt.Errorf("PlanOptions.In of %d: must be from 0 to %d", o.In, maxMoves)
	case o.Out < 0 || o.Out > maxMoves:
		return fmt.Errorf("PlanOptions.Out of %d: must be from 0 to %d", o.Out, maxMoves)
	}
	return nil
}

func (a *Allocator) checkSteps(steps []Step) error {
	for i, step := range steps {
		for _, u := range step {
			if err := u.Range.check(); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			if u.Range.Memory.a != a {
				return fmt.Errorf("step %d: %v: is of another allocator", i, u.Range.Memory)
			}
			if u.Mode < ReadWrite || u.Mode > InPlace {
				return fmt.Errorf("step %d: the mode %d is unknown", i, u.Mode)
			}
		}
	}
	return nil
}

// Traffic has the bytes that one Run moves, and that its steps access in place.
type Traffic struct {
	In      int // moved to the device
	Out     int // moved to the host
	Dropped int // dropped on the device, because the host has a copy
	Spared  int // moved neither to the device nor back, because a step overwrites them
	InPlace int // accessed on the host, each byte once for each step that uses it
}

// Traffic returns the bytes that one Run moves and accesses in place. It does not block.
func (p *Plan) Traffic() Traffic {
	if !p.made() {
		return Traffic{}
	}
	return p.traffic
}

// made reports whether NewPlan has made the Plan.
func (p *Plan) made() bool { return p != nil && p.a != nil }
