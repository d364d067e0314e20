//go:build linux

package benchmarks

import (
	"errors"
	"testing"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
)

// BenchmarkPinned is copies of pinned memory, by a copier and by a stream.
func BenchmarkPinned(b *testing.B) { bench(b, "Pinned") }

// BenchmarkPin is pinned memory allocated, and as unpin-ns released.
func BenchmarkPin(b *testing.B) { bench(b, "Pin") }

// BenchmarkPool is memory got from a pool and released.
func BenchmarkPool(b *testing.B) { bench(b, "Pool") }

var _ = func() bool {
	for _, n := range []int{64 * kib, mib, 2 * gib} {
		add("Pinned",
			row{name: "upload/" + sizeName(n), quick: n == 2*gib, prepare: pinnedCopy(n, byCopierUp)},
			row{name: "download/" + sizeName(n), quick: n == 2*gib, prepare: pinnedCopy(n, byCopierDown)})
	}
	for _, n := range []int{64 * kib, mib, gib + 1, 4*gib + 1} {
		telling := n == gib+1
		add("Pin", row{name: sizeName(n), quick: telling, twoCores: telling, busy: telling, prepare: pin(n, 0)})
	}
	return add("Pin", row{name: "4GiB+1/chunks-of-64MiB", prepare: pin(4*gib+1, 64*mib)})
}()

var _ = add("Pinned",
	row{name: "both-ways/2GiB", prepare: pinnedCopy(2*gib, byCopierBoth)},
	row{name: "upload-stream/1MiB", prepare: pinnedCopy(mib, byStream)},
	row{name: "upload-stream/256MiB", prepare: pinnedCopy(256*mib, byStream)})

var _ = add("Pool",
	row{name: "get-release/1MiB", quick: true, twoCores: true, prepare: leases(1, noStream)},
	row{name: "get-release/16-goroutines", quick: true, prepare: leases(16, noStream)},
	row{name: "release-on-idle-stream/1MiB", quick: true, prepare: leases(1, idleStream)},
	row{name: "release-after-copy/1MiB", prepare: leases(1, afterCopy)})

// A pinnedMethod is a method of copying pinned memory.
type pinnedMethod int

const (
	byCopierUp pinnedMethod = iota
	byCopierDown
	byCopierBoth
	byStream
)

func pinnedCopy(n int, method pinnedMethod) func(*fixture) task {
	return func(f *fixture) task {
		n := f.size(n)
		dev, there, c := f.memoryAndCopier()
		_, from := f.memory(0, 1)
		s, src := f.stream(dev), f.pinned(dev, n)
		copy(src, f.source())
		var dst []byte
		if method == byCopierDown || method == byCopierBoth {
			dst = f.pinned(dev, n)
		}
		up := func() error { return c.Upload(ctx, there, src) }
		down := func() error { return c.Download(ctx, dst, from) }
		t := task{bytes: n, op: up}
		switch method {
		case byCopierDown:
			t.op = down
		case byCopierBoth:
			t.bytes, t.op = 2*n, func() error { return together(up, down) }
		case byStream:
			t.op = func() error {
				if err := s.CopyToDevice(there, pointer(src), n); err != nil {
					return err
				}
				return s.Synchronize(ctx)
			}
		}
		t.verify = func(op func() error) error {
			err := errors.Join(poison(dev, there, n), put(dev, from, src))
			clear(dst)
			if err = errors.Join(err, op()); err != nil {
				return err
			}
			if method != byCopierDown {
				err = onDevice(dev, there, src)
			}
			if dst != nil {
				err = errors.Join(err, equal(dst, src))
			}
			return err
		}
		return t
	}
}

// pin allocates and closes a buffer, and times both.
func pin(n, chunk int) func(*fixture) task {
	return func(f *fixture) task {
		n, options := f.size(n), hostmem.Options{Chunk: chunk}
		dev, p := f.memory(0, 0)
		s := f.stream(dev)
		var unpinned time.Duration
		count := 0
		return task{bytes: n,
			loop: func(m *meter) error {
				for ; m.next(); count++ {
					buf, err := hostmem.Alloc(ctx, dev, n, options)
					m.pause()
					if err != nil {
						return err
					}
					took, err := timed(buf.Close)
					if err != nil {
						return err
					}
					unpinned += took
				}
				return nil
			},
			report: func(b *testing.B) { b.ReportMetric(float64(unpinned)/float64(count), "unpin-ns") },
			verify: func(func() error) error {
				buf, err := hostmem.Alloc(ctx, dev, n, options)
				if err != nil {
					return err
				}
				// A copy by the GPU shows that its memory is pinned at both ends.
				last := min(4096, n)
				copy(buf.Bytes(), "first")
				copy(buf.Bytes()[n-last:], f.source()[:last])
				return errors.Join(
					buf.CopyToDevice(s, p, n-last, last), s.Synchronize(ctx), onDevice(dev, p, buf.Bytes()[n-last:]),
					buf.CopyToDevice(s, p, 0, 5), s.Synchronize(ctx), onDevice(dev, p, []byte("first")), buf.Close())
			}}
	}
}

// A leaseMethod is the kind of stream on which a lease is released.
type leaseMethod int

const (
	noStream   leaseMethod = iota
	idleStream             // a stream that got nothing since the last release
	afterCopy              // a stream that has a copy of the lease's memory queued
)

func leases(goroutines int, method leaseMethod) func(*fixture) task {
	return func(f *fixture) task {
		dev, dst := f.memory(0, 0)
		p := must(pool.New(dev, pool.Options{}))(f)
		f.later(p.Close)
		s := f.stream(dev)
		f.later(func() error { return s.Synchronize(ctx) })
		count := times(2000)
		one := func() error {
			l, err := p.Get(ctx, mib)
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
		t := task{op: many, count: goroutines * count}
		if goroutines > 1 {
			t.op = func() error { return onEach(goroutines, func(int) error { return many() }) }
		}
		t.verify = func(op func() error) error {
			l, err := p.Get(ctx, mib)
			if err != nil {
				return err
			}
			n := min(mib, len(f.source()))
			copy(l.Bytes(), f.source())
			err = errors.Join(poison(dev, dst, n), l.CopyToDevice(s, dst, 0, n), l.Release(s), s.Synchronize(ctx))
			return errors.Join(err, onDevice(dev, dst, f.source()[:n]), op())
		}
		return t
	}
}
