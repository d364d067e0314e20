package weights_test

import (
	"fmt"
	"testing"

	"github.com/gopinned/pinned/weights"
)

// BenchmarkParse shows the cost of a tensor to be the same in small and large
// headers.
func BenchmarkParse(b *testing.B) {
	for _, n := range []int{1_000, 100_000} {
		specs := make([]spec, n)
		for i := range specs {
			specs[i] = spec{fmt.Sprintf("model.layers.%d.mlp.down_proj.weight", i), weights.BF16, []int{2, 8}}
		}
		for format, file := range map[string][]byte{"safetensors": makeSafetensors(b, nil, specs...), "GGUF": makeGGUF(3, 32, specs...)} {
			b.Run(fmt.Sprintf("%s/%d", format, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := parse(file); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/tensor")
			})
		}
	}
}

func BenchmarkNewPlan(b *testing.B) {
	for _, n := range []int{1_000, 100_000} {
		specs := make([]spec, n)
		for i := range specs {
			specs[i] = spec{fmt.Sprintf("model.layers.%d.mlp.down_proj.weight", i), weights.BF16, []int{2, 8}}
		}
		f := mustParse(b, makeGGUF(3, 32, specs...), "f")
		place := func(t *weights.Tensor) int { return int(t.Offset>>10) & 3 }
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				if _, err := weights.NewPlan(f.Tensors(), place, weights.PlanOptions{}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/tensor")
		})
	}
}
