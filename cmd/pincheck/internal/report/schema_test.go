package report

import (
	"bytes"
	"encoding"
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

// types returns the JSON types that a node allows.
func (n *node) types(root *node) []string {
	n = n.resolve(root)
	if list, ok := n.Type.([]any); ok {
		var all []string
		for _, one := range list {
			all = append(all, fmt.Sprint(one))
		}
		return all
	}
	if n.Type == nil && len(n.Enum) > 0 {
		return []string{"string"}
	}
	return []string{fmt.Sprint(n.Type)}
}

// jsonType returns the JSON type of a Go type, or "" for types that write themselves.
func jsonType(t reflect.Type) string {
	if t.Implements(reflect.TypeFor[json.Marshaler]()) || t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		return ""
	}
	switch t.Kind() {
	case reflect.Pointer:
		return jsonType(t.Elem())
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "boolean"
	case reflect.Float32, reflect.Float64:
		return "number"
	case reflect.Slice, reflect.Array:
		return "array"
	case reflect.Struct, reflect.Map:
		return "object"
	}
	return "integer"
}

// Every type and every property has a description, which is a sentence, and every type is used.
func TestSchemaDescribesEveryProperty(t *testing.T) {
	t.Parallel()
	root := schemaNode(t)
	described := func(at string, n *node) {
		assert.Regexp(t, `^[A-Za-z0-9(].*\.$`, n.Description, at)
	}
	used := map[string]bool{}
	var walk func(at string, n *node)
	walk = func(at string, n *node) {
		if n.Ref != "" {
			name := strings.TrimPrefix(n.Ref, "#/$defs/")
			if !used[name] {
				used[name] = true
				described(name, root.Defs[name])
				walk(name, root.Defs[name])
			}
		}
		for name, p := range n.Properties {
			described(at+"."+name, p)
			walk(at+"."+name, p)
		}
		if n.Items != nil {
			walk(at+"[]", n.Items)
		}
	}
	for _, whole := range []string{"result", "comparison", "change"} {
		walk("", &node{Ref: "#/$defs/" + whole})
	}
	assert.ElementsMatch(t, slices.Collect(maps.Keys(root.Defs)), slices.Collect(maps.Keys(used)))
}

// Every field is in the schema with its type, also those that no test's result has, and no other is.
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
					if want := jsonType(f.Type); want != "" {
						assert.Contains(t, p.types(root), want, "%s.%s (%v)", at, name, f.Type)
					}
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

// The document lists every format, metric and column.
func TestDocument(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "output.md"))
	require.NoError(t, err)
	for _, column := range csvColumns {
		assert.Contains(t, string(text), "`"+column+"`", "a column of CSV")
	}
	for _, f := range Formats() {
		assert.Contains(t, string(text), "`"+string(f)+"`", "a format")
	}
	family := regexp.MustCompile(`(?m)^# TYPE (pincheck_[a-z_]+) gauge$`)
	for name, r := range results(t) {
		for _, m := range family.FindAllStringSubmatch(render(t, r, Prometheus, Style{}), -1) {
			if !strings.HasPrefix(m[1], "pincheck_series_") {
				assert.Contains(t, string(text), "`"+m[1]+"`", "a metric of %s", name)
			}
		}
	}
}
