package weights

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// Pieces have all bytes of the runs, in order, end at multiples of their size, and have host memory apart if asked.
func TestFilesAreCutIntoPieces(t *testing.T) {
	t.Parallel()
	dev := &cudart.Device{}
	f := &savedFile{}
	off := int64(4096)
	for _, run := range []struct {
		dev *cudart.Device
		n   int
	}{{dev, 100}, {nil, 30_000}, {nil, 7}, {dev, 50_000}, {nil, 1}, {dev, 5}, {dev, 4096}} {
		f.runs = append(f.runs, savedRun{device: run.dev, ptr: cudart.DevPtr(off), off: off, n: run.n})
		if last := &f.runs[len(f.runs)-1]; run.dev == nil {
			last.host = make([]byte, run.n)
		}
		off += int64(run.n)
	}
	for _, apart := range []bool{false, true} {
		at := int64(4096)
		for _, piece := range f.cut(8192, apart) {
			assert.Equal(t, piece[0].off/8192, (piece[len(piece)-1].end()-1)/8192)
			for _, r := range piece {
				require.Equal(t, at, r.off)
				at += int64(r.n)
				switch {
				case r.device == nil:
					assert.Len(t, r.host, r.n)
					assert.True(t, !apart || len(piece) == 1)
				default:
					assert.EqualValues(t, r.off, r.ptr, "neighbours in the file and in memory")
				}
			}
		}
		assert.Equal(t, off, at)
	}
}
