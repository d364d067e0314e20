package report

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/gopinned/pinned/internal/doctor"
)

// SchemaVersion is the version of the JSON's shape.
const SchemaVersion = 1

// Result is the result of one run of the tool.
type Result struct {
	SchemaVersion int    `json:"schema_version"`
	Command       string `json:"command"` // check, verify, devices or version
	Tool          Tool   `json:"tool"`
	*doctor.Facts        // nil for version
	// Findings are in the order of their weight; there are none if all is well.
	Findings []doctor.Finding `json:"findings,omitempty"`
	Verdict  doctor.Verdict   `json:"verdict,omitempty"` // if the run was judged
}

// Tool is the program that ran.
type Tool struct {
	Name     string `json:"name"`
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"` // of the source, with "+dirty" if it was changed
	Go       string `json:"go"`
	Platform string `json:"platform"` // linux/amd64
}

// Format is a form of output.
type Format string

// The formats.
const (
	Text Format = "text"
	JSON Format = "json"
)

// Formats returns all formats.
func Formats() []Format { return []Format{Text, JSON} }

// ParseFormat returns the format with a name, or an error that lists all names.
func ParseFormat(s string) (Format, error) {
	for _, f := range Formats() {
		if s == string(f) {
			return f, nil
		}
	}
	return "", fmt.Errorf("unknown format %q: formats are text and json", s)
}

// Write writes the result in a format. Style is for text. The error is that of w, or of a
// format that does not exist.
func Write(w io.Writer, r *Result, f Format, s Style) error {
	r.SchemaVersion = SchemaVersion
	switch f {
	case JSON:
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(r)
	case Text:
		return writeText(w, r, s)
	}
	return fmt.Errorf("unknown format %q", string(f))
}
