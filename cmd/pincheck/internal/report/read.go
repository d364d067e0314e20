package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/jsonlimit"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/internal/units"
)

// maxFile is the most bytes of one file of results: a run has some hundred kilobytes.
const maxFile = 256 << 20

// resultLimits returns the limits of a result. Real ones have 30 bytes and more for each of their objects and
// lists, and 12 for each value; what is decoded of an empty series takes two hundred times its text.
func resultLimits(text []byte) jsonlimit.Limits {
	nested := 10_000 + len(text)/24
	return jsonlimit.Limits{Depth: 64, Nested: nested, Values: nested + len(text)/10}
}

// errForeign is the error for JSON that pincheck did not write.
var errForeign = errors.New("not a result of pincheck (--format json)")

// ReadAll reads the results of one file, one after the other: JSON, or JSON lines. A file without a result is an error,
// and so is anything else.
func ReadAll(r io.Reader) ([]*Result, error) {
	return readEach(r, maxFile, Read)
}

// ReadDocuments reads what package compare compares: results of pincheck bench, as [ReadAll]
// reads them, and of nvbandwidth 0.8 or later. A result without measurements is an error.
func ReadDocuments(r io.Reader) ([]compare.Document, error) { return readEach(r, maxFile, document) }

// readEach parses the JSON documents of a file of at most limit bytes.
func readEach[T any](r io.Reader, limit int64, parse func([]byte) (T, error)) ([]T, error) {
	limited := &io.LimitedReader{R: r, N: limit + 1}
	decoder := json.NewDecoder(limited)
	var all []T
	for {
		var raw json.RawMessage
		err := decoder.Decode(&raw)
		switch syntax := (*json.SyntaxError)(nil); {
		case limited.N == 0:
			return nil, fmt.Errorf("more than %s: no result is that large", units.ExactBytes(int(limit)))
		case errors.Is(err, io.EOF) && len(all) > 0:
			return all, nil
		case errors.Is(err, io.EOF):
			return nil, errors.New("empty: no result is in it")
		case errors.Is(err, io.ErrUnexpectedEOF):
			return nil, fmt.Errorf("truncated: it ends within document %d", len(all)+1)
		case errors.As(err, &syntax):
			return nil, fmt.Errorf("not JSON: byte %d: %w", syntax.Offset, err)
		case err != nil:
			return nil, err
		}
		var one T
		if err = resultLimits(raw).Check(raw); err == nil {
			one, err = parse(raw)
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", len(all)+1, err)
		}
		all = append(all, one)
	}
}

// A Judged is a document of pincheck compare --reference: a result, or a file of the reference table.
type Judged struct {
	Result    *Result
	Reference *reference.File
}

// ReadJudged reads the documents of a file, whose name is for messages.
func ReadJudged(name string, r io.Reader) ([]Judged, error) {
	return readEach(r, maxFile, func(raw []byte) (j Judged, err error) {
		if reference.IsFile(raw) {
			j.Reference, err = reference.Read(name, raw)
		} else {
			j.Result, err = Read(raw)
		}
		return j, err
	})
}

// document returns the measurements of a result of pincheck or of nvbandwidth.
func document(raw []byte) (compare.Document, error) {
	var head struct {
		NVBandwidth json.RawMessage `json:"nvbandwidth"`
	}
	if json.Unmarshal(raw, &head) == nil && head.NVBandwidth != nil {
		return compare.ParseNVBandwidth(head.NVBandwidth)
	}
	if reference.IsFile(raw) {
		return compare.Document{}, errors.New("a file of the reference table: compare --reference judges by it")
	}
	r, err := Read(raw)
	if errors.Is(err, errForeign) {
		return compare.Document{}, fmt.Errorf("not a result of nvbandwidth (--json), and %w", err)
	}
	if err != nil {
		return compare.Document{}, err
	}
	return r.Document()
}

// Document returns the measurements of a result. A result without any is an error.
func (r *Result) Document() (compare.Document, error) {
	d := compare.Document{Tool: "pincheck", Host: r.HostName, Started: r.Started, Complete: r.Complete, Benches: r.Benches}
	if r.Facts != nil && r.Simulated {
		d.Simulated = true
		d.Notes = append(d.Notes, "a simulated GPU: its figures say nothing of the host")
	}
	series := 0
	for _, b := range d.Benches {
		series += len(b.Series)
		d.Complete = d.Complete && b.Complete
	}
	if series == 0 {
		return compare.Document{}, errors.New("it has no measurements: compare what pincheck bench --format json writes")
	}
	return d, nil
}

// Read reads a result from JSON that Write wrote. Results of other versions, and what is no result, are errors.
func Read(data []byte) (*Result, error) {
	var head struct {
		Version *float64 `json:"schema_version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("%w: %w", errForeign, err)
	}
	if head.Version == nil {
		return nil, fmt.Errorf("%w: it has no schema_version", errForeign)
	}
	if *head.Version != SchemaVersion {
		return nil, fmt.Errorf("schema_version %v: this pincheck reads %d (use the pincheck that wrote it, or a newer one)", *head.Version, SchemaVersion)
	}
	r := &Result{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, err
	}
	return r, nil
}
