package main

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer"
)

// Copies of memory of the Go heap, each with a wait for its end.
func init() {
	quick := []int{4 * kib, 256 * kib, mib, 16 * mib, 64 * mib, 2 * gib}
	for _, n := range copySizes {
		unit, target := "GB/s", 60*time.Millisecond
		if n < 16*mib {
			unit, target = "µs", 30*time.Millisecond
		}
		large := n == 2*gib
		r := row{unit: unit, target: target, quick: slices.Contains(quick, n), cpu: n >= 64*mib}
		r.twoCores, r.busy = large || n == mib, large || n == mib
		up, down := r, r
		up.name, up.prepare = "copies/upload/"+sizeName(n), upload(n, warm)
		down.name, down.prepare = "copies/download/"+sizeName(n), download(n, warm)
		if large {
			up.c, down.c = inC("ring Copies/upload/2GiB/"), inC("ring Copies/download/2GiB/")
		}
		register(up, down)
	}
	for _, n := range []int{64 * kib, 128 * kib, 256 * kib, mib, 16 * mib} {
		quick := n == 256*kib
		register(
			row{name: "copies/upload-cold/" + sizeName(n), unit: "µs", quick: quick, prepare: upload(n, cold)},
			row{name: "copies/download-cold/" + sizeName(n), unit: "µs", quick: quick, prepare: download(n, cold)},
		)
	}
	register(
		row{name: "copies/both-ways/2GiB", unit: "GB/s", cpu: true, quick: true, twoCores: true, busy: true, target: 80 * time.Millisecond,
			c: inC("ring Copies/both-ways/2GiB/"), prepare: bothWays(2 * gib)},
		row{name: "copies/upload-queued/4KiB", unit: "µs", prepare: uploadQueued(4 * kib)},
		row{name: "copies/upload-queued/1MiB", unit: "µs", prepare: uploadQueued(mib)},
		row{name: "copies/new/1GiB", unit: "GB/s", cpu: true, quick: true, c: inC("transfer Copies/new/1GiB/"), prepare: downloadNew(gib)},
		row{name: "copies/untouched/1GiB", unit: "GB/s", c: inC("transfer Copies/untouched/1GiB/"), prepare: downloadUntouched(gib)},
		row{name: "copies/scattered-upload/10000x4KiB", unit: "ms", quick: true, c: inC("transfer Copies/scattered-upload/10000x4KiB/"), prepare: scattered(true)},
		row{name: "copies/scattered-download/10000x4KiB", unit: "ms", prepare: scattered(false)},
		row{name: "copies/16-goroutines/1MiB", unit: "GB/s", quick: true, busy: true, prepare: parallelUploads(1)},
	)
}

var copySizes = []int{1, 4 * kib, 64 * kib, 128 * kib, 256 * kib, 512 * kib, mib, 4 * mib, 16 * mib, 32 * mib, 64 * mib, 256 * mib, 2 * gib}

// A temperature says whether the CPU's caches have the memory that is copied.
type temperature bool

const (
	warm temperature = false // one of eight places in turn, so that they have small ones
	cold temperature = true  // the whole source in turn, so that they have none
)

// offsets returns a function that returns n bytes of mem, at another offset each time. All tasks go on from the same
// cold offset.
func (f *fixture) offsets(mem []byte, n int, t temperature) func() []byte {
	at, step := &f.coldOffset, max(n, 4096)
	if t == warm {
		at, step = new(int), max((len(mem)-n)/8/4096*4096, 1)
	}
	return func() []byte {
		if *at += step; *at+n > len(mem) {
			*at = 0
		}
		return mem[*at : *at+n]
	}
}

func upload(n int, t temperature) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, dst, c, err := f.memoryAndCopier()
		if err != nil {
			return nil, err
		}
		next, src := f.offsets(f.source(), n, t), []byte(nil)
		op := func() error { src = next(); return c.Upload(f.ctx, dst, src) }
		return &task{bytes: n, op: op, verify: func() error {
			return f.checkUpload(dev, dst, n, op, func() []byte { return src })
		}}, nil
	}
}

func download(n int, t temperature) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, src, c, err := f.memoryAndCopier()
		if err != nil {
			return nil, err
		}
		next, dst := f.offsets(f.target(), n, t), []byte(nil)
		op := func() error { dst = next(); return c.Download(f.ctx, dst, src) }
		return &task{bytes: n, op: op, verify: func() error { return f.checkDownload(dev, src, n, op, func() []byte { return dst }) }}, nil
	}
}

// onEach calls do with each of n numbers, such as those of GPUs, at once.
func onEach(n int, do func(i int) error) error {
	all := make([]func() error, n)
	for i := range all {
		all[i] = func() error { return do(i) }
	}
	return together(all...)
}

// together runs functions at once.
func together(all ...func() error) error {
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, f := range all {
		group.Go(func() { errs[i] = f() })
	}
	group.Wait()
	return errors.Join(errs...)
}

// bothWays is an upload and a download at once.
func bothWays(n int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, there, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		_, uploaded, err := f.memory(0, 1)
		if err != nil {
			return nil, err
		}
		c, err := f.copier(0)
		if err != nil {
			return nil, err
		}
		src, dst := f.source()[:n], f.target()[:n]
		op := func() error {
			return together(func() error { return c.Upload(f.ctx, there, src) }, func() error { return c.Download(f.ctx, dst, uploaded) })
		}
		return &task{bytes: 2 * n, op: op, verify: func() error {
			if err := f.poison(dev, there, n); err != nil {
				return err
			}
			return errors.Join(f.checkDownload(dev, uploaded, n, op, func() []byte { return dst }), f.onDevice(dev, there, src))
		}}, nil
	}
}

// uploadQueued is 64 uploads on a caller's stream, which return when their source may be changed, and a
// wait for the last.
func uploadQueued(n int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		const count = 64
		n := min(n, f.size(gib)/count)
		dev, dst, c, err := f.memoryAndCopier()
		if err != nil {
			return nil, err
		}
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, err
		}
		queued := c.With(transfer.Call{Stream: s})
		src := f.source()[:count*n]
		op := func() error {
			for i := range count {
				if err := queued.Upload(f.ctx, dst+cudart.DevPtr(i*n), src[i*n:][:n]); err != nil {
					return err
				}
			}
			return s.Synchronize(f.ctx)
		}
		return &task{bytes: count * n, count: count, op: op, close: s.Close, verify: func() error {
			return f.checkUpload(dev, dst, count*n, op, func() []byte { return src })
		}}, nil
	}
}

// downloadNew is a download into memory that the library allocates.
func downloadNew(n int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, src, c, err := f.memoryAndCopier()
		if err != nil {
			return nil, err
		}
		var mem *hostmem.Pageable
		op := func() (err error) { mem, err = c.DownloadNew(f.ctx, src, n); return err }
		after := func() error { return mem.Close() }
		return &task{bytes: n, op: op, after: after, verify: func() error {
			return errors.Join(f.checkDownload(dev, src, n, op, func() []byte { return mem.Bytes() }), after())
		}}, nil
	}
}

// downloadUntouched is a download into memory that has no pages yet, as a large new Go slice has none.
func downloadUntouched(n int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, src, c, err := f.memoryAndCopier()
		if err != nil {
			return nil, err
		}
		var mem []byte
		before := func() (err error) { mem, err = mapUntouched(n); return err }
		op := func() error { return c.Download(f.ctx, mem, src) }
		after := func() error { return unmap(mem) }
		return &task{bytes: n, before: before, op: op, after: after, verify: func() error {
			if err := before(); err != nil {
				return err
			}
			return errors.Join(f.checkDownload(dev, src, n, op, func() []byte { return mem }), after())
		}}, nil
	}
}

// scattered is 10,000 parts of 4 KiB, scattered on both sides.
func scattered(up bool) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		const n = 4 * kib
		count := min(10_000, f.size(gib)/n/2)
		dev, mem, c, err := f.memoryAndCopier()
		if err != nil {
			return nil, err
		}
		host, all := f.source()[:2*count*n], c.UploadAll
		if !up {
			host, all = f.target()[:2*count*n], c.DownloadAll
		}
		// Each part is one of two neighbours, so that none follows on another one.
		hosts, devices := rand.New(rand.NewPCG(1, 2)).Perm(count), rand.New(rand.NewPCG(3, 4)).Perm(count)
		parts := make([]transfer.Part, count)
		for i := range parts {
			parts[i] = transfer.Part{Device: mem + cudart.DevPtr(2*devices[i]*n), Host: host[2*hosts[i]*n:][:n]}
		}
		op := func() error { return all(f.ctx, parts) }
		return &task{bytes: count * n, op: op, verify: func() error {
			var err error
			if up {
				err = f.poison(dev, mem, 2*count*n)
			} else {
				_, err = f.putPattern(dev, mem, 2*count*n)
			}
			if err == nil {
				err = op()
			}
			for i := 0; i < len(parts) && err == nil; i++ {
				err = f.onDevice(dev, parts[i].Device, parts[i].Host)
			}
			return err
		}}, nil
	}
}

// parallelUploads is 16 goroutines a GPU that upload 1 MiB each, again and again: the rate of all, and how long
// the slowest of a hundred uploads took.
func parallelUploads(gpus int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		const each = 16
		goroutines := gpus * each
		n := min(mib, f.size(gib)/each)
		rounds := 128
		if f.sim {
			rounds = 1
		}
		devs := make([]*cudart.Device, gpus)
		mems := make([]cudart.DevPtr, gpus)
		copiers := make([]*transfer.Copier, gpus)
		for i := range devs {
			var err error
			if devs[i], mems[i], err = f.memory(i, 0); err != nil {
				return nil, err
			}
			if copiers[i], err = f.copier(i); err != nil {
				return nil, err
			}
		}
		host := f.source()
		latencies := make([][]time.Duration, goroutines)
		last := make([]byte, goroutines*n)
		run := func(rounds int) error {
			var at atomic.Int64
			return onEach(goroutines, func(g int) error {
				gpu, mem := g/each, mems[g/each]+cudart.DevPtr(g%each*n)
				latencies[g] = latencies[g][:0]
				for range rounds {
					src := host[int(at.Add(1))*n%(len(host)-n+1):][:n]
					took, err := timed(func() error { return copiers[gpu].Upload(f.ctx, mem, src) })
					if err != nil {
						return err
					}
					latencies[g] = append(latencies[g], took)
					if rounds == 1 {
						copy(last[g*n:], src)
					}
				}
				return nil
			})
		}
		return &task{
			sample: func(time.Duration) (sample, error) {
				used, began := cpuTime(), time.Now()
				if err := run(rounds); err != nil {
					return sample{}, err
				}
				count := goroutines * rounds
				s := figures("GB/s", time.Since(began), count, count*n)
				s.Figures = append(s.Figures, cpuFigure(used, count*n))
				all := slices.Concat(latencies...)
				slices.Sort(all)
				s.Figures = append(s.Figures, figure{Name: "p99", Value: all[len(all)*99/100].Seconds() * 1e6, Unit: "µs"})
				return s, nil
			},
			verify: func() error {
				err := onEach(gpus, func(i int) error { return f.poison(devs[i], mems[i], each*n) })
				if err == nil {
					err = run(1)
				}
				if err != nil {
					return err
				}
				return onEach(gpus, func(i int) error { return f.onDevice(devs[i], mems[i], last[i*each*n:][:each*n]) })
			},
		}, nil
	}
}
