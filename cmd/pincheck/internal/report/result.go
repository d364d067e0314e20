package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// SchemaVersion is the version of the JSON's shape.
const SchemaVersion = 2

// Result is the result of one run of the tool. It is complete data at every moment: when
// a run is stopped, it has what was found until then, and is not Complete.
type Result struct {
	SchemaVersion int       `json:"schema_version"`
	Command       string    `json:"command"` // check, verify, devices, bench, report or version
	Tool          Tool      `json:"tool"`
	HostName      string    `json:"host_name,omitempty"`
	Started       time.Time `json:"started"`
	Seconds       float64   `json:"took_s"`
	Complete      bool      `json:"complete"`
	Stopped       string    `json:"stopped,omitempty"` // what ended a run that is not Complete
	// Verdict is empty if nothing was evaluated.
	Verdict       doctor.Verdict `json:"verdict,omitempty"`
	Errors        []string       `json:"errors"` // of the run itself
	*doctor.Facts                // nil if nothing was examined
	// Findings are in the order of their weight; there are none if all is well.
	Findings []doctor.Finding `json:"findings"`
	// Passed are the names of the check groups that had data and found no warning or problem.
	Passed  []string       `json:"fine,omitempty"`
	Benches []result.Bench `json:"benches"`
}

// Tool is the program that ran.
type Tool struct {
	Name     string `json:"name"`
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"` // of the source, with "+dirty" if it was changed
	Go       string `json:"go"`
	Platform string `json:"platform"` // linux/amd64
}

// Conclude sets the verdict from the content of the result. If evaluate is set, it searches for
// findings, without the ids in ignore. If there is no GPU, it searches always, as the findings
// contain what is missing; except if experiments ran, which needed no GPU then.
func (r *Result) Conclude(evaluate bool, ignore ...string) {
	verdict := r.Verdict
	if r.Facts != nil && (evaluate || len(r.Devices) == 0 && len(r.Benches) == 0) {
		verdict, r.Findings = doctor.Evaluate(r.Facts, ignore...)
		r.Passed = doctor.Passed(r.Facts, r.Findings)
	}
	switch {
	case !r.Complete:
		r.Verdict = doctor.Incomplete
	case r.Facts != nil && len(r.Devices) == 0 && len(r.Sources) == 0 && !r.NotStarted():
		r.Verdict = doctor.Unusable
	case r.failures() > 0 || r.count(doctor.Problem) > 0:
		r.Verdict = doctor.Problems
	case evaluate:
		r.Verdict = verdict
	case len(r.Benches) > 0:
		r.Verdict = doctor.Measured
	}
}

// failures counts what failed, in the run, its experiments and on its GPUs. Where there are
// findings, they have those of the GPUs.
func (r *Result) failures() int {
	n := len(r.Errors)
	for i := range r.Benches {
		n += len(r.Benches[i].Errors)
	}
	if r.Facts != nil && r.Findings == nil {
		for i := range r.Devices {
			n += len(r.Devices[i].Errors)
		}
	}
	return n
}

// count returns the number of findings of a severity.
func (r *Result) count(s doctor.Severity) int {
	n := 0
	for _, f := range r.Findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

// Format is a form of output.
type Format string

// The formats.
const (
	Text       Format = "text"
	JSON       Format = "json"
	JSONLines  Format = "jsonl"
	Prometheus Format = "prometheus"
	CSV        Format = "csv"
	HTML       Format = "html"
	// Ticket is the gravest finding in a few lines of text, for a ticket. Only commands that find something write it.
	Ticket Format = "ticket"
)

// Formats returns the formats that every result has.
func Formats() []Format { return []Format{Text, JSON, JSONLines, Prometheus, CSV, HTML} }

// Write writes the result in a format, by one call of w.Write, so that a result that
// cannot be rendered leaves nothing behind. Style is for text. Numbers that are not
// finite are left out of all formats. The error is that of w, or of a format that does
// not exist.
func Write(w io.Writer, r *Result, f Format, s Style) error {
	r = finite(r)
	var b bytes.Buffer
	switch f {
	case JSON, JSONLines:
		r.SchemaVersion = SchemaVersion
		return writeJSON(w, r, map[Format]string{JSON: "  "}[f])
	case Text:
		writeText(&b, r, s)
		return s.write(w, b.String())
	case Ticket:
		writeTicket(&b, r)
	case Prometheus:
		writePrometheus(&b, r)
	case CSV:
		if err := writeCSV(&b, r); err != nil {
			return err
		}
	case HTML:
		return WriteHTML(w, r)
	default:
		return fmt.Errorf("unknown format %q", string(f))
	}
	_, err := w.Write(b.Bytes())
	return err
}

// writeJSON writes a value as JSON, by one call of w.Write.
func writeJSON(w io.Writer, v any, indent string) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(printable.JSON(b.Bytes()))
	return err
}

// Schema is the JSON Schema of a result.
//
//go:embed schema.json
var Schema string
