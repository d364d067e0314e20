package main

import (
	"errors"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// One source onto two GPUs. Rates are of the source.
func init() {
	register(
		row{name: "gpus/fanout/2GiB", unit: "GB/s", cpu: true, quick: true, target: 80 * time.Millisecond, c: inC("fanout Fanout/2/bytes/2GiB/"), prepare: fanout(false)},
		row{name: "gpus/fanout-file/2GiB", unit: "GB/s", cpu: true, target: 80 * time.Millisecond, prepare: fanout(true)},
	)
}

func fanout(fromFile bool) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n, src := f.size(2*gib), f.source()
		var devs []*cudart.Device
		var dsts []cudart.DevPtr
		for i := range 2 {
			dev, dst, err := f.memory(i, 0)
			if err != nil {
				return nil, err
			}
			devs, dsts = append(devs, dev), append(dsts, dst)
		}
		fan, err := transfer.NewFanout(f.ctx, devs, transfer.Options{})
		if err != nil {
			return nil, err
		}
		t := &task{bytes: n, op: func() error { return fan.Upload(f.ctx, dsts, src[:n]) }, close: fan.Close}
		if fromFile {
			file, err := f.sharedFile(cached, "source", nil, n)
			if err != nil {
				return nil, errors.Join(err, fan.Close())
			}
			t.op = func() error { _, err := fan.UploadFrom(f.ctx, dsts, file, 0, n); return err }
			t.close = func() error { return errors.Join(fan.Close(), file.Close()) }
		}
		t.verify = func() error {
			err := f.poison(devs[1], dsts[1], n)
			if err == nil {
				err = f.checkUpload(devs[0], dsts[0], n, t.op, func() []byte { return src[:n] })
			}
			return errors.Join(err, f.onDevice(devs[1], dsts[1], src[:n]))
		}
		return t, nil
	}
}
