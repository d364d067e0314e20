package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"strings"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/weights"
)

// Safetensors of 2 GiB in the page cache, with large matrices and small norms as a language model has
// them, onto one GPU and onto several. Rates are of the files.
func init() {
	one := whole(func(int, int, int) int { return 0 })
	const target = 80 * time.Millisecond
	register(
		row{name: "weights/one-gpu/2GiB", unit: "GB/s", cpu: true, quick: true, twoCores: true, target: target, prepare: loadWeights(1, 1, layers, one)},
		row{name: "weights/20000-tensors/one-gpu", unit: "GB/s", cpu: true, twoCores: true, target: target, prepare: loadWeights(1, 1, small, one)},
		row{name: "first/weights/2GiB", unit: "GB/s", once: func(f *fixture) (sample, error) {
			if err := f.open(); err != nil {
				return sample{}, err
			}
			t, err := loadWeights(1, 1, layers, one)(f)
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
	for _, n := range gpuCounts {
		const files = 16
		byBytes := whole(func(_, before, all int) int { return n * before / all })
		inTurn := whole(func(i, _, _ int) int { return i % n })
		register(
			placedRow(n, "whole-files", loadWeights(n, files, layers, whole(func(_, before, all int) int { return files * before / all % n }))),
			placedRow(n, "shares-by-bytes", loadWeights(n, 1, layers, byBytes)),
			placedRow(n, "tensors-in-turn", loadWeights(n, 1, layers, inTurn)),
			placedRow(n, "20000-tensors-in-turn", loadWeights(n, 1, small, inTurn)),
		)
	}
}

// placedRow is a row of a placement on several GPUs.
func placedRow(gpus int, placement string, prepare func(*fixture) (*task, error)) row {
	return row{name: fmt.Sprintf("gpus/%d/weights/%s/2GiB", gpus, placement), unit: "GB/s", gpus: gpus, tableOnly: gpus > 2, quick: placement == "tensors-in-turn",
		cpu: true, target: 80 * time.Millisecond, goals: []goal{{Row: fanoutFileRow(gpus), Ratio: 0.9}}, prepare: prepare}
}

// A shapes returns the shape of tensor i of a file of n bytes, of which left are without a tensor.
type shapes func(i, n, left int) []int

// layers are large matrices and small norms, one of which is no multiple of the alignment.
func layers(i, n, left int) []int {
	return []int{min([]int{48 * mib, 16 * mib, 8192, 4*mib + 2}[i%4], max(n/8, 1), left)}
}

// small are 20,000 tensors, two thirds of which are no multiple of the alignment.
func small(i, n, left int) []int { return []int{min(max(n/20000/4096, 1)*4096+i%3, left)} }

// safetensors returns the header of a file of a model, by its number, with tensors of n bytes in all.
func safetensors(number, n int, shapeOf shapes) []byte {
	var text strings.Builder
	for off, i := 0, 0; off < n; i++ {
		shape := shapeOf(i, n, n-off)
		size := 1
		for _, k := range shape {
			size *= k
		}
		list, _ := json.Marshal(shape) // of integers
		fmt.Fprintf(&text, `,"files.%d.layers.%d":{"dtype":"U8","shape":%s,"data_offsets":[%d,%d]}`, number, i, list, off, off+size)
		off += size
	}
	header := []byte("{" + text.String()[1:] + "}")
	header = append(header, bytes.Repeat([]byte(" "), 7-(len(header)+7)%8)...)
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
}

// A placer returns where tensor i goes, before which there are that many bytes of all: for each device, what it
// gets and which bytes of the tensor that is.
type placer func(i, before, all int, t *weights.Tensor) ([]placedPart, error)

type placedPart struct {
	weights.Share
	bytes func(tensor []byte) []byte
}

// whole places tensors as they are.
func whole(deviceOf func(i, before, all int) int) placer {
	return func(i, before, all int, t *weights.Tensor) ([]placedPart, error) {
		part := placedPart{bytes: func(tensor []byte) []byte { return tensor }}
		part.Part, part.Device = t.Whole(), deviceOf(i, before, all)
		return []placedPart{part}, nil
	}
}

// loadWeights loads tensors of these shapes, in so many files, onto the GPUs where place has them.
func loadWeights(gpus, files int, shapeOf shapes, place placer) func(*fixture) (*task, error) {
	return func(f *fixture) (_ *task, err error) {
		memory := map[int]weights.Memory{}
		for i := range gpus {
			dev, p, err := f.memory(i, 0)
			if err != nil {
				return nil, err
			}
			memory[i] = weights.Memory{Device: dev, Ptr: p, Bytes: f.size(sourceBytes)}
		}
		n := f.size(2*gib) / files
		n -= min(8*mib/files, n/2) // for the alignment of tensors
		content := map[*weights.Tensor][]byte{}
		var opened []*weights.File
		defer func() {
			for i := 0; i < len(opened) && err != nil; i++ {
				_ = opened[i].Close()
			}
		}()
		for i := range files {
			file, err := f.weightsFile(i, n, shapeOf)
			if err != nil {
				return nil, err
			}
			opened = append(opened, file)
			at := i * n
			for t := range file.Tensors() {
				content[t] = f.source()[at:][:t.Size]
				at += t.Size
			}
		}
		m, err := weights.NewModel(opened...)
		if err != nil {
			return nil, err
		}
		plan, parts, err := planOf(m, files*n, place)
		if err != nil {
			return nil, err
		}
		op := func() error { return plan.Load(f.ctx, memory, weights.LoadOptions{}) }
		return &task{bytes: files * n, op: op, close: m.Close, verify: func() error {
			err := onEach(gpus, func(i int) error { return f.poison(memory[i].Device, memory[i].Ptr, memory[i].Bytes) })
			if err == nil {
				err = op()
			}
			if err != nil {
				return err
			}
			return onEach(len(plan.Devices), func(i int) error {
				d := plan.Devices[i]
				for _, t := range d.Tensors {
					want := parts[placeOf{t.Tensor, d.Device}](content[t.Tensor])
					if err := f.onDevice(memory[d.Device].Device, memory[d.Device].Ptr+cudart.DevPtr(t.Offset), want); err != nil {
						return fmt.Errorf("%s: %w", t.Tensor.Name, err)
					}
				}
				return nil
			})
		}}, nil
	}
}

// weightsFile opens file number i of n bytes of tensors each, which are the source from i*n on.
func (f *fixture) weightsFile(i, n int, shapeOf shapes) (*weights.File, error) {
	header := safetensors(i, n, shapeOf)
	name := fmt.Sprintf("model-%08x.safetensors", crc32.ChecksumIEEE(header))
	file, err := f.sharedFile(cached, name, header, i*n, n)
	if err != nil {
		return nil, err
	}
	if err := file.Close(); err != nil {
		return nil, err
	}
	return weights.OpenFile(filepath.Join(f.folder(cached), name))
}

// A placeOf is a tensor on a device.
type placeOf struct {
	tensor *weights.Tensor
	device int
}

// planOf plans the tensors of a model of n bytes, and returns which bytes of them go where.
func planOf(m *weights.Model, n int, place placer) (*weights.Plan, map[placeOf]func([]byte) []byte, error) {
	var shares []weights.Share
	parts := map[placeOf]func([]byte) []byte{}
	i, before := 0, 0
	for t := range m.Tensors() {
		list, err := place(i, before, n, t)
		if err != nil {
			return nil, nil, err
		}
		for _, p := range list {
			shares = append(shares, p.Share)
			parts[placeOf{t, p.Device}] = p.bytes
		}
		i, before = i+1, before+t.Size
	}
	plan, err := weights.PlanShares(shares, weights.PlanOptions{})
	return plan, parts, err
}
