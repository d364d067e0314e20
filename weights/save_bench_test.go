//go:build unix

package weights_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/testgpu"
	"github.com/gopinned/pinned/weights"
)

// BenchmarkSave saves to a file in memory where the system has /dev/shm: a large tensor, and many small ones that are no
// neighbours on the device. Its CPU time is that of the simulated GPU too, if that is used.
func BenchmarkSave(b *testing.B) {
	for name, tensors := range map[string]struct{ count, size int }{"large": {1, benchBytes(b)}, "small": {20_000, 3072}} {
		b.Run(name, func(b *testing.B) {
			dir := b.TempDir()
			if shared, err := os.MkdirTemp("/dev/shm", "weights"); err == nil {
				b.Cleanup(func() { _ = os.RemoveAll(shared) })
				dir = shared
			}
			const apart = 64
			dev := testgpu.Device(b)
			m := memoryOf(b, dev, tensors.count*(tensors.size+apart))
			var list []weights.SavedTensor
			for i := range tensors.count {
				memory := weights.Memory{Device: dev, Ptr: m.Ptr + cudart.DevPtr(i*(tensors.size+apart)), Bytes: tensors.size}
				list = append(list, weights.SavedTensor{Name: fmt.Sprint(i), DType: weights.U8, Shape: []int{tensors.size}, Memory: memory})
			}
			b.SetBytes(int64(tensors.count * tensors.size))
			began := hostos.CPUTime()
			for b.Loop() {
				require.NoError(b, save(b.Context(), filepath.Join(dir, "m.safetensors"), list, weights.SaveOptions{}))
			}
			b.ReportMetric((hostos.CPUTime()-began).Seconds()*1e9/float64(b.N*tensors.count*tensors.size), "cpu-s/GB")
		})
	}
}
