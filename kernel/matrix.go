package kernel

import (
	"fmt"

	"github.com/gopinned/pinned/cudart"
)

// A Matrix is float32 in device memory, row by row without gaps.
type Matrix struct {
	P          cudart.DevPtr
	Rows, Cols int  // as it is stored
	Transposed bool // as an operand it stands for its transpose
}

// T returns the transpose, of the same memory.
func (m Matrix) T() Matrix {
	m.Transposed = !m.Transposed
	return m
}

// Len returns the number of elements.
func (m Matrix) Len() int { return m.Rows * m.Cols }

// shape returns the numbers of rows and columns as an operand.
func (m Matrix) shape() (rows, cols int) {
	if m.Transposed {
		return m.Cols, m.Rows
	}
	return m.Rows, m.Cols
}

// String returns the shape, for messages.
func (m Matrix) String() string {
	s := fmt.Sprintf("%dx%d", m.Rows, m.Cols)
	if m.Transposed {
		s += " transposed"
	}
	return s
}

// maxDimension is what cuBLAS takes: it has int dimensions.
const maxDimension = 1<<31 - 1

// product checks the shapes of c = a * b and returns c's, and the dimension in between.
func product(c, a, b Matrix) (m, n, k int, err error) {
	m, k = a.shape()
	inner, n := b.shape()
	least, most := min(m, n, k), max(m, n, k)
	if least <= 0 || most > maxDimension || inner != k || c.Transposed || c.Rows != m || c.Cols != n {
		return 0, 0, 0, fmt.Errorf("kernel: multiply %v by %v into %v: %w", a, b, c, cudart.ErrInvalidValue)
	}
	return m, n, k, nil
}
