package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/examples/internal/exampletest"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/managed"
)

var small = sizes{Nodes: 60, EdgesPerNode: 3, Features: 12, Hidden: 7, Classes: 4, Seed: 5}

// onCPU makes a model whose steps compute in Go.
func onCPU(t *testing.T, s sizes, width int, staged bool) (*model, *cpu) {
	t.Helper()
	b := &cpu{}
	m, err := newModel(t.Context(), newGraph(s), b, width, staged)
	require.NoError(t, err)
	return m, b
}

// lossOf runs all steps of an epoch and returns its loss.
func lossOf(t *testing.T, m *model, b *cpu) float64 {
	t.Helper()
	require.NoError(t, b.begin(0))
	for _, s := range m.epoch() {
		require.NoError(t, s.queue())
	}
	return b.losses[len(b.losses)-1]
}

// The gradients are those of the loss: each is compared with a difference of losses.
func TestGradientsAreOfTheLoss(t *testing.T) {
	t.Parallel()
	for _, width := range []int{12, 4} {
		m, b := onCPU(t, small, width, width == 4)
		lossOf(t, m, b)
		for layer, pair := range [][2]matrix{{m.w1, m.w1Gradient}, {m.w2, m.w2Gradient}} {
			weight := values(pair[0])
			gradient := append([]float64(nil), values(pair[1])...)
			nonzero := 0
			for i, g := range gradient {
				const h = 1e-5
				was := weight[i]
				weight[i] = was + h
				up := lossOf(t, m, b)
				weight[i] = was - h
				down := lossOf(t, m, b)
				weight[i] = was
				assert.InDelta(t, (up-down)/(2*h), g, 1e-6, "weight %d of layer %d, panels of %d", i, layer+1, width)
				if math.Abs(g) > 1e-4 {
					nonzero++
				}
			}
			assert.Greater(t, nonzero, len(gradient)/4, "most gradients are not zero")
		}
	}
}

// A panel's width changes the order of sums, and nothing else; where the means are changes nothing.
func TestPanelsDoNotChangeTheResult(t *testing.T) {
	t.Parallel()
	var want []float64
	for i, width := range []int{12, 6, 1, 12, 6} {
		o := options{graph: small, epochs: 4, rate: 1, cpu: true, panel: width}
		if i >= 3 {
			o.budget, o.plan, o.inPlace = 0.5, true, true
			require.True(t, o.staged())
		}
		result, err := train(t.Context(), o, newGraph(small), &cpu{}, io.Discard)
		require.NoError(t, err)
		if want == nil {
			want = result.Losses
		}
		assert.InDeltaSlice(t, want, result.Losses, 1e-12)
	}
}

func TestLossFalls(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := sizes{Nodes: 500, EdgesPerNode: 4, Features: 16, Hidden: 16, Classes: 4, Seed: 1}
	file := filepath.Join(t.TempDir(), "losses.json")
	require.NoError(t, run(t.Context(), options{graph: s, epochs: 30, rate: 1, cpu: true, output: output{json: file}}, &out))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var result outcome
	require.NoError(t, json.Unmarshal(text, &result))
	require.Len(t, result.Losses, 30)
	require.Len(t, result.Seconds, 30)
	assert.InDelta(t, math.Log(4), result.Losses[0], 0.3, "of random weights")
	for i, loss := range result.Losses[1:] {
		assert.Less(t, loss, result.Losses[i], "epoch %d", i+2)
	}
	assert.Less(t, result.Losses[29], 0.97*result.Losses[0])
	assert.Equal(t, 30, strings.Count(out.String(), "\nepoch "))
}

// What gcn.py reads is what the model is trained on.
func TestFileHasGraphAndWeights(t *testing.T) {
	t.Parallel()
	g := newGraph(small)
	file := filepath.Join(t.TempDir(), "graph.bin")
	require.NoError(t, g.write(file))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	r := bufio.NewReader(bytes.NewReader(text))
	line, err := r.ReadBytes('\n')
	require.NoError(t, err)
	var header sizes
	require.NoError(t, json.Unmarshal(line, &header))
	assert.Equal(t, small, header)
	read := func(v any) { require.NoError(t, binary.Read(r, binary.LittleEndian, v)) }
	from, to, labels := make([]uint32, g.edges()), make([]uint32, g.edges()), make([]uint32, g.Nodes)
	x, w1, w2 := make([]float32, g.Nodes*g.Features), make([]float32, g.Features*g.Hidden), make([]float32, g.Hidden*g.Classes)
	for _, v := range []any{from, to, x, labels, w1, w2} {
		read(v)
	}
	_, err = r.ReadByte()
	assert.ErrorIs(t, err, io.EOF)
	assert.Equal(t, g.from, from)
	assert.Equal(t, g.to, to)

	m, _ := onCPU(t, small, small.Features, false)
	assert.Equal(t, labels, m.labels.indices)
	for _, pair := range []struct {
		model []float64
		file  []float32
	}{{m.x[0].memory.host, x}, {m.w1.memory.host, w1}, {m.w2.memory.host, w2}} {
		for i, v := range pair.file {
			require.Equal(t, pair.model[i], float64(v))
		}
	}
	for i, label := range labels {
		for c := range g.Classes {
			assert.LessOrEqual(t, x[i*g.Features+c], x[i*g.Features+int(label)])
		}
	}
}

func TestGraphIsWhole(t *testing.T) {
	t.Parallel()
	g := newGraph(small)
	assert.Len(t, g.from, 60*4)
	sum := make([]float64, g.Nodes)
	for e, target := range g.to {
		require.Less(t, g.from[e], uint32(g.Nodes))
		sum[target] += float64(g.weight[e])
	}
	for node, s := range sum {
		assert.InDelta(t, 1, s, 1e-6, "the weights of the edges to node %d", node)
	}
}

// Every step's memory is listed, so that a plan brings it: the uses cover what is computed on.
func TestStepsListTheirMemory(t *testing.T) {
	t.Parallel()
	s := small
	s.Nodes = 2 << 20 // several blocks; nothing is computed
	s.EdgesPerNode = 5
	table := func(label string, cols int) matrix { return matrix{s.Nodes, cols, &memory{label: label}, 0} }
	m := &model{graph: &graph{sizes: s, from: make([]uint32, s.edges())}, width: 6}
	m.x, m.mean = []matrix{table("x 0", 6), table("x 1", 6)}, []matrix{table("mean 0", 6), table("mean 1", 6)}
	m.mixed, m.logits = table("mixed", s.Classes), table("logits", s.Classes)
	m.hidden, m.gradient = matrix{blockRows, s.Hidden, &memory{}, 0}, matrix{blockRows, s.Hidden, &memory{}, 0}
	m.from, m.to, m.weight = &memory{label: "from"}, &memory{label: "to"}, &memory{label: "weight"}
	elements := map[string]int{}
	for _, st := range m.epoch() {
		total := 0
		for _, u := range st.uses {
			elements[u.memory.label] += u.n
			total += 4 * u.n
		}
		assert.LessOrEqual(t, total, 2*s.panelBytes(6)+stepBytes)
	}
	blocks := (s.edges() + stepBytes/12 - 1) / (stepBytes / 12)
	require.Greater(t, blocks, 1)
	// Means of two panels, and of the second layer forward and backward.
	assert.Equal(t, 4*s.edges(), elements["from"])
	assert.Equal(t, 4*s.edges(), elements["weight"])
	assert.Equal(t, 6*s.Nodes*blocks, elements["x 1"])
	assert.Equal(t, 6*s.Nodes*(blocks+2), elements["mean 0"], "and by rows, forward and backward")
	assert.Equal(t, s.Classes*s.Nodes*(2*blocks+3), elements["mixed"], "and when it is zeroed")
	assert.Equal(t, s.Classes*s.Nodes*(2*blocks+1), elements["logits"])

	// Staged, the mean is written once and read by rows, in place; what is in place is nothing else.
	m.sum, m.rows = table("sum", 6), matrix{blockRows, 12, &memory{}, 0}
	clear(elements)
	for _, st := range m.epoch() {
		for _, u := range st.uses {
			elements[u.memory.label] += u.n
			assert.Equal(t, strings.HasPrefix(u.memory.label, "mean"), u.mode == managed.InPlace)
		}
	}
	assert.Equal(t, 6*s.Nodes*(1+2), elements["mean 0"])
	assert.Equal(t, 6*s.Nodes*(1+2), elements["mean 1"])
	assert.Equal(t, 2*6*s.Nodes*(blocks+1), elements["sum"])
	assert.Equal(t, 6*s.Nodes*blocks, elements["x 1"])
}

// Rows are cut into blocks, and the results are the same as of one.
func TestManyBlocksOfRows(t *testing.T) {
	t.Parallel()
	s := sizes{Nodes: blockRows + 17, EdgesPerNode: 1, Features: 4, Hidden: 3, Classes: 2, Seed: 9}
	m, b := onCPU(t, s, 2, false)
	require.Len(t, m.rowBlocks(), 2)
	loss := lossOf(t, m, b)
	staged, c := onCPU(t, s, 2, true)
	assert.Equal(t, loss, lossOf(t, staged, c))
	assert.Equal(t, values(m.w1Gradient), values(staged.w1Gradient))
	assert.Equal(t, values(m.w2Gradient), values(staged.w2Gradient))
	for _, pair := range [][2]matrix{{m.w1, m.w1Gradient}, {m.w2, m.w2Gradient}} {
		const h = 1e-3
		weight, g := values(pair[0]), values(pair[1])[0]
		weight[0] += h
		assert.InDelta(t, g, (lossOf(t, m, b)-loss)/h, 1e-3)
		weight[0] -= h
	}
}

func TestWrongOptionsAreRefused(t *testing.T) {
	t.Parallel()
	for text, change := range map[string]func(o *options){
		"must be positive":            func(o *options) { o.graph.Nodes = 0 },
		"as many classes as features": func(o *options) { o.graph.Classes = 13 },
		"from 0 to 1":                 func(o *options) { o.budget = 2; o.managed = true },
		"-budget is a share":          func(o *options) { o.budget = math.NaN(); o.managed = true },
		"at most 2^20 edges a node":   func(o *options) { o.graph.EdgesPerNode = math.MaxInt },
		"hidden, and epochs":          func(o *options) { o.epochs = math.MaxInt }, // whose losses had -8 bytes
		"-budget needs -managed":      func(o *options) { o.budget = 0.5 },
		"-panel must divide the 12":   func(o *options) { o.panel = 5 },
		"-chunk must be a multiple":   func(o *options) { o.chunk = 3 },
		"at most 2^20":                func(o *options) { o.chunk = 1 << 44 }, // MiB, whose bytes are 0
		"-cpu uses no unified memory": func(o *options) { o.cpu, o.managed = true, true },
		"and no simulated GPU":        func(o *options) { o.cpu, o.sim = true, true },
	} {
		o := options{graph: small, epochs: 1}
		change(&o)
		assert.ErrorContains(t, run(t.Context(), o, io.Discard), text)
	}
}

func TestPanelsFitTheBudget(t *testing.T) {
	t.Parallel()
	o := options{graph: sizes{Nodes: 2_000_000, EdgesPerNode: 10, Features: 128, Hidden: 256, Classes: 10}}
	assert.Equal(t, 128, o.panelWidth(), "without a budget")
	o.budget = 0.25
	assert.Equal(t, 16, o.panelWidth())
	assert.LessOrEqual(t, float64(2*o.graph.panelBytes(16)), 0.25*float64(o.graph.bytes()))
	o.panel = 64
	assert.Equal(t, 64, o.panelWidth())
}

// planOf plans epochs of a graph on a simulated GPU, and returns the traffic.
func planOf(t *testing.T, o options) managed.Traffic {
	t.Helper()
	_, rt := testgpu.Sim(t, cudasim.Config{Version: 13000})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	a, err := managed.New(t.Context(), dev, managed.Options{})
	require.NoError(t, err)
	width := o.panelWidth()
	m := &model{graph: &graph{sizes: o.graph, from: make([]uint32, o.graph.edges())}, width: width}
	total := 0
	var all []*managed.Memory
	large := func(n int) *memory {
		p, err := a.Alloc(t.Context(), 4*n+2<<20, managed.AllocOptions{})
		require.NoError(t, err)
		all = append(all, p)
		total += 4 * n
		return &memory{n: n, managed: p}
	}
	// A real GPU's memory begins at a multiple of 2 MiB, of which chunks are made.
	table := func(cols int) matrix {
		p := large(m.Nodes * cols)
		return matrix{m.Nodes, cols, p, -int(p.managed.Ptr()) & (2<<20 - 1) / 4}
	}
	m.mixed, m.logits = table(m.Classes), table(m.Classes)
	for range m.Features / width {
		m.x, m.mean = append(m.x, table(width)), append(m.mean, table(width))
	}
	m.from, m.to, m.weight = large(m.edges()), large(m.edges()), large(m.edges())
	assert.Equal(t, m.bytes(), total)
	if o.staged() {
		m.sum, m.rows = table(width), matrix{blockRows, m.Features, &memory{}, 0}
	}
	m.hidden = matrix{blockRows, m.Hidden, &memory{}, 0}
	m.gradient = m.hidden
	r, err := newPlanned(t.Context(), &gpu{options: o, unified: a, dev: dev}, m, o.epochs, int(o.budget*float64(total)))
	require.NoError(t, err, "panels of %d", width)
	for _, p := range all {
		require.NoError(t, p.Close())
	}
	require.NoError(t, a.Close())
	return r.(*planned).plan.Traffic()
}

// What panelWidth chooses fits the budget, so that a plan can be made, and moves little more than
// it has to.
func TestChosenPanelsCanBePlanned(t *testing.T) {
	t.Parallel()
	g := sizes{Nodes: 2_000_000, EdgesPerNode: 10, Features: 128, Hidden: 256, Classes: 10}
	features := g.panelBytes(g.Features)
	for _, budget := range []float64{0.25, 0.5, 1} {
		for _, inPlace := range []bool{false, true} {
			o := options{graph: g, epochs: 4, managed: true, budget: budget, plan: true, inPlace: inPlace}
			traffic := planOf(t, o)
			t.Logf("budget %.2f, in place %v, panels of %d: of an epoch %.3f GB in, %.3f back, %.3f in place", budget, inPlace, o.panelWidth(),
				float64(traffic.In)/4e9, float64(traffic.Out)/4e9, float64(traffic.InPlace)/4e9)
			if !o.staged() {
				assert.Less(t, traffic.Out, 4*g.bytes()/2)
				continue
			}
			// The features come once an epoch, the edges once and for all where there is room.
			assert.Equal(t, 4*3*features, traffic.InPlace, "the means are written once and read twice")
			assert.Less(t, traffic.In, 4*(features+2*12*g.edges()))
			assert.Less(t, traffic.Out, 4*features/4, "only the second layer's, and at the end")
		}
	}
}

// On a GPU, by every way of bringing memory there, the losses are those of the CPU.
func TestTrainsAsTheCPUDoes(t *testing.T) {
	s := sizes{Nodes: 3000, EdgesPerNode: 6, Features: 48, Hidden: 70, Classes: 7, Seed: 3}
	if !testgpu.Real() {
		s.Nodes = 300
		if testing.Short() {
			s.Nodes = 60
		}
	}
	want, err := train(t.Context(), options{graph: s, epochs: 5, rate: 1}, newGraph(s), &cpu{}, io.Discard)
	require.NoError(t, err)
	for name, o := range map[string]options{
		"plain":              {blas: true},
		"own products":       {},
		"panels":             {blas: true, panel: 16},
		"managed":            {blas: true, managed: true},
		"managed, by plan":   {blas: true, managed: true, budget: 1, plan: true, panel: 16},
		"managed, in place":  {blas: true, managed: true, budget: 0.5, plan: true, inPlace: true, panel: 16},
		"managed, by faults": {blas: true, managed: true, budget: 0.5, panel: 16},
	} {
		t.Run(name, func(t *testing.T) {
			o.graph, o.epochs, o.rate = s, 5, 1
			if !testgpu.Real() {
				o.source, _ = testgpu.Sim(t, cudasim.Config{Kernels: simulatedKernels})
			}
			file := filepath.Join(t.TempDir(), "losses.json")
			o.json = file
			var out bytes.Buffer
			require.NoError(t, run(t.Context(), o, &out), out.String())
			t.Log(out.String())
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			var got outcome
			require.NoError(t, json.Unmarshal(text, &got))
			require.Len(t, got.Losses, 5)
			for i := range want.Losses {
				assert.InEpsilon(t, want.Losses[i], got.Losses[i], 1e-4, "epoch %d", i+1)
			}
		})
	}
}

func TestTheProgramRunsOnASimulatedGPU(t *testing.T) {
	out := exampletest.Run(t, main, "-sim", "-nodes", "20", "-epochs", "2", "-features", "16", "-hidden", "8")
	require.Regexp(t, `^graph: 20 nodes(?s:.*)\nepoch 1: loss 2\.(?s:.*)\nepoch 2: loss 2\.(?s:.*)\nmemory: `, out)
}
