package main

import (
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel"
)

// Kernels: what a launch costs, and device memory that a kernel checks.
func init() {
	register(
		row{name: "kernel/launch", unit: "ns", quick: true, c: inC("launch Kernel/launch"), prepare: kernelRow(func(f *fixture, k kernels) *task {
			const count = 256 // the stream must not be full, or a launch waits for the GPU
			return &task{count: count, after: k.wait, op: func() error {
				for range count {
					if err := k.Fill(k.stream, k.mem, 64, kernel.Content{}, 0); err != nil {
						return err
					}
				}
				return nil
			}}
		})},
		row{name: "kernel/check/1GiB", unit: "GB/s", quick: true, prepare: kernelRow(func(f *fixture, k kernels) *task {
			const count = 8
			n := f.size(gib)
			return &task{bytes: count * n, op: func() error {
				for range count {
					if err := k.Check(k.stream, k.mem, n, kernel.Content{}, 0, k.result); err != nil {
						return err
					}
				}
				return k.wait()
			}}
		})},
	)
}

// kernels are the module's kernels for memory, and what they are launched with.
type kernels struct {
	*kernel.Memory
	stream      *cudart.Stream
	mem, result cudart.DevPtr
	wait        func() error
}

func kernelRow(make func(*fixture, kernels) *task) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		dev, mem, err := f.memory(0, 0)
		if err != nil {
			return nil, err
		}
		_, result, err := f.memory(0, 1)
		if err != nil {
			return nil, err
		}
		m, err := kernel.NewMemory(f.ctx, dev)
		if err != nil {
			return nil, err
		}
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		k := kernels{Memory: m, stream: s, mem: mem, result: result, wait: func() error { return s.Synchronize(f.ctx) }}
		t := make(f, k)
		t.close = func() error { return errors.Join(s.Close(), m.Close()) }
		t.verify = func() error {
			n := f.size(gib)
			if err := errors.Join(f.poison(dev, mem, n), m.Fill(s, mem, n, kernel.Content{}, 0), k.wait()); err != nil {
				return err
			}
			// One byte in 1 GiB is wrong: a check that looks at all of it finds it.
			var b [1]byte
			if err := dev.CopyToHost(pointer(b[:]), mem+cudart.DevPtr(n/3), 1); err != nil {
				return err
			}
			for mismatches := range 2 {
				found, err := m.Compare(f.ctx, s, mem, n, kernel.Content{}, 0)
				if err != nil {
					return err
				}
				if found.Mismatches != mismatches {
					return fmt.Errorf("%d bytes are wrong, not %d", found.Mismatches, mismatches)
				}
				b[0] ^= 1
				if err := f.put(dev, mem+cudart.DevPtr(n/3), b[:]); err != nil {
					return err
				}
			}
			return errors.Join(m.ResetResult(s, result), t.op(), k.wait())
		}
		return t, nil
	}
}
