package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	s, err := c.Compile("schema.json")
	require.NoError(t, err)
	return s
}

func valid(s *jsonschema.Schema, text []byte) error {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

func TestOutputIsOfTheSchema(t *testing.T) {
	t.Parallel()
	s := compiled(t)
	for name, r := range results(t) {
		assert.NoError(t, valid(s, []byte(render(t, r, JSON, Style{}))), name)
		assert.NoError(t, valid(s, []byte(render(t, r, JSONLines, Style{}))), name)
	}
	// Those that the command's tests keep, too.
	kept, err := filepath.Glob(filepath.Join(testdata, "golden", "*.json"))
	require.NoError(t, err)
	assert.NotEmpty(t, kept)
	for _, file := range kept {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		text = bytes.ReplaceAll(text, []byte(`"started": "T"`), []byte(`"started": "2026-11-21T20:30:00Z"`))
		assert.NoError(t, valid(s, text), file)
	}
	// The schema refuses what is not of it.
	for _, bad := range []string{`{}`, `{"schema_version":1}`, `{"schema_version":2,"more":1}`, `[]`} {
		assert.Error(t, valid(s, []byte(bad)), bad)
	}
	whole := render(t, results(t)["healthy"], JSON, Style{})
	for old, changed := range map[string]string{`"started": "2026-`: `"started": "26-`, `"gb_per_s": 63`: `"gb_per_s": "63`, `"verdict": "healthy"`: `"verdict": "fine"`, `"benches": []`: `"benches": null`} {
		require.Contains(t, whole, old)
		text := strings.Replace(whole, old, changed, 1)
		if strings.HasSuffix(changed, `"63`) {
			text = regexp.MustCompile(`"gb_per_s": "[0-9.]+`).ReplaceAllString(text, `${0}"`)
		}
		assert.Error(t, valid(s, []byte(text)), changed)
	}
}

// A node is a part of the schema.
type node struct {
	Ref         string           `json:"$ref"`
	Type        any              `json:"type"`
	Enum        []string         `json:"enum"`
	Description string           `json:"description"`
	Properties  map[string]*node `json:"properties"`
	Required    []string         `json:"required"`
	Items       *node            `json:"items"`
	Defs        map[string]*node `json:"$defs"`
}

func schemaNode(t *testing.T) *node {
	t.Helper()
	text, err := os.ReadFile("schema.json")
	require.NoError(t, err)
	n := &node{}
	require.NoError(t, json.Unmarshal(text, n))
	return n
}

func (n *node) resolve(root *node) *node {
	if n.Ref != "" {
		return root.Defs[strings.TrimPrefix(n.Ref, "#/$defs/")]
	}
	return n
}

// fields returns the names in JSON of a struct's fields, with whether they may be absent.
func fields(t reflect.Type, optional bool) map[string]reflect.StructField {
	out := map[string]reflect.StructField{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case f.Anonymous && name == "":
			inner := f.Type
			if inner.Kind() == reflect.Pointer {
				inner, optional = inner.Elem(), true
			}
			maps.Copy(out, fields(inner, optional))
		default:
			out[name] = f
		}
	}
	return out
}

// Every field is in the schema, also those that no test's result has, and no other is.
func TestSchemaHasAllFields(t *testing.T) {
	t.Parallel()
	root := schemaNode(t)
	seen := map[reflect.Type]bool{}
	var walk func(at string, typ reflect.Type, n *node)
	walk = func(at string, typ reflect.Type, n *node) {
		n = n.resolve(root)
		require.NotNil(t, n, at)
		switch typ.Kind() {
		case reflect.Pointer:
			walk(at, typ.Elem(), n)
		case reflect.Slice:
			if n.Items != nil {
				walk(at+"[]", typ.Elem(), n.Items)
			}
		case reflect.Struct:
			if n.Properties == nil || seen[typ] { // time.Time, and types with a form of their own
				return
			}
			seen[typ] = true
			have := fields(typ, false)
			assert.ElementsMatch(t, slices.Collect(maps.Keys(have)), slices.Collect(maps.Keys(n.Properties)), "fields of %s (%v)", at, typ)
			for name, f := range have {
				if p := n.Properties[name]; p != nil {
					assert.NotEmpty(t, p.Description, "%s.%s", at, name)
					walk(at+"."+name, f.Type, p)
				}
				if strings.Contains(f.Tag.Get("json"), "omitempty") {
					assert.NotContains(t, n.Required, name, at)
				}
			}
		}
	}
	walk("result", reflect.TypeFor[Result](), root.Defs["result"])
	walk("comparison", reflect.TypeFor[comparisonDocument](), root.Defs["comparison"])
	assert.Greater(t, len(seen), 25)
}

const (
	fieldsBegin = "<!-- The tables below are made of cmd/pincheck/internal/report/schema.json: make golden -->\n"
	fieldsEnd   = "<!-- end -->\n"
)

// fieldTables renders the schema as Markdown.
func fieldTables(root *node) string {
	var b strings.Builder
	table := func(name string, n *node) {
		fmt.Fprintf(&b, "### %s\n\n%s\n\n| field | type | meaning |\n|---|---|---|\n", name, n.Description)
		for _, field := range slices.Sorted(maps.Keys(n.Properties)) {
			p := n.Properties[field]
			kind := typeText(p)
			if len(p.Enum) > 0 {
				kind = "`" + strings.Join(slices.DeleteFunc(slices.Clone(p.Enum), func(s string) bool { return s == "" }), "`, `") + "`"
			}
			if !slices.Contains(n.Required, field) {
				kind += ", optional"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", field, kind, strings.ReplaceAll(p.Description, "|", `\|`))
		}
		b.WriteByte('\n')
	}
	whole := []string{"result", "comparison", "change"}
	for _, name := range whole {
		table(name, root.Defs[name])
	}
	for _, name := range slices.Sorted(maps.Keys(root.Defs)) {
		if !slices.Contains(whole, name) {
			table(name, root.Defs[name])
		}
	}
	return b.String()
}

func typeText(n *node) string {
	switch {
	case n.Ref != "":
		name := strings.TrimPrefix(n.Ref, "#/$defs/")
		return fmt.Sprintf("[%s](#%s)", name, name)
	case n.Items != nil:
		return "list of " + typeText(n.Items)
	case n.Type == nil:
		return "integer"
	}
	if list, ok := n.Type.([]any); ok {
		return fmt.Sprintf("%v or null", list[0])
	}
	return fmt.Sprint(n.Type)
}

// The document describes every field, metric and column.
func TestDocument(t *testing.T) {
	t.Parallel()
	file := filepath.Join("..", "..", "..", "..", "docs", "output.md")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), fieldsBegin)
	require.True(t, ok)
	tables, after, ok := strings.Cut(rest, fieldsEnd)
	require.True(t, ok)
	made := "\n" + fieldTables(schemaNode(t))
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(before+fieldsBegin+made+fieldsEnd+after), 0o644))
	} else {
		assert.Equal(t, made, tables, "run the test with -update")
	}
	for _, column := range csvColumns {
		assert.Contains(t, before+after, "`"+column+"`", "a column of CSV")
	}
	for _, f := range Formats() {
		assert.Contains(t, before+after, "`"+string(f)+"`", "a format")
	}
	family := regexp.MustCompile(`(?m)^# TYPE (pincheck_[a-z_]+) gauge$`)
	for name, r := range results(t) {
		for _, m := range family.FindAllStringSubmatch(render(t, r, Prometheus, Style{}), -1) {
			if !strings.HasPrefix(m[1], "pincheck_series_") {
				assert.Contains(t, before+after, "`"+m[1]+"`", "a metric of %s", name)
			}
		}
	}
}
