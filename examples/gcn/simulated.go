package main

import (
	"math"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// simulatedKernels do on simulated devices what src/network.cu does. The sums of several threads
// have another order there.
var simulatedKernels = map[string]cudasim.KernelFunc{
	"pinned_edges_add": func(l *cudasim.Launch) {
		edges, width := cudasim.Arg[int](l, 5), int(cudasim.Arg[uint64](l, 6))
		from, to, weight := readOf[uint32](l, cudasim.Arg[cudart.DevPtr](l, 2), edges), readOf[uint32](l, cudasim.Arg[cudart.DevPtr](l, 3), edges), []float32(nil)
		if cudasim.Arg[cudart.DevPtr](l, 4) != 0 {
			weight = readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 4), edges)
		}
		row := func(table cudart.DevPtr, i uint32) cudart.DevPtr { return table + cudart.DevPtr(4*int(i)*width) }
		for e := range edges {
			w := float32(1)
			if weight != nil {
				w = weight[e]
			}
			x, y := readOf[float32](l, row(cudasim.Arg[cudart.DevPtr](l, 1), from[e]), width), writeOf[float32](l, row(cudasim.Arg[cudart.DevPtr](l, 0), to[e]), width)
			for c := range y {
				y[c] += w * x[c]
			}
		}
	},
	"pinned_relu": func(l *cudasim.Launch) {
		n := cudasim.Arg[int](l, 2)
		dst, src := writeOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 0), n), readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 1), n)
		for i, x := range src {
			if x < 0 {
				x = 0
			}
			dst[i] = x
		}
	},
	"pinned_relu_gradient": func(l *cudasim.Launch) {
		n := cudasim.Arg[int](l, 3)
		dst, gradient, output := writeOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 0), n), readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 1), n), readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 2), n)
		for i, g := range gradient {
			if !(output[i] > 0) {
				g = 0
			}
			dst[i] = g
		}
	},
	"pinned_cross_entropy": func(l *cudasim.Launch) {
		rows, classes, scale := cudasim.Arg[int](l, 4), int(cudasim.Arg[uint64](l, 5)), cudasim.Arg[float32](l, 6)
		logits, label := readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 1), rows*classes), readOf[uint32](l, cudasim.Arg[cudart.DevPtr](l, 2), rows)
		var gradient []float32
		if cudasim.Arg[cudart.DevPtr](l, 0) != 0 {
			gradient = writeOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 0), rows*classes)
		}
		exp := func(x float32) float32 { return float32(math.Exp(float64(x))) }
		sum := 0.0
		for r := range rows {
			x := logits[r*classes:][:classes]
			largest, total := float32(math.Inf(-1)), float32(0)
			for _, v := range x {
				largest = max(largest, v)
			}
			for _, v := range x {
				total += exp(v - largest)
			}
			want, counts := int(label[r]), int(label[r]) < classes
			if counts {
				sum += math.Log(float64(total)) + float64(largest) - float64(x[want])
			}
			for c, v := range x {
				g := float32(0)
				if counts {
					if g = exp(v-largest) / total; c == want {
						g--
					}
				}
				if gradient != nil {
					gradient[r*classes+c] = g * scale
				}
			}
		}
		writeOf[float64](l, cudasim.Arg[cudart.DevPtr](l, 3), 1)[0] += sum * float64(scale)
	},
	"pinned_sgd": func(l *cudasim.Launch) {
		n := cudasim.Arg[int](l, 3)
		weight, gradient := writeOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 0), n), readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 1), n)
		for i, g := range gradient {
			weight[i] -= cudasim.Arg[float32](l, 2) * g
		}
	},
	"pinned_scale": func(l *cudasim.Launch) {
		x := writeOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 0), cudasim.Arg[int](l, 2))
		for i := range x {
			x[i] *= cudasim.Arg[float32](l, 1)
		}
	},
	"pinned_multiply_nn": func(l *cudasim.Launch) { multiplySimulated(l, false, false) },
	"pinned_multiply_nt": func(l *cudasim.Launch) { multiplySimulated(l, false, true) },
	"pinned_multiply_tn": func(l *cudasim.Launch) { multiplySimulated(l, true, false) },
	"pinned_multiply_tt": func(l *cudasim.Launch) { multiplySimulated(l, true, true) },
}

func readOf[T any](l *cudasim.Launch, p cudart.DevPtr, n int) []T {
	return cudasim.Elements[T](l.Read(p, n*int(unsafe.Sizeof(*new(T)))))
}

func writeOf[T any](l *cudasim.Launch, p cudart.DevPtr, n int) []T {
	return cudasim.Elements[T](l.Write(p, n*int(unsafe.Sizeof(*new(T)))))
}

func multiplySimulated(l *cudasim.Launch, ta, tb bool) {
	m, n, k, alpha, beta := cudasim.Arg[int](l, 3), cudasim.Arg[int](l, 4), cudasim.Arg[int](l, 5), cudasim.Arg[float32](l, 6), cudasim.Arg[float32](l, 7)
	c, a, b := writeOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 0), m*n), readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 1), m*k), readOf[float32](l, cudasim.Arg[cudart.DevPtr](l, 2), k*n)
	aRow, aColumn, bRow, bColumn := k, 1, n, 1
	if ta {
		aRow, aColumn = 1, m
	}
	if tb {
		bRow, bColumn = 1, k
	}
	for i := range m {
		for j := range n {
			exact := 0.0 // many threads' sums of few products are closer to it than one of all
			for p := range k {
				exact += float64(a[i*aRow+p*aColumn] * b[p*bRow+j*bColumn])
			}
			sum := float32(exact)
			to := &c[i*n+j]
			switch {
			case l.Grid[2] > 1: // blocks add their shares
				*to += alpha * sum
			case beta == 0:
				*to = alpha * sum
			default:
				*to = alpha*sum + beta**to
			}
		}
	}
}
