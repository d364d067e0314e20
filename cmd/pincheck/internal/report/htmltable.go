package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A seriesTable has a row for each series.
type seriesTable struct {
	Caption string // what all rows share
	Keys    []string
	Rows    []row
	Range   string // of the strips of samples
	// Columns that are there if a row has something in them; Several are those about several samples.
	Several, Samples, Expected, CPU, Node, Checked bool
}

// A row has the texts of one series.
type row struct {
	Labels                    []label
	Median, Low, High, Spread string
	Count                     int
	Strip                     string // a path through the samples from 0 to 100; the median is at 50
	Expected, Share, Source   string
	CPU, Node                 string
	Checked                   bool
}

// A label is a cell that names a row.
type label string

// Long reports whether it is to be broken into lines.
func (l label) Long() bool { return utf8.RuneCountInString(string(l)) > 28 }

const (
	maxMarks     = 40 // of a strip
	widestStrip  = 0.5
	closestStrip = 0.01
)

// newTable returns the table of series: the labels in which they differ, in the view's
// order, then the rest.
func newTable(v result.View, all []*result.Series) seriesTable {
	var t seriesTable
	keys := varying(append(append([]string{v.X}, v.Lines...), otherKeys(v, all)...), all)
	if len(all) == 1 && v.X != "" {
		keys = []string{v.X}
	}
	var shared []string
	for _, l := range all[0].Labels {
		if !slices.Contains(keys, l.Key) {
			shared = append(shared, labelKey(l.Key)+": "+labelValue(l.Key, l.Value))
		}
	}
	t.Caption = strings.Join(shared, "; ")
	for _, k := range keys {
		t.Keys = append(t.Keys, labelKey(k))
	}
	width := closestStrip
	for _, s := range all {
		if st, ok := stats(s); ok && st.Median != 0 && len(s.Samples) > 1 {
			width = max(width, (st.Max-st.Median)/math.Abs(st.Median), (st.Median-st.Min)/math.Abs(st.Median))
		}
	}
	width = min(width, widestStrip)
	t.Range = "±" + typesetShare(width)
	for _, s := range all {
		r := newRow(s, keys, width)
		t.Several = t.Several || r.Count > 1
		t.Samples = t.Samples || r.Strip != ""
		t.Expected = t.Expected || r.Expected != ""
		t.CPU = t.CPU || r.CPU != ""
		t.Node = t.Node || r.Node != ""
		t.Checked = t.Checked || r.Checked
		t.Rows = append(t.Rows, r)
	}
	return t
}

// newRow formats a series. Width is the range of the strip of samples, as a share of the median.
func newRow(s *result.Series, keys []string, width float64) row {
	r := row{Count: len(s.Samples), Checked: s.Verified, Median: "–", Low: "–", High: "–", Spread: "–"}
	for _, k := range keys {
		r.Labels = append(r.Labels, label(labelValue(k, s.Labels.Get(k))))
	}
	st, ok := stats(s)
	if ok {
		r.Median, r.Low, r.High = quantity(st.Median, s.Unit, 4), quantity(st.Min, s.Unit, 4), quantity(st.Max, s.Unit, 4)
		if len(s.Samples) != 1 {
			r.Spread = typesetShare(st.Spread)
		}
		r.Strip = strip(s.Samples, st.Median, width)
	}
	if e := s.Expected; e != nil {
		r.Expected, r.Source = quantity(e.Value, s.Unit, 4), clean(e.Source)
		if ok && e.Value != 0 {
			r.Share = typesetShare(st.Median / e.Value)
		}
	}
	if s.CPUSecondsPerGB != nil {
		r.CPU = number(*s.CPUSecondsPerGB, 3)
	}
	if s.NUMANode != nil {
		r.Node = strconv.Itoa(*s.NUMANode)
	}
	return r
}

// strip returns dots for samples around their median. Those further away than width are at
// the ends; of many, some are left out.
func strip(samples []float64, median, width float64) string {
	if len(samples) < 2 || median == 0 {
		return ""
	}
	var out []float64
	for _, v := range samples {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			continue
		}
		at := (v - median) / math.Abs(median) / width // -1 to 1
		out = append(out, math.Round(10*(50+46*min(max(at, -1), 1)))/10)
	}
	slices.Sort(out)
	out = slices.Compact(out)
	for len(out) > maxMarks { // the outermost stay
		for i := 1; i < len(out)-1; i++ {
			out = slices.Delete(out, i, i+1)
		}
	}
	var path strings.Builder
	for _, at := range out {
		fmt.Fprintf(&path, "M%g 6h0", at)
	}
	return path.String()
}
