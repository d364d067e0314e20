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
	{"\v{}", `begins with "\v", want {`},
	{"\x00{}", `begins with "\x00", want {`},
	{" x{}", "invalid character 'x' looking for beginning of value at byte 1"},
	{" []", "the header is an array, want an object"},
	{"\uFEFF{}", `begins with "\xef", want {`},
	{"{}\x00", `invalid character '\x00' after top-level value at byte 2`},
	{"{\"a\n\":1}", `invalid character '\n' in string literal at byte 3`},
	{`{"a\x":1}`, "invalid character 'x' in string escape code at byte 4"},
	{`{"a\u00g0":1}`, `invalid character 'g' in \u hexadecimal character escape at byte 7`},
	{`{"\ud83d":1}`, "has half of a surrogate pair at byte 2"},
	{`{"\ud83dx":1}`, "has half of a surrogate pair at byte 2"},
	{`{"\ud83d\ud83d\ude00":1}`, "has half of a surrogate pair at byte 2"},
	{`{"\ud83d\t":1}`, "has half of a surrogate pair at byte 2"},
	{`{"\ude00":1}`, "has half of a surrogate pair at byte 2"},
	{`{"\ude00\ud83d":1}`, "has half of a surrogate pair at byte 2"},
	{`{"\ud83d`, "unexpected end of JSON input at byte 7"},
	{`{"\`, "invalid character ' ' in string escape code at byte 2"},
	{`{"\u00`, `invalid character ' ' in \u hexadecimal character escape at byte 5`},
	{"{\"\xed\xa0\x80\":{}}", "is not UTF-8"},
	{"{\"\xc3\\u00a9\":{}}", "is not UTF-8"},
	{`{"a":{"x":"\ud83d"}}`, "has half of a surrogate pair at byte 11"},
	{`{"a":{"x":nul}}`, "invalid character '}' in literal null (expecting 'l') at byte 13"},
	{`{"a":{"x":nan}}`, "invalid character 'a' in literal null (expecting 'u') at byte 11"},
	{`{"a":{"x":tru`, "invalid character ' ' in literal true (expecting 'e') at byte 12"},
	{`{"a":{"x":NaN}}`, "invalid character 'N' looking for beginning of value at byte 10"},
	{`{"a":{"x":}}`, "invalid character '}' looking for beginning of value at byte 10"},
	{`{"a":{"shape":[01]}}`, "invalid character '1' after array element at byte 16"},
	{`{"a":{"shape":[1.2.3]}}`, "invalid character '.' after array element at byte 18"},
	{`{"a":{"x":-}}`, "invalid character '}' in numeric literal at byte 11"},
	{`{"a":{"x":+1}}`, "invalid character '+' looking for beginning of value at byte 10"},
	{`{"a":{"x":1e}}`, "invalid character '}' in exponent of numeric literal at byte 12"},
	{`{"a":{"x":1 "y":2}}`, `invalid character '"' after object key:value pair at byte 12`},
	{`{"a":{"x":[1}}}`, "invalid character '}' after array element at byte 12"},
	{`{"a":{"x":[1,]}}`, "invalid character ']' looking for beginning of value at byte 13"},
	{`{"a":{"x":[,1]}}`, "invalid character ',' looking for beginning of value at byte 11"},
	{`{"a":{,}}`, "invalid character ',' looking for beginning of object key string at byte 6"},
	{`{"a":{'x':1}}`, `invalid character '\'' looking for beginning of object key string at byte 6`},
	{`{"a":{"x":` + strings.Repeat("[", 9999), "exceeded max depth"},
	{`{"a":{"x":` + strings.Repeat(`{"y":`, 9999), "exceeded max depth"},
	{`{"a":{"dtype":"U8","Shape":[1],"data_offsets":[0,1]}}`, "its entry has no shape"},
}

func TestInvalidJSONIsRefused(t *testing.T) {
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

func TestJSONIsDecodedAsByEncodingJSON(t *testing.T) {
	t.Parallel()
	for _, text := range jsonSeeds {
		if text != `1,"b":2` { // which is a value and a member
			checkJSON(t, text)
		}
	}
}

// What is read does not depend on where one read of the file ends and the next begins.
func TestLongHeadersAreRead(t *testing.T) {
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
