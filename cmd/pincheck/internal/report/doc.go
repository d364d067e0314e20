// Package report writes a result as text for people, as one HTML file, as JSON for programs, or as
// CSV or metrics for Prometheus. Results of the simulated GPU say so in every form.
//
// The JSON is stable: names are snake_case and contain their units. A name keeps its
// meaning; if one has to change, SchemaVersion changes.
package report
