package main

import (
	"errors"
	"time"
)

// Two GPUs, each with memory of its own to get.
func init() {
	register(row{name: "gpus/two/upload/2GiB", unit: "GB/s", cpu: true, quick: true, target: 80 * time.Millisecond,
		c: inC("fanout TwoDevices/pageable/2GiB/"), prepare: twoUploads})
}

func twoUploads(f *fixture) (*task, error) {
	n := f.size(2 * gib)
	var ops, checks []func() error
	for i := range 2 {
		dev, dst, err := f.memory(i, 0)
		if err != nil {
			return nil, err
		}
		c, err := f.copier(i)
		if err != nil {
			return nil, err
		}
		src := f.source()[:n]
		if i == 1 {
			src = f.target()[:n]
			copy(src, f.source()[n/2:])
			copy(src[n/2:], f.source())
		}
		ops = append(ops, func() error { return c.Upload(f.ctx, dst, src) })
		checks = append(checks, func() error { return f.checkUpload(dev, dst, n, ops[i], func() []byte { return src }) })
	}
	return &task{bytes: 2 * n, op: func() error { return together(ops...) }, verify: func() error {
		return errors.Join(checks[0](), checks[1]())
	}}, nil
}
