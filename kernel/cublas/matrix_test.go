package cublas

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cudart"
)

func TestShapesOfProductsAreChecked(t *testing.T) {
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
		{shape(2, 1<<31), shape(2, 3), shape(3, 1<<31), false},
		{shape(2, 4), shape(2, math.MaxInt), shape(math.MaxInt, 4), false},
		{shape(-2, 4), shape(-2, 3), shape(3, 4), false},
		{shape(2, 4), shape(2, math.MinInt), shape(math.MinInt, 4), false},
	} {
		err := checkProduct(tt.c, tt.a, tt.b)
		if !tt.ok {
			assert.ErrorIs(t, err, cudart.ErrInvalidValue, "%v = %v * %v", tt.c, tt.a, tt.b)
			continue
		}
		assert.NoError(t, err)
	}
	assert.EqualError(t, new(Handle).Multiply(shape(1, 1), shape(2, 3).T(), shape(3, 4), 1, 0),
		"cublas: multiply 2x3 transposed by 3x4 into 1x1: "+cudart.ErrInvalidValue.Error())
}

func TestStatusHasNameAndMeaning(t *testing.T) {
	t.Parallel()
	assert.EqualError(t, AllocFailed, "CUBLAS_STATUS_ALLOC_FAILED (3)")
	assert.EqualError(t, Status(99), "unrecognized cublasStatus_t (99)")
	assert.ErrorIs(t, AllocFailed, cudart.ErrMemoryAllocation)
	assert.False(t, errors.Is(Status(7), cudart.ErrMemoryAllocation))
}
