package main

import (
	"errors"
)

// The copies of rows_copies.go by cudaMemcpy. Its uploads may return before the device has the bytes: they have a
// wait for its stream, cudaStreamSynchronize, as Upload waits too.
func init() {
	for _, n := range copySizes {
		unit := "GB/s"
		if n < 16*mib {
			unit = "µs"
		}
		register(
			row{name: "copies/upload/" + sizeName(n) + "/cudaMemcpy", of: "copies/upload/" + sizeName(n), unit: unit, prepare: memcpyUp(n, warm)},
			row{name: "copies/download/" + sizeName(n) + "/cudaMemcpy", of: "copies/download/" + sizeName(n), unit: unit, prepare: memcpyDown(n, warm)},
		)
	}
	for _, n := range []int{64 * kib, 128 * kib, 256 * kib, mib, 16 * mib} {
		register(
			row{name: "copies/upload-cold/" + sizeName(n) + "/cudaMemcpy", of: "copies/upload-cold/" + sizeName(n), unit: "µs", prepare: memcpyUp(n, cold)},
			row{name: "copies/download-cold/" + sizeName(n) + "/cudaMemcpy", of: "copies/download-cold/" + sizeName(n), unit: "µs", prepare: memcpyDown(n, cold)},
		)
	}
}

func memcpyUp(n int, t temperature) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, dst, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		legacy, err := dev.StreamFromHandle(0) // cudaMemcpy's
		if err != nil {
			return nil, err
		}
		next, src := f.offsets(f.source(), n, t), []byte(nil)
		op := func() error {
			src = next()
			return errors.Join(dev.CopyToDevice(dst, pointer(src), n), legacy.SynchronizeBlocking())
		}
		return &task{bytes: n, op: op, close: legacy.Close, verify: func() error {
			return f.checkUpload(dev, dst, n, op, func() []byte { return src })
		}}, nil
	}
}

func memcpyDown(n int, t temperature) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(n)
		dev, src, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		next, dst := f.offsets(f.target(), n, t), []byte(nil)
		op := func() error { dst = next(); return dev.CopyToHost(pointer(dst), src, n) }
		return &task{bytes: n, op: op, verify: func() error {
			return f.checkDownload(dev, src, n, op, func() []byte { return dst })
		}}, nil
	}
}
