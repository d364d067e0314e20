//go:build linux

package benchmarks

import (
	"errors"
	"testing"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/managed"
)

// BenchmarkManaged is managed memory: moved to the GPU and, as back-GB/s, to the host, and used with an eighth of it in
// device memory, by plans that move it or leave it on the host.
func BenchmarkManaged(b *testing.B) { bench(b, "Managed") }

var _ = add("Managed",
	row{name: "plan-read/2GiB", prepare: planned(planRead)},
	row{name: "plan-write/2GiB", prepare: planned(planWrite)},
	row{name: "plan-in-place/2GiB", prepare: planned(planInPlace)},
	row{name: "prefetch/1GiB", quick: true, prepare: prefetch})

// allocate allocates n bytes of managed memory.
func allocate(f *fixture, n int) (*cudart.Device, *managed.Allocator, *managed.Memory) {
	dev := f.device(0)
	a := must(managed.New(ctx, dev, managed.Options{}))(f)
	f.later(a.Close)
	m := must(a.Alloc(ctx, n, managed.AllocOptions{}))(f)
	f.later(m.Close)
	return dev, a, m
}

func prefetch(f *fixture) task {
	n := f.size(gib)
	dev, a, m := allocate(f, n)
	inParallel(m.Bytes(), func(part []byte, at int) { copy(part, f.source()[at:]) })
	there := func() error { return a.Move(ctx, dev.Location(), m.Whole()) }
	toHost := func() error { return a.Move(ctx, cudart.HostLocation(), m.Whole()) }
	var back time.Duration
	count := 0
	return task{bytes: n,
		loop: func(meter *meter) error {
			for ; meter.next(); count++ {
				err := there()
				meter.pause()
				if err != nil {
					return err
				}
				took, err := timed(toHost)
				if err != nil {
					return err
				}
				back += took
			}
			return nil
		},
		report: func(b *testing.B) { b.ReportMetric(float64(count*n)/1e9/back.Seconds(), "back-GB/s") },
		verify: func(func() error) error {
			if err := there(); err != nil {
				return err
			}
			at, err := dev.RangeAttributes(m.Ptr(), n)
			if err == nil && at.LastPrefetch != dev.Location() {
				err = errors.New("the memory was not prefetched to the device")
			}
			return errors.Join(err, onDevice(dev, m.Ptr(), f.source()[:n]), toHost(), equal(m.Bytes(), f.source()[:n]))
		}}
}

// A planMethod is the access of a plan's work to managed memory.
type planMethod int

const (
	planRead    planMethod = iota // it copies it to other memory of the device
	planWrite                     // it copies to it from there
	planInPlace                   // it reads it over the link
)

func planned(method planMethod) func(*fixture) task {
	return func(f *fixture) task {
		n, chunk := 2*gib, 32*mib
		if !testgpu.Real() {
			n, chunk = 16*mib, 2*mib
		}
		dev, a, m := allocate(f, n)
		other := must(dev.Malloc(n))(f)
		f.later(func() error { return dev.Free(other) })
		s := f.stream(dev)
		var steps []managed.Step
		for off := 0; off < n; off += chunk {
			part := m.Range(off, chunk)
			steps = append(steps, managed.Step{part.As([...]managed.Mode{managed.ReadOnly, managed.ReadWrite, managed.InPlace}[method])})
		}
		plan := must(a.NewPlan(steps, managed.PlanOptions{Budget: max(n/8, 4*chunk), Chunk: chunk}))(f)
		op := func() error {
			err := plan.Run(ctx, s, func(step int) error {
				from, to := m.Ptr(), other
				if method == planWrite {
					from, to = to, from
				}
				return s.CopyOnDevice(to+cudart.DevPtr(step*chunk), from+cudart.DevPtr(step*chunk), chunk)
			})
			return errors.Join(err, s.Synchronize(ctx))
		}
		return task{bytes: n, op: op, verify: func(op func() error) error {
			want, got := f.newPattern(), f.target()
			if len(got) < n {
				got = make([]byte, n)
			}
			if method == planWrite {
				want.fill(got)
				clear(m.Bytes())
				if err := errors.Join(put(dev, other, got), op()); err != nil {
					return err
				}
				return want.check(m.Bytes())
			}
			want.fill(m.Bytes())
			if err := errors.Join(poison(dev, other, n), op(), dev.CopyToHost(pointer(got), other, n)); err != nil {
				return err
			}
			return want.check(got)
		}}
	}
}
