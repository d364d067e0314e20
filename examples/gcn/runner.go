package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/managed"
)

// A runner runs the epochs of a model, and reports each.
type runner interface {
	run(ctx context.Context, m *model, rate float32, epoch func(n int, loss, seconds float64)) error
}

// inOrder queues the steps as they come.
type inOrder struct{ epochs int }

func (r inOrder) run(ctx context.Context, m *model, rate float32, epoch func(int, float64, float64)) error {
	return runEpochs(ctx, m, r.epochs, rate, epoch, func(s step) error { return s.queue() })
}

// runEpochs runs all steps of each epoch by queue, and waits for each epoch.
func runEpochs(ctx context.Context, m *model, epochs int, rate float32, epoch func(int, float64, float64), queue func(step) error) error {
	steps := m.epoch()
	for n := range epochs {
		began := time.Now()
		if err := m.b.begin(n); err != nil {
			return err
		}
		for _, s := range steps {
			if err := queue(s); err != nil {
				return err
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		if err := m.learn(rate); err != nil {
			return err
		}
		loss, err := m.b.loss(ctx, n)
		if err != nil {
			return err
		}
		epoch(n, loss, time.Since(began).Seconds())
	}
	return nil
}

// planned moves the memory of all epochs to and from the device by one plan.
type planned struct {
	b      *gpu
	epochs int
	plan   *managed.Plan
}

func newPlanned(ctx context.Context, b *gpu, m *model, epochs, budget int) (runner, error) {
	var steps []managed.Step
	for range epochs {
		for _, s := range m.epoch() {
			var accesses managed.Step
			for _, u := range s.uses {
				accesses = append(accesses, managed.Use{Range: u.memory.managed.Range(4*u.off, 4*u.n), Mode: u.mode})
			}
			steps = append(steps, accesses)
		}
	}
	plan, err := b.unified.NewPlan(steps, managed.PlanOptions{Budget: budget, Chunk: b.chunk << 20})
	if err != nil {
		return nil, err
	}
	if m.staged() { // else the first epoch would populate the host's memory
		var mean []managed.Range
		for _, p := range m.mean {
			mean = append(mean, p.memory.managed.Whole())
		}
		if err := b.unified.Move(ctx, cudart.HostLocation(), mean...); err != nil {
			return nil, err
		}
	}
	return &planned{b, epochs, plan}, nil
}

func (r *planned) run(ctx context.Context, m *model, rate float32, epoch func(int, float64, float64)) (err error) {
	steps := m.epoch()
	var ends []*cudart.Event // of the epochs
	defer func() {
		for _, e := range ends {
			err = errors.Join(err, e.Close())
		}
	}()
	for range r.epochs {
		e, err := r.b.dev.NewEvent()
		if err != nil {
			return err
		}
		ends = append(ends, e)
	}
	began := time.Now()
	err = r.plan.Run(ctx, r.b.s, func(i int) error {
		if i%len(steps) == 0 {
			if err := m.b.begin(i / len(steps)); err != nil {
				return err
			}
		}
		if err := steps[i%len(steps)].queue(); err != nil {
			return err
		}
		if i%len(steps) < len(steps)-1 {
			return nil
		}
		if err := m.learn(rate); err != nil {
			return err
		}
		return r.b.s.Record(ends[i/len(steps)])
	})
	if err != nil {
		return err
	}
	seconds := make([]float64, r.epochs) // the first one prepares the memory, and takes it back
	seconds[0] = time.Since(began).Seconds()
	for n := 1; n < r.epochs; n++ {
		took, err := ends[n].Since(ends[n-1])
		if err != nil {
			return err
		}
		seconds[n] = took.Seconds()
		seconds[0] -= seconds[n]
	}
	for n := range r.epochs {
		loss, err := m.b.loss(ctx, n)
		if err != nil {
			return err
		}
		epoch(n, loss, seconds[n])
	}
	return nil
}

// byFaults lets page faults move memory to the device, and moves back the memory that was used longest
// ago, so that the budget holds.
type byFaults struct {
	s      *cudart.Stream
	epochs int
	budget int

	resident []piece // the one that was used longest ago first
	bytes    int
}

// A piece is a part of memory that moves at once.
type piece struct {
	memory *memory
	index  int
}

const pieceBytes = 32 << 20

func (p piece) len() int { return min(pieceBytes, 4*p.memory.n-p.index*pieceBytes) }

func (r *byFaults) run(ctx context.Context, m *model, rate float32, epoch func(int, float64, float64)) error {
	return runEpochs(ctx, m, r.epochs, rate, epoch, func(s step) error {
		if err := r.use(ctx, s.uses); err != nil {
			return err
		}
		return s.queue()
	})
}

// use makes room for what a step accesses.
func (r *byFaults) use(ctx context.Context, uses []use) error {
	used := make(map[piece]bool)
	var list []piece
	for _, u := range uses {
		for i := 4 * u.off / pieceBytes; i <= (4*(u.off+u.n)-1)/pieceBytes; i++ {
			if p := (piece{u.memory, i}); !used[p] {
				used[p] = true
				list = append(list, p)
				r.bytes += p.len()
			}
		}
	}
	// Those that the step uses are counted twice, and listed again.
	old := slices.DeleteFunc(r.resident, func(p piece) bool {
		if used[p] {
			r.bytes -= p.len()
		}
		return used[p]
	})
	for len(old) > 0 && r.bytes > r.budget {
		p := old[0]
		if err := p.memory.managed.Range(p.index*pieceBytes, p.len()).Prefetch(ctx, r.s, cudart.HostLocation()); err != nil {
			return err
		}
		r.bytes -= p.len()
		old = old[1:]
	}
	r.resident = append(old, list...)
	return nil
}
