package ptx

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestKernelsHaveParametersAndBlocks(t *testing.T) {
	t.Parallel()
	code, ok := Parse([]byte(`//
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
.entry none() .reqntid 8,4 /* and more */ { .maxntid 7 ret; }
.entry bare { ret; }
`))
	require.True(t, ok)
	assert.Equal(t, Code{7, 8, "sm_75", map[string]Entry{
		"saxpy": {[]int{8, 4, 1, 24, 8, 2, 16}, 256}, "none": {nil, 32}, "bare": {},
	}}, code)
}

func TestOtherTextIsNotPTX(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"":                            false,
		".version 7.0":                false,
		".version 7.0\n.target sm_75": true,
		".version 7.0 .target sm_75 .address_size 64":                 true,
		"/* .version\n9 */ // x\n.version 7.0\n// y\n.target sm_75\n": true,
		".version 7.0\n// .target sm_75":                              false,
		"x .version 7.0\n.target sm_75":                               false,
		"__global__ void f() {}":                                      false,
		"/":                                                           false,
		"/* .version 7.0\n.target sm_75":                              false,
		".version 7\n.target sm_75":                                   false,
	} {
		_, ok := Parse([]byte(text))
		assert.Equal(t, want, ok, "%q", text)
	}
}

func BenchmarkParse(b *testing.B) {
	text, err := os.ReadFile("../../internal/gpukernels/src/memory.ptx")
	require.NoError(b, err)
	for b.Loop() {
		Parse(text)
	}
}
