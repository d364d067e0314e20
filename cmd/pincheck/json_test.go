package main

import (
	"bytes"
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// printedSchema is what pincheck schema prints.
func printedSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	got := call(t, system{}, "schema")
	require.Equal(t, exitOK, got.code)
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(got.stdout))
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	require.NoError(t, c.AddResource("schema.json", doc))
	s, err := c.Compile("schema.json")
	require.NoError(t, err)
	return s
}

// documents validates each JSON document of a text, and returns how many there are.
func documents(t *testing.T, s *jsonschema.Schema, what, text string) (n int) {
	t.Helper()
	for all := json.NewDecoder(strings.NewReader(text)); ; n++ {
		var raw json.RawMessage
		err := all.Decode(&raw)
		if err == io.EOF {
			return n
		}
		require.NoError(t, err, "%s: %.300s", what, text)
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
		require.NoError(t, err, what)
		assert.NoError(t, s.Validate(doc), what)
	}
}

// All JSON that any command writes is of the schema that pincheck schema prints, also where a command fails. A command
// without a row here fails the test.
func TestAllJSONIsOfThePrintedSchema(t *testing.T) {
	needsSim(t)
	t.Parallel()
	s := printedSchema(t)
	dir := t.TempDir()
	sys := benches(t, none)
	a, b := filepath.Join(dir, "a.json"), filepath.Join(dir, "b.json")
	for _, file := range []string{a, b} {
		got := call(t, sys, "bench", "bandwidth", "--quick", "--quiet", "--format", "json", "-o", file)
		require.Equal(t, exitOK, got.code, got.stderr)
	}
	archive := filepath.Join(dir, "a.tgz")
	rows := map[string][][]string{
		"check":    {{"check"}, {"check", "--expect-gpus", "9"}},
		"verify":   {{"verify"}},
		"devices":  {{"devices"}},
		"bench":    {{"bench", "bandwidth", "--quick"}, {"bench"}},
		"report":   {{"report", "--quick"}, {"report", a}},
		"compare":  {{"compare", a, b}, {"compare", a, b, a}, {"compare", "--all", a, b}, {"compare", "--reference", a}, {"compare", "none.json"}},
		"version":  {{"version"}},
		"capture":  {{"capture", "-o", archive}},
		"explain":  {{"explain"}, {"explain", "no_gpu"}},
		"watch":    {}, // does not end: TestWatchLinesAreOfThePrintedSchema
		"licenses": {{"licenses"}},
		"man":      {{"man", dir}},
		"schema":   {}, // writes the schema itself
	}
	written := 0
	for _, cmd := range newRoot(&options{}, sys).Commands() {
		if !cmd.Runnable() || cmd.Name() == "help" || cmd.Name() == "completion" {
			continue
		}
		calls, ok := rows[cmd.Name()]
		assert.True(t, ok, "%s: say how it is called", cmd.Name())
		for _, args := range calls {
			for _, format := range []string{"json", "jsonl"} {
				got := call(t, sys, append(args[:len(args):len(args)], "--format", format)...)
				if out := strings.TrimSpace(got.stdout); strings.HasPrefix(out, "{") || strings.HasPrefix(out, "[") {
					written += documents(t, s, strings.Join(args, " ")+" as "+format, out)
				}
			}
		}
	}
	assert.Greater(t, written, 20)
}

func TestWatchLinesAreOfThePrintedSchema(t *testing.T) {
	t.Parallel()
	stdout, _ := watched(t, 40, func(look int) bool { return look > 15 }, func(int, string, string) {}, "--format", "jsonl")
	assert.Positive(t, documents(t, printedSchema(t), "watch", stdout))
}
