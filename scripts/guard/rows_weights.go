package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/weights"
)

// A safetensors file of 2 GiB in the page cache, with large matrices and small norms as a language model has
// them, onto one GPU and onto two. Rates are of the file.
func init() {
	one := func(int, int, int) int { return 0 }
	halves := func(_, before, all int) int { return 2 * before / all }
	inTurn := func(i, _, _ int) int { return i % 2 }
	const target = 80 * time.Millisecond
	register(
		row{name: "weights/one-gpu/2GiB", unit: "GB/s", cpu: true, quick: true, twoCores: true, target: target, prepare: loadWeights(1, one)},
		row{name: "weights/split-in-halves/2GiB", unit: "GB/s", cpu: true, target: target, prepare: loadWeights(2, halves)},
		row{name: "weights/tensors-in-turn/2GiB", unit: "GB/s", cpu: true, quick: true, target: target, prepare: loadWeights(2, inTurn)},
		row{name: "first/weights/2GiB", unit: "GB/s", once: func(f *fixture) (sample, error) {
			if err := f.open(); err != nil {
				return sample{}, err
			}
			t, err := loadWeights(1, one)(f)
			if err != nil {
				return sample{}, err
			}
			took, err := timed(t.op)
			if err != nil {
				return sample{}, err
			}
			if f.verify {
				err = t.verify()
			}
			return figures("GB/s", took, 1, t.bytes), errors.Join(err, t.close())
		}},
	)
}

// safetensors returns the header of a file with tensors of n bytes in all.
func safetensors(n int) []byte {
	var text strings.Builder
	sizes := []int{48 * mib, 16 * mib, 8192, 4*mib + 2}
	for off, i := 0, 0; off < n; i++ {
		size := min(sizes[i%len(sizes)], max(n/8, 1), n-off)
		fmt.Fprintf(&text, `,"layers.%d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}`, i, size, off, off+size)
		off += size
	}
	header := []byte("{" + text.String()[1:] + "}")
	header = append(header, bytes.Repeat([]byte(" "), 7-(len(header)+7)%8)...)
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
}

// loadWeights loads each tensor onto the GPU that deviceOf returns for its number and the bytes before it, of all.
func loadWeights(gpus int, deviceOf func(i, before, all int) int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		n := f.size(2 * gib)
		memory := map[int]weights.Memory{}
		for i := range gpus {
			dev, p, err := f.memory(i, 0)
			if err != nil {
				return nil, err
			}
			memory[i] = weights.Memory{Device: dev, Ptr: p, Bytes: f.size(sourceBytes)}
		}
		const slack = mib // for the alignment of tensors
		n -= min(slack, n/2)
		header := safetensors(n)
		file, err := f.sharedFile(cached, "model.safetensors", header, n)
		if err != nil {
			return nil, err
		}
		if err := file.Close(); err != nil {
			return nil, err
		}
		m, err := weights.OpenModel(filepath.Join(f.folder(cached), "model.safetensors"))
		if err != nil {
			return nil, err
		}
		i, before := 0, 0
		plan, err := weights.NewPlan(m.Tensors(), func(t *weights.Tensor) int {
			to := deviceOf(i, before, n)
			i, before = i+1, before+t.Size
			return to
		}, weights.PlanOptions{})
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		op := func() error { return plan.Load(f.ctx, memory, weights.LoadOptions{}) }
		return &task{bytes: n, op: op, close: m.Close, verify: func() error {
			for _, to := range memory {
				if err := f.poison(to.Device, to.Ptr, to.Bytes); err != nil {
					return err
				}
			}
			if err := op(); err != nil {
				return err
			}
			for _, d := range plan.Devices {
				for _, t := range d.Tensors {
					want := f.source()[int(t.Tensor.Offset)-len(header):][:t.Size]
					if err := f.onDevice(memory[d.Device].Device, memory[d.Device].Ptr+cudart.DevPtr(t.Offset), want); err != nil {
						return fmt.Errorf("%s: %w", t.Tensor.Name, err)
					}
				}
			}
			return nil
		}}, nil
	}
}
