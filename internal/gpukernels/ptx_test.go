package gpukernels

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/ptx"
)

// Our PTX is what the compiler has made of the sources beside it, and drivers of CUDA 11.8 take
// it. scripts/ptx.sh compiles, and alone writes the hashes. scripts/ptx.sh check compiles with
// CUDA 11.8 and compares. What the PTX computes only a GPU shows, as nothing here runs
// PTX: there TestSimulatedDevicesComputeWhatKernelsDo compares it with the Go functions of simulated
// devices, and the tests of examples/gcn with what Go computes.
func TestPTXMatchesItsSources(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"src", "../../examples/gcn/src"} {
		files, err := filepath.Glob(dir + "/*.[cp]*")
		require.NoError(t, err)
		var sums strings.Builder
		hashed := 0
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			if name, packed := strings.CutSuffix(file, ".gz"); packed {
				want, err := os.ReadFile(name)
				require.NoError(t, err)
				got, err := unpack(text)
				require.NoError(t, err)
				require.Equal(t, string(want), string(got), "what is embedded is the PTX beside it: run scripts/ptx.sh")
				continue
			}
			hashed++
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(text), filepath.Base(file))
			if filepath.Ext(file) == ".cu" {
				continue
			}
			var major, minor int
			_, version, _ := strings.Cut(string(text), "\n.version ")
			_, err = fmt.Sscanf(version, "%d.%d", &major, &minor)
			require.NoError(t, err)
			assert.LessOrEqual(t, 100*major+minor, 708, "drivers of CUDA 11.8 take up to 7.8: compile with CUDA 11.8 or older")
			assert.Contains(t, string(text), "\n.target sm_75\n")
		}
		recorded, err := os.ReadFile(dir + "/SHA256SUMS")
		require.NoError(t, err)
		assert.Equal(t, string(recorded), sums.String(), "a source or PTX was changed by hand: run scripts/ptx.sh")
		assert.NotZero(t, hashed)
		assert.Zero(t, hashed%2, "a source and its PTX each")
	}
}

func unpacked(t *testing.T, packed []byte) []byte {
	t.Helper()
	text, err := unpack(packed)
	require.NoError(t, err)
	return text
}

// The kernels that the package launches are in its PTX, with the parameters that it gives them:
// without a GPU nothing else compares the two.
func TestOwnKernelsHaveTheLaunchedParameters(t *testing.T) {
	t.Parallel()
	memory, ok := ptx.Parse(unpacked(t, memoryPTX))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{
		"pinned_fill": {Params: []int{8, 8, 8, 4, 8, 8}, BlockThreads: blockThreads}, "pinned_check": {Params: []int{8, 8, 8, 4, 8, 8, 8}, BlockThreads: blockThreads},
		"pinned_copy": {Params: []int{8, 8, 8}, BlockThreads: copyThreads}, "pinned_chase": {Params: []int{8, 8, 8, 8}}, "pinned_busy": {Params: []int{8, 8}},
	}, memory.Kernels)
	blocks, ok := ptx.Parse(unpacked(t, blocksPTX))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{
		"pinned_blocks":       {Params: []int{8, 8, 8, 8, 8, 8, 8, 8}, BlockThreads: blocksThreads},
		"pinned_first_beyond": {Params: []int{8, 8, 8, 8}, BlockThreads: blocksThreads},
	}, blocks.Kernels)
	parts, ok := ptx.Parse(unpacked(t, partsPTX))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{"pinned_parts": {Params: []int{8, 8, 8, 8}, BlockThreads: partsThreads}}, parts.Kernels)
}
