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

// A safetensors file of 2 GiB in the page cache, with large matrices and small norms as a language model has
// them, onto one GPU and onto two. Rates are of the file.
func init() {
	one := whole(func(int, int, int) int { return 0 })
	halves := whole(func(_, before, all int) int { return 2 * before / all })
	inTurn := whole(func(i, _, _ int) int { return i % 2 })
	const target = 80 * time.Millisecond
	register(
		row{name: "weights/one-gpu/2GiB", unit: "GB/s", cpu: true, quick: true, twoCores: true, target: target, prepare: loadWeights(1, layers, one)},
		row{name: "weights/split-in-halves/2GiB", unit: "GB/s", cpu: true, target: target, prepare: loadWeights(2, layers, halves)},
		row{name: "weights/tensors-in-turn/2GiB", unit: "GB/s", cpu: true, quick: true, target: target, prepare: loadWeights(2, layers, inTurn)},
		row{name: "weights/20000-tensors/one-gpu", unit: "GB/s", cpu: true, twoCores: true, target: target, prepare: loadWeights(1, small, one)},
		row{name: "weights/20000-tensors/in-turn", unit: "GB/s", cpu: true, target: target, prepare: loadWeights(2, small, inTurn)},
		row{name: "first/weights/2GiB", unit: "GB/s", once: func(f *fixture) (sample, error) {
			if err := f.open(); err != nil {
				return sample{}, err
			}
			t, err := loadWeights(1, layers, one)(f)
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

// A shapes returns the shape of tensor i of a file of n bytes, of which left are without a tensor.
type shapes func(i, n, left int) []int

// layers are large matrices and small norms, one of which is no multiple of the alignment.
func layers(i, n, left int) []int {
	return []int{min([]int{48 * mib, 16 * mib, 8192, 4*mib + 2}[i%4], max(n/8, 1), left)}
}

// small are 20,000 tensors, two thirds of which are no multiple of the alignment.
func small(i, n, left int) []int { return []int{min(max(n/20000/4096, 1)*4096+i%3, left)} }

// safetensors returns the header of a file with tensors of n bytes in all.
func safetensors(n int, shapeOf shapes) []byte {
	var text strings.Builder
	for off, i := 0, 0; off < n; i++ {
		shape := shapeOf(i, n, n-off)
		size := 1
		for _, k := range shape {
			size *= k
		}
		list, _ := json.Marshal(shape) // of integers
		fmt.Fprintf(&text, `,"layers.%d":{"dtype":"U8","shape":%s,"data_offsets":[%d,%d]}`, i, list, off, off+size)
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

// loadWeights loads tensors of these shapes onto the GPUs where place has them.
func loadWeights(gpus int, shapeOf shapes, place placer) func(*fixture) (*task, error) {
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
		header := safetensors(n, shapeOf)
		name := fmt.Sprintf("model-%08x.safetensors", crc32.ChecksumIEEE(header))
		file, err := f.sharedFile(cached, name, header, n)
		if err != nil {
			return nil, err
		}
		if err := file.Close(); err != nil {
			return nil, err
		}
		m, err := weights.OpenModel(filepath.Join(f.folder(cached), name))
		if err != nil {
			return nil, err
		}
		plan, parts, err := planOf(m, n, place)
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
					want := parts[placeOf{t.Tensor, d.Device}](f.source()[int(t.Tensor.Offset)-len(header):][:t.Tensor.Size])
					if err := f.onDevice(memory[d.Device].Device, memory[d.Device].Ptr+cudart.DevPtr(t.Offset), want); err != nil {
						return fmt.Errorf("%s: %w", t.Tensor.Name, err)
					}
				}
			}
			return nil
		}}, nil
	}
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
