package compare

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A Run is what was measured on one host in one go.
type Run struct {
	Name     string    `json:"name"` // of the host, or of the file where hosts do not differ
	File     string    `json:"file"`
	Host     string    `json:"host_name,omitempty"`
	Tool     string    `json:"tool"`
	Started  time.Time `json:"started,omitzero"`
	Complete bool      `json:"complete"`
	// Simulated is whether it is of the simulated GPU.
	Simulated bool     `json:"simulated,omitempty"`
	Notes     []string `json:"notes,omitempty"`
	series    []series
	index     map[string]int // of the series, by their keys
}

// series is one of the series of a run.
type series struct {
	bench string
	runs  int // that the samples are of
	result.Series
}

// key identifies what was measured: series of two runs with one key are compared.
func (s *series) key() string {
	labels := slices.SortedFunc(slices.Values(s.Labels), func(a, b result.Label) int { return cmp.Compare(a.Key, b.Key) })
	var key []byte
	for _, part := range append(result.Labels{{Key: s.bench, Value: s.Name}, {Key: string(s.Unit)}}, labels...) {
		key = strconv.AppendQuote(strconv.AppendQuote(key, part.Key), part.Value)
	}
	return string(key)
}

// A Document is what one run of a tool wrote.
type Document struct {
	Tool     string // pincheck, or nvbandwidth with its version
	Host     string // empty if it is not known
	Started  time.Time
	Complete bool // false if the run ended early
	// Simulated is whether the GPU is the simulated one.
	Simulated bool
	Benches   []result.Bench
	Notes     []string // what was left out when it was read
}

// A File is the documents of a file.
type File struct {
	Name      string
	Documents []Document
}

// Runs returns the runs in these files. Documents of one file with one host's name are
// one run, such as the benches that one host appended to a file of JSON lines.
func Runs(files []File) []Run {
	var runs []Run
	for _, f := range files {
		first := len(runs)
		for _, d := range f.Documents {
			at := slices.IndexFunc(runs[first:], func(r Run) bool { return d.Host != "" && r.Host == d.Host && r.Tool == d.Tool })
			if at < 0 {
				runs = append(runs, Run{File: f.Name, Host: d.Host, Tool: d.Tool, Started: d.Started, Complete: true, index: map[string]int{}})
				at = len(runs) - 1 - first
			}
			runs[first+at].add(d)
		}
	}
	name(runs)
	for i := range runs {
		if strings.HasPrefix(runs[i].Tool, "nvbandwidth") {
			if at := slices.IndexFunc(runs, func(r Run) bool { return r.Tool == "pincheck" }); at >= 0 {
				runs[i].matchLabels(&runs[at])
			}
		}
	}
	return runs
}

func (r *Run) add(d Document) {
	r.Complete = r.Complete && d.Complete
	r.Simulated = r.Simulated || d.Simulated
	r.Notes = append(r.Notes, d.Notes...)
	for _, b := range d.Benches {
		for _, s := range b.Series {
			if len(s.Samples) == 0 {
				continue
			}
			added := series{b.Name, 1, s}
			key := added.key()
			if at, ok := r.index[key]; ok {
				old := &r.series[at]
				old.Samples = slices.Concat(old.Samples, s.Samples)
				old.runs++
				old.Stats = result.Summarize(old.Samples)
				continue
			}
			added.Stats = result.Summarize(s.Samples)
			r.index[key] = len(r.series)
			r.series = append(r.series, added)
		}
	}
}

// name names the runs: after their hosts if these differ, else after their files.
func name(runs []Run) {
	count := map[string]int{}
	for _, r := range runs {
		count[r.Host]++
	}
	used := map[string]int{}
	for i := range runs {
		r := &runs[i]
		if r.Name = r.Host; r.Host == "" || count[r.Host] > 1 {
			r.Name = strings.TrimSuffix(filepath.Base(r.File), ".json")
		}
		if used[r.Name]++; used[r.Name] > 1 {
			r.Name += fmt.Sprintf(" (%d)", used[r.Name])
		}
	}
}

// matchLabels gives the series of nvbandwidth the labels of those of pincheck that they
// are about: its JSON has neither the size of the copies nor the kind of memory, which is
// that of cuMemHostAlloc. They are compared with the largest copies.
func (r *Run) matchLabels(ours *Run) {
	kinds := []string{"cuda_host_alloc", "registered"} // the better one first
	for i := range r.series {
		s := &r.series[i]
		var best *series
		bestKind, bestSize := len(kinds), 0
		for j := range ours.series {
			c := &ours.series[j]
			kind, size := slices.Index(kinds, c.Labels.Get(result.Memory)), c.Labels.Size()
			if c.bench != s.bench || c.Name != s.Name || c.Unit != s.Unit || kind < 0 || !covers(c.Labels, s.Labels) {
				continue
			}
			if kind < bestKind || kind == bestKind && size > bestSize {
				best, bestKind, bestSize = c, kind, size
			}
		}
		if best != nil {
			s.Labels = best.Labels
		}
	}
	r.Notes = append(r.Notes, "nvbandwidth does not say how large its copies were: they are compared with pincheck's largest")
}

// covers reports whether labels are these and besides only those that nvbandwidth lacks.
func covers(labels, these result.Labels) bool {
	for _, l := range these {
		if labels.Get(l.Key) != l.Value {
			return false
		}
	}
	for _, l := range labels {
		if l.Key != result.Size && l.Key != result.Memory && these.Get(l.Key) == "" {
			return false
		}
	}
	return true
}
