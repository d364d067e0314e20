package main

import (
	"time"

	"github.com/gopinned/pinned/weights"
)

// Matrices of which each of two GPUs gets half of the rows, or of the columns, as tensor parallelism has them.
func init() {
	const target = 80 * time.Millisecond
	register(
		row{name: "weights/rows-of-each/2GiB", unit: "GB/s", cpu: true, target: target, prepare: loadWeights(2, matrices, halfOf(0))},
		row{name: "weights/columns-of-each/2GiB", unit: "GB/s", cpu: true, target: target, prepare: loadWeights(2, matrices, halfOf(1))},
	)
}

// matrices are of 4096 x 7168 elements of 2 bytes.
func matrices(_, n, left int) []int {
	const columns = 2 * 7168
	rows := min(4096, n/8/columns, left/columns)
	if rows == 0 {
		return []int{1, left}
	}
	return []int{rows, columns}
}

// halfOf places a half of a dimension of each tensor on each of two devices.
func halfOf(dim int) placer {
	return func(_, _, _ int, t *weights.Tensor) (parts []placedPart, err error) {
		for d := range 2 {
			n := t.Shape[dim]
			part, err := t.Slice(dim, n*d/2, n*(d+1)/2)
			if err != nil {
				return nil, err
			}
			one := placedPart{bytes: func(tensor []byte) (list []byte) {
				if part.Row == 0 {
					return tensor[part.From:][:part.Size]
				}
				for from := part.From; len(list) < part.Size; from += part.Stride {
					list = append(list, tensor[from:][:part.Row]...)
				}
				return list
			}}
			one.Part, one.Device = part, d
			parts = append(parts, one)
		}
		return parts, nil
	}
}
