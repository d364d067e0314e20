package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer"
)

// Several GPUs at once, each with memory of its own to copy. Rates are sums.
func init() {
	for _, n := range gpuCounts {
		for _, way := range []string{"upload", "download", "both-ways"} {
			r := row{unit: "GB/s", gpus: n, tableOnly: n > 2, target: 80 * time.Millisecond}
			pinned := r
			pinned.name, pinned.prepare = fmt.Sprintf("gpus/%d/pinned/%s/1GiB", n, way), ownCopies(n, way, true)
			r.name, r.prepare, r.cpu, r.goals = fmt.Sprintf("gpus/%d/%s/1GiB", n, way), ownCopies(n, way, false), true, []goal{{Row: pinned.name, Ratio: 0.9}}
			if way == "upload" {
				r.quick = true
				r.c = inC(fmt.Sprintf("%s GPUs/%d/upload/1GiB/", fanoutProgram(n, false), n))
			}
			register(r, pinned)
		}
		calls := row{name: parallelRow(n), unit: "GB/s", gpus: n, tableOnly: n > 2, prepare: parallelUploads(n)}
		if n > 2 {
			calls.goals = []goal{{Figure: "p99", Row: parallelRow(2), Ratio: 1.5}}
		}
		register(calls)
	}
	register(row{name: "gpus/contexts-on-others", unit: contextsUnit, gpus: 2, tableOnly: true, once: contextsAfter(workOn), goals: []goal{{}}})
}

func parallelRow(gpus int) string { return fmt.Sprintf("gpus/%d/16-goroutines/1MiB", gpus) }

// ownCopies copies 1 GiB to each of the GPUs, from each, or both. The memory is freed with the task.
func ownCopies(gpus int, way string, pinned bool) func(*fixture) (*task, error) {
	return func(f *fixture) (_ *task, err error) {
		n := f.size(gib)
		up, down := way != "download", way != "upload"
		type own struct {
			dev         *cudart.Device
			c           *transfer.Copier
			to, from    cudart.DevPtr
			src, dst    []byte
			first, next pattern // of src, and of what a download gets
		}
		all := make([]own, gpus)
		var releases []func() error
		release := func() error {
			var errs []error
			for _, do := range releases {
				errs = append(errs, do())
			}
			return errors.Join(errs...)
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, release())
			}
		}()
		allocate := func(dev *cudart.Device) ([]byte, error) {
			if pinned {
				buf, err := hostmem.Alloc(f.ctx, dev, n, hostmem.Options{})
				if err != nil {
					return nil, err
				}
				releases = append(releases, buf.Close)
				return buf.Bytes(), nil
			}
			mem, err := mapUntouched(n)
			if err == nil {
				releases = append(releases, func() error { return unmap(mem) })
				inParallel(mem, func(part []byte, _ int) { clear(part) }) // which makes it resident
			}
			return mem, err
		}
		for i := range all {
			o := &all[i]
			if o.dev, o.to, err = f.memory(i, 0); err != nil {
				return nil, err
			}
			if o.c, err = f.copier(i); err != nil {
				return nil, err
			}
			if up {
				if o.src, err = allocate(o.dev); err != nil {
					return nil, err
				}
				f.patterns++
				o.first = f.patterns
				o.first.fill(o.src)
			}
			if down {
				if _, o.from, err = f.memory(i, 1); err != nil {
					return nil, err
				}
				if o.dst, err = allocate(o.dev); err != nil {
					return nil, err
				}
			}
		}
		op := func() error {
			var calls []func() error
			for i := range all {
				o := &all[i]
				if up {
					calls = append(calls, func() error { return o.c.Upload(f.ctx, o.to, o.src) })
				}
				if down {
					calls = append(calls, func() error { return o.c.Download(f.ctx, o.dst, o.from) })
				}
			}
			return together(calls...)
		}
		bytes := gpus * n
		if up && down {
			bytes *= 2
		}
		return &task{bytes: bytes, op: op, close: release, verify: func() error {
			for i := range all {
				f.patterns++
				all[i].next = f.patterns
			}
			err := onEach(gpus, func(i int) error {
				o := &all[i]
				if up {
					if err := f.poison(o.dev, o.to, n); err != nil {
						return err
					}
				}
				if !down {
					return nil
				}
				o.next.fill(o.dst)
				err := f.put(o.dev, o.from, o.dst)
				clear(o.dst)
				return err
			})
			if err == nil {
				err = op()
			}
			if err != nil {
				return err
			}
			return onEach(gpus, func(i int) error {
				o := &all[i]
				if up {
					if err := f.onDevice(o.dev, o.to, o.src); err != nil {
						return err
					}
				}
				if !down {
					return nil
				}
				return o.next.check(o.dst)
			})
		}}, nil
	}
}

// contextsAfter counts the other GPUs on which this process has a context after work on the last one
// alone. CUDA does not tell, since a call that asks for free memory makes a context.
func contextsAfter(work func(f *fixture, gpu int) error) func(*fixture) (sample, error) {
	return func(f *fixture) (sample, error) {
		if err := f.open(); err != nil { // which makes no context
			return sample{}, err
		}
		last := f.rt.DeviceCount() - 1
		if last == 0 {
			return sample{}, leftOut("needs 2 GPUs")
		}
		before, err := f.usedMemory()
		if err == nil {
			err = work(f, last)
		}
		if err != nil {
			return sample{}, err
		}
		after, err := f.usedMemory()
		if err != nil {
			return sample{}, err
		}
		const least = 64 * mib // of a context, which takes hundreds
		others := 0
		for i := range after {
			used := after[i] - before[i]
			switch {
			case i == last && used < least:
				return sample{}, fmt.Errorf("%d MiB more are in use on the GPU that worked: nothing of this process is seen", used/mib)
			case i != last && used >= least:
				others++
			}
		}
		return sample{Figures: []figure{{Value: float64(others), Unit: contextsUnit}}}, nil
	}
}

// workOn copies to a GPU and back, from many threads, and from memory of all kinds.
func workOn(f *fixture, gpu int) error {
	dev, p, err := f.memory(gpu, 0)
	if err != nil {
		return err
	}
	c, err := f.copier(gpu)
	if err != nil {
		return err
	}
	n := f.size(64 * mib)
	buf, err := hostmem.Alloc(f.ctx, dev, n, hostmem.Options{})
	if err != nil {
		return err
	}
	src, dst := make([]byte, n), make([]byte, n)
	pattern(1).fill(src)
	err = onEach(16, func(int) error { return c.Upload(f.ctx, p, src) })
	err = errors.Join(err, c.Download(f.ctx, dst, p), c.Download(f.ctx, buf.Bytes(), p))
	return errors.Join(err, equal(dst, src), equal(buf.Bytes(), src), buf.Close())
}
