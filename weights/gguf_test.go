package weights_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

func TestGGUFTensorsOfEveryTypeAreRead(t *testing.T) {
	t.Parallel()
	var specs []spec
	for i, d := range slices.Sorted(maps.Keys(ggmlIDs)) {
		perBlock, _ := d.Block()
		specs = append(specs, spec{fmt.Sprintf("blk.%d.%s", i, d), d, []int{2, i%3 + 1, perBlock * (i%2 + 1)}})
	}
	specs = append(specs,
		spec{"scalar", weights.F16, nil},
		spec{"empty", "Q4_K", []int{0, 256}},
		spec{"after an empty one", weights.I8, []int{3}},
		spec{"an empty row", "Q4_K", []int{7, 0}},
		spec{strings.Repeat("größe ", 20), weights.F32, []int{1, 2, 3, 4}},
	)
	for version := uint32(1); version <= 3; version++ {
		for _, align := range []int{1, 8, 32, 4096} {
			t.Run(fmt.Sprintf("version %d aligned to %d", version, align), func(t *testing.T) {
				f, err := parse(makeGGUF(version, align, specs...))
				require.NoError(t, err)
				checkTensors(t, f, specs...)
				assert.Equal(t, weights.GGUF, f.Format())
				for tensor := range f.Tensors() {
					assert.Zero(t, tensor.Offset%int64(align), tensor.Name)
				}
			})
		}
	}
}

func TestGGUFMetadataHasDeclaredTypes(t *testing.T) {
	t.Parallel()
	for version := uint32(1); version <= 3; version++ {
		g := newGGUF(version, 0, 27)
		g.pair("u8", ggufU8).u8(200)
		g.pair("i8", ggufI8).u8(0x80)
		g.pair("u16", ggufU16).u16(65535)
		g.pair("i16", ggufI16).u16(65535)
		g.pair("u32", ggufU32).u32(1 << 31)
		g.pair("i32", ggufI32).u32(1 << 31)
		g.pair("u64", ggufU64).u64(1 << 63)
		g.pair("i64", ggufI64).u64(1 << 63)
		g.pair("f32", ggufF32).u32(math.Float32bits(1.5))
		g.pair("f64", ggufF64).u64(math.Float64bits(-2.25))
		g.pair("true", ggufBool).u8(1)
		g.pair("false", ggufBool).u8(0)
		g.pair("string", ggufString).str("grüße")
		g.pair("no UTF-8", ggufString).str("\xff\xfe")
		g.array("u8s", ggufU8, 2).u8(1, 2)
		g.array("i8s", ggufI8, 2).u8(1, 0xff)
		g.array("u16s", ggufU16, 1).u16(7)
		g.array("i16s", ggufI16, 1).u16(65534)
		g.array("u32s", ggufU32, 1).u32(8)
		g.array("i32s", ggufI32, 2).u32(9).u32(math.MaxUint32)
		g.array("u64s", ggufU64, 1).u64(10)
		g.array("i64s", ggufI64, 1).u64(math.MaxUint64)
		g.array("f32s", ggufF32, 1).u32(math.Float32bits(0.5))
		g.array("f64s", ggufF64, 1).u64(math.Float64bits(0.25))
		g.array("bools", ggufBool, 2).u8(1, 0)
		g.array("strings", ggufString, 3).str("a").str("").str("\xc3")
		g.array("none", ggufString, 0)
		want := map[string]any{
			"u8": uint8(200), "i8": int8(-128), "u16": uint16(65535), "i16": int16(-1),
			"u32": uint32(1 << 31), "i32": int32(math.MinInt32), "u64": uint64(1 << 63), "i64": int64(math.MinInt64),
			"f32": float32(1.5), "f64": -2.25, "true": true, "false": false,
			"string": "grüße", "no UTF-8": "\xff\xfe",
			"u8s": []uint8{1, 2}, "i8s": []int8{1, -1}, "u16s": []uint16{7}, "i16s": []int16{-2},
			"u32s": []uint32{8}, "i32s": []int32{9, -1}, "u64s": []uint64{10}, "i64s": []int64{-1},
			"f32s": []float32{0.5}, "f64s": []float64{0.25}, "bools": []bool{true, false},
			"strings": []string{"a", "", "\xc3"}, "none": []string{},
		}
		f, err := parse(g.b)
		require.NoError(t, err)
		checkFile(t, f)
		got := map[string]any{}
		for _, key := range f.MetadataKeys() {
			got[key], _ = f.Metadata(key)
		}
		assert.Equal(t, want, got, "version %d", version)
	}
}

func TestGGUFStringsMayExceedTheBuffer(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("0123456789", 20_000)
	words := make([]string, 3000) // more than a buffer in all, so that one crosses its end
	for i := range words {
		words[i] = strings.Repeat(string(rune('a'+i%26)), i%97)
	}
	g := newGGUF(3, 1, 4)
	g.pair("long", ggufString).str(long)
	g.array("words", ggufString, uint64(len(words)))
	for _, w := range words {
		g.str(w)
	}
	g.pair("after", ggufU32).u32(7)
	want := spec{"a", weights.F32, []int{5}}
	f, err := parse(writeGGUF(g, 32, want))
	require.NoError(t, err)
	checkTensors(t, f, want)
	for key, value := range map[string]any{"long": long, "words": words, "after": uint32(7)} {
		got, _ := f.Metadata(key)
		assert.Equal(t, value, got, key)
	}
}

func TestValidGGUFFilesAreRead(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		file []byte
		want []string
	}{
		"nothing in it":           {newGGUF(3, 0, 0).b, nil},
		"bytes and no tensor":     {newGGUF(3, 0, 0).zeros(3).b, nil},
		"no padding at the end":   {newGGUF(3, 1, 0).tensor("a", 0, 0, 1).align(32).zeros(4).b, []string{"a"}},
		"padding at the end":      {newGGUF(3, 1, 0).tensor("a", 0, 0, 1).align(32).zeros(32).b, []string{"a"}},
		"more bytes at the end":   {newGGUF(3, 1, 0).tensor("a", 0, 0, 1).align(32).zeros(1000).b, []string{"a"}},
		"an empty tensor, no end": {newGGUF(3, 1, 0).tensor("a", 0, 0, 0).align(32).b, []string{"a"}},
		"listed in another order": {newGGUF(3, 2, 0).tensor("b", 0, 32, 1).tensor("a", 0, 0, 1).align(32).zeros(36).b, []string{"a", "b"}},
		"a long name":             {newGGUF(3, 1, 0).tensor(strings.Repeat("n", 1<<20), 0, 0, 1).align(32).zeros(4).b, []string{strings.Repeat("n", 1<<20)}},
		"alignment with no use":   {newGGUF(3, 0, 1).pair("general.alignment", ggufU32).u32(1 << 31).b, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parse(tt.file)
			require.NoError(t, err)
			checkFile(t, f)
			var names []string
			for tensor := range f.Tensors() {
				names = append(names, tensor.Name)
			}
			assert.Equal(t, tt.want, names)
		})
	}
}

func malformedGGUF() []malformed {
	// one has a tensor a, and enough data behind it.
	one := func(kind uint32, offset uint64, dims ...uint64) string {
		return newGGUF(3, 1, 0).tensor("a", kind, offset, dims...).align(32).zeros(4096).string()
	}
	pair := func(kind uint32) *gguf { return newGGUF(3, 0, 1).pair("k", kind) }
	array := func(kind uint32, n uint64) *gguf { return newGGUF(3, 0, 1).array("k", kind, n) }
	aligned := func(align uint32) *gguf {
		return newGGUF(3, 1, 1).pair("general.alignment", ggufU32).u32(align)
	}
	const f32, q4_0, q4_K = 0, 2, 12
	const huge = math.MaxUint64
	long := strings.Repeat("n", 65536)
	return []malformed{
		// The header's first bytes.
		{"magic and no more", "GGUF\x03\x00\x00\x00\x00", "", "8 bytes are wanted at offset 8, the header ends at 9 at the latest"},
		{"cut off in a count", "GGUF\x03\x00\x00\x00\x00\x00", "", "8 bytes are wanted at offset 8, the header ends at 10 at the latest"},
		{"cut off in the second count", newGGUF(3, 0, 0).string()[:20], "", "8 bytes are wanted at offset 16, the header ends at 20 at the latest"},
		{"version 0", newGGUF(0, 0, 0).string(), "", "GGUF version 0, want 1 to 3"},
		{"version 4", newGGUF(4, 0, 0).string(), "", "GGUF version 4, want 1 to 3"},
		{"big-endian", "GGUF\x00\x00\x00\x03" + strings.Repeat("\x00", 16), "", "GGUF version 3 in big-endian byte order, whose tensors a GPU cannot use as they are (convert the file to little-endian)"},
		{"magic of the predecessor", "tjgg\x03\x00\x00\x00\x00\x7d\x00\x00", "", "neither GGUF nor safetensors, as safetensors its header would have 14619732596 bytes, want at most 100000000"},
		{"tensors that cannot fit", newGGUF(3, 2, 0).zeros(49).string(), "", "2 tensors are declared, the 49 bytes after that hold at most 1"},
		{"2^64-1 tensors", newGGUF(3, huge, 0).zeros(100).string(), "", "18446744073709551615 tensors are declared, the 100 bytes after that hold at most 4"},
		{"2^32-1 tensors in version 1", newGGUF(1, math.MaxUint32, 0).zeros(42).string(), "", "4294967295 tensors are declared, the 42 bytes after that hold at most 2"},
		{"pairs that cannot fit", newGGUF(3, 0, 2).zeros(27).string(), "", "2 key-value pairs are declared, the 27 bytes after that hold at most 1"},
		{"2^63 pairs", newGGUF(2, 0, 1<<63).zeros(28).string(), "", "9223372036854775808 key-value pairs are declared, the 28 bytes after that hold at most 2"},
		{"2^32-1 pairs in version 1", newGGUF(1, 0, math.MaxUint32).zeros(25).string(), "", "4294967295 key-value pairs are declared, the 25 bytes after that hold at most 2"},

		// Keys.
		{"empty key", newGGUF(3, 0, 1).pair("", ggufU32).u32(1).string(), "", "key-value pair 1 of 1: its key is empty"},
		{"key past the file", newGGUF(3, 0, 1).length(100).zeros(20).string(), "", "key-value pair 1 of 1: 100 bytes of a string are declared, the 20 bytes after that hold at most 20"},
		{"key of 2^64-1 bytes", newGGUF(3, 0, 1).length(huge).zeros(20).string(), "", "key-value pair 1 of 1: 18446744073709551615 bytes of a string are declared, the 20 bytes after that hold at most 20"},
		{"long key", newGGUF(3, 0, 1).pair(long, ggufU8).u8(1).string(), "", "key-value pair 1 of 1: its key has 65536 bytes, want at most 65535"},
		{"key twice", newGGUF(3, 0, 2).pair("k", ggufU8).u8(1).pair("k", ggufU32).u32(1).string(), "", `key-value pair 2 of 2: the file has the key "k" twice`},
		{"second pair missing", newGGUF(3, 0, 2).pair("k", ggufString).str("12345678").string(), "", "key-value pair 2 of 2: 8 bytes are wanted at offset 53, the header ends at 53 at the latest"},

		// Values.
		{"unknown type", pair(13).zeros(8).string(), "", `the value of "k": its type is 13, want 0 to 12`},
		{"type 2^32-1", pair(math.MaxUint32).zeros(8).string(), "", `the value of "k": its type is 4294967295, want 0 to 12`},
		{"bool of 2", pair(ggufBool).u8(2).string(), "", `the value of "k": a bool is 2, want 0 or 1`},
		{"value cut off", pair(ggufU64).u32(1).string(), "", `the value of "k": 8 bytes are wanted at offset 37, the header ends at 41 at the latest`},
		{"string past the file", pair(ggufString).length(5).u8('1', '2', '3', '4').string(), "", `the value of "k": 5 bytes of a string are declared, the 4 bytes after that hold at most 4`},
		{"array of arrays", array(ggufArray, 1).u32(ggufU8).length(1).u8(1).string(), "", `the value of "k": it is an array of arrays, which ggml does not read either`},
		{"array of an unknown type", array(99, 1).zeros(20).string(), "", `the value of "k": its type is 99, want 0 to 12`},
		{"array past the file", array(ggufU64, 3).zeros(23).string(), "", `the value of "k": 3 values of an array are declared, the 23 bytes after that hold at most 2`},
		{"array of 2^64-1 bytes", array(ggufU8, huge).zeros(23).string(), "", `the value of "k": 18446744073709551615 values of an array are declared, the 23 bytes after that hold at most 23`},
		{"array whose size wraps to 8", array(ggufU64, 1<<61+1).zeros(8).string(), "", `the value of "k": 2305843009213693953 values of an array are declared, the 8 bytes after that hold at most 1`},
		{"strings that cannot fit", array(ggufString, 3).zeros(22).string(), "", `the value of "k": 3 values of an array are declared, the 22 bytes after that hold at most 2`},
		{"strings that cannot fit in version 1", newGGUF(1, 0, 1).array("k", ggufString, 6).zeros(23).string(), "", `the value of "k": 6 values of an array are declared, the 23 bytes after that hold at most 5`},
		{"strings that do not fit", array(ggufString, 2).str("12345678").zeros(4).string(), "", `the value of "k": 8 bytes are wanted at offset 65, the header ends at 69 at the latest`},
		{"string in an array past the file", array(ggufString, 2).str("a").length(2).u8('b').string(), "", `the value of "k": 2 bytes of a string are declared, the 1 bytes after that hold at most 1`},
		{"bool in an array", array(ggufBool, 3).u8(0, 1, 255).string(), "", `the value of "k": a bool is 255, want 0 or 1`},
		{"array cut off before its length", newGGUF(3, 0, 1).pair("k", ggufArray).u32(ggufU8).zeros(3).string(), "", `the value of "k": 8 bytes are wanted at offset 41, the header ends at 44 at the latest`},

		// The alignment.
		{"alignment a uint64", newGGUF(3, 0, 1).pair("general.alignment", ggufU64).u64(32).string(), "", "general.alignment is of type uint64, want uint32"},
		{"alignment a string", newGGUF(3, 0, 1).pair("general.alignment", ggufString).str("32").string(), "", "general.alignment is of type string, want uint32"},
		{"alignment of 0", aligned(0).zeros(30).string(), "", "general.alignment is 0, want a power of two"},
		{"alignment of 48", aligned(48).zeros(30).string(), "", "general.alignment is 48, want a power of two"},
		{"alignment past the file", aligned(1<<31).tensor("a", f32, 0, 2).zeros(64).string(), "a", "its 8 bytes at offset 0 of the data end beyond the file, which has 0 bytes of data"},

		// Tensors.
		{"empty name", newGGUF(3, 1, 0).tensor("", f32, 0, 1).zeros(64).string(), "", "tensor 1 has an empty name"},
		{"name not UTF-8", newGGUF(3, 1, 0).tensor("\xff", f32, 0, 1).zeros(64).string(), "\xff", "its name is not UTF-8"},
		{"zero byte in a name", newGGUF(3, 1, 0).tensor("a\x00", f32, 0, 1).zeros(64).string(), "a\x00", "its name has a zero byte, at which C libraries end it"},
		{"name past the file", newGGUF(3, 1, 0).length(100).zeros(30).string(), "", "tensor 1 of 1: 100 bytes of a string are declared, the 30 bytes after that hold at most 30"},
		{"tensor twice", newGGUF(3, 2, 0).tensor("a", f32, 0, 1).tensor("a", f32, 32, 1).zeros(100).string(), "a", "the file has two tensors of this name"},
		{"5 dimensions", one(f32, 0, 1, 1, 1, 1, 1), "a", "it has 5 dimensions, want at most 4"},
		{"2^32-1 dimensions", newGGUF(3, 1, 0).str("a").u32(math.MaxUint32).zeros(100).string(), "a", "it has 4294967295 dimensions, want at most 4"},
		{"cut off in a dimension", newGGUF(3, 1, 0).str("a").u32(2).length(1).zeros(7).string(), "a", "8 bytes are wanted at offset 45, the header ends at 52 at the latest"},
		{"cut off in the offset", newGGUF(3, 1, 0).tensor("a", f32, 0, 1).string()[:55], "a", "8 bytes are wanted at offset 49, the header ends at 55 at the latest"},
		{"negative dimension", one(f32, 0, huge), "a", fmt.Sprintf("dimension 0 is 18446744073709551615, want at most %d", maxInt)},
		{"dimension of 2^63", one(f32, 0, 1, 1<<63), "a", fmt.Sprintf("dimension 1 is 9223372036854775808, want at most %d", maxInt)},
		{"product overflows", one(f32, 0, maxInt, 3), "a", fmt.Sprintf("shape [3 %d] has more than %d elements", maxInt, maxInt)},
		{"product wraps to its size", one(f32, 0, maxInt/2+1, 4, 1, 1), "a", fmt.Sprintf("shape [1 1 4 %d] has more than %d elements", maxInt/2+1, maxInt)},
		{"bytes overflow", one(f32, 0, maxInt/2), "a", fmt.Sprintf("F32 of shape [%d] takes more than %d bytes", maxInt/2, maxInt)},
		{"removed type", one(4, 0, 32), "a", "ggml type 4 is not known, or was removed"},
		{"another removed type", one(31, 0, 32), "a", "ggml type 31 is not known, or was removed"},
		{"unknown type of a tensor", one(43, 0, 32), "a", "ggml type 43 is not known, or was removed"},
		{"negative type", one(math.MaxUint32, 0, 32), "a", "ggml type 4294967295 is not known, or was removed"},
		{"half a block", one(q4_0, 0, 16), "a", "its rows have 16 elements, want whole blocks: Q4_0 has 32 elements a block"},
		{"rows of half a block", one(q4_0, 0, 8, 4), "a", "its rows have 8 elements, want whole blocks: Q4_0 has 32 elements a block"},
		{"rows of one and a half blocks", one(q4_K, 0, 384, 2), "a", "its rows have 384 elements, want whole blocks: Q4_K has 256 elements a block"},
		{"scalar of blocks", one(q4_0, 0), "a", "shape [] has 1 elements, which do not fill bytes: Q4_0 is stored as 32 elements in 18 bytes"},

		// Offsets.
		{"offset past the file", one(f32, 1<<40, 1), "a", "its data is at offset 1099511627776, the file has 4160 bytes"},
		{"offset of 2^64-32", one(f32, huge-31, 1), "a", "its data is at offset 18446744073709551584, the file has 4160 bytes"},
		{"offset not aligned", one(f32, 4, 1), "a", "its data is at offset 4, want a multiple of 32, the alignment"},
		{"offset aligned to less", aligned(64).tensor("a", f32, 32, 1).align(64).zeros(64).string(), "a", "its data is at offset 32, want a multiple of 64, the alignment"},
		{"tensor past the file", one(f32, 0, 1025), "a", "its 4100 bytes at offset 0 of the data end beyond the file, which has 4096 bytes of data"},
		{"tensor past the file by its offset", one(f32, 4096, 1), "a", "its 4 bytes at offset 4096 of the data end beyond the file, which has 4096 bytes of data"},
		{"tensor past the file by far", one(f32, 0, maxInt/4), "a", fmt.Sprintf("its %d bytes at offset 0 of the data end beyond the file, which has 4096 bytes of data", maxInt/4*4)},
		{"no data", newGGUF(3, 1, 0).tensor("a", f32, 0, 1).string(), "a", "its 4 bytes at offset 0 of the data end beyond the file, which has 0 bytes of data"},
		{"data cut off", newGGUF(3, 1, 0).tensor("a", f32, 0, 1).align(32).zeros(3).string(), "a", "its 4 bytes at offset 0 of the data end beyond the file, which has 3 bytes of data"},
		{"overlap", newGGUF(3, 2, 0).tensor("a", f32, 0, 9).tensor("b", f32, 32, 1).align(32).zeros(100).string(), "b", `starts at offset 128, 4 bytes before the end of tensor "a": they overlap`},
		{"two at one place", newGGUF(3, 2, 0).tensor("b", f32, 0, 1).tensor("a", f32, 0, 1).align(32).zeros(100).string(), "b", `starts at offset 96, 4 bytes before the end of tensor "a": they overlap`},
		{"hole at the start", one(f32, 32, 1), "a", "starts at offset 96, 32 bytes after the end of the header, want offset 64: bytes between tensors belong to none"},
		{"hole between", newGGUF(3, 2, 0).tensor("a", f32, 0, 1).tensor("b", f32, 64, 1).align(32).zeros(100).string(), "b", `starts at offset 160, 60 bytes after the end of tensor "a", want offset 128: bytes between tensors belong to none`},
	}
}

func TestMalformedGGUFFilesAreRefused(t *testing.T) {
	t.Parallel()
	checkRefused(t, malformedGGUF())
}

// TestTruncatedFilesAreRefused cuts good files off at every byte.
func TestTruncatedFilesAreRefused(t *testing.T) {
	t.Parallel()
	specs := []spec{{"a", weights.F32, []int{2, 3}}, {"b", weights.BF16, []int{5}}, {"c", weights.U8, []int{0}}}
	long := makeSafetensors(t, map[string]string{"k": "v"}, specs...)
	for n := range long {
		_, err := parse(long[:n])
		var refused *weights.FormatError
		assert.ErrorAs(t, err, &refused, "safetensors of %d bytes", n)
	}
	specs[2].dtype = weights.I8
	for version := uint32(1); version <= 3; version++ {
		g := newGGUF(version, 3, 4)
		g.array("words", ggufString, 2).str("one").str("two")
		g.array("flags", ggufBool, 2).u8(0, 1)
		g.pair("pi", ggufF64).u64(math.Float64bits(math.Pi))
		long = writeGGUF(g, 32, specs...)
		f, err := parse(long)
		require.NoError(t, err)
		checkTensors(t, f, specs...)
		last, _ := f.Tensor("c") // empty, so what is there is the padding before it
		for n := range long {
			_, err := parse(long[:n])
			var refused *weights.FormatError
			assert.ErrorAs(t, err, &refused, "version %d of %d bytes", version, n)
		}
		assert.EqualValues(t, len(long), last.Offset)
	}
}

func TestGGUFHeaderAloneIsRead(t *testing.T) {
	t.Parallel()
	if maxInt>>40 == 0 {
		t.Skip("a tensor of 1 TiB is more than an int")
	}
	const size = 1 << 40
	g := newGGUF(3, 1, 0).tensor("a", 24, 0, size).align(32) // I8
	r := &sparse{start: g.b, size: int64(len(g.b)) + size}
	f, err := weights.Parse(r, r.size, "large")
	require.NoError(t, err)
	checkFile(t, f)
	assert.LessOrEqual(t, r.read, int64(9+64<<10))

	// Zeros are pairs with empty keys, so the limit is seen through lengths.
	for _, g := range []*gguf{
		newGGUF(3, 0, 1).pair("k", ggufString).length(100_000_000),
		newGGUF(3, 0, 1).array("k", ggufU64, 100_000_000/8),
		newGGUF(3, 0, 100_000_000/14),
	} {
		r := &sparse{start: g.b, size: size}
		_, err := weights.Parse(r, size, "large")
		assert.ErrorContains(t, err, "hold at most")
		assert.LessOrEqual(t, r.read, int64(9+64<<10))
	}
}

// A readerAt is a function as an io.ReaderAt.
type readerAt func(p []byte, off int64) (int, error)

func (r readerAt) ReadAt(p []byte, off int64) (int, error) { return r(p, off) }

func TestReaderErrorsAreReturned(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for format, file := range map[string][]byte{
		"safetensors": makeSafetensors(t, nil, spec{"a", weights.F32, []int{2}}),
		"GGUF":        makeGGUF(3, 32, spec{"a", weights.F32, []int{2}}),
		"long string": writeGGUF(newGGUF(3, 0, 2).pair("k", ggufString).str(strings.Repeat("s", 1<<20)), 32),
	} {
		good := bytes.NewReader(file)
		tests := map[string]struct {
			read readerAt
			is   error
			says string
		}{
			"an error": {func([]byte, int64) (int, error) { return 0, broken }, broken, "broken"},
			"an error later": {func(p []byte, off int64) (int, error) {
				if off > 0 {
					return 0, broken
				}
				return good.ReadAt(p, off)
			}, broken, "broken"},
			"fewer bytes": {func(p []byte, off int64) (int, error) {
				return good.ReadAt(p[:len(p)-1], off)
			}, io.ErrUnexpectedEOF, "unexpected EOF"},
			"a smaller file": {func(p []byte, off int64) (int, error) {
				return bytes.NewReader(file[:12]).ReadAt(p, off)
			}, io.ErrUnexpectedEOF, fmt.Sprintf("of a file of %d", len(file))},
			"more bytes": {func(p []byte, off int64) (int, error) {
				return len(p) + 1, nil
			}, nil, "the reader returned 10 bytes where 9 were asked for"},
			"negative count": {func(p []byte, off int64) (int, error) {
				return -1, nil
			}, nil, "the reader returned -1 bytes where 9 were asked for"},
		}
		for name, tt := range tests {
			f, err := weights.Parse(tt.read, int64(len(file)), "test file")
			assert.Nil(t, f)
			assert.ErrorContains(t, err, tt.says, "%s: %s", format, name)
			if tt.is != nil {
				assert.ErrorIs(t, err, tt.is, "%s: %s", format, name)
			}
			var refused *weights.FormatError
			assert.False(t, errors.As(err, &refused), "%s: %s is no malformed of the file", format, name)
		}
		_, err := weights.Parse(readerAt(func(p []byte, off int64) (int, error) {
			n, err := good.ReadAt(p, off)
			if err == nil && off+int64(n) == int64(len(file)) {
				err = io.EOF
			}
			return n, err
		}), int64(len(file)), "test file")
		assert.NoError(t, err, "%s: the last bytes may come with io.EOF", format)
	}
	long := writeGGUF(newGGUF(3, 0, 2).pair("k", ggufString).str(strings.Repeat("s", 1<<20)), 32)
	_, err := weights.Parse(readerAt(func(p []byte, off int64) (int, error) {
		if off > 64<<10 {
			return 0, broken
		}
		return bytes.NewReader(long).ReadAt(p, off)
	}), int64(len(long)), "test file")
	assert.ErrorIs(t, err, broken, "in the long string itself")
	_, err = weights.Parse(nil, 8, "test file")
	assert.ErrorContains(t, err, "nil reader")
	_, err = weights.Parse(bytes.NewReader(nil), -1, "test file")
	assert.ErrorContains(t, err, "negative size -1")
}

// The header of a large vocabulary is a few reads, because each may be a request to a server. No more than as much
// again is read behind it.
func TestLongHeadersAreReadInFewPieces(t *testing.T) {
	t.Parallel()
	for _, tokens := range []uint64{10, 100_000} {
		g := newGGUF(3, 0, 1).array("tokens", ggufString, tokens)
		for i := range tokens {
			g.str(fmt.Sprintf("token %d", i))
		}
		header := len(g.b)
		content := g.zeros(16 << 20).string()
		reads, bytes, largest := 0, 0, 0
		f, err := weights.Parse(readerAt(func(p []byte, off int64) (int, error) {
			reads, bytes, largest = reads+1, bytes+len(p), max(largest, len(p))
			return strings.NewReader(content).ReadAt(p, off)
		}), int64(len(content)), "w")
		require.NoError(t, err)
		list, _ := f.Metadata("tokens")
		require.Len(t, list, int(tokens))
		require.Equal(t, fmt.Sprintf("token %d", tokens-1), list.([]string)[tokens-1])
		require.LessOrEqual(t, reads, 8)
		require.LessOrEqual(t, bytes, 2*header+64<<10+9, "bytes that were read")
		require.LessOrEqual(t, largest, 4<<20)
	}
}
