package weights_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

var safetensorsTypes = []weights.DType{
	weights.BOOL, weights.F4, weights.F6_E2M3, weights.F6_E3M2, weights.U8, weights.I8,
	weights.F8_E5M2, weights.F8_E4M3, weights.F8_E8M0, weights.F8_E4M3FNUZ, weights.F8_E5M2FNUZ,
	weights.I16, weights.U16, weights.F16, weights.BF16, weights.I32, weights.U32, weights.F32,
	weights.C64, weights.F64, weights.I64, weights.U64,
}

func TestSafetensorsOfEveryTypeAreRead(t *testing.T) {
	t.Parallel()
	var specs []spec
	for i, d := range safetensorsTypes {
		specs = append(specs, spec{fmt.Sprintf("layers.%d.%s", i, d), d, []int{i%3 + 1, 4, 2}})
	}
	specs = append(specs,
		spec{"scalar", weights.F16, nil},
		spec{"empty", weights.F32, []int{3, 0, 5}},
		spec{"größe \"quoted\" \\ \n", weights.U8, []int{11}},
		spec{"unaligned after 11 bytes", weights.F64, []int{2}},
	)
	f, err := parse(makeSafetensors(t, map[string]string{"format": "pt", "note": ""}, specs...))
	require.NoError(t, err)
	checkTensors(t, f, specs...)
	assert.Equal(t, weights.Safetensors, f.Format())
	assert.Equal(t, "test file", f.Name())
	assert.NoError(t, f.Close(), "there is nothing to close")

	assert.Equal(t, []string{"format", "note"}, f.MetadataKeys())
	value, ok := f.Metadata("format")
	assert.True(t, ok)
	assert.Equal(t, "pt", value)
	_, ok = f.Metadata("none")
	assert.False(t, ok)
	_, ok = f.Tensor("none")
	assert.False(t, ok)

	var order []string
	for tensor := range f.Tensors() {
		order = append(order, tensor.Name)
	}
	assert.Equal(t, specs[0].name, order[0], "in the order of offsets, not of the header")
	assert.Equal(t, "unaligned after 11 bytes", order[len(order)-1])
}

func TestValidSafetensorsAreRead(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		header string
		data   int
		want   []string
	}{
		"no tensors":             {"{}", 0, nil},
		"white space behind":     {"{}\t\n \r\n", 0, nil},
		"white space before":     {"\x09\x0a\x0d\x20{}\x0d\x20", 0, nil},
		"padding before":         {strings.Repeat(" ", 4<<10) + `{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"a"}},
		"white space within":     {" {\n\t\"a\" : { \"dtype\" :\"U8\"\r, \"shape\":[ 1 , 1 ],\"data_offsets\": [0,1]\n}\n}"[1:], 1, []string{"a"}},
		"null metadata":          {`{"__metadata__":null}`, 0, nil},
		"empty metadata":         {`{"__metadata__":{}}`, 0, nil},
		"empty tensors alone":    {`{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"I8","shape":[2,0],"data_offsets":[0,0]}}`, 0, []string{"a", "b"}},
		"empty between":          {`{"c":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}`, 3, []string{"a", "b", "c"}},
		"keys in any order":      {`{"a":{"data_offsets":[0,2],"shape":[1],"dtype":"F16"}}`, 2, []string{"a"}},
		"64 dimensions":          {`{"a":{"dtype":"U8","shape":[` + strings.Repeat("1,", 63) + `2],"data_offsets":[0,2]}}`, 2, []string{"a"}},
		"one zero, others large": {fmt.Sprintf(`{"a":{"dtype":"U8","shape":[0,%d],"data_offsets":[0,0]}}`, maxInt), 0, []string{"a"}},
		"escapes":                {`{"\u0061\/":{"dtype":"\u0055\u0038","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"a/"}},
		"a pair of surrogates":   {`{"\ud83d\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"\U0001F600"}},
		"U+FFFD":                 {`{"\ufffd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"\uFFFD"}},
		"every escape":           {`{"\"\\\/\b\f\n\r\t\u00Df":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"\"\\/\b\f\n\r\tß"}},
		"a long name":            {`{"` + strings.Repeat("n", 3<<20) + `":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{strings.Repeat("n", 3<<20)}},
		"other keys": {`{"a":{"strides":[1,[2,{}],-0.5e+7],"dtype":"U8","x":{"shape":"y","z":[]},"shape":[1],"t":true,"f":false,"n":null,` +
			`"data_offsets":[0,1],"":"\"}","":0}}`, 1, []string{"a"}},
		"nested deep":          {`{"a":{"x":` + strings.Repeat("[", 9998) + strings.Repeat("]", 9998) + `,"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"a"}},
		"metadata named twice": {`{"__metadata__":{"a":"b"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1, []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parse(st(tt.header, tt.data))
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

// entry is the header of a file with one tensor.
func entry(fields string) string { return `{"a":{` + fields + `}}` }

func malformedSafetensors() []malformed {
	file := func(header string, data int) string { return string(st(header, data)) }
	one := func(fields string, data int) string { return file(entry(fields), data) }
	const atLimit = "\x01\xe1\xf5\x05\x00\x00\x00\x00" // 100,000,001
	return []malformed{
		// The first 8 bytes.
		{"nothing", "", "", "the file has 0 bytes, every safetensors or GGUF file has more than 8"},
		{"seven bytes", "\x02\x00\x00\x00\x00\x00\x00", "", "the file has 7 bytes, every safetensors or GGUF file has more than 8"},
		{"header of nothing", "\x00\x00\x00\x00\x00\x00\x00\x00", "", "the file has 8 bytes, every safetensors or GGUF file has more than 8"},
		{"header past the file", "\x03\x00\x00\x00\x00\x00\x00\x00{}", "", "its header has 3 bytes by its first 8, the file has 2 after these"},
		{"header past the limit", atLimit + "{}", "", "neither GGUF nor safetensors, as safetensors its header would have 100000001 bytes, want at most 100000000"},
		{"header of 2^64-1", "\xff\xff\xff\xff\xff\xff\xff\xff{}", "", "neither GGUF nor safetensors, as safetensors its header would have 18446744073709551615 bytes, want at most 100000000"},
		{"Git LFS pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "", "looks like a Git LFS pointer instead of the file (run git lfs pull), as safetensors its header would have 2336927755350992246 bytes, want at most 100000000"},
		{"PyTorch archive", "PK\x03\x04\x00\x00\x08\x08\x00\x00", "", "looks like a zip archive, such as PyTorch's .pt and .bin (convert it to safetensors), as safetensors its header would have 578712552184433488 bytes, want at most 100000000"},
		{"pickle", "\x80\x02}q\x01X\x00\x00.", "", "looks like a Python pickle (convert it to safetensors), as safetensors its header would have 96763222229632 bytes, want at most 100000000"},
		{"web page", "<!DOCTYPE html>", "", "looks like HTML or XML, such as a failed download's page, as safetensors its header would have 5789751444030890300 bytes, want at most 100000000"},

		// JSON.
		{"invalid UTF-8", file("{\"\xff\":1}", 0), "", "the header is not UTF-8"},
		{"no JSON", file("hello", 0), "", "the header begins with \"h\", want {"},
		{"spaces alone", file("    ", 0), "", "the header is not JSON: unexpected end of JSON input at byte 3"},
		{"JSON cut off", file(`{"a":{"dtype":"F32"`, 0), "", "the header is not JSON: unexpected end of JSON input at byte 18"},
		{"JSON cut off in a string", file(`{"a`, 0), "", "the header is not JSON: unexpected end of JSON input at byte 2"},
		{"header an array", file(`[]`, 0), "", "the header begins with \"[\", want {"},
		{"header a string", file(`"{}"`, 0), "", `the header begins with "\"", want {`},
		{"header null", file(`null`, 0), "", "the header begins with \"n\", want {"},
		{"more than one value", file(`{}{}`, 0), "", "the header is not JSON: invalid character '{' after top-level value at byte 2"},
		{"text behind", file(`{"__metadata__":null}x`, 0), "", "the header is not JSON: invalid character 'x' after top-level value at byte 21"},
		{"comma at the end", file(`{"__metadata__":{},}`, 0), "", "the header is not JSON: invalid character '}' looking for beginning of object key string at byte 19"},
		{"no colon", file(`{"a" 1}`, 0), "", "the header is not JSON: invalid character '1' after object key at byte 5"},
		{"key a number", file(`{1:2}`, 0), "", "the header is not JSON: invalid character '1' looking for beginning of object key string at byte 1"},
		{"nested", file(strings.Repeat(`{"a":`, 100000)+`1`+strings.Repeat("}", 100000), 0), "", "the header is not JSON: invalid character '{' exceeded max depth at byte 50000"},

		// Keys and names.
		{"tensor twice", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), "a", "the file has two tensors of this name"},
		{"tensor twice, escaped", file(`{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0062":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), "b", "the file has two tensors of this name"},
		{"metadata twice", file(`{"__metadata__":{},"__metadata__":{}}`, 0), "", `the header has the key "__metadata__" twice`},
		{"metadata's key twice", file(`{"__metadata__":{"k":"1","k":"2"}}`, 0), "", `__metadata__ has the key "k" twice`},
		{"dtype twice", one(`"dtype":"U8","dtype":"F32"`, 0), "a", `its entry has the key "dtype" twice`},
		{"shape twice", one(`"shape":[],"sh\u0061pe":[]`, 0), "a", `its entry has the key "shape" twice`},
		{"data_offsets twice", one(`"data_offsets":[0,0],"data_offsets":[0,0]`, 0), "a", `its entry has the key "data_offsets" twice`},
		{"empty name", file(`{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), "", "tensor 1 has an empty name"},
		{"zero byte in a name", file(`{"a\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), "a\x00b", "its name has a zero byte, at which C libraries end it"},
		{"metadata an array", file(`{"__metadata__":["a"]}`, 0), "", "__metadata__ is an array, want an object"},
		{"metadata a number", file(`{"__metadata__":{"n":1}}`, 0), "", `the value of "n" in __metadata__ is the number 1, want a string`},
		{"metadata nested", file(`{"__metadata__":{"n":{"m":"x"}}}`, 0), "", `the value of "n" in __metadata__ is an object, want a string`},

		// Entries.
		{"entry a string", file(`{"a":"F32"}`, 0), "a", `its entry is the string "F32", want an object`},
		{"entry an array", file(`{"a":["F32",[1],[0,4]]}`, 4), "a", "its entry is an array, want an object"},
		{"entry empty", one(``, 0), "a", "its entry has no dtype"},
		{"no shape", one(`"dtype":"U8","data_offsets":[0,1]`, 1), "a", "its entry has no shape"},
		{"no offsets", one(`"dtype":"U8","shape":[1]`, 1), "a", "its entry has no data_offsets"},
		{"unknown dtype", one(`"dtype":"F33","shape":[1],"data_offsets":[0,1]`, 1), "a", `dtype "F33" is not one of safetensors`},
		{"lower-case dtype", one(`"dtype":"f32","shape":[1],"data_offsets":[0,4]`, 4), "a", `dtype "f32" is not one of safetensors`},
		{"dtype of GGUF", one(`"dtype":"Q4_0","shape":[32],"data_offsets":[0,18]`, 18), "a", `dtype "Q4_0" is not one of safetensors`},
		{"dtype empty", one(`"dtype":"","shape":[1],"data_offsets":[0,1]`, 1), "a", `dtype "" is not one of safetensors`},
		{"dtype null", one(`"dtype":null,"shape":[1],"data_offsets":[0,1]`, 1), "a", "dtype is null, want a string"},
		{"dtype a bool", one(`"dtype":true,"shape":[1],"data_offsets":[0,1]`, 1), "a", "dtype is true, want a string"},

		// Shapes.
		{"shape a number", one(`"dtype":"U8","shape":1,"data_offsets":[0,1]`, 1), "a", "shape is the number 1, want an array"},
		{"shape null", one(`"dtype":"U8","shape":null,"data_offsets":[0,1]`, 1), "a", "shape is null, want an array"},
		{"negative shape", one(`"dtype":"U8","shape":[-1],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf("shape has the number -1, want whole numbers from 0 to %d", maxInt)},
		{"fraction in shape", one(`"dtype":"U8","shape":[1.0],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf("shape has the number 1.0, want whole numbers from 0 to %d", maxInt)},
		{"exponent in shape", one(`"dtype":"U8","shape":[1e0],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf("shape has the number 1e0, want whole numbers from 0 to %d", maxInt)},
		{"string in shape", one(`"dtype":"U8","shape":["1"],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf(`shape has the string "1", want whole numbers from 0 to %d`, maxInt)},
		{"array in shape", one(`"dtype":"U8","shape":[[1]],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf("shape has an array, want whole numbers from 0 to %d", maxInt)},
		{"2^63 in shape", one(`"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf("shape has the number 9223372036854775808, want whole numbers from 0 to %d", maxInt)},
		{"huge number in shape", one(`"dtype":"U8","shape":[`+strings.Repeat("9", 10000)+`],"data_offsets":[0,1]`, 1), "a", fmt.Sprintf("shape has the number %s, want whole numbers from 0 to %d", strings.Repeat("9", 120), maxInt)},
		{"65 dimensions", one(`"dtype":"U8","shape":[`+strings.Repeat("1,", 64)+`1],"data_offsets":[0,1]`, 1), "a", "shape has more than 64 numbers"},
		{"product overflows", one(fmt.Sprintf(`"dtype":"U8","shape":[2,%d],"data_offsets":[0,1]`, maxInt/2+1), 1), "a", fmt.Sprintf("shape [2 %d] has more than %d elements", maxInt/2+1, maxInt)},
		{"product wraps to its size", one(fmt.Sprintf(`"dtype":"U8","shape":[%d,%d,4],"data_offsets":[0,4]`, maxInt, maxInt), 4), "a", fmt.Sprintf("shape [%d %d 4] has more than %d elements", maxInt, maxInt, maxInt)},
		{"bytes overflow", one(fmt.Sprintf(`"dtype":"F32","shape":[%d],"data_offsets":[0,1]`, maxInt/2), 1), "a", fmt.Sprintf("F32 of shape [%d] takes more than %d bytes", maxInt/2, maxInt)},
		{"half a byte", one(`"dtype":"F4","shape":[3],"data_offsets":[0,2]`, 2), "a", "shape [3] has 3 elements, which do not fill bytes: F4 is stored as 2 elements in 1 bytes"},
		{"half a byte of 6 bits", one(`"dtype":"F6_E3M2","shape":[3,2],"data_offsets":[0,5]`, 5), "a", "shape [3 2] has 6 elements, which do not fill bytes: F6_E3M2 is stored as 4 elements in 3 bytes"},

		// Offsets.
		{"one offset", one(`"dtype":"U8","shape":[1],"data_offsets":[1]`, 1), "a", "data_offsets has 1 numbers, want 2"},
		{"no offset", one(`"dtype":"U8","shape":[0],"data_offsets":[]`, 0), "a", "data_offsets has 0 numbers, want 2"},
		{"three offsets", one(`"dtype":"U8","shape":[1],"data_offsets":[0,1,1]`, 1), "a", "data_offsets has more than 2 numbers"},
		{"negative offset", one(`"dtype":"U8","shape":[1],"data_offsets":[-1,0]`, 1), "a", fmt.Sprintf("data_offsets has the number -1, want whole numbers from 0 to %d", maxInt)},
		{"offset of 2^64", one(`"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]`, 1), "a", fmt.Sprintf("data_offsets has the number 18446744073709551616, want whole numbers from 0 to %d", maxInt)},
		{"offsets backwards", one(`"dtype":"U8","shape":[1],"data_offsets":[1,0]`, 1), "a", "data_offsets start at 1 and end at 0, before it"},
		{"end past the file", one(`"dtype":"U8","shape":[2],"data_offsets":[0,2]`, 1), "a", "its 2 bytes at offset 0 of the data end beyond the file, which has 1 bytes of data"},
		{"end past the file by far", one(fmt.Sprintf(`"dtype":"U8","shape":[%d],"data_offsets":[0,%d]`, maxInt, maxInt), 1), "a", fmt.Sprintf("its %d bytes at offset 0 of the data end beyond the file, which has 1 bytes of data", maxInt)},
		{"too few bytes", one(`"dtype":"F32","shape":[3],"data_offsets":[0,8]`, 8), "a", "data_offsets 0 to 8 are 8 bytes, F32 of shape [3] takes 12"},
		{"too many bytes", one(`"dtype":"F32","shape":[],"data_offsets":[0,8]`, 8), "a", "data_offsets 0 to 8 are 8 bytes, F32 of shape [] takes 4"},
		{"overlap", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}`, 7), "b", `starts at offset 116, 1 bytes before the end of tensor "a": they overlap`},
		{"two at one place", file(`{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}`, 4), "b", `starts at offset 113, 4 bytes before the end of tensor "a": they overlap`},
		{"one within another", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}`, 4), "b", `starts at offset 115, 2 bytes before the end of tensor "a": they overlap`},
		{"hole at the start", one(`"dtype":"U8","shape":[4],"data_offsets":[4,8]`, 8), "a", "starts at offset 65, 4 bytes after the end of the header, want offset 61: bytes between tensors belong to none"},
		{"hole between", file(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}}`, 8), "b", `starts at offset 118, 1 bytes after the end of tensor "a", want offset 117: bytes between tensors belong to none`},
		{"bytes at the end", one(`"dtype":"U8","shape":[4],"data_offsets":[0,4]`, 9), "", "its tensors end at offset 65, the file has 70 bytes: the last 5 belong to no tensor"},
		{"bytes and no tensor", file(`{}`, 1), "", "its tensors end at offset 10, the file has 11 bytes: the last 1 belong to no tensor"},
	}
}

func TestMalformedSafetensorsAreRefused(t *testing.T) {
	t.Parallel()
	checkRefused(t, malformedSafetensors())
}

func TestSafetensorsHeaderAloneIsRead(t *testing.T) {
	t.Parallel()
	header := `{"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}`
	if maxInt>>40 == 0 {
		t.Skip("a tensor of 1 TiB is more than an int")
	}
	r := &sparse{start: st(header, 0), size: int64(8+len(header)) + 1<<40}
	f, err := weights.Parse(r, r.size, "large")
	require.NoError(t, err)
	checkFile(t, f)
	assert.EqualValues(t, 9+len(header), r.read, "its first byte twice")

	r = &sparse{start: []byte{0, 0xe1, 0xf5, 0x05, 0, 0, 0, 0, '['}, size: 1 << 40} // 100,000,000
	_, err = weights.Parse(r, r.size, "large")
	require.ErrorContains(t, err, `the header begins with "["`, "the limit itself is allowed")
	assert.EqualValues(t, 9, r.read)
}

func TestEveryTypeHasABlock(t *testing.T) {
	t.Parallel()
	all := slices.Sorted(maps.Keys(bitsPerElement))
	var both []weights.DType
	both = append(both, safetensorsTypes...)
	both = slices.AppendSeq(both, maps.Keys(ggmlIDs))
	slices.Sort(both)
	assert.Equal(t, all, slices.Compact(both))
	for _, d := range all {
		elements, bytes := d.Block()
		assert.Equal(t, bitsPerElement[d], float64(bytes)*8/float64(elements), d)
	}
	elements, bytes := weights.DType("F33").Block()
	assert.Zero(t, elements+bytes)
}
