// Package reference has what machines were measured, or are known, to reach: a JSON file for each type of
// machine, and their schema. docs/reference.md has them as tables, and how to add one.
package reference

import "embed" // also for Schema

// Machines are the files, and schema.json.
//
//go:embed *.json
var Machines embed.FS

// SchemaFile is the JSON Schema of the others in [Machines].
const SchemaFile = "schema.json"
