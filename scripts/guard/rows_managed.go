package main

import (
	"errors"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/managed"
)

// Managed memory: moved to the GPU and back, and used with an eighth of it on the card, by plans that
// move it or leave it on the host.
func init() {
	const target = 50 * time.Millisecond
	register(
		row{name: "managed/plan-read/2GiB", unit: "GB/s", target: target, c: inC("managed Managed/plan-read/2GiB"), prepare: planned(planRead)},
		row{name: "managed/plan-write/2GiB", unit: "GB/s", target: target, c: inC("managed Managed/plan-write/2GiB"), prepare: planned(planWrite)},
		row{name: "managed/plan-in-place/2GiB", unit: "GB/s", target: target, prepare: planned(planInPlace)},
	)
	register(row{name: "managed/prefetch/1GiB", unit: "GB/s", quick: true, target: 100 * time.Millisecond,
		c: inC("managed Managed/prefetch/1GiB"), prepare: prefetch})
}

func prefetch(f *fixture) (*task, error) {
	n := f.size(gib)
	dev, err := f.device(0)
	if err != nil {
		return nil, err
	}
	a, err := managed.New(f.ctx, dev, managed.Options{})
	if err != nil {
		return nil, err
	}
	m, err := a.Alloc(f.ctx, n)
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	inParallel(m.Bytes(), func(part []byte, at int) { copy(part, f.source()[at:]) })
	there := func() error { return a.Move(f.ctx, dev.Location(), m.All()) }
	toHost := func() error { return a.Move(f.ctx, managed.Host(), m.All()) }
	return &task{
		sample: func(target time.Duration) (sample, error) {
			var in, out time.Duration
			count := 0
			for ; in+out < target; count++ {
				took, err := timed(there)
				if err != nil {
					return sample{}, err
				}
				in += took
				if took, err = timed(toHost); err != nil {
					return sample{}, err
				}
				out += took
			}
			s := figures("GB/s", in, count, count*n)
			s.Figures = append(s.Figures, figure{Name: "back", Value: float64(count*n) / 1e9 / out.Seconds(), Unit: "GB/s"})
			return s, nil
		},
		verify: func() error {
			if err := there(); err != nil {
				return err
			}
			at, err := dev.RangeAttributes(m.DevPtr(), n)
			if err == nil && (at.LastPrefetch != dev.Location()) {
				err = errors.New("the memory was not prefetched to the device")
			}
			return errors.Join(err, f.onDevice(dev, m.DevPtr(), f.source()[:n]), toHost(), equal(m.Bytes(), f.source()[:n]))
		},
		close: func() error { return errors.Join(m.Close(), a.Close()) },
	}, nil
}

// A planMethod is the access of a plan's work to managed memory.
type planMethod int

const (
	planRead    planMethod = iota // it copies it to other memory of the device
	planWrite                     // it copies to it from there
	planInPlace                   // it reads it over the link
)

func planned(method planMethod) func(*fixture) (*task, error) {
	return func(f *fixture) (_ *task, err error) {
		n, chunk := 2*gib, 32*mib
		if f.sim {
			n, chunk = 16*mib, 2*mib
		}
		dev, err := f.device(0)
		if err != nil {
			return nil, err
		}
		var undo []func() error
		closeAll := func() error {
			var all []error
			for len(undo) > 0 {
				all = append(all, undo[len(undo)-1]())
				undo = undo[:len(undo)-1]
			}
			return errors.Join(all...)
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, closeAll())
			}
		}()
		a, err := managed.New(f.ctx, dev, managed.Options{})
		if err != nil {
			return nil, err
		}
		undo = append(undo, a.Close)
		m, err := a.Alloc(f.ctx, n)
		if err != nil {
			return nil, err
		}
		undo = append(undo, m.Close)
		other, err := dev.Malloc(n)
		if err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return dev.Free(other) })
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, err
		}
		undo = append(undo, s.Close)
		var steps []managed.Step
		for off := 0; off < n; off += chunk {
			part := m.Range(off, chunk)
			steps = append(steps, managed.Step{[...]managed.Use{part.Read(), part.Write(), part.InPlace()}[method]})
		}
		plan, err := a.NewPlan(steps, managed.PlanOptions{Budget: max(n/8, 4*chunk), Chunk: chunk})
		if err != nil {
			return nil, err
		}
		op := func() error {
			err := plan.Run(f.ctx, s, func(step int) error {
				from, to := m.DevPtr(), other
				if method == planWrite {
					from, to = to, from
				}
				return s.CopyOnDevice(to+cudart.DevPtr(step*chunk), from+cudart.DevPtr(step*chunk), chunk)
			})
			return errors.Join(err, s.Synchronize(f.ctx))
		}
		return &task{bytes: n, op: op, close: closeAll, verify: func() error {
			f.patterns++
			want, got := f.patterns, f.target()
			if len(got) < n {
				got = make([]byte, n)
			}
			if method == planWrite {
				want.fill(got)
				clear(m.Bytes())
				err := errors.Join(f.put(dev, other, got), op())
				if err != nil {
					return err
				}
				return want.check(m.Bytes())
			}
			want.fill(m.Bytes())
			if err := errors.Join(f.poison(dev, other, n), op(), dev.CopyToHost(pointer(got), other, n)); err != nil {
				return err
			}
			return want.check(got)
		}}, nil
	}
}
