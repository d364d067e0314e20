package main

import (
	"errors"
	"time"

	"github.com/gopinned/pinned/hostmem"
)

// Copies of pinned memory, by a copier and by a stream.
func init() {
	for _, n := range []int{64 * kib, mib, 2 * gib} {
		unit, up, down := "GB/s", inC("link Pinned/upload/2GiB"), inC("link Pinned/download/2GiB")
		if n < 16*mib {
			unit, up, down = "µs", nil, nil
		}
		register(
			row{name: "pinned/upload/" + sizeName(n), unit: unit, quick: n == 2*gib, c: up, prepare: pinnedCopy(n, byCopierUp)},
			row{name: "pinned/download/" + sizeName(n), unit: unit, quick: n == 2*gib, c: down, prepare: pinnedCopy(n, byCopierDown)},
		)
	}
	register(
		row{name: "pinned/both-ways/2GiB", unit: "GB/s", target: 80 * time.Millisecond, c: inC("link Pinned/both-ways/2GiB"), prepare: pinnedCopy(2*gib, byCopierBoth)},
		row{name: "pinned/upload-stream/1MiB", unit: "µs", prepare: pinnedCopy(mib, byStream)},
		row{name: "pinned/upload-stream/256MiB", unit: "GB/s", prepare: pinnedCopy(256*mib, byStream)},
	)
}

// A pinnedMethod is a method of copying pinned memory.
type pinnedMethod int

const (
	byCopierUp pinnedMethod = iota
	byCopierDown
	byCopierBoth
	byStream
)

func pinnedCopy(n int, method pinnedMethod) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, there, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		_, returned, err := f.memory(0, 1)
		if err != nil {
			return nil, err
		}
		c, err := f.copier(0)
		if err != nil {
			return nil, err
		}
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, err
		}
		t := &task{bytes: n, close: s.Close}
		pin := func() []byte {
			var buf *hostmem.Buffer
			if err == nil {
				buf, err = hostmem.Alloc(f.ctx, dev, n, hostmem.Options{})
			}
			if err != nil {
				return nil
			}
			closeOthers := t.close
			t.close = func() error { return errors.Join(buf.Close(), closeOthers()) }
			return buf.Bytes()
		}
		src := pin()
		copy(src, f.source())
		var dst []byte
		if method == byCopierDown || method == byCopierBoth {
			dst = pin()
		}
		if err != nil {
			return nil, errors.Join(err, t.close())
		}
		up := func() error { return c.Upload(f.ctx, there, src) }
		down := func() error { return c.Download(f.ctx, dst, returned) }
		t.op = up
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
				return s.Synchronize(f.ctx)
			}
		}
		t.verify = func() error {
			err := errors.Join(f.poison(dev, there, n), f.put(dev, returned, src))
			clear(dst)
			if err = errors.Join(err, t.op()); err != nil {
				return err
			}
			if method != byCopierDown {
				err = f.onDevice(dev, there, src)
			}
			if dst != nil {
				err = errors.Join(err, equal(dst, src))
			}
			return err
		}
		return t, nil
	}
}
