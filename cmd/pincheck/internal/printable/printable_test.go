package printable_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
)

func TestLine(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                                       "",
		"NVIDIA H200":                            "NVIDIA H200",
		" a\tb\nc\r\n d\u00a0e ":                 "a b c d e",
		"\x1b[31mred\x1b[0m":                     "?[31mred?[0m",
		"\x1b]52;c;cm0gLXJm\a":                   "?]52;c;cm0gLXJm?",
		"\u009b2J\x7f\b":                         "?2J??",
		"\u202etxt.exe\u2066\u200b":              "?txt.exe??",
		"\xff\xfea":                              "��a",
		"größe 大 Δ –":                            "größe 大 Δ –",
		"\U000e0041 tag, \ue000 private, \ufeff": "? tag, ? private, ?",
	} {
		assert.Equal(t, want, printable.Line(in), "%q", in)
	}
}

func TestTextKeepsLines(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "a\n\tb  c?\n?[2J", printable.Text("a\n\tb  c\r\n\x1b[2J"))
}

// JSON shows a terminal nothing that commands it, and has the same values.
func TestJSONKeepsItsValues(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"", "plain", "größe", "\x1b[2J", "\u009b2J\x7f", "\u202e\u2066", "\U000e0041", "a\u2028b"} {
		text, err := json.MarshalIndent(map[string]string{s: s}, "", "  ")
		require.NoError(t, err)
		shown := printable.JSON(text)
		assert.Equal(t, printable.Text(string(shown)), string(shown), "%q", s)
		var back map[string]string
		require.NoError(t, json.Unmarshal(shown, &back))
		assert.Equal(t, map[string]string{s: s}, back)
	}
}
