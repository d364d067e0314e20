package main

import (
	"errors"

	"github.com/gopinned/pinned/hostmem/pool"
)

// Memory got from a pool and released.
func init() {
	register(
		row{name: "pool/get-release/1MiB", unit: "ns", quick: true, twoCores: true, prepare: poolRow(1, noStream)},
		row{name: "pool/get-release/16-goroutines", unit: "million/s", quick: true, prepare: poolRow(16, noStream)},
		row{name: "pool/release-on-idle-stream/1MiB", unit: "ns", quick: true, prepare: poolRow(1, idleStream)},
		row{name: "pool/release-after-copy/1MiB", unit: "ns", c: inC("calls Pool/release-after-copy/1MiB"), prepare: poolRow(1, afterCopy)},
	)
}

// A poolMethod is the kind of stream on which a lease is released.
type poolMethod int

const (
	noStream   poolMethod = iota
	idleStream            // a stream that got nothing since the last release
	afterCopy             // a stream that has a copy of the lease's memory queued
)

func poolRow(goroutines int, method poolMethod) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		dev, dst, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		p, err := pool.New(dev, pool.Options{})
		if err != nil {
			return nil, err
		}
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		count := 2000
		if f.sim {
			count = 10
		}
		one := func() error {
			l, err := p.Get(f.ctx, mib)
			if err != nil {
				return err
			}
			if method == noStream {
				return l.Release()
			}
			if method == afterCopy {
				if err := l.CopyToDevice(s, dst, 0, 64); err != nil {
					return errors.Join(err, l.Release())
				}
			}
			return l.Release(s)
		}
		many := func() error {
			for range count {
				if err := one(); err != nil {
					return err
				}
			}
			return nil
		}
		t := &task{op: many, count: goroutines * count}
		if goroutines > 1 {
			all := make([]func() error, goroutines)
			for i := range all {
				all[i] = many
			}
			t.op = func() error { return together(all...) }
		}
		t.close = func() error { return errors.Join(s.Synchronize(f.ctx), s.Close(), p.Close()) }
		t.verify = func() error {
			l, err := p.Get(f.ctx, mib)
			if err != nil {
				return err
			}
			copy(l.Bytes(), f.source())
			err = errors.Join(f.poison(dev, dst, mib), l.CopyToDevice(s, dst, 0, mib), l.Release(s), s.Synchronize(f.ctx))
			return errors.Join(err, f.onDevice(dev, dst, f.source()[:min(mib, len(f.source()))]))
		}
		return t, nil
	}
}
