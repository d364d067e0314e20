// Package report writes a result as text for people or as JSON for programs. Results of
// the simulated GPU say so in every form.
//
// The JSON is stable: names are snake_case and contain their units. A name keeps its
// meaning; if one has to change, SchemaVersion changes.
package report
