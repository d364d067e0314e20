package weights

import (
	"fmt"
	"math"
)

// A DType is the type of a tensor's elements, under the name that its format
// gives it: safetensors' in its header, GGUF's in ggml's enum ggml_type.
type DType string

// Plain types: one element after the other. F4 and the F6 types are packed
// without padding, and their tensors end at a byte. GGUF has F64, F32, F16,
// BF16 and I8 to I64 of these, safetensors has all. GGUF's quantized types have
// ggml's names, such as Q4_K.
const (
	BOOL        DType = "BOOL"
	F4          DType = "F4"
	F6_E2M3     DType = "F6_E2M3"
	F6_E3M2     DType = "F6_E3M2"
	U8          DType = "U8"
	I8          DType = "I8"
	F8_E5M2     DType = "F8_E5M2"
	F8_E4M3     DType = "F8_E4M3"
	F8_E8M0     DType = "F8_E8M0"
	F8_E4M3FNUZ DType = "F8_E4M3FNUZ"
	F8_E5M2FNUZ DType = "F8_E5M2FNUZ"
	I16         DType = "I16"
	U16         DType = "U16"
	F16         DType = "F16"
	BF16        DType = "BF16"
	I32         DType = "I32"
	U32         DType = "U32"
	F32         DType = "F32"
	C64         DType = "C64"
	F64         DType = "F64"
	I64         DType = "I64"
	U64         DType = "U64"
)

// A block is the smallest piece of a type that is whole bytes.
type block struct{ elements, bytes int }

var safetensorsTypes = map[DType]block{
	BOOL: {1, 1},
	F4:   {2, 1}, F6_E2M3: {4, 3}, F6_E3M2: {4, 3},
	U8: {1, 1}, I8: {1, 1},
	F8_E5M2: {1, 1}, F8_E4M3: {1, 1}, F8_E8M0: {1, 1}, F8_E4M3FNUZ: {1, 1}, F8_E5M2FNUZ: {1, 1},
	I16: {1, 2}, U16: {1, 2}, F16: {1, 2}, BF16: {1, 2},
	I32: {1, 4}, U32: {1, 4}, F32: {1, 4},
	C64: {1, 8}, F64: {1, 8}, I64: {1, 8}, U64: {1, 8},
}

// quantizedTypes holds GGUF's quantized types: blocks of elements that share their scales, which
// ggml declares as struct block_*. 256 elements are a super-block there. The sums go through the
// fields of the struct. A row, which is the last dimension of a shape, is whole blocks.
var quantizedTypes = map[DType]block{
	"Q1_0": {128, 2 + 16}, "Q2_0": {64, 2 + 16}, "Q4_0": {32, 2 + 16}, "Q4_1": {32, 2 + 2 + 16},
	"Q5_0": {32, 2 + 4 + 16}, "Q5_1": {32, 2 + 2 + 4 + 16}, "Q8_0": {32, 2 + 32}, "Q8_1": {32, 2 + 2 + 32},
	"Q2_K": {256, 16 + 64 + 2 + 2}, "Q3_K": {256, 32 + 64 + 12 + 2}, "Q4_K": {256, 2 + 2 + 12 + 128},
	"Q5_K": {256, 2 + 2 + 12 + 32 + 128}, "Q6_K": {256, 128 + 64 + 16 + 2}, "Q8_K": {256, 4 + 256 + 32},
	"IQ1_S": {256, 2 + 32 + 16}, "IQ1_M": {256, 32 + 16 + 8},
	"IQ2_XXS": {256, 2 + 64}, "IQ2_XS": {256, 2 + 64 + 8}, "IQ2_S": {256, 2 + 64 + 8 + 8},
	"IQ3_XXS": {256, 2 + 96}, "IQ3_S": {256, 2 + 64 + 8 + 32 + 4},
	"IQ4_NL": {32, 2 + 16}, "IQ4_XS": {256, 2 + 2 + 4 + 128},
	"TQ1_0": {256, 48 + 4 + 2}, "TQ2_0": {256, 64 + 2}, "MXFP4": {32, 1 + 16}, "NVFP4": {64, 4 + 32},
}

// ggmlTypes is enum ggml_type. The numbers left out are of types that ggml
// removed; no file has them any more.
var ggmlTypes = map[uint32]DType{
	0: F32, 1: F16, 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
	10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
	16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
	24: I8, 25: I16, 26: I32, 27: I64, 28: F64, 29: "IQ1_M", 30: BF16,
	34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}

// Block returns the number of elements that are stored together and the bytes
// that they take: 1 and 2 for BF16, 32 and 18 for Q4_0. Both are 0 for a type
// that this package does not know. It does not block.
func (d DType) Block() (elements, bytes int) {
	b, ok := safetensorsTypes[d]
	if !ok {
		b = quantizedTypes[d]
	}
	return b.elements, b.bytes
}

// size returns the size of a tensor in bytes, or an error for a shape that the type cannot have.
func (d DType) size(shape []int) (int, error) {
	perBlock, blockBytes := d.Block()
	if perBlock == 0 {
		return 0, fmt.Errorf("the type %s is not known", quote(string(d)))
	}
	elements, limit := 1, math.MaxInt
	for _, n := range shape {
		switch {
		case n < 0:
			return 0, fmt.Errorf("shape %v has a negative dimension", shape)
		case n > 0 && elements > limit/n:
			return 0, fmt.Errorf("shape %v has more than %d elements", shape, limit)
		}
		elements *= n
	}
	switch blocks := elements / perBlock; {
	case elements%perBlock != 0:
		return 0, fmt.Errorf("shape %v has %d elements, which do not fill bytes: %s is stored as %d elements in %d bytes", shape, elements, d, perBlock, blockBytes)
	case blocks > limit/blockBytes:
		return 0, fmt.Errorf("%s of shape %v takes more than %d bytes", d, shape, limit)
	default:
		return blocks * blockBytes, nil
	}
}
