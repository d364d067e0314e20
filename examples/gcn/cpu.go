package main

import (
	"context"
	"fmt"
	"io"
	"math"
)

// cpu is a backend that computes in Go, in float64 and with one goroutine: a reference.
type cpu struct {
	bytes  int
	losses []float64
}

func (c *cpu) alloc(ctx context.Context, label string, n int, _ bool) (*memory, error) {
	c.bytes += 8 * n
	return &memory{label: label, n: n, host: make([]float64, n)}, nil
}

func (c *cpu) fill(_ context.Context, m *memory, f func(dst []float32, first int)) error {
	part := make([]float32, min(m.n, 1<<20))
	for at := 0; at < m.n; at += len(part) {
		part = part[:min(len(part), m.n-at)]
		f(part, at)
		for i, v := range part {
			m.host[at+i] = float64(v)
		}
	}
	return nil
}

func (c *cpu) fillIndices(_ context.Context, m *memory, v []uint32) error {
	m.indices = v
	return nil
}

// values are the elements of a matrix.
func values(m matrix) []float64 { return m.memory.host[m.off:][:m.len()] }

func (c *cpu) zero(m matrix) error {
	clear(values(m))
	return nil
}

func (c *cpu) copy(dst, src matrix) error {
	copy(values(dst), values(src))
	return nil
}

func (c *cpu) multiply(to, a, b matrix, ta, tb bool, beta float32) error {
	inner := a.cols
	if ta {
		inner = a.rows
	}
	x, y, z := values(a), values(b), values(to)
	for i := range to.rows {
		for j := range to.cols {
			sum := 0.0
			for k := range inner {
				left, right := i*a.cols+k, k*b.cols+j
				if ta {
					left = k*a.cols + i
				}
				if tb {
					right = j*b.cols + k
				}
				sum += x[left] * y[right]
			}
			at := &z[i*to.cols+j]
			if beta == 0 {
				*at = sum // also if it was no number
			} else {
				*at = sum + float64(beta)**at
			}
		}
	}
	return nil
}

func (c *cpu) addEdges(dst, src matrix, l edgeList) error {
	x, y := values(src), values(dst)
	for e := l.first; e < l.first+l.count; e++ {
		from, to, w := int(l.from.indices[e]), int(l.to.indices[e]), l.weight.host[e]
		for i := range dst.cols {
			y[to*dst.cols+i] += w * x[from*dst.cols+i]
		}
	}
	return nil
}

func (c *cpu) relu(m matrix) error {
	for i, v := range values(m) {
		values(m)[i] = max(v, 0)
	}
	return nil
}

func (c *cpu) reluGradient(gradient, output matrix) error {
	g := values(gradient)
	for i, v := range values(output) {
		if v <= 0 {
			g[i] = 0
		}
	}
	return nil
}

func (c *cpu) crossEntropy(logits matrix, labels *memory, scale float32) error {
	all := values(logits)
	for i, label := range labels.indices {
		row := all[i*logits.cols:][:logits.cols]
		largest := math.Inf(-1)
		for _, v := range row {
			largest = max(largest, v)
		}
		total := 0.0
		for _, v := range row {
			total += math.Exp(v - largest)
		}
		c.losses[len(c.losses)-1] += float64(scale) * (math.Log(total) + largest - row[label])
		for j, v := range row {
			row[j] = math.Exp(v-largest) / total * float64(scale)
		}
		row[label] -= float64(scale)
	}
	return nil
}

func (c *cpu) sgd(weight, gradient matrix, rate float32) error {
	w := values(weight)
	for i, g := range values(gradient) {
		w[i] -= float64(rate) * g
	}
	return nil
}

func (c *cpu) begin(int) error {
	c.losses = append(c.losses, 0)
	return nil
}

func (c *cpu) loss(_ context.Context, epoch int) (float64, error) { return c.losses[epoch], nil }

func (c *cpu) runner(_ context.Context, _ *model, epochs int) (runner, error) {
	return inOrder{epochs}, nil
}

func (c *cpu) stats(out io.Writer) error {
	_, err := fmt.Fprintf(out, "memory: %.3f GB of the host, in float64\n", float64(c.bytes)/1e9)
	return err
}

func (c *cpu) close() error { return nil }
