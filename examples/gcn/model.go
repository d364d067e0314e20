package main

import (
	"context"
	"fmt"
	"io"
)

// The network has two layers. Each multiplies its input by weights, and takes for each node the
// mean over the edges that lead to it, of which one is from itself:
//
//	logits = mean(relu(mean(X W1)) W2),  loss = mean of the cross-entropy
//
// The hidden layer is computed in panels of some columns: a panel needs no others, neither
// forward nor backward. So beside the features and the hidden layer itself only two panels
// must be in memory, and nothing of the size of the edges times the width, as PyTorch's
// index_add needs.

// A matrix is float32 in a backend's memory, row by row.
type matrix struct {
	rows, cols int
	memory     *memory
	off        int // elements
}

// block returns rows from first up to last.
func (m matrix) block(first, last int) matrix {
	m.off += first * m.cols
	m.rows = last - first
	return m
}

func (m matrix) len() int { return m.rows * m.cols }

// A use is memory that a step accesses.
type use struct {
	memory  *memory
	off, n  int // elements of 4 bytes
	written bool
}

func reads(m matrix) use  { return use{m.memory, m.off, m.len(), false} }
func writes(m matrix) use { return use{m.memory, m.off, m.len(), true} }

// A step is work that is queued at once, and the large memory that it accesses.
type step struct {
	uses  []use
	queue func() error
}

// An edgeList is a part of the edges: of three arrays.
type edgeList struct {
	from, to, weight *memory
	first, count     int
}

func (l edgeList) uses() []use {
	return []use{{l.from, l.first, l.count, false}, {l.to, l.first, l.count, false}, {l.weight, l.first, l.count, false}}
}

// A backend computes, in the order of the calls.
type backend interface {
	// alloc allocates n elements of 4 bytes. Small memory is always where it is used.
	alloc(label string, n int, small bool) (*memory, error)
	// fill sets all elements: f sets some of them, from first on.
	fill(ctx context.Context, m *memory, f func(dst []float32, first int)) error
	fillIndices(ctx context.Context, m *memory, v []uint32) error

	zero(m matrix) error
	multiply(c, a, b matrix, ta, tb bool, beta float32) error        // c = a b + beta c, of transposes if ta, tb
	addEdges(dst, src matrix, edges edgeList) error                  // dst[to] += weight * src[from]
	relu(m matrix) error                                             // in place
	reluGradient(gradient, output matrix) error                      // in place
	crossEntropy(logits matrix, labels *memory, scale float32) error // in place; adds to the epoch's loss
	sgd(weight, gradient matrix, rate float32) error

	begin(epoch int) error                                // queues that its loss is 0
	loss(ctx context.Context, epoch int) (float64, error) // waits for all work
	runner(m *model, epochs int) (runner, error)          // after everything was allocated
	stats(out io.Writer) error
	close() error
}

type model struct {
	*graph
	b     backend
	width int // of a panel

	x              matrix
	hidden         []matrix // panels
	panel          matrix   // of the hidden layer before the mean, or of the gradient by the hidden layer
	back           matrix   // of the gradient by what is before the mean
	mixed, logits  matrix   // the second layer before and after the mean
	w1, w1Gradient []matrix // panels
	w2, w2Gradient []matrix // rows for each panel
	labels         *memory
	from, to       *memory
	weight         *memory
}

// newModel allocates and fills everything.
func newModel(ctx context.Context, g *graph, b backend, width int) (*model, error) {
	m := &model{graph: g, b: b, width: width}
	var err error
	alloc := func(label string, n int, small bool) *memory {
		if err != nil {
			return nil
		}
		var p *memory
		if p, err = b.alloc(label, n, small); err != nil {
			err = fmt.Errorf("%s, %.2f GB: %w", label, 4*float64(n)/1e9, err)
		}
		return p
	}
	table := func(label string, rows, cols int, small bool) matrix {
		return matrix{rows, cols, alloc(label, rows*cols, small), 0}
	}
	m.x = table("features", g.Nodes, g.Features, false)
	m.from, m.to, m.weight = alloc("edges' sources", len(g.from), false), alloc("edges' targets", len(g.to), false), alloc("edges' weights", len(g.weight), false)
	m.panel, m.back = table("panel", g.Nodes, width, false), table("gradient's panel", g.Nodes, width, false)
	m.mixed, m.logits = table("second layer", g.Nodes, g.Classes, false), table("logits", g.Nodes, g.Classes, false)
	m.labels = alloc("labels", g.Nodes, true)
	for range g.Hidden / width {
		m.hidden = append(m.hidden, table("hidden layer", g.Nodes, width, false))
		m.w1, m.w1Gradient = append(m.w1, table("weights", g.Features, width, true)), append(m.w1Gradient, table("weights' gradients", g.Features, width, true))
		m.w2, m.w2Gradient = append(m.w2, table("weights", width, g.Classes, true)), append(m.w2Gradient, table("weights' gradients", width, g.Classes, true))
	}
	if err != nil {
		return nil, err
	}
	return m, m.fill(ctx)
}

func (m *model) fill(ctx context.Context) error {
	w1, w2 := m.weights(1, m.Features, m.Hidden), m.weights(2, m.Hidden, m.Classes)
	for _, f := range []func() error{
		func() error { return m.b.fill(ctx, m.x.memory, m.features) },
		func() error { return m.b.fillIndices(ctx, m.from, m.graph.from) },
		func() error { return m.b.fillIndices(ctx, m.to, m.graph.to) },
		func() error { return m.b.fill(ctx, m.weight, part(m.graph.weight)) },
		func() error { return m.b.fillIndices(ctx, m.labels, m.graph.labels()) },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	for p := range m.hidden {
		columns := make([]float32, 0, m.Features*m.width)
		for row := range m.Features {
			columns = append(columns, w1[row*m.Hidden+p*m.width:][:m.width]...)
		}
		if err := m.b.fill(ctx, m.w1[p].memory, part(columns)); err != nil {
			return err
		}
		if err := m.b.fill(ctx, m.w2[p].memory, part(w2[p*m.width*m.Classes:][:m.width*m.Classes])); err != nil {
			return err
		}
	}
	return nil
}

// part sets elements to those of v.
func part(v []float32) func(dst []float32, first int) {
	return func(dst []float32, first int) { copy(dst, v[first:]) }
}

// stepBytes is about what a step accesses that works on some rows or edges.
const stepBytes = 64 << 20

// rowBlocks cuts the rows for steps that access so many columns.
func (m *model) rowBlocks(cols int) (blocks [][2]int) {
	rows := max(1, stepBytes/(4*cols))
	for first := 0; first < m.Nodes; first += rows {
		blocks = append(blocks, [2]int{first, min(first+rows, m.Nodes)})
	}
	return blocks
}

// edgeBlocks cuts the edges. Backward they lead the other way.
func (m *model) edgeBlocks(backward bool) (blocks []edgeList) {
	from, to := m.from, m.to
	if backward {
		from, to = to, from
	}
	const count = stepBytes / 12
	for first := 0; first < len(m.graph.from); first += count {
		blocks = append(blocks, edgeList{from, to, m.weight, first, min(count, len(m.graph.from)-first)})
	}
	return blocks
}

// mean are the steps of a mean over edges, or of its gradient. dst is written.
func (m *model) mean(dst, src matrix, backward bool) (steps []step) {
	for i, l := range m.edgeBlocks(backward) {
		steps = append(steps, step{append(l.uses(), reads(src), writes(dst)), func() error {
			if i == 0 {
				if err := m.b.zero(dst); err != nil {
					return err
				}
			}
			return m.b.addEdges(dst, src, l)
		}})
	}
	return steps
}

// beta is the factor of what a sum over panels has so far.
func beta(first bool) float32 {
	if first {
		return 0
	}
	return 1
}

// forward are the steps up to the logits.
func (m *model) forward() (steps []step) {
	b := m.b
	for p, hidden := range m.hidden {
		for _, r := range m.rowBlocks(m.Features + m.width) {
			x, to := m.x.block(r[0], r[1]), m.panel.block(r[0], r[1])
			steps = append(steps, step{[]use{reads(x), writes(to)}, func() error { return b.multiply(to, x, m.w1[p], false, false, 0) }})
		}
		steps = append(steps, m.mean(hidden, m.panel, false)...)
		for _, r := range m.rowBlocks(m.width + m.Classes) {
			h, to := hidden.block(r[0], r[1]), m.mixed.block(r[0], r[1])
			steps = append(steps, step{[]use{writes(h), writes(to)}, func() error {
				if err := b.relu(h); err != nil {
					return err
				}
				return b.multiply(to, h, m.w2[p], false, false, beta(p == 0))
			}})
		}
	}
	return append(steps, m.mean(m.logits, m.mixed, false)...)
}

// backward are the steps from the logits to the gradients of all weights. The logits are
// overwritten. The hidden layer is not, so that a plan need not copy it back to the host.
func (m *model) backward() (steps []step) {
	b := m.b
	steps = append(steps, step{[]use{writes(m.logits)}, func() error {
		return b.crossEntropy(m.logits, m.labels, 1/float32(m.Nodes))
	}})
	steps = append(steps, m.mean(m.mixed, m.logits, true)...)
	for p := len(m.hidden) - 1; p >= 0; p-- {
		hidden := m.hidden[p]
		for i, r := range m.rowBlocks(2*m.width + m.Classes) {
			h, g, to := hidden.block(r[0], r[1]), m.mixed.block(r[0], r[1]), m.panel.block(r[0], r[1])
			steps = append(steps, step{[]use{reads(h), reads(g), writes(to)}, func() error {
				if err := b.multiply(m.w2Gradient[p], h, g, true, false, beta(i == 0)); err != nil {
					return err
				}
				if err := b.multiply(to, g, m.w2[p], false, true, 0); err != nil {
					return err
				}
				return b.reluGradient(to, h)
			}})
		}
		steps = append(steps, m.mean(m.back, m.panel, true)...)
		for i, r := range m.rowBlocks(m.Features + m.width) {
			x, g := m.x.block(r[0], r[1]), m.back.block(r[0], r[1])
			steps = append(steps, step{[]use{reads(x), reads(g)}, func() error {
				return b.multiply(m.w1Gradient[p], x, g, true, false, beta(i == 0))
			}})
		}
	}
	return steps
}

// epoch are all steps of an epoch but the change of the weights.
func (m *model) epoch() []step { return append(m.forward(), m.backward()...) }

// learn changes the weights, which are small memory.
func (m *model) learn(rate float32) error {
	for p := range m.hidden {
		if err := m.b.sgd(m.w1[p], m.w1Gradient[p], rate); err != nil {
			return err
		}
		if err := m.b.sgd(m.w2[p], m.w2Gradient[p], rate); err != nil {
			return err
		}
	}
	return nil
}
