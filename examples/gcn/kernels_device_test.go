//go:build linux && !android && (amd64 || arm64)

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/kernel/cublas"
)

// openGPU opens a simulated device, or the machine's GPU.
func openGPU(tb testing.TB) (*cudart.Device, *cudart.Stream) {
	tb.Helper()
	dev := testgpu.DeviceWith(tb, cudasim.Config{Kernels: simulatedKernels})
	s, err := dev.NewStream(cudart.StreamOptions{})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return dev, s
}

func openNetwork(tb testing.TB, dev *cudart.Device) *network {
	tb.Helper()
	n, err := newNetwork(context.Background(), dev)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, n.Close()) })
	return n
}

func randoms(r *rand.Rand, n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = r.Float32()*2 - 1
	}
	return v
}

func indices(r *rand.Rand, n, below int) []uint32 {
	v := make([]uint32, n)
	for i := range v {
		v[i] = uint32(r.IntN(below))
	}
	return v
}

// near compares with a reference in float64.
func near(t *testing.T, want []float64, got []float32, tolerance float64, name string) {
	t.Helper()
	require.Len(t, got, len(want))
	for i, w := range want {
		if math.Abs(w-float64(got[i])) > tolerance*(1+math.Abs(w)) || math.IsNaN(float64(got[i])) {
			t.Fatalf("%s: element %d is %v, want %v", name, i, got[i], w)
		}
	}
}

func wide(v []float32) []float64 {
	w := make([]float64, len(v))
	for i, x := range v {
		w[i] = float64(x)
	}
	return w
}

func TestKernelsAddEdges(t *testing.T) {
	dev, s := openGPU(t)
	n := openNetwork(t, dev)
	r := rand.New(rand.NewPCG(1, 1))
	for _, width := range []int{1, 7, 32, 33, 128, 300} {
		for _, rows := range []int{1, 100, 20_000} {
			if rows > 1000 && !testgpu.Real() && testing.Short() {
				continue
			}
			const nodes = 137
			name := fmt.Sprintf("%d rows of %d", rows, width)
			table, weight := randoms(r, nodes*width), randoms(r, rows)
			a, b := indices(r, rows, nodes), indices(r, rows, nodes)
			pTable, pWeight, pa, pb := testgpu.ToDevice(t, dev, table), testgpu.ToDevice(t, dev, weight), testgpu.ToDevice(t, dev, a), testgpu.ToDevice(t, dev, b)
			for _, w := range []cudart.DevPtr{pWeight, 0} {
				sum := testgpu.ToDevice(t, dev, table)
				require.NoError(t, n.addEdges(s, sum, pTable, pa, pb, w, rows, width))
				want := wide(table)
				for e := range rows {
					f := 1.0
					if w != 0 {
						f = float64(weight[e])
					}
					for c := range width {
						want[int(b[e])*width+c] += f * float64(table[int(a[e])*width+c])
					}
				}
				near(t, want, testgpu.CopyToHost[float32](t, s, sum, nodes*width), 1e-4, "edges "+name)
			}
		}
	}
	require.NoError(t, n.addEdges(s, 0, 0, 0, 0, 0, 0, 1), "of none")
}

func TestElementwiseKernels(t *testing.T) {
	dev, s := openGPU(t)
	n := openNetwork(t, dev)
	r := rand.New(rand.NewPCG(2, 2))
	for _, many := range []int{1, 255, 256, 100_003, 2_000_000} {
		x, g := randoms(r, many), randoms(r, many)
		x[0] = 0
		px, pg, out := testgpu.ToDevice(t, dev, x), testgpu.ToDevice(t, dev, g), testgpu.Malloc(t, dev, 4*many)
		require.NoError(t, n.relu(s, out, px, many))
		relu := make([]float64, many)
		for i, v := range x {
			relu[i] = math.Max(0, float64(v))
		}
		near(t, relu, testgpu.CopyToHost[float32](t, s, out, many), 0, "ReLU")

		require.NoError(t, n.reluGradient(s, pg, pg, out, many), "in place")
		want := make([]float64, many)
		for i := range g {
			if relu[i] > 0 {
				want[i] = float64(g[i])
			}
		}
		near(t, want, testgpu.CopyToHost[float32](t, s, pg, many), 0, "ReLU gradient")

		require.NoError(t, n.sgd(s, px, pg, 0.25, many))
		for i := range want {
			want[i] = float64(x[i]) - 0.25*want[i]
		}
		near(t, want, testgpu.CopyToHost[float32](t, s, px, many), 1e-6, "SGD")
	}
	nan := testgpu.ToDevice(t, dev, []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))})
	require.NoError(t, n.relu(s, nan, nan, 3))
	got := testgpu.CopyToHost[float32](t, s, nan, 3)
	assert.True(t, math.IsNaN(float64(got[0])), "NaN stays")
	assert.True(t, math.IsInf(float64(got[1]), 1))
	assert.Zero(t, got[2])
}

func TestCrossEntropyKernel(t *testing.T) {
	dev, s := openGPU(t)
	n := openNetwork(t, dev)
	r := rand.New(rand.NewPCG(3, 3))
	for _, classes := range []int{1, 2, 10, 32, 33, 1000} {
		const rows = 501
		x, label := randoms(r, rows*classes), indices(r, rows, classes)
		for i := range x {
			x[i] *= 30 // so that the largest must be subtracted
		}
		label[7] = uint32(classes) // no class
		const scale = 0.5
		want, loss := make([]float64, rows*classes), 0.0
		for i := range rows {
			if i == 7 {
				continue
			}
			largest, total := math.Inf(-1), 0.0
			for _, v := range x[i*classes:][:classes] {
				largest = max(largest, float64(v))
			}
			for _, v := range x[i*classes:][:classes] {
				total += math.Exp(float64(v) - largest)
			}
			for c, v := range x[i*classes:][:classes] {
				p := math.Exp(float64(v)-largest) / total
				if c == int(label[i]) {
					p--
					loss += scale * (math.Log(total) + largest - float64(v))
				}
				want[i*classes+c] = scale * p
			}
		}
		logits, labels, sum := testgpu.ToDevice(t, dev, x), testgpu.ToDevice(t, dev, label), testgpu.ToDevice(t, dev, []float64{100})
		require.NoError(t, n.crossEntropy(s, 0, logits, labels, sum, rows, classes, scale), "the loss alone")
		gradient := testgpu.Malloc(t, dev, 4*len(x))
		require.NoError(t, n.crossEntropy(s, gradient, logits, labels, sum, rows, classes, scale))
		near(t, want, testgpu.CopyToHost[float32](t, s, gradient, len(x)), 1e-5, "gradient")
		assert.InEpsilon(t, 100+2*loss, testgpu.CopyToHost[float64](t, s, sum, 1)[0], 1e-6)
		require.NoError(t, n.crossEntropy(s, logits, logits, labels, sum, rows, classes, scale), "in place")
		near(t, want, testgpu.CopyToHost[float32](t, s, logits, len(x)), 1e-5, "gradient in place")
	}
}

// multiplyReference is c = alpha * a * b + beta * c in float64.
func multiplyReference(c, a, b []float32, m, n, k int, ta, tb bool, alpha, beta float64) []float64 {
	want := make([]float64, m*n)
	for i := range m {
		for j := range n {
			sum := 0.0
			for p := range k {
				x, y := i*k+p, p*n+j
				if ta {
					x = p*m + i
				}
				if tb {
					y = j*k + p
				}
				sum += float64(a[x]) * float64(b[y])
			}
			want[i*n+j] = alpha*sum + beta*float64(c[i*n+j])
		}
	}
	return want
}

// All products of matrices, by the package's kernel and by cuBLAS where it is.
func TestKernelsMultiply(t *testing.T) {
	dev, s := openGPU(t)
	network := openNetwork(t, dev)
	ways := map[string]func(c, a, b cublas.Matrix, alpha, beta float32) error{
		"own": func(c, a, b cublas.Matrix, alpha, beta float32) error {
			return network.multiply(s, c, a, b, alpha, beta)
		},
	}
	blas, err := cublas.New(context.Background(), s)
	switch {
	case err == nil:
		defer func() { require.NoError(t, blas.Close()) }()
		ways["cuBLAS"] = blas.Multiply
	case errors.Is(err, errors.ErrUnsupported):
		t.Logf("without cuBLAS: %v", err)
	default:
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(4, 4))
	for _, shape := range [][3]int{{1, 1, 1}, {3, 5, 7}, {64, 64, 16}, {65, 63, 17}, {200, 130, 129}, {16, 300, 40}, {20, 33, 20_000}, {128, 64, 9_999}} {
		m, n, k := shape[0], shape[1], shape[2]
		if !testgpu.Real() && (m*n*k > 20_000_000 || testing.Short() && m*n*k > 100_000) {
			continue // slow there, and more so under the race detector and an emulator
		}
		a, b, c := randoms(r, m*k), randoms(r, k*n), randoms(r, m*n)
		pa, pb := testgpu.ToDevice(t, dev, a), testgpu.ToDevice(t, dev, b)
		for _, factors := range [][2]float32{{1, 0}, {1, 1}, {-0.5, 2}} {
			for form := range 4 {
				ta, tb := form&1 != 0, form&2 != 0
				want := multiplyReference(c, a, b, m, n, k, ta, tb, float64(factors[0]), float64(factors[1]))
				x, y := cublas.Matrix{P: pa, Rows: m, Cols: k}, cublas.Matrix{P: pb, Rows: k, Cols: n}
				if ta {
					x = cublas.Matrix{P: pa, Rows: k, Cols: m}.T()
				}
				if tb {
					y = cublas.Matrix{P: pb, Rows: n, Cols: k}.T()
				}
				for name, multiply := range ways {
					z := cublas.Matrix{P: testgpu.ToDevice(t, dev, c), Rows: m, Cols: n}
					require.NoError(t, multiply(z, x, y, factors[0], factors[1]))
					near(t, want, testgpu.CopyToHost[float32](t, s, z.P, m*n), 2e-4, fmt.Sprintf("%s %dx%dx%d %v %v %v", name, m, n, k, ta, tb, factors))
				}
			}
		}
	}
}

// BenchmarkMultiply compares the package's kernel with cuBLAS, in TFLOP/s by the device's time.
func BenchmarkMultiply(b *testing.B) {
	if !testgpu.Real() {
		b.Skipf("needs a real GPU, which %s=1 requests: a simulated one has no times of its own", testgpu.Env)
	}
	dev, s := openGPU(b)
	network := openNetwork(b, dev)
	blas, err := cublas.New(context.Background(), s)
	if err == nil {
		defer func() { require.NoError(b, blas.Close()) }()
	}
	const m, n, k = 1 << 20, 256, 128
	x := cublas.Matrix{P: testgpu.Malloc(b, dev, 4*m*k), Rows: m, Cols: k}
	w := cublas.Matrix{P: testgpu.Malloc(b, dev, 4*n*k), Rows: k, Cols: n}
	y := cublas.Matrix{P: testgpu.Malloc(b, dev, 4*m*n), Rows: m, Cols: n}
	begin, err2 := dev.NewEvent()
	require.NoError(b, err2)
	end, err2 := dev.NewEvent()
	require.NoError(b, err2)
	b.Cleanup(func() { require.NoError(b, errors.Join(begin.Close(), end.Close())) })
	run := func(name string, f func() error) {
		b.Run(name, func(b *testing.B) {
			require.NoError(b, f())
			require.NoError(b, s.Record(begin))
			for range b.N {
				require.NoError(b, f())
			}
			require.NoError(b, s.Record(end))
			require.NoError(b, s.SynchronizeBlocking())
			took, err := end.Since(begin)
			require.NoError(b, err)
			b.ReportMetric(float64(b.N)*2*m*n*k/1e12/took.Seconds(), "TFLOP/s")
		})
	}
	run("own forward", func() error { return network.multiply(s, y, x, w, 1, 0) })
	run("own weight gradient", func() error { return network.multiply(s, w, x.T(), y, 1, 0) })
	if err == nil {
		run("cuBLAS forward", func() error { return blas.Multiply(y, x, w, 1, 0) })
		run("cuBLAS weight gradient", func() error { return blas.Multiply(w, x.T(), y, 1, 0) })
	}
}
