//go:build linux

package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/raw"
)

// BenchmarkCalls is what single calls cost.
func BenchmarkCalls(b *testing.B) { bench(b, "Calls") }

// BenchmarkStreams is many streams, and many goroutines that wait for some.
func BenchmarkStreams(b *testing.B) { bench(b, "Streams") }

// BenchmarkKernel is a launch, and a kernel that reads device memory.
func BenchmarkKernel(b *testing.B) { bench(b, "Kernel") }

// BenchmarkControl is arithmetic on one core, and nothing of the library. Builds that differ in it were measured
// on a host that is not quiet, or one was slowed down on purpose.
func BenchmarkControl(b *testing.B) { bench(b, "Control") }

var _ = add("Calls",
	callRow(row{name: "copy64-issue", quick: true}),
	callRow(row{name: "copy64-wait", quick: true, twoCores: true}),
	callRow(row{name: "copy64-wait-cancellable", quick: true, busy: true}),
	callRow(row{name: "event-record"}),
	callRow(row{name: "event-query"}),
	callRow(row{name: "stream-query", quick: true}),
	callRow(row{name: "idle-wait"}),
)

var _ = add("Streams", row{name: "64-with-copies", prepare: manyStreams}, row{name: "1000-waiters", prepare: manyWaiters})

var _ = add("Kernel", row{name: "launch", quick: true, prepare: kernelRow(launch)},
	row{name: "check/1GiB", quick: true, prepare: kernelRow(checkMemory)})

var _ = add("Control", row{name: "arithmetic", quick: true, twoCores: true, busy: true, prepare: arithmetic})

// callRow adds the setup of a row of Calls, whose name is the call.
func callRow(r row) row {
	r.prepare = func(f *fixture) task {
		dev, dst := f.memory(0, 0)
		src := pinnedSource(f, dev, 4096)
		s := f.stream(dev)
		e := must(dev.NewEvent())(f)
		f.later(e.Close)
		cancellable, cancel := context.WithCancel(ctx)
		f.Cleanup(cancel)
		copies := func() error { return s.CopyToDevice(dst, pointer(src), 64) }
		wait := func() error { return s.Synchronize(ctx) }
		one := map[string]func() error{
			"copy64-issue": copies,
			"copy64-wait": func() error {
				if err := copies(); err != nil {
					return err
				}
				return wait()
			},
			"copy64-wait-cancellable": func() error {
				if err := copies(); err != nil {
					return err
				}
				return s.Synchronize(cancellable)
			},
			"event-record": func() error { return s.Record(e) },
			"event-query":  func() error { _, err := raw.QueryEvent(e); return err },
			"stream-query": func() error { _, err := s.Query(); return err },
			"idle-wait":    wait,
		}[r.name]
		count := times(2000)
		op := func() error {
			for range count {
				if err := one(); err != nil {
					return err
				}
			}
			return nil
		}
		return task{op: op, count: count, after: wait, verify: func(op func() error) error {
			err := poison(dev, dst, 64)
			if !strings.HasPrefix(r.name, "copy64") {
				err = errors.Join(err, copies(), s.Record(e))
			}
			if err = errors.Join(err, op(), wait()); err != nil {
				return err
			}
			if idle, err := s.Query(); err != nil || !idle {
				return errors.Join(errors.New("the stream is idle, and a query has another result"), err)
			}
			return onDevice(dev, dst, src[:64])
		}}
	}
	return r
}

// pinnedSource allocates pinned memory by cudaHostAlloc, with bytes of the source.
func pinnedSource(f *fixture, dev *cudart.Device, n int) []byte {
	p := must(dev.HostAlloc(n, 0))(f)
	f.later(func() error { return dev.FreeHost(p) })
	mem := bytesAt(p, n)
	copy(mem, f.source())
	return mem
}

// streamsOf makes streams, and functions that queue a copy of n bytes on each, and verify all copies.
func streamsOf(f *fixture, count, n int) (all []*cudart.Stream, queue func() error, verify func(op func() error) error) {
	dev, dst := f.memory(0, 0)
	src := pinnedSource(f, dev, count*n)
	for range count {
		all = append(all, f.stream(dev))
	}
	queue = func() error {
		for i, s := range all {
			if err := s.CopyToDevice(dst+cudart.DevPtr(i*n), pointer(src[i*n:]), n); err != nil {
				return err
			}
		}
		return nil
	}
	return all, queue, uploaded(dev, dst, count*n, func() []byte { return src })
}

// manyStreams is a copy on each of 64 streams, and a wait for all.
func manyStreams(f *fixture) task {
	all, queue, verify := streamsOf(f, 64, min(64*kib, f.size(gib)/64))
	return task{verify: verify, op: func() error {
		if err := queue(); err != nil {
			return err
		}
		for _, s := range all {
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
		}
		return nil
	}}
}

// manyWaiters is 1000 goroutines that wait for copies of 16 streams.
func manyWaiters(f *fixture) task {
	const waiters = 1000
	all, queue, verify := streamsOf(f, 16, min(4*mib, f.size(gib)/16))
	cancellable, cancel := context.WithCancel(ctx)
	f.Cleanup(cancel)
	return task{verify: verify, op: func() error {
		if err := queue(); err != nil {
			return err
		}
		errs := make([]error, waiters)
		var group sync.WaitGroup
		for i := range errs {
			group.Go(func() { errs[i] = all[i%len(all)].Synchronize(cancellable) })
		}
		group.Wait()
		return errors.Join(errs...)
	}}
}

// kernels are the module's kernels for memory, and what they are launched with.
type kernels struct {
	*gpukernels.Memory
	stream      *cudart.Stream
	mem, result cudart.DevPtr
	bytes       int
}

func (k kernels) wait() error { return k.stream.Synchronize(ctx) }

func launch(k kernels) task {
	const count = 256 // the stream must not be full, or a launch waits for the GPU
	return task{count: count, after: k.wait, op: func() error {
		for range count {
			if err := k.Fill(k.stream, k.mem, 64, gpukernels.Content{}, 0); err != nil {
				return err
			}
		}
		return nil
	}}
}

func checkMemory(k kernels) task {
	const count = 8
	return task{count: count, bytes: count * k.bytes, op: func() error {
		for range count {
			if err := k.Check(k.stream, k.mem, k.bytes, gpukernels.Content{}, 0, k.result); err != nil {
				return err
			}
		}
		return k.wait()
	}}
}

func kernelRow(taskOf func(kernels) task) func(*fixture) task {
	return func(f *fixture) task {
		dev, mem := f.memory(0, 0)
		_, result := f.memory(0, 1)
		m := must(gpukernels.NewMemory(ctx, dev))(f)
		f.later(m.Close)
		k := kernels{Memory: m, stream: f.stream(dev), mem: mem, result: result, bytes: f.size(gib)}
		t := taskOf(k)
		t.verify = func(op func() error) error {
			n, at := k.bytes, mem+cudart.DevPtr(k.bytes/3)
			if err := errors.Join(poison(dev, mem, n), m.Fill(k.stream, mem, n, gpukernels.Content{}, 0), k.wait()); err != nil {
				return err
			}
			// One byte in 1 GiB is wrong: a check that reads all of it finds it.
			var b [1]byte
			if err := dev.CopyToHost(pointer(b[:]), at, 1); err != nil {
				return err
			}
			for mismatches := range 2 {
				found, err := m.Compare(ctx, k.stream, mem, n, gpukernels.Content{}, 0)
				if err != nil {
					return err
				}
				if found.Mismatches != mismatches {
					return fmt.Errorf("%d bytes are wrong, want %d", found.Mismatches, mismatches)
				}
				b[0] ^= 1
				if err := put(dev, at, b[:]); err != nil {
					return err
				}
			}
			return errors.Join(m.ResetResult(k.stream, result), op(), k.wait())
		}
		return t
	}
}

func arithmetic(*fixture) task {
	const doublings, factor, addend = 18, 6364136223846793005, 1442695040888963407
	x := uint64(1)
	op := func() error {
		for range 1 << doublings {
			x = x*factor + addend
		}
		return nil
	}
	return task{op: op, verify: func(op func() error) error {
		f, a := uint64(factor), uint64(addend) // of 1, 2, 4 and so on steps
		for range doublings {
			f, a = f*f, f*a+a
		}
		want := x*f + a
		if err := op(); err != nil || x != want {
			return errors.Join(errors.New("another result than by doublings"), err)
		}
		return nil
	}}
}
