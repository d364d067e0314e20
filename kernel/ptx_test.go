package kernel

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParametersOfPTX(t *testing.T) {
	t.Parallel()
	kernels, ok := parsePTX([]byte(`//
.version 7.8
.target sm_75
.address_size 64
// .entry commented(.param .u64 x)
/* .entry commented_too() */
.visible .entry saxpy(
	.param .u64 saxpy_param_0, // the target
	.param .f32 saxpy_param_1,
	.param .u8 saxpy_param_2,
	.param .align 8 .b8 saxpy_param_3[24],
	.param .u64 .ptr .global .align 4 saxpy_param_4,
	.param .s16 saxpy_param_5,
	.param .align 16 .b64 saxpy_param_6[2]
)
.maxntid 256, 1, 1
{ ret; }
.func (.param .b32 result) helper(.param .b32 a) { ret; }
.entry none() { ret; }
.entry bare { ret; }
`))
	require.True(t, ok)
	assert.Equal(t, map[string]parameters{"saxpy": {8, 4, 1, 24, 8, 2, 16}, "none": nil, "bare": nil}, kernels)

	for _, code := range []string{"", "\x7fELF\x02.version 7.8", "\x50\xed\x55\xba", ".entry x()"} {
		_, ok := parsePTX([]byte(code))
		assert.False(t, ok, "%q", code)
	}
}

// Our PTX is of the sources beside it, and drivers of CUDA 11.8 take it. If this fails,
// run scripts/ptx.sh.
func TestPTXIsOfItsSources(t *testing.T) {
	t.Parallel()
	sources, err := filepath.Glob("src/*.cu")
	require.NoError(t, err)
	require.Len(t, sources, 2)
	for _, source := range sources {
		text, err := os.ReadFile(source)
		require.NoError(t, err)
		ptx, err := os.ReadFile(strings.TrimSuffix(source, ".cu") + ".ptx")
		require.NoError(t, err)
		first, rest, _ := strings.Cut(string(ptx), "\n")
		assert.Equal(t, fmt.Sprintf("// %s has the SHA-256 %x", filepath.Base(source), sha256.Sum256(text)), first, "run scripts/ptx.sh")
		var major, minor int
		_, version, _ := strings.Cut(rest, "\n.version ")
		_, err = fmt.Sscanf(version, "%d.%d", &major, &minor)
		require.NoError(t, err)
		assert.LessOrEqual(t, 100*major+minor, 708, "drivers of CUDA 11.8 take up to 7.8: compile with CUDA 11.8 or older")
		assert.Contains(t, rest, "\n.target sm_75\n")
	}
}

// The kernels that the package launches are in its PTX, with the parameters that it gives them:
// without a GPU nothing else compares the two.
func TestOwnKernelsHaveTheParametersThatAreGiven(t *testing.T) {
	t.Parallel()
	memory, _ := parsePTX(memoryPTX)
	assert.Equal(t, map[string]parameters{
		"pinned_fill": {8, 8, 8, 4, 8, 8}, "pinned_check": {8, 8, 8, 4, 8, 8, 8}, "pinned_copy": {8, 8, 8},
		"pinned_chase": {8, 8, 8, 8}, "pinned_busy": {8, 8},
	}, memory)
	network, _ := parsePTX(networkPTX)
	product := parameters{8, 8, 8, 8, 8, 8, 4, 4}
	assert.Equal(t, map[string]parameters{
		"pinned_gather": {8, 8, 8, 8, 4}, "pinned_scatter_add": {8, 8, 8, 8, 4}, "pinned_edges_add": {8, 8, 8, 8, 8, 8, 4},
		"pinned_relu": {8, 8, 8}, "pinned_relu_gradient": {8, 8, 8, 8}, "pinned_cross_entropy": {8, 8, 8, 8, 8, 4, 4},
		"pinned_sgd": {8, 8, 4, 8}, "pinned_scale": {8, 4, 8},
		"pinned_multiply_nn": product, "pinned_multiply_nt": product, "pinned_multiply_tn": product, "pinned_multiply_tt": product,
	}, network)
}
