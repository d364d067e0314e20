package main

import (
	"errors"
	"time"

	"github.com/gopinned/pinned/hostmem"
)

// Pinned memory allocated and released.
func init() {
	for _, n := range []int{64 * kib, mib, gib + 1, 4*gib + 1} {
		unit, quick, name, slash := "GB/s", n == gib+1, sizeName(n), "/"
		if n < 16*mib {
			unit, slash = "µs", ""
		}
		register(row{name: "pin/" + sizeName(n), unit: unit, quick: quick, twoCores: quick, busy: quick,
			c: inC("pin Pin/" + name + slash), prepare: pin(n, unit, 0)})
	}
	register(row{name: "pin/4GiB+1/chunks-of-64MiB", unit: "GB/s", prepare: pin(4*gib+1, "GB/s", 64*mib)})
}

// pin allocates and closes a buffer: a figure each.
func pin(n int, unit string, chunk int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, err := f.device(0)
		if err != nil {
			return nil, err
		}
		buffers := func(target time.Duration) (sample, error) {
			var pinned, unpinned time.Duration
			count := 0
			for ; pinned+unpinned < target; count++ {
				var buf *hostmem.Buffer
				took, err := timed(func() (err error) { buf, err = hostmem.Alloc(f.ctx, dev, n, hostmem.Options{Chunk: chunk}); return err })
				if err != nil {
					return sample{}, err
				}
				pinned += took
				if took, err = timed(buf.Close); err != nil {
					return sample{}, err
				}
				unpinned += took
			}
			s := figures(unit, pinned, count, count*n)
			s.Figures = append(s.Figures, figure{Name: "unpin", Value: unpinned.Seconds() / float64(count) * 1e6, Unit: "µs"})
			return s, nil
		}
		return &task{sample: buffers, verify: func() error {
			_, p, err := f.memory(0, 0)
			if err != nil {
				return err
			}
			buf, err := hostmem.Alloc(f.ctx, dev, n, hostmem.Options{Chunk: chunk})
			if err != nil {
				return err
			}
			// A copy by the GPU shows that its memory is pinned at both ends.
			s, err := dev.NewStream(streamOptions)
			if err != nil {
				return errors.Join(err, buf.Close())
			}
			last := min(4096, n)
			copy(buf.Bytes(), "first")
			copy(buf.Bytes()[n-last:], f.source()[:last])
			err = errors.Join(buf.CopyToDevice(s, p, n-last, last), s.Synchronize(f.ctx), f.onDevice(dev, p, buf.Bytes()[n-last:]),
				buf.CopyToDevice(s, p, 0, 5), s.Synchronize(f.ctx), f.onDevice(dev, p, []byte("first")))
			return errors.Join(err, s.Close(), buf.Close())
		}}, nil
	}
}
