package transfer

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

func TestBadInput(t *testing.T) {
	t.Parallel()
	dev := testgpu.Device(t)
	for _, o := range []Options{{Workers: -1}, {Chunk: -64 * kib}, {Chunk: 64 * kib}, {Chunk: mib + 1}} {
		_, err := NewCopier(t.Context(), dev, o)
		require.ErrorContains(t, err, "must not be negative", "%+v", o)
	}
	r := rigOn(t, dev, Options{Workers: 1, Chunk: mib})
	mem := r.device(1)
	_, err := r.c.UploadFrom(t.Context(), mem, nil, 0, -1)
	require.ErrorContains(t, err, "-1 bytes: must not be negative")
	require.NoError(t, r.c.Upload(t.Context(), mem, nil))
	require.NoError(t, r.c.Download(t.Context(), nil, mem))
	require.NoError(t, r.c.UploadAll(t.Context(), nil))
	require.NoError(t, r.c.DownloadAll(t.Context(), []Part{{}, {Device: mem}}))
	require.Zero(t, r.c.Stats().Copies)
	_, err = r.c.DownloadNew(t.Context(), mem, -1)
	require.Error(t, err)
}

func TestDefaultWorkers(t *testing.T) {
	t.Parallel()
	for procs, want := range map[int]int{1: 1, 2: 2, 4: 4, 5: 3, 8: 6, 16: 12, 22: 16, 256: 16} {
		assert.Equal(t, want, defaultWorkers(procs), "%d cores", procs)
	}
}

// Whatever the sizes, chunks cover all bytes once, in order, within bounds.
func TestChunksCoverEverything(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		j := &job{
			n: 1 + random.IntN(200*mib), unit: chunkUnit << random.IntN(6), workers: 1 + random.IntN(16),
			least: leastChunk, chunk: leastChunk + random.IntN(100)*chunkUnit, at: math.MaxInt,
		}
		what := fmt.Sprintf("%d bytes, unit %d, chunk %d, %d workers", j.n, j.unit, j.chunk, j.workers)
		want := 0
		for off, n, ok := j.claim(context.Background()); ok; off, n, ok = j.claim(context.Background()) {
			require.Equal(t, want, off, what)
			require.Positive(t, n, what)
			require.LessOrEqual(t, n, j.chunk, what)
			if off+n < j.n {
				require.GreaterOrEqual(t, n, j.least, what)
			}
			want += n
		}
		require.Equal(t, j.n, want, what)
	}
}
