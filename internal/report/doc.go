// Package report turns one result into text for people or JSON for programs.
// Results of the simulated GPU are marked as simulated in every form.
//
// The JSON is stable: names are snake_case and tell their units, a name that
// is there keeps its meaning, and SchemaVersion changes when one must not.
package report
