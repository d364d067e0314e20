package main

import (
	"errors"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer"
)

// The first calls of a process, one after another.
func init() {
	register(row{name: "first/calls", unit: "ms", quick: true, once: firstCalls})
}

func firstCalls(f *fixture) (sample, error) {
	n := f.size(64 * mib)
	src := make([]byte, n)
	pattern(1).fill(src)
	var s sample
	step := func(name string, do func() error) error {
		took, err := timed(do)
		s.Figures = append(s.Figures, figure{Name: name, Value: took.Seconds() * 1e3, Unit: "ms"})
		return err
	}
	var buf *hostmem.Buffer
	var c *transfer.Copier
	if err := step("open", f.open); err != nil {
		return s, err
	}
	dev, err := f.device(0)
	if err != nil {
		return s, err
	}
	// The first call that needs a context makes it.
	err = step("context", func() (err error) { _, _, err = f.memory(0, 0); return err })
	if err == nil {
		err = step("alloc", func() (err error) { buf, err = hostmem.Alloc(f.ctx, dev, n, hostmem.Options{}); return err })
	}
	if err != nil {
		return s, err
	}
	_, dst, err := f.memory(0, 0)
	if err != nil {
		return s, err
	}
	if err := step("copier", func() (err error) { c, err = f.copier(0); return err }); err != nil {
		return s, err
	}
	if err := step("upload", func() error { return c.Upload(f.ctx, dst, src) }); err != nil {
		return s, err
	}
	return s, errors.Join(f.onDevice(dev, dst, src), buf.Close())
}
