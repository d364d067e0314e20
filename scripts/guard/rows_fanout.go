package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// One source onto several GPUs. Rates are of the source.
func init() {
	for _, n := range gpuCounts {
		r := row{unit: "GB/s", gpus: n, tableOnly: n > 2, cpu: true, target: 80 * time.Millisecond, goals: []goal{{Ratio: 0.95}}}
		memory, file := r, r
		memory.name, memory.prepare, memory.quick = fmt.Sprintf("gpus/%d/fanout/2GiB", n), fanout(n, false), true
		memory.c = inC(fmt.Sprintf("%s GPUs/%d/fanout/2GiB/", fanoutProgram(n, false), n))
		file.name, file.prepare = fanoutFileRow(n), fanout(n, true)
		file.c = inC(fmt.Sprintf("%s GPUs/%d/fanout-file/2GiB/", fanoutProgram(n, true), n))
		register(memory, file)
	}
}

// fanoutFileRow names the row of a file in the page cache.
func fanoutFileRow(gpus int) string { return fmt.Sprintf("gpus/%d/fanout-file/2GiB", gpus) }

func fanout(gpus int, fromFile bool) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n, src := f.size(2*gib), f.source()
		devs := make([]*cudart.Device, gpus)
		dsts := make([]cudart.DevPtr, gpus)
		for i := range devs {
			var err error
			if devs[i], dsts[i], err = f.memory(i, 0); err != nil {
				return nil, err
			}
		}
		fan, err := transfer.NewFanout(f.ctx, devs, transfer.Options{})
		if err != nil {
			return nil, err
		}
		t := &task{bytes: n, op: func() error { return fan.Upload(f.ctx, dsts, src[:n]) }, close: fan.Close}
		if fromFile {
			file, err := f.sharedFile(cached, "source", nil, 0, n)
			if err != nil {
				return nil, errors.Join(err, fan.Close())
			}
			t.op = func() error { _, err := fan.UploadFrom(f.ctx, dsts, file, 0, n); return err }
			t.close = func() error { return errors.Join(fan.Close(), file.Close()) }
		}
		t.verify = func() error {
			err := onEach(gpus, func(i int) error { return f.poison(devs[i], dsts[i], n) })
			if err == nil {
				err = t.op()
			}
			if err != nil {
				return err
			}
			return onEach(gpus, func(i int) error { return f.onDevice(devs[i], dsts[i], src[:n]) })
		}
		return t, nil
	}
}
