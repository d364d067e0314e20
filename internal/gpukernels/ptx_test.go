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
			if filepath.Ext(file) == ".gz" {
				continue // see TestEmbeddedCodeIsOfItsSources
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

// sources are the files in src without their suffixes, and their kernels.
var sources = map[string][]string{
	"memory":   {"pinned_fill", "pinned_check", "pinned_copy", "pinned_chase", "pinned_busy"},
	"blocks":   {"pinned_blocks", "pinned_first_beyond"},
	"parts":    {"pinned_parts"},
	"checksum": {"pinned_crc32c"},
}

// What is embedded is the PTX beside it, and for each architecture a cubin that scripts/ptx.sh has compiled from that PTX.
func TestEmbeddedCodeIsOfItsSources(t *testing.T) {
	t.Parallel()
	recorded, err := os.ReadFile("src/CUBINS")
	require.NoError(t, err)
	compiled := make(map[string][]string) // by the name of the cubin: the hashes of it and of its PTX
	for line := range strings.Lines(string(recorded)) {
		fields := strings.Fields(line)
		require.Len(t, fields, 4, line)
		compiled[fields[2]] = fields[:2]
	}
	total := 0
	size := func(name string) int {
		info, err := os.Stat("src/" + name + ".gz")
		require.NoError(t, err)
		return int(info.Size())
	}
	for source, kernels := range sources {
		ptx, err := os.ReadFile("src/" + source + ".ptx")
		require.NoError(t, err)
		got, err := unpack(source + ".ptx")
		require.NoError(t, err)
		require.Equal(t, string(ptx), string(got), "run scripts/ptx.sh")
		total += size(source + ".ptx")
		for _, arch := range architectures {
			name := fmt.Sprintf("%s.sm_%d.cubin", source, arch)
			cubin, err := unpack(name)
			require.NoError(t, err, "run scripts/ptx.sh cubins where a ptxas knows sm_%d", arch)
			assert.Equal(t, []string{fmt.Sprintf("%x", sha256.Sum256(cubin)), fmt.Sprintf("%x", sha256.Sum256(ptx))}, compiled[name], "%s: run scripts/ptx.sh", name)
			for _, kernel := range kernels {
				assert.Contains(t, string(cubin), "\x00.text."+kernel+"\x00", name)
			}
			delete(compiled, name)
			total += size(name)
		}
	}
	assert.Empty(t, compiled)
	files, err := embedded.ReadDir("src")
	require.NoError(t, err)
	assert.Len(t, files, len(sources)*(len(architectures)+1))
	assert.Less(t, total, 300<<10, "bytes in each program")
}

func TestArchitecturesOfDevices(t *testing.T) {
	t.Parallel()
	for capability, want := range map[int]int{70: 0, 75: 75, 80: 80, 86: 86, 87: 86, 89: 89, 90: 90, 100: 100, 103: 100, 110: 0, 120: 120, 121: 120, 130: 0} {
		assert.Equal(t, want, architecture(capability), "compute capability %d", capability)
	}
}

func unpacked(t *testing.T, source string) []byte {
	t.Helper()
	text, err := unpack(source + ".ptx")
	require.NoError(t, err)
	return text
}

// The kernels that the package launches are in its PTX, with the parameters that it gives them:
// without a GPU nothing else compares the two.
func TestOwnKernelsHaveTheLaunchedParameters(t *testing.T) {
	t.Parallel()
	memory, ok := ptx.Parse(unpacked(t, "memory"))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{
		"pinned_fill": {Params: []int{8, 8, 8, 4, 8, 8}, BlockThreads: blockThreads}, "pinned_check": {Params: []int{8, 8, 8, 4, 8, 8, 8}, BlockThreads: blockThreads},
		"pinned_copy": {Params: []int{8, 8, 8}, BlockThreads: copyThreads}, "pinned_chase": {Params: []int{8, 8, 8, 8}}, "pinned_busy": {Params: []int{8, 8}},
	}, memory.Kernels)
	blocks, ok := ptx.Parse(unpacked(t, "blocks"))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{
		"pinned_blocks":       {Params: []int{8, 8, 8, 8, 8, 8, 4, 8, 4}, BlockThreads: blocksThreads},
		"pinned_first_beyond": {Params: []int{8, 8, 8, 8}, BlockThreads: blocksThreads},
	}, blocks.Kernels)
	parts, ok := ptx.Parse(unpacked(t, "parts"))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{"pinned_parts": {Params: []int{8, 8, 8, 8}, BlockThreads: partsThreads}}, parts.Kernels)
	checksum, ok := ptx.Parse(unpacked(t, "checksum"))
	require.True(t, ok)
	assert.Equal(t, map[string]ptx.Entry{"pinned_crc32c": {Params: []int{8, 8, 8}, BlockThreads: checksumThreads}}, checksum.Kernels)
}
