//go:build linux

package benchmarks

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/weights"
)

// BenchmarkWeights is safetensors of 2 GiB in the page cache, with large matrices and small norms as a language model
// has them, onto one GPU. Rates are of the files. Those of BenchmarkGPUs are onto several.
func BenchmarkWeights(b *testing.B) { bench(b, "Weights") }

var _ = func() bool {
	one := whole(func(int, int, int) int { return 0 })
	add("Weights",
		row{name: "one-gpu/2GiB", cpu: true, quick: true, twoCores: true, prepare: loadWeights(1, 1, layers, one)},
		row{name: "20000-tensors/one-gpu", cpu: true, twoCores: true, prepare: loadWeights(1, 1, small, one)})
	for _, n := range []int{2, 4, 8} {
		const files = 16
		inTurn := whole(func(i, _, _ int) int { return i % n })
		place := func(name string, prepare func(*fixture) task) {
			add("GPUs", row{name: fmt.Sprintf("%d/weights/%s/2GiB", n, name), gpus: n, cpu: true, quick: name == "tensors-in-turn", prepare: prepare})
		}
		place("whole-files", loadWeights(n, files, layers, whole(func(_, before, all int) int { return files * before / all % n })))
		place("shares-by-bytes", loadWeights(n, 1, layers, whole(func(_, before, all int) int { return n * before / all })))
		place("tensors-in-turn", loadWeights(n, 1, layers, inTurn))
		place("20000-tensors-in-turn", loadWeights(n, 1, small, inTurn))
		// Each GPU gets a part of the rows, or of the columns, as tensor parallelism has them.
		place("rows-of-each", loadWeights(n, 1, matrices, partOf(0, n)))
		place("columns-of-each", loadWeights(n, 1, matrices, partOf(1, n)))
	}
	return true
}()

// A shapes returns the shape of tensor i of a file of n bytes. The last left of them have no tensor yet.
type shapes func(i, n, left int) []int

// layers are large matrices and small norms. The size of one norm is not a multiple of the alignment.
func layers(i, n, left int) []int {
	return []int{min([]int{48 * mib, 16 * mib, 8192, 4*mib + 2}[i%4], max(n/8, 1), left)}
}

// small are 20,000 tensors. The sizes of two thirds are not multiples of the alignment.
func small(i, n, left int) []int { return []int{min(max(n/20000/4096, 1)*4096+i%3, left)} }

// matrices are of 4096 x 7168 elements of 2 bytes.
func matrices(_, n, left int) []int {
	const columns = 2 * 7168
	rows := min(4096, n/8/columns, left/columns)
	if rows == 0 {
		return []int{1, left}
	}
	return []int{rows, columns}
}

// safetensors returns the header of a file of a model, by its number, with tensors of n bytes in all.
func safetensors(number, n int, shapeOf shapes) []byte {
	var text strings.Builder
	for off, i := 0, 0; off < n; i++ {
		shape, size := shapeOf(i, n, n-off), 1
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

// partOf places an equal part of a dimension of each tensor on each device.
func partOf(dim, devices int) placer {
	return func(_, _, _ int, t *weights.Tensor) (parts []placedPart, err error) {
		for d := range devices {
			n := t.Shape[dim]
			part, err := t.Slice(dim, n*d/devices, n*(d+1)/devices)
			if err != nil {
				return nil, err
			}
			one := placedPart{bytes: func(tensor []byte) (list []byte) {
				if part.Row == 0 {
					return tensor[part.From:][:part.Size]
				}
				for from := part.From; len(list) < part.Size; from += part.Stride {
					list = append(list, tensor[from:][:part.Row]...)
				}
				return list
			}}
			one.Part, one.Device = part, d
			parts = append(parts, one)
		}
		return parts, nil
	}
}

// loadWeights loads tensors of these shapes, in so many files, onto the GPUs where place has them.
func loadWeights(gpus, files int, shapeOf shapes, place placer) func(*fixture) task {
	return func(f *fixture) task {
		memory := map[int]weights.Memory{}
		for i := range gpus {
			dev, p := f.memory(i, 0)
			memory[i] = weights.Memory{Device: dev, Ptr: p, Bytes: f.size(sourceBytes)}
		}
		n := f.size(2*gib) / files
		n -= min(8*mib/files, n/2) // for the alignment of tensors
		content := map[*weights.Tensor][]byte{}
		var opened []*weights.File
		for i := range files {
			file := weightsFile(f, i, n, shapeOf)
			opened = append(opened, file)
			at := i * n
			for t := range file.Tensors() {
				content[t] = f.source()[at:][:t.Size]
				at += t.Size
			}
		}
		m := must(weights.NewModel(opened...))(f)
		f.later(m.Close)
		plan, parts, err := planOf(m, files*n, place)
		f.check(err)
		op := func() error { return plan.Load(ctx, memory, weights.LoadOptions{}) }
		return task{bytes: files * n, op: op, verify: func(op func() error) error {
			err := onEach(gpus, func(i int) error { return poison(memory[i].Device, memory[i].Ptr, memory[i].Bytes) })
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
					if err := onDevice(memory[d.Device].Device, memory[d.Device].Ptr+cudart.DevPtr(t.Offset), want); err != nil {
						return fmt.Errorf("%s: %w", t.Tensor.Name, err)
					}
				}
				return nil
			})
		}}
	}
}

// weightsFile opens file number i of n bytes of tensors each, which are the source from i*n on.
func weightsFile(f *fixture, i, n int, shapeOf shapes) *weights.File {
	header := safetensors(i, n, shapeOf)
	name := fmt.Sprintf("model-%08x.safetensors", crc32.ChecksumIEEE(header))
	f.sharedFile(cached, name, header, i*n, n)
	return must(weights.OpenFile(filepath.Join(f.folder(cached), name)))(f)
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

var _ = add("First", firstRow(row{name: "weights/2GiB"}, func(f *fixture, b *testing.B) {
	t := loadWeights(1, 1, layers, whole(func(int, int, int) int { return 0 }))(f)
	took, err := timed(t.op)
	f.check(err)
	b.ReportMetric(float64(took), "ns/op")
	b.ReportMetric(float64(t.bytes)/float64(took), "GB/s")
	if verifying() {
		f.check(errors.Join(t.verify(t.op)))
	}
}))
