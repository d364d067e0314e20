package cublas_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel/cublas"
)

// A product on a stream, where cuBLAS is installed.
func Example() {
	multiply := func(ctx context.Context, s *cudart.Stream, c, x, y cublas.Matrix) (err error) {
		h, err := cublas.New(ctx, s)
		if errors.Is(err, errors.ErrUnsupported) {
			return nil // without cuBLAS, or on a simulated GPU
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.Close()) }() // waits for the product
		return h.Multiply(c, x, y, 1, 0)
	}
	_ = multiply
}

// A transpose is of the same memory. Shapes are checked before anything is queued.
func ExampleMatrix_T() {
	x := cublas.Matrix{P: 0x1000, Rows: 2, Cols: 3}
	fmt.Println(x, "and", x.T())
	err := new(cublas.Handle).Multiply(cublas.Matrix{Rows: 2, Cols: 2}, x, x, 1, 0)
	fmt.Println(errors.Is(err, cudart.ErrInvalidValue), err)
	// Output:
	// 2x3 and 2x3 transposed
	// true cublas: multiply 2x3 by 2x3 into 2x2: cudaErrorInvalidValue (1): invalid argument
}

// Without enough device memory the error is that of an allocation, and not that cuBLAS is missing.
func ExampleNew() {
	err := fmt.Errorf("cublas: %w", cublas.AllocFailed)
	fmt.Println(errors.Is(err, cudart.ErrMemoryAllocation), errors.Is(err, errors.ErrUnsupported))
	// Output: true false
}
