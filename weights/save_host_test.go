package weights_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// Host memory of any size and alignment is written by several goroutines, without pinned memory.
func TestSaveOfHostMemory(t *testing.T) {
	t.Parallel()
	s := &toSave{bytes: map[string][]byte{}}
	random := rand.NewChaCha8([32]byte{1})
	for i, size := range []int{1, 20*mib + 3, 8 * mib, 4095, 17, 9*mib + 1} {
		b := make([]byte, size+i)[i:]
		_, _ = random.Read(b)
		name := fmt.Sprint("t", i)
		s.bytes[name] = b
		s.tensors = append(s.tensors, weights.SavedTensor{Name: name, DType: weights.U8, Shape: []int{size}, Host: b})
	}
	dirs := []string{t.TempDir()}
	if dir, err := os.MkdirTemp("/dev/shm", "pinned-save-"); err == nil {
		t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
		dirs = append(dirs, dir)
	}
	for _, dir := range dirs {
		for _, o := range []weights.SaveOptions{{}, {DirectIO: true}, {ShardBytes: 10 * mib}, {NoChecksums: true}} {
			path := filepath.Join(dir, "m.safetensors")
			var last [2]int
			o.Progress = func(done, total int) { last = [2]int{done, total} }
			require.NoError(t, save(t.Context(), path, s.tensors, o))
			require.Equal(t, last[1], last[0])
			require.Equal(t, 37*mib+4095+1+3+17+1, last[0])
			s.check(t, dir)
			if !o.NoChecksums {
				require.NoError(t, weights.Verify(t.Context(), dir))
			}
		}
	}
}
