package compare

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A Document is what one run of a tool wrote.
type Document struct {
	Tool     string // pincheck, or nvbandwidth with its version
	Host     string // empty if it is not said
	Started  time.Time
	Complete bool // false if the run ended early
	Benches  []result.Bench
	Notes    []string // what was left out when it was read
}

// largest is the most bytes of one file: a run has some hundred kilobytes.
const largest = 256 << 20

// Read reads the documents of one file, one after the other: JSON of pincheck bench, in a
// version of the schema up to newest, and of nvbandwidth 0.8 or later. JSON lines are
// such a file too. No document at all is an error, and so is anything else.
func Read(r io.Reader, newest int) ([]Document, error) { return read(r, newest, largest) }

func read(r io.Reader, newest int, largest int64) ([]Document, error) {
	limited := &io.LimitedReader{R: r, N: largest + 1}
	decoder := json.NewDecoder(limited)
	var documents []Document
	for {
		var raw json.RawMessage
		err := decoder.Decode(&raw)
		switch {
		case limited.N == 0:
			return nil, fmt.Errorf("more than %s: no result is that large", units.ExactBytes(int(largest)))
		case errors.Is(err, io.EOF) && len(documents) > 0:
			return documents, nil
		case errors.Is(err, io.EOF):
			return nil, errors.New("empty: no result is in it")
		case errors.Is(err, io.ErrUnexpectedEOF):
			return nil, fmt.Errorf("truncated: it ends within document %d", len(documents)+1)
		case err != nil:
			if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
				return nil, fmt.Errorf("not JSON: byte %d: %w", syntax.Offset, err)
			}
			return nil, err
		}
		d, err := parse(raw, newest)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", len(documents)+1, err)
		}
		documents = append(documents, d)
	}
}

// errForeign is the error for JSON of something else.
var errForeign = errors.New("neither a result of pincheck (--format json) nor one of nvbandwidth (--json)")

func parse(raw json.RawMessage, newest int) (Document, error) {
	if raw[0] != '{' {
		return Document{}, errForeign
	}
	var head struct {
		Version     *float64        `json:"schema_version"`
		NVBandwidth json.RawMessage `json:"nvbandwidth"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return Document{}, fmt.Errorf("%w: %w", errForeign, err)
	}
	switch {
	case head.NVBandwidth != nil:
		return parseNVBandwidth(head.NVBandwidth)
	case head.Version == nil:
		return Document{}, errForeign
	case *head.Version > float64(newest):
		return Document{}, fmt.Errorf("schema version %v, and this pincheck reads versions up to %d: use the pincheck that wrote it, or a newer one", *head.Version, newest)
	}
	var d struct {
		HostName  string         `json:"host_name"`
		Started   time.Time      `json:"started"`
		Complete  *bool          `json:"complete"`
		Simulated bool           `json:"simulated"`
		Benches   []result.Bench `json:"benches"`
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return Document{}, err
	}
	out := Document{Tool: "pincheck", Host: d.HostName, Started: d.Started, Complete: d.Complete == nil || *d.Complete, Benches: d.Benches}
	if d.Simulated {
		out.Notes = append(out.Notes, "a simulated GPU: its figures say nothing of the host")
	}
	series := 0
	for _, b := range d.Benches {
		series += len(b.Series)
		out.Complete = out.Complete && b.Complete
		if out.Started.IsZero() {
			out.Started = b.Started
		}
	}
	if series == 0 {
		return Document{}, errors.New("it has no measurements: compare what pincheck bench --format json writes")
	}
	return out, nil
}
