package main

import "github.com/gopinned/pinned/weights"

// Matrices of which each of several GPUs gets a part of the rows, or of the columns, as tensor parallelism has them.
func init() {
	for _, n := range gpuCounts {
		register(
			placedRow(n, "rows-of-each", loadWeights(n, 1, matrices, partOf(0, n))),
			placedRow(n, "columns-of-each", loadWeights(n, 1, matrices, partOf(1, n))),
		)
	}
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

// partOf places an equal part of a dimension of each tensor on each device.
func partOf(dim, devices int) placer {
	return func(_, _, _ int, t *weights.Tensor) (parts []placedPart, err error) {
		for d := range devices {
			n := t.Shape[dim]
			part, err := t.Slice(dim, n*d/devices, n*(d+1)/devices)
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
