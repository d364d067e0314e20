package weights

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/testgpu"
)

// BenchmarkPrepare is what a load does before its first copy, for 20,000 tensors of odd sizes in one file,
// which has no data.
func BenchmarkPrepare(b *testing.B) {
	const n = 20_000
	var header strings.Builder
	end := 0
	for i := range n {
		size := 106_496 + i%3
		fmt.Fprintf(&header, `,"layers.%d":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}`, i, size, end, end+size)
		end += size
	}
	text := "{" + header.String()[1:] + "}"
	path := filepath.Join(b.TempDir(), "model.safetensors")
	require.NoError(b, os.WriteFile(path, append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), 0o600))
	require.NoError(b, os.Truncate(path, int64(8+len(text)+end)))
	f, err := OpenFile(path)
	require.NoError(b, err)
	defer f.Close()
	plan, err := NewPlan(f.Tensors(), nil, PlanOptions{})
	require.NoError(b, err)
	memory := map[int]Memory{0: {Device: testgpu.Device(b), Ptr: 1 << 30, Bytes: plan.Devices[0].Bytes}}
	b.ReportAllocs()
	for b.Loop() {
		l := loading{owned: true}
		placements, err := plan.placements(memory)
		require.NoError(b, err)
		require.NoError(b, l.plan(plan.files, placements))
		for _, q := range l.queues {
			_, err := q.source()
			require.NoError(b, err)
		}
	}
}
