package main

import (
	"context"
	"fmt"
	"io"

	"github.com/gopinned/pinned/managed"
)

// The network has two layers. Each takes for each node the mean over the edges that lead to it, of
// which one is from itself, and multiplies by weights:
//
//	logits = mean(relu(mean(X) W1) W2),  loss = mean of the cross-entropy
//
// The mean comes before the product where that is narrower, and after it in the second layer, as
// both orders give the same. A mean accesses all rows at random: the features and their mean are
// stored in panels of some columns, so that only two panels must be in memory at a time. All else
// goes row by row. The hidden layer is never stored: backward it is computed again. So nothing is
// as large as the nodes times the hidden width, and nothing as the edges times a width, of which
// PyTorch's index_add needs both.
//
// A model that is staged leaves the mean on the host. Each panel of it is summed in device
// memory, and then written over the link; rows are read over the link when they are needed. That is
// faster than moving memory there and back, because each byte is written once and read twice.

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
	memory *memory
	off, n int // elements of 4 bytes
	mode   managed.Mode
}

func (m matrix) use(mode managed.Mode) use { return use{m.memory, m.off, m.len(), mode} }

// useAll are uses of several matrices.
func useAll(list []matrix, mode managed.Mode) (uses []use) {
	for _, x := range list {
		uses = append(uses, x.use(mode))
	}
	return uses
}

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
	return []use{{l.from, l.first, l.count, managed.ReadOnly}, {l.to, l.first, l.count, managed.ReadOnly}, {l.weight, l.first, l.count, managed.ReadOnly}}
}

// A backend computes, in the order of the calls.
type backend interface {
	// alloc allocates n elements of 4 bytes. Small memory is always where it is used.
	alloc(ctx context.Context, label string, n int, small bool) (*memory, error)
	// fill sets all elements: f sets some of them, from first on.
	fill(ctx context.Context, m *memory, f func(dst []float32, first int)) error
	fillIndices(ctx context.Context, m *memory, v []uint32) error

	zero(m matrix) error
	copy(dst, src matrix) error
	multiply(c, a, b matrix, ta, tb bool, beta float32) error        // c = a b + beta c, of transposes if ta, tb
	addEdges(dst, src matrix, edges edgeList) error                  // dst[to] += weight * src[from]
	relu(m matrix) error                                             // in place
	reluGradient(gradient, output matrix) error                      // in place
	crossEntropy(logits matrix, labels *memory, scale float32) error // in place; adds to the epoch's loss
	sgd(weight, gradient matrix, rate float32) error

	begin(epoch int) error                                            // queues that its loss is 0
	loss(ctx context.Context, epoch int) (float64, error)             // waits for all work
	runner(ctx context.Context, m *model, epochs int) (runner, error) // after everything was allocated
	stats(out io.Writer) error
	close() error
}

type model struct {
	*graph
	b     backend
	width int // of a panel

	x, mean   []matrix // panels of the features, and of their mean
	sum, rows matrix   // of a staged model: a panel of the mean, and some rows of all panels
	products
	layers
	labels   *memory
	from, to *memory
	weight   *memory
}

// products are what a step computes.
type products struct {
	mixed, logits    matrix // the second layer before and after the mean
	hidden, gradient matrix // some rows of the hidden layer, and of the gradient by it
}

// layers are the weights of both layers, with the gradients by them.
type layers struct {
	w1, w1Gradient matrix
	w2, w2Gradient matrix
}

// blockRows is the number of rows of the hidden layer that one step computes.
const blockRows = 1 << 15

// newModel allocates and fills everything.
func newModel(ctx context.Context, g *graph, b backend, width int, staged bool) (*model, error) {
	m, err := allocateModel(ctx, g, b, width, staged)
	if err != nil {
		return nil, err
	}
	return m, m.fill(ctx)
}

// allocateModel allocates everything. Of the graph it needs the sizes.
func allocateModel(ctx context.Context, g *graph, b backend, width int, staged bool) (*model, error) {
	m := &model{graph: g, b: b, width: width}
	var err error
	alloc := func(label string, n int, small bool) *memory {
		if err != nil {
			return nil
		}
		var p *memory
		if p, err = b.alloc(ctx, label, n, small); err != nil {
			err = fmt.Errorf("%s, %.2f GB: %w", label, 4*float64(n)/1e9, err)
		}
		return p
	}
	table := func(label string, rows, cols int, small bool) matrix {
		return matrix{rows, cols, alloc(label, rows*cols, small), 0}
	}
	for range g.Features / width {
		m.x, m.mean = append(m.x, table("features", g.Nodes, width, false)), append(m.mean, table("mean", g.Nodes, width, false))
	}
	m.from, m.to, m.weight = alloc("edges' sources", g.edges(), false), alloc("edges' targets", g.edges(), false), alloc("edges' weights", g.edges(), false)
	m.mixed, m.logits = table("second layer", g.Nodes, g.Classes, false), table("logits", g.Nodes, g.Classes, false)
	rows := min(g.Nodes, blockRows)
	if staged {
		m.sum, m.rows = table("sum", g.Nodes, width, false), table("rows of the mean", rows, g.Features, true)
	}
	m.hidden, m.gradient = table("hidden layer", rows, g.Hidden, true), table("gradient", rows, g.Hidden, true)
	m.labels = alloc("labels", g.Nodes, true)
	m.w1, m.w1Gradient = table("weights", g.Features, g.Hidden, true), table("weights' gradients", g.Features, g.Hidden, true)
	m.w2, m.w2Gradient = table("weights", g.Hidden, g.Classes, true), table("weights' gradients", g.Hidden, g.Classes, true)
	return m, err
}

func (m *model) fill(ctx context.Context) error {
	for p, x := range m.x {
		if err := m.b.fill(ctx, x.memory, func(dst []float32, first int) { m.features(dst, first, p*m.width, m.width) }); err != nil {
			return err
		}
	}
	for _, f := range []func() error{
		func() error { return m.b.fillIndices(ctx, m.from, m.graph.from) },
		func() error { return m.b.fillIndices(ctx, m.to, m.graph.to) },
		func() error { return m.b.fill(ctx, m.weight, part(m.graph.weight)) },
		func() error { return m.b.fillIndices(ctx, m.labels, m.graph.labels()) },
		func() error { return m.b.fill(ctx, m.w1.memory, part(m.weights(1, m.Features, m.Hidden))) },
		func() error { return m.b.fill(ctx, m.w2.memory, part(m.weights(2, m.Hidden, m.Classes))) },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

// part sets elements to those of v.
func part(v []float32) func(dst []float32, first int) {
	return func(dst []float32, first int) { copy(dst, v[first:]) }
}

// stepBytes is the number of bytes of edges that a step reads.
const stepBytes = 64 << 20

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

// staged reports whether the mean stays on the host.
func (m *model) staged() bool { return m.sum.memory != nil }

// overEdges are the steps of a mean over edges, or of its gradient. dst is written.
func (m *model) overEdges(dst, src matrix, backward bool) (steps []step) {
	for i, l := range m.edgeBlocks(backward) {
		mode := managed.ReadWrite
		if i == 0 {
			mode = managed.Overwrite
		}
		steps = append(steps, step{append(l.uses(), src.use(managed.ReadOnly), dst.use(mode)), func() error {
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

// meanOf are the steps of a panel of the features' mean.
func (m *model) meanOf(panel int) []step {
	x, mean := m.x[panel], m.mean[panel]
	if !m.staged() {
		return m.overEdges(mean, x, false)
	}
	return append(m.overEdges(m.sum, x, false), step{[]use{m.sum.use(managed.ReadOnly), mean.use(managed.InPlace)}, func() error {
		return m.b.copy(mean, m.sum)
	}})
}

// beta is the factor of what a sum has so far.
func beta(first bool) float32 {
	if first {
		return 0
	}
	return 1
}

// A rowBlock is some rows of what is stored, and place for those of the hidden layer.
type rowBlock struct {
	mean             []matrix
	stored           []matrix // of a staged model: what is copied to mean first
	mixed            matrix
	hidden, gradient matrix
	first            bool
}

func (m *model) rowBlocks() (blocks []rowBlock) {
	for first := 0; first < m.Nodes; first += blockRows {
		last := min(first+blockRows, m.Nodes)
		b := rowBlock{mixed: m.mixed.block(first, last), hidden: m.hidden.block(0, last-first), gradient: m.gradient.block(0, last-first), first: first == 0}
		for i, p := range m.mean {
			p = p.block(first, last)
			if m.staged() {
				b.stored = append(b.stored, p)
				p = matrix{p.rows, p.cols, m.rows.memory, i * m.rows.rows * p.cols}
			}
			b.mean = append(b.mean, p)
		}
		blocks = append(blocks, b)
	}
	return blocks
}

// means are the uses of a block's rows of the mean.
func (r rowBlock) means() []use {
	if r.stored != nil {
		return useAll(r.stored, managed.InPlace)
	}
	return useAll(r.mean, managed.ReadOnly)
}

// hide computes rows of the hidden layer.
func (m *model) hide(r rowBlock) error {
	for p, stored := range r.stored {
		if err := m.b.copy(r.mean[p], stored); err != nil {
			return err
		}
	}
	for p, mean := range r.mean {
		if err := m.b.multiply(r.hidden, mean, m.w1.block(p*m.width, (p+1)*m.width), false, false, beta(p == 0)); err != nil {
			return err
		}
	}
	return m.b.relu(r.hidden)
}

// forward are the steps up to the logits.
func (m *model) forward() (steps []step) {
	for p := range m.x {
		steps = append(steps, m.meanOf(p)...)
	}
	// The rows overwrite all of it, but each step a part: so a plan brings nothing of it.
	steps = append(steps, step{[]use{m.mixed.use(managed.Overwrite)}, func() error { return m.b.zero(m.mixed) }})
	for _, r := range m.rowBlocks() {
		steps = append(steps, step{append(r.means(), r.mixed.use(managed.ReadWrite)), func() error {
			if err := m.hide(r); err != nil {
				return err
			}
			return m.b.multiply(r.mixed, r.hidden, m.w2, false, false, 0)
		}})
	}
	return append(steps, m.overEdges(m.logits, m.mixed, false)...)
}

// backward are the steps from the logits to the gradients of all weights. The logits are
// overwritten.
func (m *model) backward() (steps []step) {
	steps = append(steps, step{[]use{m.logits.use(managed.ReadWrite)}, func() error {
		return m.b.crossEntropy(m.logits, m.labels, 1/float32(m.Nodes))
	}})
	steps = append(steps, m.overEdges(m.mixed, m.logits, true)...)
	for _, r := range m.rowBlocks() {
		steps = append(steps, step{append(r.means(), r.mixed.use(managed.ReadOnly)), func() error { return m.gradients(r) }})
	}
	return steps
}

// gradients adds what some rows contribute.
func (m *model) gradients(r rowBlock) error {
	if err := m.hide(r); err != nil {
		return err
	}
	if err := m.b.multiply(m.w2Gradient, r.hidden, r.mixed, true, false, beta(r.first)); err != nil {
		return err
	}
	if err := m.b.multiply(r.gradient, r.mixed, m.w2, false, true, 0); err != nil {
		return err
	}
	if err := m.b.reluGradient(r.gradient, r.hidden); err != nil {
		return err
	}
	for p, mean := range r.mean {
		if err := m.b.multiply(m.w1Gradient.block(p*m.width, (p+1)*m.width), mean, r.gradient, true, false, beta(r.first)); err != nil {
			return err
		}
	}
	return nil
}

// epoch are all steps of an epoch but the change of the weights.
func (m *model) epoch() []step { return append(m.forward(), m.backward()...) }

// learn changes the weights, which are small memory.
func (m *model) learn(rate float32) error {
	if err := m.b.sgd(m.w1, m.w1Gradient, rate); err != nil {
		return err
	}
	return m.b.sgd(m.w2, m.w2Gradient, rate)
}
