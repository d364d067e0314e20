package weights_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"iter"
	"math"
	"math/big"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// st makes a safetensors file of a header and so many bytes of data.
func st(header string, data int) []byte {
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(file, header...), make([]byte, data)...)
}

// A gguf is a GGUF file that is being written, without any checks.
type gguf struct {
	version uint32
	b       []byte
}

// newGGUF starts a file with these counts.
func newGGUF(version uint32, tensors, pairs uint64) *gguf {
	g := &gguf{version: version, b: []byte("GGUF")}
	return g.u32(version).length(tensors).length(pairs)
}

func (g *gguf) u8(v ...uint8) *gguf { g.b = append(g.b, v...); return g }
func (g *gguf) u16(v uint16) *gguf  { g.b = binary.LittleEndian.AppendUint16(g.b, v); return g }
func (g *gguf) u32(v uint32) *gguf  { g.b = binary.LittleEndian.AppendUint32(g.b, v); return g }
func (g *gguf) u64(v uint64) *gguf  { g.b = binary.LittleEndian.AppendUint64(g.b, v); return g }

func (g *gguf) length(n uint64) *gguf {
	if g.version == 1 {
		return g.u32(uint32(n))
	}
	return g.u64(n)
}

func (g *gguf) str(s string) *gguf {
	g.length(uint64(len(s)))
	g.b = append(g.b, s...)
	return g
}

// pair writes a key and its value's type; the value follows.
func (g *gguf) pair(key string, kind uint32) *gguf { return g.str(key).u32(kind) }

// array writes a key and the type and length of an array; the values follow.
func (g *gguf) array(key string, kind uint32, n uint64) *gguf {
	return g.pair(key, ggufArray).u32(kind).length(n)
}

// tensor writes a tensor's info, with its dimensions as GGUF orders them.
func (g *gguf) tensor(name string, kind uint32, offset uint64, dims ...uint64) *gguf {
	g.str(name).u32(uint32(len(dims)))
	for _, n := range dims {
		g.length(n)
	}
	return g.u32(kind).u64(offset)
}

func (g *gguf) align(n int) *gguf { return g.zeros(-len(g.b) & (n - 1)) }
func (g *gguf) zeros(n int) *gguf { g.b = append(g.b, make([]byte, n)...); return g }
func (g *gguf) string() string    { return string(g.b) }

// Types of GGUF's values.
const (
	ggufU8, ggufI8, ggufU16, ggufI16, ggufU32, ggufI32, ggufF32, ggufBool = 0, 1, 2, 3, 4, 5, 6, 7
	ggufString, ggufArray, ggufU64, ggufI64, ggufF64                      = 8, 9, 10, 11, 12
)

// A spec is a tensor that a test puts into a file.
type spec struct {
	name  string
	dtype weights.DType
	shape []int
}

// content is what a tensor's bytes are in files made from specs.
func (s spec) content() []byte {
	b := make([]byte, wantSize(s.dtype, s.shape))
	for i := range b {
		b[i] = byte(i*7+len(s.name)) ^ s.name[i%len(s.name)]
	}
	return b
}

// bitsPerElement are the figures that the formats' documents give, times 256
// elements whole bytes for all.
var bitsPerElement = map[weights.DType]float64{
	"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
	"F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
	"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
	"C64": 64, "F64": 64, "I64": 64, "U64": 64,
	"Q1_0": 1.125, "Q2_0": 2.25, "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q8_1": 9,
	"Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q8_K": 9.125,
	"IQ1_S": 1.5625, "IQ1_M": 1.75, "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ2_S": 2.5625,
	"IQ3_XXS": 3.0625, "IQ3_S": 3.4375, "IQ4_NL": 4.5, "IQ4_XS": 4.25,
	"TQ1_0": 1.6875, "TQ2_0": 2.0625, "MXFP4": 4.25, "NVFP4": 4.5,
}

// ggmlIDs is enum ggml_type of ggml.h.
var ggmlIDs = map[weights.DType]uint32{
	"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q8_1": 9,
	"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "Q8_K": 15, "IQ2_XXS": 16, "IQ2_XS": 17,
	"IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23,
	"I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "IQ1_M": 29, "BF16": 30,
	"TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42,
}

func wantSize(d weights.DType, shape []int) int {
	bits := bitsPerElement[d]
	for _, n := range shape {
		bits *= float64(n)
	}
	return int(bits / 8)
}

// makeSafetensors makes a file that has the tensors in this order, and their
// entries in the opposite one.
func makeSafetensors(t testing.TB, metadata map[string]string, specs ...spec) []byte {
	type entry struct {
		DType   weights.DType `json:"dtype"`
		Shape   []int         `json:"shape"`
		Offsets [2]int        `json:"data_offsets"`
	}
	var entries []string
	var data []byte
	for _, s := range specs {
		e := entry{s.dtype, s.shape, [2]int{len(data), len(data) + len(s.content())}}
		if e.Shape == nil {
			e.Shape = []int{}
		}
		data = append(data, s.content()...)
		text, err := json.Marshal(map[string]entry{s.name: e})
		require.NoError(t, err)
		entries = append(entries, strings.Trim(string(text[1:len(text)-1]), " "))
	}
	if metadata != nil {
		text, err := json.Marshal(map[string]any{"__metadata__": metadata})
		require.NoError(t, err)
		entries = append(entries, string(text[1:len(text)-1]))
	}
	slices.Reverse(entries)
	header := "{" + strings.Join(entries, ",") + "}"
	header += strings.Repeat(" ", -len(header)&7)
	return append(st(header, 0), data...)
}

// makeGGUF makes a file that has the tensors in this order.
func makeGGUF(version uint32, align int, specs ...spec) []byte {
	return writeGGUF(newGGUF(version, uint64(len(specs)), 1), align, specs...)
}

// writeGGUF adds an alignment and tensors to a file.
func writeGGUF(g *gguf, align int, specs ...spec) []byte {
	g.pair("general.alignment", ggufU32).u32(uint32(align))
	offset := 0
	for _, s := range specs {
		var dims []uint64
		for _, n := range slices.Backward(s.shape) {
			dims = append(dims, uint64(n))
		}
		g.tensor(s.name, ggmlIDs[s.dtype], uint64(offset), dims...)
		offset += len(s.content())
		offset += -offset & (align - 1)
	}
	g.align(align)
	start := len(g.b)
	for _, s := range specs {
		g.zeros(-(len(g.b) - start) & (align - 1))
		g.b = append(g.b, s.content()...)
	}
	return g.b
}

func parse(file []byte) (*weights.File, error) {
	return weights.Parse(bytes.NewReader(file), int64(len(file)), "test file")
}

// checkTensors compares a file with what it was made from.
func checkTensors(t testing.TB, f *weights.File, specs ...spec) {
	t.Helper()
	checkFile(t, f)
	assert.Len(t, slices.Collect(f.Tensors()), len(specs))
	for _, s := range specs {
		tensor, ok := f.Tensor(s.name)
		if !assert.True(t, ok, s.name) {
			continue
		}
		assert.Equal(t, s.dtype, tensor.DType, s.name)
		assert.Equal(t, append([]int{}, s.shape...), tensor.Shape, s.name)
		assert.Same(t, f, tensor.File, s.name)
		got := make([]byte, tensor.Size)
		_, err := f.Reader().ReadAt(got, tensor.Offset)
		if tensor.Size > 0 {
			assert.NoError(t, err, s.name)
		}
		assert.Equal(t, s.content(), got, s.name)
	}
}

// checkFile asserts what holds for every file that is accepted.
func checkFile(t testing.TB, f *weights.File) {
	t.Helper()
	end := int64(8)
	names := map[string]bool{}
	for tensor := range f.Tensors() {
		name := tensor.Name
		if name == "" || !utf8.ValidString(name) || strings.ContainsRune(name, 0) || names[name] {
			t.Errorf("tensor named %q", name)
		}
		names[name] = true
		if found, ok := f.Tensor(name); !ok || found != tensor || tensor.File != f {
			t.Errorf("%q is not found by its name", name)
		}
		if tensor.Offset < end || tensor.Size < 0 || int64(tensor.Size) > f.Size()-tensor.Offset {
			t.Errorf("%q is %d bytes at %d, after %d in a file of %d", name, tensor.Size, tensor.Offset, end, f.Size())
		}
		end = tensor.Offset + int64(tensor.Size)

		perBlock, blockBytes := tensor.DType.Block()
		if perBlock < 1 || blockBytes < 1 {
			t.Fatalf("%q has type %q", name, tensor.DType)
		}
		bytes := big.NewInt(int64(blockBytes))
		for _, n := range tensor.Shape {
			bytes.Mul(bytes, big.NewInt(int64(n)))
		}
		if bytes.Cmp(new(big.Int).Mul(big.NewInt(int64(tensor.Size)), big.NewInt(int64(perBlock)))) != 0 {
			t.Errorf("%q has %d bytes, %s of shape %v", name, tensor.Size, tensor.DType, tensor.Shape)
		}
	}
	if f.Format() == weights.Safetensors && len(names) > 0 && end != f.Size() {
		t.Errorf("the tensors end at %d, the file at %d", end, f.Size())
	}
	for _, key := range f.MetadataKeys() {
		if value, ok := f.Metadata(key); !ok || value == nil {
			t.Errorf("key %q has no value", key)
		}
	}
}

// A malformed file must be refused.
type malformed struct {
	name   string
	file   string
	tensor string // of the FormatError
	reason string // of the FormatError: the whole of it, or its start if that ends in "..."
}

// checkRefused asserts that each file is refused for its own reason.
func checkRefused(t *testing.T, files []malformed) {
	reasons := map[string]string{}
	for _, l := range files {
		t.Run(l.name, func(t *testing.T) {
			f, err := parse([]byte(l.file))
			assert.Nil(t, f)
			var refused *weights.FormatError
			require.ErrorAs(t, err, &refused)
			want := l.reason
			if start, cut := strings.CutSuffix(want, "..."); cut && strings.HasPrefix(refused.Reason, start) {
				want = refused.Reason
			}
			assert.Equal(t, &weights.FormatError{File: "test file", Tensor: l.tensor, Reason: want}, refused)
			text := err.Error()
			assert.True(t, strings.HasPrefix(text, "weights: read test file: "), text)
			assert.True(t, strings.HasSuffix(text, refused.Reason), text)
			assert.Less(t, len(text), 600)
			assert.Empty(t, reasons[text], "the same sentence")
			reasons[text] = l.name
		})
	}
}

// A sparse is a file of zeros after its first bytes, which counts what is read
// of it.
type sparse struct {
	start []byte
	size  int64
	read  int64
}

func (s *sparse) ReadAt(p []byte, off int64) (int, error) {
	n := int(min(int64(len(p)), s.size-off))
	s.read += int64(n)
	clear(p[:n])
	if off < int64(len(s.start)) {
		copy(p[:n], s.start[off:])
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

const maxInt = math.MaxInt

// long reports whether sweeps take all that they can.
func long() bool { return os.Getenv("PINNED_SOAK") != "" }

// cells iterates over indices of the dimensions of a sweep, which have so many values each:
// over all combinations in a long run, else over as few as have each value once.
func cells(dims ...int) iter.Seq[[]int] {
	all, limit := 1, 0
	for _, n := range dims {
		all, limit = all*n, max(limit, n)
	}
	return func(yield func([]int) bool) {
		for i := range all {
			at, rest := make([]int, len(dims)), i
			for d, n := range dims {
				at[d] = i % n
				if long() {
					at[d] = rest % n
					rest /= n
				}
			}
			if !long() && i == limit || !yield(at) {
				return
			}
		}
	}
}

func TestCellsHaveEachValueOnce(t *testing.T) {
	for soak, want := range map[string][][]int{
		"":    {{0, 0}, {1, 1}, {0, 2}},
		"10m": {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}},
	} {
		t.Setenv("PINNED_SOAK", soak)
		assert.Equal(t, want, slices.Collect(cells(2, 3)))
	}
}
