package kernel

import (
	_ "embed"
	"fmt"

	"github.com/gopinned/pinned/cudart"
)

//go:embed src/network.ptx
var networkPTX []byte

// Network is kernels for small neural networks, loaded on a device. Matrices are float32, row
// by row; indices and labels are uint32. All methods queue work on a stream and return. They
// do nothing for 0 rows or elements and return [cudart.ErrInvalidValue] for less. Indices are
// not checked: one that is no row makes the context unusable. Sums by several threads are in no
// fixed order, so results differ from run to run in their last bits. Other errors are those
// of [Kernel.Launch].
type Network struct {
	*Module
	gather, scatterAdd, addEdges, relu, reluGradient, crossEntropy, sgd, scale *Kernel

	multiply   [2][2]*Kernel // [a transposed][b transposed]
	processors int
}

// NewNetwork loads the kernels. Close them. The errors are those of [Load].
func NewNetwork(dev *cudart.Device) (*Network, error) {
	n := new(Network)
	var err error
	n.Module, n.processors, err = loadOwn(dev, networkPTX, map[string]**Kernel{
		"pinned_gather": &n.gather, "pinned_scatter_add": &n.scatterAdd, "pinned_edges_add": &n.addEdges,
		"pinned_relu": &n.relu, "pinned_relu_gradient": &n.reluGradient,
		"pinned_cross_entropy": &n.crossEntropy, "pinned_sgd": &n.sgd, "pinned_scale": &n.scale,
		"pinned_multiply_nn": &n.multiply[0][0], "pinned_multiply_nt": &n.multiply[0][1],
		"pinned_multiply_tn": &n.multiply[1][0], "pinned_multiply_tt": &n.multiply[1][1],
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}

// sized checks a number of rows or elements, and the width of rows.
func (n *Network) sized(what string, many, width int) error {
	switch {
	case n == nil:
		return fmt.Errorf("kernel: %s: %w", what, errNotMade)
	case many < 0 || width <= 0 || width > maxDimension:
		return fmt.Errorf("kernel: %s: %d of width %d: %w", what, many, width, cudart.ErrInvalidValue)
	}
	return nil
}

// byRow is the shape for rows that a warp each handles, and byElement that for elements.
func (n *Network) byRow(rows int) Config     { return spread(32*rows, blockThreads, n.processors) }
func (n *Network) byElement(many int) Config { return spread(many, blockThreads, n.processors) }

// Gather sets row i of dst to row index[i] of src.
func (n *Network) Gather(s *cudart.Stream, dst, src, index cudart.DevPtr, rows, width int) error {
	if err := n.sized("gather", rows, width); err != nil || rows == 0 {
		return err
	}
	return n.gather.Launch(s, n.byRow(rows), Ptr(dst), Ptr(src), Ptr(index), Int(rows), Uint32(uint32(width)))
}

// ScatterAdd adds row i of src to row index[i] of dst.
func (n *Network) ScatterAdd(s *cudart.Stream, dst, src, index cudart.DevPtr, rows, width int) error {
	if err := n.sized("scatter add", rows, width); err != nil || rows == 0 {
		return err
	}
	return n.scatterAdd.Launch(s, n.byRow(rows), Ptr(dst), Ptr(src), Ptr(index), Int(rows), Uint32(uint32(width)))
}

// AddEdges adds for each edge e of a graph row from[e] of src, times weight[e], to row to[e] of
// dst: Gather and ScatterAdd, without memory for the rows in between. weight is float32, or 0
// for 1 everywhere.
func (n *Network) AddEdges(s *cudart.Stream, dst, src, from, to, weight cudart.DevPtr, edges, width int) error {
	if err := n.sized("add edges", edges, width); err != nil || edges == 0 {
		return err
	}
	return n.addEdges.Launch(s, n.byRow(edges), Ptr(dst), Ptr(src), Ptr(from), Ptr(to), Ptr(weight), Int(edges), Uint32(uint32(width)))
}

// ReLU sets many elements of dst to those of src, negative ones to 0. Both may be the same.
func (n *Network) ReLU(s *cudart.Stream, dst, src cudart.DevPtr, many int) error {
	if err := n.sized("ReLU", many, 1); err != nil || many == 0 {
		return err
	}
	return n.relu.Launch(s, n.byElement(many), Ptr(dst), Ptr(src), Int(many))
}

// ReLUGradient sets dst to gradient where output, of ReLU, is positive, and else to 0. dst may be
// gradient.
func (n *Network) ReLUGradient(s *cudart.Stream, dst, gradient, output cudart.DevPtr, many int) error {
	if err := n.sized("ReLU gradient", many, 1); err != nil || many == 0 {
		return err
	}
	return n.reluGradient.Launch(s, n.byElement(many), Ptr(dst), Ptr(gradient), Ptr(output), Int(many))
}

// CrossEntropy adds to loss, one float64, scale times the cross-entropy of the softmax of each
// row of logits and its label. It sets gradient to the gradient of that by logits, unless it is
// 0; it may be logits. Rows whose label is not a class add nothing, and have gradient 0.
func (n *Network) CrossEntropy(s *cudart.Stream, gradient, logits, labels, loss cudart.DevPtr, rows, classes int, scale float32) error {
	if err := n.sized("cross entropy", rows, classes); err != nil || rows == 0 {
		return err
	}
	return n.crossEntropy.Launch(s, n.byRow(rows), Ptr(gradient), Ptr(logits), Ptr(labels), Ptr(loss), Int(rows), Uint32(uint32(classes)), Float32(scale))
}

// SGD is a step of stochastic gradient descent: weight -= rate * gradient.
func (n *Network) SGD(s *cudart.Stream, weight, gradient cudart.DevPtr, rate float32, many int) error {
	if err := n.sized("SGD", many, 1); err != nil || many == 0 {
		return err
	}
	return n.sgd.Launch(s, n.byElement(many), Ptr(weight), Ptr(gradient), Float32(rate), Int(many))
}

// Tiles of the product's kernel, as in src/network.cu.
const (
	tile      = 64
	tileShare = 2048 // of the inner dimension that is worth a block of its own
)

// Multiply computes c = alpha * a * b + beta * c with a kernel of this package, for where
// [BLAS] is not. If c has few tiles and the inner dimension is long, several blocks share it.
// The error wraps [cudart.ErrInvalidValue] if the shapes do not fit.
func (n *Network) Multiply(s *cudart.Stream, c, a, b Matrix, alpha, beta float32) error {
	rows, cols, inner, err := product(c, a, b)
	switch {
	case err != nil:
		return err
	case n == nil || !n.made():
		return fmt.Errorf("kernel: multiply: %w", errNotMade)
	case noStream(s):
		return fmt.Errorf("kernel: multiply: %w", errNilStream)
	}
	grid := Dim{X: (rows-1)/tile + 1, Y: (cols-1)/tile + 1, Z: 1}
	if tiles := grid.Size(); tiles < 2*n.processors {
		grid.Z = max(1, min(inner/tileShare, 4*n.processors/tiles))
	}
	if grid.Z > 1 { // blocks add: what is there first must be beta * c
		switch beta {
		case 0:
			err = s.Memset(c.P, 0, 4*c.Len())
		case 1:
		default:
			err = n.scale.Launch(s, n.byElement(c.Len()), Ptr(c.P), Float32(beta), Int(c.Len()))
		}
		if err != nil {
			return err
		}
	}
	k := n.multiply[index(a.Transposed)][index(b.Transposed)]
	return k.Launch(s, Config{Grid: grid, Block: Dim{X: blockThreads}}, Ptr(c.P), Ptr(a.P), Ptr(b.P),
		Int(rows), Int(cols), Int(inner), Float32(alpha), Float32(beta))
}

func index(b bool) int {
	if b {
		return 1
	}
	return 0
}
