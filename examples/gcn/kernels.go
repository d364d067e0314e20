package main

import (
	"context"
	_ "embed"
	"errors"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel"
	"github.com/gopinned/pinned/kernel/cublas"
)

//go:embed src/network.ptx
var networkPTX []byte

// A network has the kernels of the graph network, loaded on a device. Matrices are float32, row
// by row; indices and labels are uint32. All methods queue work on a stream and return. They do
// nothing for 0 rows or elements. Indices are not checked: one that is no row makes the context
// unusable. Sums by several threads have no fixed order, so results differ from run to run in
// their last bits.
type network struct {
	*kernel.Module
	edges, clamp, positive, entropy, descent, scale *kernel.Kernel

	product    [2][2]*kernel.Kernel // [a transposed][b transposed]
	processors int
}

func newNetwork(ctx context.Context, dev *cudart.Device) (*network, error) {
	m, err := kernel.Load(ctx, dev, networkPTX)
	if err != nil {
		return nil, err
	}
	n := &network{Module: m}
	for name, k := range map[string]**kernel.Kernel{
		"pinned_edges_add": &n.edges, "pinned_relu": &n.clamp, "pinned_relu_gradient": &n.positive,
		"pinned_cross_entropy": &n.entropy, "pinned_sgd": &n.descent, "pinned_scale": &n.scale,
		"pinned_multiply_nn": &n.product[0][0], "pinned_multiply_nt": &n.product[0][1],
		"pinned_multiply_tn": &n.product[1][0], "pinned_multiply_tt": &n.product[1][1],
	} {
		if err == nil {
			*k, err = m.Kernel(ctx, name)
		}
	}
	if err == nil {
		n.processors, err = dev.Attribute(cudart.AttrMultiProcessorCount)
	}
	if err != nil {
		return nil, errors.Join(err, m.CloseContext(ctx))
	}
	return n, nil
}

const (
	blockThreads     = 256  // as in src/network.cu
	processorThreads = 2048 // that a multiprocessor runs at once
)

// launch runs a kernel with so many threads, or as many as the device runs at once.
func (n *network) launch(s *cudart.Stream, k *kernel.Kernel, threads int, args ...kernel.Value) error {
	if threads == 0 {
		return nil
	}
	return k.Launch(s, kernel.Threads(min(threads, max(n.processors, 1)*processorThreads), blockThreads), args...)
}

// addEdges adds for each edge e of a graph row from[e] of src, times weight[e], to row to[e] of
// dst. weight is float32, or 0 for 1 everywhere. A warp handles an edge.
func (n *network) addEdges(s *cudart.Stream, dst, src, from, to, weight cudart.DevPtr, edges, width int) error {
	return n.launch(s, n.edges, 32*edges, kernel.Arg(dst), kernel.Arg(src), kernel.Arg(from), kernel.Arg(to), kernel.Arg(weight), kernel.Arg(edges), kernel.Arg(uint32(width)))
}

// relu sets count elements of dst to those of src, negative ones to 0. Both may be the same.
func (n *network) relu(s *cudart.Stream, dst, src cudart.DevPtr, count int) error {
	return n.launch(s, n.clamp, count, kernel.Arg(dst), kernel.Arg(src), kernel.Arg(count))
}

// reluGradient sets dst to gradient where output, of relu, is positive, and else to 0. dst may
// be gradient.
func (n *network) reluGradient(s *cudart.Stream, dst, gradient, output cudart.DevPtr, count int) error {
	return n.launch(s, n.positive, count, kernel.Arg(dst), kernel.Arg(gradient), kernel.Arg(output), kernel.Arg(count))
}

// crossEntropy adds to loss, one float64, scale times the cross-entropy of the softmax of each
// row of logits and its label. It sets gradient to the gradient of that by logits, unless it is
// 0; it may be logits. Rows whose label is not a class add nothing, and have gradient 0. A warp
// handles a row.
func (n *network) crossEntropy(s *cudart.Stream, gradient, logits, labels, loss cudart.DevPtr, rows, classes int, scale float32) error {
	return n.launch(s, n.entropy, 32*rows, kernel.Arg(gradient), kernel.Arg(logits), kernel.Arg(labels), kernel.Arg(loss), kernel.Arg(rows), kernel.Arg(uint32(classes)), kernel.Arg(float32(scale)))
}

// sgd is a step of stochastic gradient descent: weight -= rate * gradient.
func (n *network) sgd(s *cudart.Stream, weight, gradient cudart.DevPtr, rate float32, count int) error {
	return n.launch(s, n.descent, count, kernel.Arg(weight), kernel.Arg(gradient), kernel.Arg(float32(rate)), kernel.Arg(count))
}

// Tiles of the product's kernel, as in src/network.cu.
const (
	tile      = 64
	tileShare = 2048 // of the inner dimension: fewer are not worth a block of their own
)

// multiply computes c = alpha * a * b + beta * c, for where cuBLAS is not. The shapes must fit. If
// c has few tiles and the inner dimension is long, several blocks share it.
func (n *network) multiply(s *cudart.Stream, c, a, b cublas.Matrix, alpha, beta float32) error {
	inner, ta, tb := a.Cols, 0, 0
	if a.Transposed {
		inner, ta = a.Rows, 1
	}
	if b.Transposed {
		tb = 1
	}
	grid := kernel.Dim{X: (c.Rows-1)/tile + 1, Y: (c.Cols-1)/tile + 1, Z: 1}
	if tiles := grid.Size(); tiles < 2*n.processors {
		grid.Z = max(1, min(inner/tileShare, 4*n.processors/tiles))
	}
	if grid.Z > 1 { // blocks add to c, which must be beta * c before
		var err error
		switch count := c.Rows * c.Cols; beta {
		case 0:
			err = s.Memset(c.P, 0, 4*count)
		case 1:
		default:
			err = n.launch(s, n.scale, count, kernel.Arg(c.P), kernel.Arg(float32(beta)), kernel.Arg(count))
		}
		if err != nil {
			return err
		}
	}
	return n.product[ta][tb].Launch(s, kernel.Config{Grid: grid, Block: kernel.Dim{X: blockThreads}}, kernel.Arg(c.P), kernel.Arg(a.P), kernel.Arg(b.P),
		kernel.Arg(c.Rows), kernel.Arg(c.Cols), kernel.Arg(inner), kernel.Arg(float32(alpha)), kernel.Arg(float32(beta)))
}
