package report

import _ "embed"

// Schema is the JSON Schema of a result.
//
//go:embed schema.json
var Schema string
