package weights_test

import (
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/weights"
)

// badHeaders are headers that are no JSON, or no JSON of safetensors, with the reasons for
// which they are refused.
var badHeaders = []struct{ header, reason string }{
	{" {}", "the header begins with white space, want {"},
	{"\n{}", "the header begins with white space, want {"},
	{"\uFEFF{}", "not JSON at byte 0: "},
	{"{}\x00", "the JSON goes on at byte 2"},
	{"{\"a\n\":1}", "not JSON at byte 3: '\\n' in a string"},
	{`{"a\x":1}`, `not JSON at byte 4: the escape sequence \'x'`},
	{`{"a\u00g0":1}`, "not JSON at byte 7: 'g', want a hexadecimal digit"},
	{`{"\ud83d":1}`, "half of a surrogate pair before byte 9"},
	{`{"\ud83dx":1}`, "half of a surrogate pair before byte 9"},
	{`{"\ud83d\ud83d\ude00":1}`, "half of a surrogate pair before byte 14"},
	{`{"\ud83d\t":1}`, "half of a surrogate pair before byte 10"},
	{`{"\ude00":1}`, "half of a surrogate pair before byte 9"},
	{`{"\ude00\ud83d":1}`, "half of a surrogate pair before byte 14"},
	{`{"\ud83d`, "the JSON has 8 bytes and ends within a value"},
	{`{"\`, "the JSON has 3 bytes and ends within a value"},
	{`{"\u00`, "the JSON has 6 bytes and ends within a value"},
	{"{\"\xed\xa0\x80\":{}}", "the JSON is not UTF-8"},
	{"{\"\xc3\\u00a9\":{}}", "the JSON is not UTF-8"},
	{`{"a":{"x":"\ud83d"}}`, "half of a surrogate pair before byte 18"},
	{`{"a":{"x":nul}}`, "not JSON at byte 10: nul"},
	{`{"a":{"x":nan}}`, "not JSON at byte 10: nan"},
	{`{"a":{"x":tru`, "not JSON at byte 10: tru"},
	{`{"a":{"x":NaN}}`, "not JSON at byte 10: NaN"},
	{`{"a":{"x":}}`, "not JSON at byte 10: '}', want a value"},
	{`{"a":{"shape":[01]}}`, "not JSON at byte 15: 01"},
	{`{"a":{"shape":[1.2.3]}}`, "not JSON at byte 15: 1.2.3"},
	{`{"a":{"x":-}}`, "not JSON at byte 10: -"},
	{`{"a":{"x":+1}}`, "not JSON at byte 10: +1"},
	{`{"a":{"x":1e}}`, "not JSON at byte 10: 1e"},
	{`{"a":{"x":1 "y":2}}`, "not JSON at byte 12: '\"', want }"},
	{`{"a":{"x":[1}}}`, "not JSON at byte 12: '}', want ]"},
	{`{"a":{"x":[1,]}}`, "not JSON at byte 13: ']', want a value"},
	{`{"a":{"x":[,1]}}`, "not JSON at byte 11: ',', want a value"},
	{`{"a":{,}}`, "not JSON at byte 6: ',', want \""},
	{`{"a":{'x':1}}`, "not JSON at byte 6: '\\'', want \""},
	{`{"a":{"x":` + strings.Repeat("[", 999), "values are nested more than 1000 levels deep"},
	{`{"a":{"x":` + strings.Repeat(`{"y":`, 999), "values are nested more than 1000 levels deep"},
	{`{"a":{"dtype":"U8","Shape":[1],"data_offsets":[0,1]}}`, "its entry has no shape"},
}

func TestHeadersThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range badHeaders {
		f, err := parse(st(tt.header, 1))
		assert.Nil(t, f)
		var refused *weights.FormatError
		if assert.ErrorAs(t, err, &refused, "%.50q", tt.header) {
			assert.Contains(t, refused.Reason, tt.reason, "%.50q", tt.header)
		}
	}
}

// escapedSurrogate is an escape sequence of half a surrogate pair, which encoding/json
// replaces.
var escapedSurrogate = regexp.MustCompile(`\\u[dD][89a-fA-F]`)

// checkJSON compares what is taken for JSON, and how strings are decoded, with
// encoding/json: text is a value that is ignored, and a name.
func checkJSON(t *testing.T, text string) {
	if !utf8.ValidString(text) || escapedSurrogate.MatchString(text) || strings.Count(text, "[")+strings.Count(text, "{") > 900 {
		return
	}
	const rest = `"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`
	_, err := parse(st(`{"a":{"x":`+text+`,`+rest, 1))
	if want := json.Valid([]byte(text)); want != (err == nil) {
		t.Errorf("%q is JSON for encoding/json: %v; here: %v", text, want, err)
	}
	var name string
	if json.Unmarshal([]byte(text), &name) != nil || strings.HasPrefix(strings.TrimLeft(text, " \t\r\n"), "n") {
		return
	}
	f, err := parse(st(`{`+text+`:{`+rest, 1))
	var refused *weights.FormatError
	if name == "" || strings.ContainsRune(name, 0) || name == "__metadata__" {
		if !errors.As(err, &refused) {
			t.Errorf("the name %q is accepted", name)
		}
		return
	}
	require.NoError(t, err, text)
	if _, ok := f.Tensor(name); !ok {
		t.Errorf("there is no tensor %q of the name %s", name, text)
	}
}

// jsonSeeds are values, of which some are no JSON.
var jsonSeeds = []string{
	`null`, `true`, `false`, `nul`, `nulll`, `truefalse`, `0`, `-0`, `00`, `01`, `-01`, `1.`, `1.0`, `.5`, `1e5`, `1E+05`, `1e-`, `1e`, `--1`, `+1`, `1-1`, `0x1`, `1 2`,
	`-`, `-.5`, `12345678901234567890123456789`, `""`, `"a"`, `"\""`, `"\\\/\b\f\n\r\t"`, `"\u0041\u00e9\u20ac"`, `"\u004"`, `"\U0041"`, `"\q"`, "\"\x7f\"", "\"\t\"",
	`"é€😀"`, `"\u0000"`, `"\ufffd"`, "\"\uFFFD\"", "\"\u2028\"", `"`, `"\`, `[]`, `[ ]`, `[1]`, `[1,2]`, `[1,]`, `[,]`, `[1 2]`, `[`, `]`, `[[[]]]`, `[}`, `{}`, `{ }`, `{"a":1}`, `{"a":1,"a":2}`,
	`{"a":1,}`, `{,}`, `{"a"}`, `{"a":}`, `{1:2}`, `{a:1}`, `{"a":1 "b":2}`, `{"a":{"b":[{"c":null}]}}`, " \t\r\n1 \t\r\n", "\v1", "\u00a01", `//`, ``, `"a":1`, `1,"b":2`, `1}`, `{]`,
}

func TestJSONIsThatOfEncodingJSON(t *testing.T) {
	t.Parallel()
	for _, text := range jsonSeeds {
		if text != `1,"b":2` { // which is a value and a member
			checkJSON(t, text)
		}
	}
}

// What is read does not depend on where one read of the file ends and the next begins.
func TestHeadersLongerThanTheBuffer(t *testing.T) {
	t.Parallel()
	const entry = `"\u00e9\ud83d\ude00 é😀":{ "dtype" : "U8", "x":[true, null,-1.5e3 ,"\n"], "shape":[1], "data_offsets":[0,1]}}`
	for at := 0; at <= len(entry)+1; at++ {
		header := "{" + strings.Repeat(" ", 1<<20-1-at) + entry
		f, err := parse(st(header, 1))
		require.NoError(t, err, at)
		checkFile(t, f)
		tensor, ok := f.Tensor("é😀 é😀")
		require.True(t, ok)
		require.Equal(t, []int{1}, tensor.Shape)
	}
}

// FuzzJSON compares the JSON reader with encoding/json.
func FuzzJSON(f *testing.F) {
	for _, text := range jsonSeeds {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		// What goes on behind the value belongs to the members of the object around it.
		dec := json.NewDecoder(strings.NewReader(text))
		var value json.RawMessage
		if dec.Decode(&value) == nil && strings.TrimLeft(text[dec.InputOffset():], " \t\r\n") != "" {
			return
		}
		checkJSON(t, text)
	})
}
