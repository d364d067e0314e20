package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
)

// What single calls cost.
func init() {
	for _, r := range []row{
		{name: "calls/copy64-issue", quick: true, c: inC("calls Calls/copy64-issue")},
		{name: "calls/copy64-wait", quick: true, twoCores: true, c: inC("calls Calls/copy64-wait")},
		{name: "calls/copy64-wait-cancellable", quick: true, busy: true, c: inC("calls Calls/copy64-wait")},
		{name: "calls/event-record", c: inC("calls Calls/event-record")},
		{name: "calls/event-query", c: inC("calls Calls/event-query")},
		{name: "calls/stream-query", quick: true, c: inC("calls Calls/stream-query")},
		{name: "calls/idle-wait"},
	} {
		r.unit, r.prepare = "ns", callRow(r.name)
		register(r)
	}
	register(
		row{name: "streams/64-with-copies", unit: "µs", prepare: manyStreams},
		row{name: "streams/1000-waiters", unit: "µs", target: 50 * time.Millisecond, prepare: manyWaiters},
	)
}

// pinnedSource allocates pinned memory by cudaHostAlloc, with bytes of the source.
func pinnedSource(f *fixture, dev *cudart.Device, n int) ([]byte, func() error, error) {
	p, err := dev.HostAlloc(n, cudart.HostAllocDefault)
	if err != nil {
		return nil, nil, err
	}
	mem := bytesAt(p, n)
	copy(mem, f.source())
	return mem, func() error { return dev.FreeHost(p) }, nil
}

func callRow(name string) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		dev, dst, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		src, free, err := pinnedSource(f, dev, 4096)
		if err != nil {
			return nil, err
		}
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, errors.Join(err, free())
		}
		e, err := dev.NewEvent(cudart.EventOptions{})
		if err != nil {
			return nil, errors.Join(err, s.Close(), free())
		}
		cancellable, cancel := context.WithCancel(f.ctx)
		copies := func() error { return s.CopyToDevice(dst, pointer(src), 64) }
		// The context of f cannot end.
		wait := func() error { return s.Synchronize(f.ctx) }
		one := map[string]func() error{
			"calls/copy64-issue": copies,
			"calls/copy64-wait": func() error {
				if err := copies(); err != nil {
					return err
				}
				return wait()
			},
			"calls/copy64-wait-cancellable": func() error {
				if err := copies(); err != nil {
					return err
				}
				return s.Synchronize(cancellable)
			},
			"calls/event-record": func() error { return s.Record(e) },
			"calls/event-query":  func() error { _, err := e.Query(); return err },
			"calls/stream-query": func() error { _, err := s.Query(); return err },
			"calls/idle-wait":    wait,
		}[name]
		count := 2000
		if f.sim {
			count = 10
		}
		op := func() error {
			for range count {
				if err := one(); err != nil {
					return err
				}
			}
			return nil
		}
		return &task{op: op, count: count, after: wait,
			verify: func() error {
				if err := errors.Join(f.poison(dev, dst, 64), copies(), s.Record(e)); err != nil {
					return err
				}
				if err := errors.Join(one(), wait()); err != nil {
					return err
				}
				done, err := e.Query()
				if idle, err2 := s.Query(); err != nil || err2 != nil || !done || !idle {
					return errors.Join(errors.New("the copy is done, and a query has another result"), err, err2)
				}
				return f.onDevice(dev, dst, src[:64])
			},
			close: func() error {
				cancel()
				return errors.Join(e.Close(), s.Close(), free())
			},
		}, nil
	}
}

// streamsOf makes streams, and a function that queues a copy of n bytes on each, to a place of its own.
func streamsOf(f *fixture, count, n int) (all []*cudart.Stream, queue, check, closeAll func() error, err error) {
	dev, dst, err := f.memory(0, 0)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	src, closeAll, err := pinnedSource(f, dev, count*n)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	for range count {
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, nil, nil, nil, errors.Join(err, closeAll())
		}
		closeOthers := closeAll
		closeAll = func() error { return errors.Join(s.Close(), closeOthers()) }
		all = append(all, s)
	}
	queue = func() error {
		for i, s := range all {
			if err := s.CopyToDevice(dst+cudart.DevPtr(i*n), pointer(src[i*n:]), n); err != nil {
				return err
			}
		}
		return nil
	}
	check = func() error { return f.onDevice(dev, dst, src) }
	return all, queue, check, closeAll, nil
}

// manyStreams is a copy on each of 64 streams, and a wait for all.
func manyStreams(f *fixture) (*task, error) {
	all, queue, check, closeAll, err := streamsOf(f, 64, min(64*kib, f.size(gib)/64))
	if err != nil {
		return nil, err
	}
	op := func() error {
		if err := queue(); err != nil {
			return err
		}
		for _, s := range all {
			if err := s.Synchronize(f.ctx); err != nil {
				return err
			}
		}
		return nil
	}
	return &task{op: op, close: closeAll, verify: func() error { return errors.Join(op(), check()) }}, nil
}

// manyWaiters is 1000 goroutines that wait for copies of 16 streams.
func manyWaiters(f *fixture) (*task, error) {
	const waiters = 1000
	all, queue, check, closeAll, err := streamsOf(f, 16, min(4*mib, f.size(gib)/16))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(f.ctx)
	op := func() error {
		if err := queue(); err != nil {
			return err
		}
		errs := make([]error, waiters)
		var group sync.WaitGroup
		for i := range errs {
			group.Go(func() { errs[i] = all[i%len(all)].Synchronize(ctx) })
		}
		group.Wait()
		return errors.Join(errs...)
	}
	return &task{op: op,
		close:  func() error { cancel(); return closeAll() },
		verify: func() error { return errors.Join(op(), check()) },
	}, nil
}
