package report

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/gopinned/pinned/internal/doctor"
)

// SchemaVersion is the version of the JSON's shape.
const SchemaVersion = 1

// Result is all that one run of the tool has to say.
type Result struct {
	SchemaVersion int    `json:"schema_version"`
	Command       string `json:"command"` // check, verify, devices or version
	Tool          Tool   `json:"tool"`
	*doctor.Facts        // nil for version
	// Findings come in order of their weight; an empty list is good news.
	Findings []doctor.Finding `json:"findings,omitempty"`
	Verdict  doctor.Verdict   `json:"verdict,omitempty"` // where something was judged
}

// Tool is the program that ran.
type Tool struct {
	Name     string `json:"name"`
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"` // of the source, "+dirty" behind it where it was changed
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

// ParseFormat reads the name of a format.
func ParseFormat(s string) (Format, error) {
	for _, f := range Formats() {
		if s == string(f) {
			return f, nil
		}
	}
	return "", fmt.Errorf("unknown format %q: formats are text and json", s)
}

// Write writes the result. Style matters to text only.
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
