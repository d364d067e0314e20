// Package report writes a result as text for people, as one HTML file, as JSON for programs, or as
// CSV or metrics for Prometheus. Results of the simulated GPU say so in every form.
//
// # Forms
//
// Each form is in files of its own: text.go and bench.go write text; html.go and the other html*.go files the page;
// compare.go has both of a comparison, whose text has the tables of its page; csv.go, prometheus.go and npd.go the rest.
// [Write] chooses between them. A new form is a [Format], a case in Write, golden files for the results of the tests, and
// a section in docs/output.md.
//
// All forms get a copy of the result without numbers that are not finite. Names, errors and output of
// drivers come from outside: text replaces characters that are not printable (plain), the page escapes
// them (markup).
//
// # JSON
//
// The JSON is stable: names are snake_case and contain their units. A name keeps its meaning; if one
// has to change, SchemaVersion changes. schema.json describes every field: tests compare it with the
// types and with the output.
//
// # Reading
//
// [Read] and [ReadAll] read results of this version. [ReadDocuments] reads what package compare compares, which includes
// the JSON of nvbandwidth.
package report
