package kernel

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cudart"
)

func TestShapesOfProducts(t *testing.T) {
	t.Parallel()
	shape := func(rows, cols int) Matrix { return Matrix{Rows: rows, Cols: cols} }
	for _, tt := range []struct {
		c, a, b Matrix
		ok      bool
	}{
		{shape(2, 4), shape(2, 3), shape(3, 4), true},
		{shape(2, 4), shape(3, 2).T(), shape(3, 4), true},
		{shape(2, 4), shape(2, 3), shape(4, 3).T(), true},
		{shape(2, 4), shape(3, 2).T(), shape(4, 3).T(), true},
		{shape(2, 4), shape(2, 3).T().T(), shape(3, 4), true},
		{shape(4, 2), shape(2, 3), shape(3, 4), false},
		{shape(4, 2).T(), shape(2, 3), shape(3, 4), false},
		{shape(2, 4), shape(2, 3), shape(4, 3), false},
		{shape(0, 4), shape(0, 3), shape(3, 4), false},
		{shape(2, 4), shape(2, 0), shape(0, 4), false},
		{shape(1<<31, 4), shape(1<<31, 3), shape(3, 4), false},
	} {
		m, n, k, err := product(tt.c, tt.a, tt.b)
		if !tt.ok {
			assert.ErrorIs(t, err, cudart.ErrInvalidValue, "%v = %v * %v", tt.c, tt.a, tt.b)
			continue
		}
		assert.NoError(t, err)
		assert.Equal(t, []int{2, 4, 3}, []int{m, n, k})
	}
	assert.EqualError(t, func() error { _, _, _, err := product(shape(1, 1), shape(2, 3).T(), shape(3, 4)); return err }(),
		"kernel: multiply 2x3 transposed by 3x4 into 1x1: "+cudart.ErrInvalidValue.Error())
}

func TestStatusOfCuBLAS(t *testing.T) {
	t.Parallel()
	assert.EqualError(t, BLASAllocFailed, "CUBLAS_STATUS_ALLOC_FAILED (3)")
	assert.EqualError(t, BLASStatus(99), "unrecognized cublasStatus_t (99)")
	assert.ErrorIs(t, BLASAllocFailed, cudart.ErrMemoryAllocation)
	assert.False(t, errors.Is(BLASStatus(7), cudart.ErrMemoryAllocation))
}

// No more threads are launched than a device runs at once, and never none.
func TestSpread(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ n, block, processors, blocks int }{
		{0, 256, 132, 1}, {1, 256, 132, 1}, {257, 256, 132, 2}, {1 << 40, 256, 132, 132 * 8}, {1 << 40, 512, 132, 132 * 4}, {1 << 40, 256, 0, 8},
	} {
		c := spread(tt.n, tt.block, tt.processors)
		assert.Equal(t, Config{Grid: Dim{X: tt.blocks}, Block: Dim{X: tt.block}}, c, "%+v", tt)
	}
	assert.Equal(t, Config{}, Threads(0, 256))
	assert.Equal(t, Config{}, Threads(5, 0))
}
