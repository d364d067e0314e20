package weights_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/transfer"
	"github.com/gopinned/pinned/weights"
)

const mib = 1 << 20

// devicesOf returns simulated devices, or with a real GPU as many as there are.
func devicesOf(t testing.TB, n int) []*cudart.Device {
	t.Helper()
	if testgpu.Real() {
		devs := testgpu.Device(t).Runtime().Devices()
		return devs[:min(n, len(devs))]
	}
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, n)})
	return rt.Devices()
}

// memoryOf allocates n bytes of 0xEE on a device until the test ends.
func memoryOf(t testing.TB, dev *cudart.Device, n int) weights.Memory {
	t.Helper()
	p, err := dev.Malloc(max(n, 1))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Free(p)) })
	m := weights.Memory{Device: dev, Ptr: p, Bytes: n}
	forget(t, m)
	return m
}

func forget(t testing.TB, m weights.Memory) {
	t.Helper()
	if m.Bytes > 0 {
		require.NoError(t, m.Device.Memset(m.Ptr, 0xEE, m.Bytes))
		require.NoError(t, m.Device.Synchronize(context.Background()))
	}
}

// onDevice reads memory by CUDA's own means.
func onDevice(t testing.TB, m weights.Memory) []byte {
	t.Helper()
	b := make([]byte, m.Bytes)
	if len(b) > 0 {
		require.NoError(t, m.Device.CopyToHost(unsafe.Pointer(&b[0]), m.Ptr, len(b)))
	}
	return b
}

// A bench is a model of several files, with the bytes of its tensors.
type bench struct {
	model    *weights.Model
	tensors  []*weights.Tensor
	contents map[*weights.Tensor][]byte
	paths    []string
}

// specsOf are tensors of sizes from none to several chunks, odd ones among them.
func specsOf(prefix string) []spec {
	return []spec{
		{prefix + "embed", weights.BF16, []int{300, 7, 512}},
		{prefix + "norm", weights.F32, []int{5}},
		{prefix + "none", weights.F32, []int{0, 7}},
		{prefix + "scalar", weights.F16, nil},
		{prefix + "odd", weights.I8, []int{1_234_567}},
		{prefix + "up", weights.F32, []int{64, 1000}},
		{prefix + "down", weights.F32, []int{64, 1000}},
		{prefix + "last", weights.I8, []int{3}},
	}
}

// newBench writes two safetensors files and two GGUF files.
func newBench(t testing.TB) *bench {
	t.Helper()
	dir := t.TempDir()
	return benchOf(t, dir, map[string][]byte{
		"a.safetensors": makeSafetensors(t, nil, specsOf("a.")...),
		"b.safetensors": makeSafetensors(t, map[string]string{"format": "pt"}, specsOf("b.")...),
		"c.gguf":        makeGGUF(3, 64, append(specsOf("c."), spec{"c.q", "Q4_0", []int{8, 64}})...),
		"d.gguf":        makeGGUF(2, 32, specsOf("d.")...),
	})
}

func benchOf(t testing.TB, dir string, files map[string][]byte) *bench {
	t.Helper()
	b := &bench{contents: map[*weights.Tensor][]byte{}}
	var opened []*weights.File
	for name, file := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, file, 0o600))
		f, err := weights.OpenFile(path)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		opened, b.paths = append(opened, f), append(b.paths, path)
		for tensor := range f.Tensors() {
			b.contents[tensor] = file[tensor.Offset:][:tensor.Size]
		}
	}
	var err error
	b.model, err = weights.NewModel(opened...)
	require.NoError(t, err)
	b.tensors = slices.Collect(b.model.Tensors())
	return b
}

// of returns the bytes of a part.
func (b *bench) of(p weights.Part) (list []byte) {
	all := b.contents[p.Tensor]
	if p.Row == 0 {
		return all[p.From:][:p.Size]
	}
	for from := p.From; len(list) < p.Size; from += p.Stride {
		list = append(list, all[from:][:min(p.Row, p.Size-len(list))]...)
	}
	return list
}

// A planned is a plan with memory for it.
type planned struct {
	*bench
	plan   *weights.Plan
	memory map[int]weights.Memory
}

func (b *bench) planned(t testing.TB, devs []*cudart.Device, plan *weights.Plan) *planned {
	t.Helper()
	p := &planned{b, plan, map[int]weights.Memory{}}
	for _, d := range plan.Devices {
		p.memory[d.Device] = memoryOf(t, devs[d.Device], d.Bytes)
	}
	return p
}

// fileBytes returns the number of bytes of files that a load reads.
func (p *planned) fileBytes(t testing.TB) (total int) {
	t.Helper()
	uploads, err := p.plan.Uploads(p.memory)
	require.NoError(t, err)
	for _, u := range uploads {
		for _, s := range u.Segments {
			total += s.N
		}
	}
	return total
}

func (p *planned) forget(t testing.TB) {
	t.Helper()
	for _, m := range p.memory {
		forget(t, m)
	}
}

// requireLoaded requires that all devices have what the plan has for them, and
// nothing else but zeros between tensors.
func (p *planned) requireLoaded(t testing.TB, what string) {
	t.Helper()
	for _, d := range p.plan.Devices {
		want, got, end := bytes.Repeat([]byte{0xEE}, d.Bytes), onDevice(t, p.memory[d.Device]), 0
		for _, placed := range d.Tensors {
			for between := want[end:placed.Offset]; len(between) > 0 && got[end] == 0; end++ {
				want[end], between = 0, between[1:]
			}
			end = placed.Offset + copy(want[placed.Offset:], p.of(placed.Part))
		}
		require.True(t, bytes.Equal(want, got), "%s: device %d", what, d.Device)
	}
}

func TestLoadBringsEveryTensorToItsPlace(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 8)
	b := newBench(t)
	options := []weights.LoadOptions{{}, {DirectIO: true}, {DropCache: true}}
	planOptions := []weights.PlanOptions{{}, {Align: 1}, {Align: 4096}}
	places := []func(*weights.Tensor) int{
		func(t *weights.Tensor) int { return len(t.Name) % len(devs) },
		nil,
		func(t *weights.Tensor) int {
			if strings.HasSuffix(t.Name, "up") {
				return weights.Skip
			}
			return len(devs) - 1
		},
	}
	for i := range cells(len(options), len(planOptions), len(places)) {
		o, what := options[i[0]], fmt.Sprint(i)
		plan, err := weights.NewPlan(slices.Values(b.tensors), places[i[2]], planOptions[i[1]])
		require.NoError(t, err)
		p := b.planned(t, devs, plan)
		total := p.fileBytes(t)
		seen := []int{0}
		o.Progress = func(done, of int) {
			seen = append(seen, done)
			assert.Equal(t, total, of)
		}
		require.NoError(t, plan.Load(t.Context(), p.memory, o), what)
		p.requireLoaded(t, what)
		assert.True(t, slices.IsSorted(seen), what)
		assert.Equal(t, total, seen[len(seen)-1], what)
	}
}

// Tensors that several devices get whole, that they share by rows, and both.
func TestSharesReachTheirDevices(t *testing.T) {
	t.Parallel()
	for name, no := range map[string][][2]int{"peers": nil, "no peers": {{0, 1}}} {
		devs := devicesOf(t, 8)
		if no != nil {
			_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3), NoPeerAccess: no})
			devs = rt.Devices()
		}
		b := newBench(t)
		var shares []weights.Share
		rows := func(tensor *weights.Tensor, from, to, device int) {
			part, err := tensor.Rows(from, to)
			require.NoError(t, err)
			shares = append(shares, weights.Share{Part: part, Device: device})
		}
		for i, tensor := range b.tensors {
			n := 1
			if len(tensor.Shape) > 0 {
				n = tensor.Shape[0]
			}
			for d := range devs {
				switch {
				case i%3 == 0 && len(tensor.Shape) > 0:
					rows(tensor, n*d/len(devs), n*(d+1)/len(devs), d)
				case i%3 == 1 && n > 2: // each has its neighbour's first rows too
					rows(tensor, n*d/len(devs), min(n*(d+1)/len(devs)+2, n), d)
				case i%3 == 2 || d == 1:
					shares = append(shares, weights.Share{Part: tensor.Whole(), Device: d})
				}
			}
		}
		rand.Shuffle(len(shares), func(i, j int) { shares[i], shares[j] = shares[j], shares[i] })
		plan, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err)
		p := b.planned(t, devs, plan)
		for range 2 {
			p.forget(t)
			require.NoError(t, plan.Load(t.Context(), p.memory, weights.LoadOptions{}), name)
			p.requireLoaded(t, name)
		}
	}
}

// A countingReader counts how often each byte is read.
type countingReader struct {
	data []byte

	mu    sync.Mutex
	reads []int
}

func (c *countingReader) ReadAt(p []byte, off int64) (int, error) {
	n := copy(p, c.data[off:])
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range n {
		c.reads[int(off)+i]++
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func TestEveryByteIsReadOnce(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	for name, data := range map[string][]byte{"safetensors": makeSafetensors(t, nil, specsOf("")...), "GGUF": makeGGUF(3, 32, specsOf("")...)} {
		reader := &countingReader{data: data, reads: make([]int, len(data))}
		f, err := weights.Parse(reader, int64(len(data)), name)
		require.NoError(t, err)
		clear(reader.reads)
		var shares []weights.Share
		for tensor := range f.Tensors() {
			for d := range devs {
				shares = append(shares, weights.Share{Part: tensor.Whole(), Device: d})
			}
		}
		plan, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err)
		p := (&bench{}).planned(t, devs, plan)
		require.Len(t, uploadsOf(t, plan), 1)
		require.NoError(t, plan.Load(t.Context(), p.memory, weights.LoadOptions{}))
		for tensor := range f.Tensors() {
			for i := range tensor.Size {
				if n := reader.reads[int(tensor.Offset)+i]; n != 1 {
					t.Fatalf("%s: byte %d of %s is read %d times", name, i, tensor.Name, n)
				}
			}
		}
	}
}

// Places of the caller's choice, in any order, some tensors on several devices, at
// several places of one, or in parts.
func TestPlaceCopiesToAddresses(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	b := newBench(t)
	for seed := range uint64(4) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		type place struct {
			part   weights.Part
			device int
			at     int
		}
		var places []place
		used := make([]int, len(devs))
		for _, i := range rnd.Perm(len(b.tensors)) {
			for range rnd.IntN(4) {
				part := b.tensors[i].Whole()
				if rnd.IntN(3) == 0 {
					part.From = rnd.IntN(part.Size + 1)
					part.Size = rnd.IntN(part.Size - part.From + 1)
				}
				d := rnd.IntN(len(devs))
				used[d] += rnd.IntN(2) * rnd.IntN(300)
				places = append(places, place{part, d, used[d]})
				used[d] += part.Size
			}
		}
		var memory []weights.Memory
		want := make([][]byte, len(devs))
		for d, dev := range devs {
			memory = append(memory, memoryOf(t, dev, used[d]))
			want[d] = bytes.Repeat([]byte{0xEE}, used[d])
		}
		var placements []weights.Placement
		for _, p := range places {
			to := memory[p.device]
			to.Ptr, to.Bytes = to.Ptr+cudart.DevPtr(p.at), to.Bytes-p.at
			placements = append(placements, weights.Placement{Part: p.part, To: to})
			copy(want[p.device][p.at:], b.of(p.part))
		}
		rnd.Shuffle(len(placements), func(i, j int) { placements[i], placements[j] = placements[j], placements[i] })
		require.NoError(t, weights.Place(t.Context(), placements, weights.LoadOptions{}))
		for d := range devs {
			require.True(t, bytes.Equal(want[d], onDevice(t, memory[d])), "seed %d, device %d", seed, d)
		}
	}
	require.NoError(t, weights.Place(t.Context(), nil, weights.LoadOptions{}), "of nothing")
}

func TestRowsAreRangesOfBytes(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeGGUF(3, 32, spec{"q", "Q4_0", []int{6, 2, 64}}, spec{"v", "Q4_0", []int{64}}, spec{"s", weights.F32, nil}, spec{"e", weights.F32, []int{0, 3}}), "f")
	get := func(name string) *weights.Tensor {
		tensor, ok := f.Tensor(name)
		require.True(t, ok)
		return tensor
	}
	q := get("q")
	p, err := q.Rows(1, 3)
	require.NoError(t, err)
	assert.Equal(t, weights.Part{Tensor: q, From: 72, Size: 144}, p)
	p, err = q.Rows(0, 6)
	require.NoError(t, err)
	assert.Equal(t, q.Whole(), p)
	p, err = q.Rows(6, 6)
	require.NoError(t, err)
	assert.Equal(t, weights.Part{Tensor: q, From: q.Size}, p)
	p, err = q.Slice(1, 1, 2)
	require.NoError(t, err)
	assert.Equal(t, weights.Part{Tensor: q, From: 36, Size: 6 * 36, Row: 36, Stride: 72}, p)
	p, err = q.Slice(2, 32, 64)
	require.NoError(t, err)
	assert.Equal(t, weights.Part{Tensor: q, From: 18, Size: 12 * 18, Row: 18, Stride: 36}, p)
	p, err = q.Slice(1, 0, 2)
	require.NoError(t, err)
	assert.Equal(t, q.Whole(), p)
	p, err = get("v").Rows(32, 64)
	require.NoError(t, err)
	assert.Equal(t, weights.Part{Tensor: get("v"), From: 18, Size: 18}, p)
	p, err = get("e").Slice(1, 1, 2)
	require.NoError(t, err)
	assert.Equal(t, get("e").Whole(), p)
	p, err = get("e").Rows(0, 0)
	require.NoError(t, err)
	assert.Equal(t, get("e").Whole(), p)
	for want, one := range map[string]func() (weights.Part, error){
		`weights: slice of tensor "s": dimension 0 of 0`:                            func() (weights.Part, error) { return get("s").Rows(0, 1) },
		`weights: slice of tensor "q": 0 to 7 of dimension 0, which is 6`:           func() (weights.Part, error) { return q.Rows(0, 7) },
		`weights: slice of tensor "q": -1 to 2 of dimension 0, which is 6`:          func() (weights.Part, error) { return q.Rows(-1, 2) },
		`weights: slice of tensor "q": 3 to 2 of dimension 0, which is 6`:           func() (weights.Part, error) { return q.Rows(3, 2) },
		`weights: slice of tensor "v": shape [33] has 33 elements, which do not fi`: func() (weights.Part, error) { return get("v").Rows(0, 33) },
		`weights: slice of tensor "q": dimension 3 of 3`:                            func() (weights.Part, error) { return q.Slice(3, 0, 1) },
		`weights: slice of tensor "q": shape [16] has 16 elements, which do not fi`: func() (weights.Part, error) { return q.Slice(2, 16, 48) },
	} {
		_, err := one()
		assert.ErrorContains(t, err, want)
	}
}

// Columns of each device, columns that both get, and rows and columns of one tensor.
func TestColumnsReachTheirDevices(t *testing.T) {
	t.Parallel()
	devs := devicesOf(t, 2)
	specs := func(prefix string) []spec {
		return []spec{
			{prefix + "wide", weights.BF16, []int{100, 60_000}}, {prefix + "narrow", weights.F32, []int{3000, 37}}, {prefix + "odd", weights.I8, []int{7, 1001}},
			{prefix + "cube", weights.F16, []int{20, 30, 50}}, {prefix + "flat", weights.I8, []int{123_457}}, {prefix + "last", weights.I8, []int{3, 3}},
		}
	}
	b := benchOf(t, t.TempDir(), map[string][]byte{"a.safetensors": makeSafetensors(t, nil, specs("a.")...), "b.gguf": makeGGUF(3, 32, specs("b.")...)})
	var shares []weights.Share
	add := func(tensor *weights.Tensor, dim, from, to int, devices ...int) {
		part, err := tensor.Slice(dim, from, to)
		require.NoError(t, err)
		for _, d := range devices {
			shares = append(shares, weights.Share{Part: part, Device: d % len(devs)})
		}
	}
	for i, tensor := range b.tensors {
		last := len(tensor.Shape) - 1
		n := tensor.Shape[last]
		switch {
		case i%3 == 0:
			add(tensor, last, 0, n/2, 0)
			add(tensor, last, n/2, n, len(devs)-1)
		case i%3 == 1 && len(devs) > 1:
			add(tensor, last, n/3, n, 0, 1)
		case last > 0 && len(devs) > 1:
			add(tensor, 0, 0, tensor.Shape[0]/2, 0) // the other device gets all of its columns but the first
			add(tensor, last, 1, n, 1)
		default:
			add(tensor, 0, 0, tensor.Shape[0], 0)
		}
	}
	rand.Shuffle(len(shares), func(i, j int) { shares[i], shares[j] = shares[j], shares[i] })
	for _, o := range []weights.LoadOptions{{}, {DirectIO: true}, {DropCache: true}} {
		plan, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err)
		p := b.planned(t, devs, plan)
		total, last := p.fileBytes(t), 0
		o.Progress = func(done, of int) {
			assert.LessOrEqual(t, last, done)
			assert.Equal(t, total, of)
			last = done
		}
		require.NoError(t, plan.Load(t.Context(), p.memory, o))
		assert.Equal(t, total, last)
		p.requireLoaded(t, fmt.Sprint(o.DirectIO, o.DropCache))
	}
}

// A failure within columns is at its byte of the file, and the tensors behind it are incomplete.
func TestFailuresWithinColumns(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	boom := errors.New("the disk is on fire")
	data := makeSafetensors(t, nil, u8("a", 100), spec{"b", weights.I8, []int{50, 1000}}, u8("c", 100))
	broken := maxInt
	f, err := weights.Parse(readerAtFunc(func(p []byte, off int64) (int, error) {
		n := copy(p, data[off:])
		if off <= int64(broken) && int64(broken) < off+int64(n) {
			return broken - int(off), boom
		}
		return n, nil
	}), int64(len(data)), "file")
	require.NoError(t, err)
	tensors := slices.Collect(f.Tensors())
	broken = int(tensors[1].Offset) + 7*1000 + 654
	columns, err := tensors[1].Slice(1, 600, 700)
	require.NoError(t, err)
	plan, err := weights.PlanShares([]weights.Share{{Part: tensors[0].Whole()}, {Part: columns}, {Part: tensors[2].Whole()}}, weights.PlanOptions{})
	require.NoError(t, err)
	p := (&bench{}).planned(t, rt.Devices(), plan)
	var failed *weights.LoadError
	require.ErrorAs(t, plan.Load(t.Context(), p.memory, weights.LoadOptions{}), &failed)
	require.ErrorIs(t, failed, boom)
	assert.Equal(t, tensors[1], failed.Tensor)
	assert.Equal(t, int64(broken), failed.Offset)
	assert.Equal(t, tensors[:1], failed.Complete)
}

// Tensors that go to two devices in turn are one upload to each, however small they are.
func TestSmallTensorsAreCopiedTogether(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	var specs []spec
	for i := range 4000 {
		specs = append(specs, u8(fmt.Sprint(i), 1001))
	}
	b := benchOf(t, t.TempDir(), map[string][]byte{"a": makeSafetensors(t, nil, specs...)})
	i := 0
	plan, err := weights.NewPlan(slices.Values(b.tensors), func(*weights.Tensor) int { i++; return i % 2 }, weights.PlanOptions{})
	require.NoError(t, err)
	p := b.planned(t, rt.Devices(), plan)
	before := sim.Calls("cudaMemcpyAsync")
	require.NoError(t, plan.Load(t.Context(), p.memory, weights.LoadOptions{}))
	assert.Less(t, sim.Calls("cudaMemcpyAsync")-before, 20)
	p.requireLoaded(t, "")
}

func TestInvalidSharesAreRefused(t *testing.T) {
	t.Parallel()
	f := mustParse(t, makeSafetensors(t, nil, u8("a", 300)), "the file")
	a, _ := f.Tensor("a")
	for want, shares := range map[string][]weights.Share{
		`tensor "a" of the file: 300 bytes from byte 1 on, it has 300`:             {{weights.Part{Tensor: a, From: 1, Size: 300}, 0}},
		`tensor "a" of the file: -1 bytes from byte 1 on, it has 300`:              {{weights.Part{Tensor: a, From: 1, Size: -1}, 0}},
		`tensor "a" of the file: 1 bytes from byte -1 on, it has 300`:              {{weights.Part{Tensor: a, From: -1, Size: 1}, 0}},
		`tensor "a" is placed on device -1`:                                        {{a.Whole(), -1}},
		`nil tensor`:                                                               {{}},
		`parts of tensor "a" of the file overlap on device 1, from byte 299 on`:    {{weights.Part{Tensor: a, From: 299, Size: 1}, 1}, {a.Whole(), 1}},
		`tensor "x": not from a File's or Model's tensors`:                         {{(&weights.Tensor{Name: "x"}).Whole(), 1}},
		`parts of tensor "a" of the file overlap on device 0, from byte 0 on`:      {{a.Whole(), 1}, {a.Whole(), 0}, {a.Whole(), 0}},
		`parts of tensor "a" of the file overlap on device 2, from byte 0 on`:      {{a.Whole(), 2}, {weights.Part{Tensor: a, Size: 1}, 2}},
		`tensor "a" of the file: 9223372036854775807 bytes from byte 1 on, it has`: {{weights.Part{Tensor: a, From: 1, Size: maxInt}, 0}},
	} {
		_, err := weights.PlanShares(shares, weights.PlanOptions{})
		assert.ErrorContains(t, err, "weights: plan: "+want)
	}
	part := func(from, size, row, stride int) weights.Part {
		return weights.Part{Tensor: a, From: from, Size: size, Row: row, Stride: stride}
	}
	for want, parts := range map[string][]weights.Part{
		"10 bytes from byte 0 on in rows of -1 every 5":  {part(0, 10, -1, 5)},
		"10 bytes from byte 0 on in rows of 3 every 2":   {part(0, 10, 3, 2)},
		"10 bytes from byte 280 on in rows of 3 every 9": {part(280, 10, 3, 9)},
		"10 bytes from byte 0 on in rows of 1 every 922": {part(0, 10, 1, maxInt)},
		"overlap on device 0, from byte 0 on":            {part(0, 30, 10, 100), part(0, 1, 0, 0)},
		"overlap on device 0, from byte 100 on":          {part(0, 30, 10, 100), part(20, 80, 0, 0), part(100, 10, 0, 0)},
		"overlap on device 0, from byte 5 on":            {part(0, 30, 10, 100), part(5, 30, 10, 100)},
		"overlap on device 0, from byte 9 on":            {part(0, 30, 10, 100), part(9, 40, 4, 25)},
	} {
		var shares []weights.Share
		for _, p := range parts {
			shares = append(shares, weights.Share{Part: p})
		}
		_, err := weights.PlanShares(shares, weights.PlanOptions{})
		assert.ErrorContains(t, err, want)
	}
	_, err := weights.PlanShares([]weights.Share{{part(0, 30, 10, 100), 0}, {part(10, 90, 0, 0), 0}, {part(110, 30, 15, 30), 0}}, weights.PlanOptions{})
	require.NoError(t, err)
	p, err := weights.PlanShares([]weights.Share{{weights.Part{Tensor: a, Size: 10}, 1}, {weights.Part{Tensor: a, From: 10, Size: 5}, 1}}, weights.PlanOptions{Align: 1})
	require.NoError(t, err)
	uploads := uploadsOf(t, p)
	require.Len(t, uploads, 1)
	assert.Len(t, uploads[0].Segments, 1)
	assert.Len(t, uploads[0].Pieces, 1, "neighbours are one copy")
}

func TestLoadRefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	_, other := testgpu.Sim(t, cudasim.Config{})
	devs := rt.Devices()
	b := benchOf(t, t.TempDir(), map[string][]byte{"a": makeSafetensors(t, nil, u8("x", 1000), u8("y", 1000))})
	path := b.paths[0]
	x, y := b.tensors[0], b.tensors[1]
	plan, err := weights.NewPlan(slices.Values(b.tensors), func(t *weights.Tensor) int { return len(t.Name) * int(t.Name[0]-'x') }, weights.PlanOptions{})
	require.NoError(t, err)
	good, second := memoryOf(t, devs[0], 5000), memoryOf(t, devs[1], 5000)
	apart := memoryOf(t, other.Devices()[0], 5000)
	mem := func(dev *cudart.Device, ptr cudart.DevPtr, n int) weights.Memory {
		return weights.Memory{Device: dev, Ptr: ptr, Bytes: n}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	copies := sim.Calls("cudaMemcpyAsync")
	for want, memory := range map[string]map[int]weights.Memory{
		"no memory for device 1 of the plan, which gets 1000 bytes":                                     {0: good},
		"device 1 of the plan: memory of 999 bytes on device 1 (Simulated GPU), want 1000":              {0: good, 1: mem(devs[1], second.Ptr, 999)},
		"device 0 of the plan: nil device":                                                              {0: {Ptr: 5, Bytes: 5000}, 1: second},
		"device 0 of the plan: memory of -1 bytes":                                                      {0: mem(devs[0], 1, -1), 1: second},
		"device 0 of the plan: memory at address 0 on device 0":                                         {0: mem(devs[0], 0, 5000), 1: second},
		"device 0 of the plan: memory of 5000 bytes at 0xfffffffffffffff0 on device 0 (Simulated GPU):": {0: mem(devs[0], ^cudart.DevPtr(15), 5000), 1: second},
		"devices 0 and 1 of the plan are both device 0 (Simulated GPU)":                                 {0: good, 1: good},
		"device 0 (Simulated GPU) and device 0 (Simulated GPU) are of different CUDA libraries":         {0: good, 1: apart},
	} {
		err := plan.Load(t.Context(), memory, weights.LoadOptions{})
		require.ErrorContains(t, err, "weights: load: "+want)
	}
	both := map[int]weights.Memory{0: good, 1: second}
	var none context.Context
	require.EqualError(t, plan.Load(none, both, weights.LoadOptions{}), "weights: load: the context is nil")
	require.ErrorIs(t, plan.Load(ended, both, weights.LoadOptions{}), context.Canceled)

	at := func(t *weights.Tensor, m weights.Memory, skip, room int) weights.Placement {
		return weights.Placement{Part: t.Whole(), To: mem(m.Device, m.Ptr+cudart.DevPtr(skip), room)}
	}
	copied := *x
	for want, placements := range map[string][]weights.Placement{
		`tensor "x" of ` + path + `: memory of 999 bytes on device 0 (Simulated GPU), want 1000`: {at(y, good, 0, 1000), at(x, good, 2000, 999)},
		`tensor "x" of ` + path + `: nil device`:                                                 {at(x, weights.Memory{}, 0, 1000)},
		`tensor "x" of ` + path + `: memory at address 0 on`:                                     {at(x, mem(devs[0], 0, 1000), 0, 1000)},
		`placement 1: tensor "x": not from a File's or Model's tensors`:                          {at(y, good, 0, 1000), at(&copied, good, 2000, 1000)},
		`placement 0: nil tensor`:                                                                {{}},
		`placement 0: tensor "x" of ` + path + `: 1001 bytes from byte 0 on, it has 1000`:        {{Part: weights.Part{Tensor: x, Size: 1001}, To: good}},
		`overlap on device 0 (Simulated GPU)`:                                                    {at(x, good, 0, 1000), at(y, good, 2000, 1000), at(x, good, 999, 1000)},
		`tensors "y" of ` + path + `, 1000 bytes at 0x`:                                          {at(x, second, 1500, 1000), at(y, second, 1000, 1000)},
		`are of different CUDA libraries`:                                                        {at(x, good, 0, 1000), at(y, apart, 0, 1000)},
		`overlap on device 1 (Simulated GPU)`:                                                    {at(x, good, 0, 1000), at(y, second, 999, 1000), at(x, second, 0, 1000)},
	} {
		err := weights.Place(t.Context(), placements, weights.LoadOptions{})
		require.ErrorContains(t, err, "weights: load: ")
		require.ErrorContains(t, err, want)
	}

	// Files that are not as they were.
	require.NoError(t, os.Truncate(path, x.File.Size()-1))
	err = plan.Load(t.Context(), both, weights.LoadOptions{})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.ErrorContains(t, err, fmt.Sprintf("weights: load: %s has %d bytes, it had %d when it was opened", path, x.File.Size()-1, x.File.Size()))
	require.NoError(t, b.model.Close())
	require.ErrorIs(t, plan.Load(t.Context(), both, weights.LoadOptions{}), os.ErrClosed)
	require.Equal(t, copies, sim.Calls("cudaMemcpyAsync"), "nothing was copied")
	require.Equal(t, bytes.Repeat([]byte{0xEE}, 5000), onDevice(t, good))

	// A library that is closed.
	f := mustParse(t, makeSafetensors(t, nil, u8("z", 10)), "f")
	z, _ := f.Tensor("z")
	closed, err := cudasim.New(testgpu.Config(cudasim.Config{}))
	require.NoError(t, err)
	closing, err := cudart.Open(context.Background(), cudart.Options{Source: closed})
	require.NoError(t, err)
	dev := closing.Devices()[0]
	require.NoError(t, closing.Close())
	err = weights.Place(t.Context(), []weights.Placement{{Part: z.Whole(), To: mem(dev, 1, 10)}}, weights.LoadOptions{})
	require.ErrorIs(t, err, os.ErrClosed)
	require.ErrorContains(t, err, `weights: load tensor "z" of f: at offset `)
	require.NotContains(t, err.Error(), "transfer:")
	require.NoError(t, closed.Close())
}

// readerAtFunc is an io.ReaderAt.
type readerAtFunc func(p []byte, off int64) (int, error)

func (f readerAtFunc) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }

// requireComplete requires that the tensors which an error calls complete are on the
// devices, and that it leaves out those that it should.
func (p *planned) requireComplete(t testing.TB, failed *weights.LoadError) {
	t.Helper()
	for _, d := range p.plan.Devices {
		mem := onDevice(t, p.memory[d.Device])
		for _, placed := range d.Tensors {
			if slices.Contains(failed.Complete, placed.Tensor) {
				require.True(t, bytes.Equal(p.of(placed.Part), mem[placed.Offset:][:placed.Size]), placed.Tensor.Name)
			}
		}
	}
	require.NotContains(t, failed.Complete, failed.Tensor)
	for i, tensor := range failed.Complete {
		for _, other := range failed.Complete[:i] {
			require.True(t, other.File != tensor.File || other.Offset <= tensor.Offset && other != tensor, "in order, each once")
		}
	}
}

// A load that ends half-way names the tensor and what is complete, for errors of the
// reader and of the context.
func TestLoadErrorListsCompleteTensors(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	devs := rt.Devices()
	boom := errors.New("the disk is on fire")
	specs := specsOf("")
	data := makeSafetensors(t, nil, specs...)
	names := []string{"embed", "norm", "odd", "down", "last"}
	ways := [][2]bool{{false, false}, {false, true}, {true, true}, {true, false}} // both, cancels
	for i := range cells(len(names), len(ways)) {
		at, both, cancels := names[i[0]], ways[i[1]][0], ways[i[1]][1]
		ctx, cancel := context.WithCancelCause(t.Context())
		var broken int64 = maxInt
		f, err := weights.Parse(readerAtFunc(func(p []byte, off int64) (int, error) {
			n := copy(p, data[off:])
			switch {
			case off+int64(n) <= broken || off > broken:
				return n, nil
			case cancels:
				cancel(boom)
				return n, nil
			}
			return int(broken - off), boom
		}), int64(len(data)), "file")
		require.NoError(t, err)
		tensor, _ := f.Tensor(at)
		broken = tensor.Offset + int64(tensor.Size/2)
		var shares []weights.Share
		b := &bench{contents: map[*weights.Tensor][]byte{}}
		i := 0
		for tensor := range f.Tensors() {
			b.contents[tensor] = data[tensor.Offset:][:tensor.Size]
			shares = append(shares, weights.Share{Part: tensor.Whole(), Device: i % 2})
			if both {
				shares = append(shares, weights.Share{Part: tensor.Whole(), Device: 1 - i%2})
			}
			i++
		}
		plan, err := weights.PlanShares(shares, weights.PlanOptions{})
		require.NoError(t, err)
		p := b.planned(t, devs, plan)
		err = plan.Load(ctx, p.memory, weights.LoadOptions{})
		if cancels && err == nil {
			continue // it was read at last
		}
		var failed *weights.LoadError
		require.ErrorAs(t, err, &failed)
		require.ErrorIs(t, err, boom)
		require.Zero(t, sim.PendingCopies())
		p.requireComplete(t, failed)
		if !cancels {
			require.Equal(t, tensor, failed.Tensor)
			require.Equal(t, broken, failed.Offset)
			require.ErrorContains(t, err, fmt.Sprintf("weights: load tensor %q of file: at offset %d, onto [device ", at, broken))
			require.NotContains(t, err.Error(), "transfer:")
			require.NotContains(t, err.Error(), "\n")
		}
		if both && !cancels {
			var before []*weights.Tensor
			for other := range f.Tensors() {
				if other.Offset+int64(other.Size) <= broken {
					before = append(before, other)
				}
				if other == tensor {
					break
				}
			}
			require.Subset(t, failed.Complete, before)
		}
		cancel(nil)
	}
}

// A file that another process cuts off while it is read.
func TestShrunkFileFails(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev := rt.Devices()[0]
	c, err := transfer.NewCopier(t.Context(), dev, transfer.Options{})
	require.NoError(t, err)
	ring := c.Stats().RingBytes
	defer func() { require.NoError(t, c.Close()) }()
	b := benchOf(t, t.TempDir(), map[string][]byte{"shrinks": makeSafetensors(t, nil, u8("a", ring), u8("b", 20*mib), u8("c", 8*mib), u8("d", 100))})
	plan, err := weights.NewPlan(b.model.Tensors(), nil, weights.PlanOptions{})
	require.NoError(t, err)
	p := b.planned(t, rt.Devices(), plan)
	left := b.tensors[2].Offset + 77
	before := sim.Calls("cudaMemcpyAsync")
	sim.Hold() // no more is read than fits the ring
	var group sync.WaitGroup
	group.Go(func() { err = plan.Load(t.Context(), p.memory, weights.LoadOptions{}) })
	for sim.Calls("cudaMemcpyAsync") == before {
		runtime.Gosched()
	}
	assert.NoError(t, os.Truncate(b.paths[0], left))
	sim.Release()
	group.Wait()
	var failed *weights.LoadError
	require.ErrorAs(t, err, &failed)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, b.tensors[2], failed.Tensor)
	require.Equal(t, left, failed.Offset)
	require.Equal(t, b.tensors[:2], failed.Complete)
	p.requireComplete(t, failed)
}
