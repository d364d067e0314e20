package report

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// comparisonDocument is a comparison as JSON.
type comparisonDocument struct {
	SchemaVersion int    `json:"schema_version"`
	Command       string `json:"command"`
	Tool          Tool   `json:"tool"`
	*compare.Comparison
}

// ComparisonFormats returns the formats of a comparison.
func ComparisonFormats() []Format { return []Format{Text, JSON, HTML} }

// WriteComparison writes a comparison in one of its formats, by one call of w.Write. Text has
// lines of the style's width, and 40 columns at least; with all it lists also the series that are
// the same, which a page always does. The error is that of w, or of another format.
func WriteComparison(w io.Writer, c *compare.Comparison, tool Tool, f Format, s Style, all bool) error {
	var b bytes.Buffer
	switch f {
	case JSON:
		return writeJSON(w, comparisonDocument{SchemaVersion, "compare", tool, c}, "  ")
	case HTML:
		d := comparisonPage(&comparison{Comparison: c}, tool)
		return d.write(w)
	case Text:
		t := &comparison{Comparison: c, page: page{&b, s}, all: all}
		t.write()
		return s.write(w, b.String())
	default:
		return fmt.Errorf("a comparison has no format %q", string(f))
	}
}

// comparison is a comparison as text, or as a page.
type comparison struct {
	*compare.Comparison
	page
	all bool
}

// pair reports whether two runs are compared: more are a fleet.
func (t *comparison) pair() bool { return len(t.Runs) == 2 }

// referenced reports whether the first of two runs is the reference table.
func (t *comparison) referenced() bool { return len(t.Rows) > 0 && t.Rows[0].Source != "" }

// write writes the verdict, the runs, the rows that differ, how many do not, and what to do about unclear ones.
func (t *comparison) write() {
	n := t.tally()
	c, text := t.concluded(n)
	label, _, _ := strings.Cut(text, ":")
	t.labelled(label, c, text, t.style.width())
	t.runs()
	shown := []compare.Verdict{compare.Worse, compare.Better, compare.Different, compare.Divided}
	if t.all {
		shown = nil
	}
	tables := t.sheets("", shown...)
	if t.Verdict != compare.Simulated {
		if !t.pair() {
			tables = append(tables, t.hostSheet())
		}
	}
	if t.all && n[compare.Missing] > 0 {
		tables = append(tables, t.missingSheet())
	}
	for _, table := range tables {
		t.gap()
		t.textTable(table.text())
	}
	if t.Verdict != compare.Simulated {
		t.counts(n)
	}
	if n[compare.Missing] > 0 && !t.all {
		t.gap()
		t.flow(0, t.missingText(n[compare.Missing])+" To list all series: --all")
	}
	if t.referenced() {
		t.sources()
	} else if t.unresolved(n) {
		t.flow(0, moreRuns)
	}
}

// unresolved reports whether more runs can tell more.
func (t *comparison) unresolved(n map[compare.Verdict]int) bool {
	return t.pair() && !t.referenced() && n[compare.Unclear]+n[compare.Untested] > 0
}

const moreRuns = "To resolve unclear and untested series, add runs of each side to its file."

// tally counts the rows by their verdicts.
func (t *comparison) tally() map[compare.Verdict]int {
	n := map[compare.Verdict]int{}
	for i := range t.Rows {
		n[t.Rows[i].Verdict]++
	}
	return n
}

// concluded returns the verdict, and its color.
func (t *comparison) concluded(n map[compare.Verdict]int) (ansiColor, string) {
	common := len(t.Rows) - n[compare.Missing]
	switch {
	case t.Verdict == compare.Simulated:
		return yellow, "No verdict: a run is of the simulated GPU, whose copies take the time of the host's processors."
	case !t.pair():
		return t.concludedFleet(n, common)
	case n[compare.Worse] > 0:
		text := fmt.Sprintf("Worse: %d of %d series%s", n[compare.Worse], common, t.where())
		if n[compare.Better] > 0 {
			text += fmt.Sprintf("; %d better", n[compare.Better])
		}
		return red, text + "."
	case n[compare.Better] > 0:
		return green, fmt.Sprintf("Better: %d of %d series, and none is worse.", n[compare.Better], common)
	case n[compare.Different] > 0:
		return yellow, fmt.Sprintf("Different: %d of %d series, in which neither direction is better.", n[compare.Different], common)
	}
	if t.referenced() {
		return green, fmt.Sprintf("No significant difference from the reference: 0 of %d series are better or worse.", common)
	}
	return green, fmt.Sprintf("No significant difference: 0 of %d shared series are better or worse.", common)
}

// where says on which GPU the worse rows are, if it is one of several, and how much worse the worst one is.
func (t *comparison) where() string {
	bad, fine := map[string]bool{}, map[string]bool{}
	worst := 0.0
	for i := range t.Rows {
		r := &t.Rows[i]
		gpu := r.Labels.Get(result.Device)
		switch {
		case r.Verdict == compare.Worse && r.Ratio != nil:
			bad[gpu], worst = true, max(worst, math.Abs(*r.Ratio-1))
		case r.Verdict == compare.Worse:
			bad[gpu] = true
		case gpu != "":
			fine[gpu] = true
		}
	}
	text := ""
	for gpu := range bad {
		if delete(fine, gpu); len(bad) == 1 && gpu != "" && len(fine) > 0 {
			text = ", all on GPU " + plain(gpu)
		}
	}
	if worst > 0 {
		text += ", by up to " + units.Share(worst)
	}
	return text
}

// concludedFleet names the hosts that are out of line for the worse.
func (t *comparison) concludedFleet(n map[compare.Verdict]int, common int) (ansiColor, string) {
	var worse []*compare.Host
	for i := range t.Hosts {
		if t.Hosts[i].Worse > 0 {
			worse = append(worse, &t.Hosts[i])
		}
	}
	switch {
	case len(worse) == 1:
		return red, fmt.Sprintf("Worse: %s is out of line in %d of %s.", worse[0].Name, worse[0].Worse, units.Things(worse[0].Series, "series", "series"))
	case len(worse) > 1:
		return red, fmt.Sprintf("Worse: %d of %d hosts are out of line.", len(worse), len(t.Hosts))
	case n[compare.Divided] > 0:
		return yellow, fmt.Sprintf("Divided: the hosts differ in %d of %d series, and none stands out.", n[compare.Divided], common)
	case n[compare.Better]+n[compare.Different] > 0:
		return yellow, fmt.Sprintf("Different: a host is out of line in %d of %d series, and none for the worse.", n[compare.Better]+n[compare.Different], common)
	}
	return green, fmt.Sprintf("No significant difference: all %d hosts are in line in %d series.", len(t.Hosts), common)
}

// runs writes what is compared.
func (t *comparison) runs() {
	for i := range t.Runs {
		name := plain(t.role(i))
		t.labelled(name, bold, joined(name, runText(&t.Runs[i])), t.style.width())
		for _, n := range t.Runs[i].Notes {
			t.flow(3, n)
		}
	}
}

// role is the name of a run. Those of a pair are a and b.
func (t *comparison) role(i int) string {
	if t.pair() {
		return []string{"a: ", "b: "}[i] + t.Runs[i].Name
	}
	return t.Runs[i].Name
}

// runText says by what and when a run was measured.
func runText(r *compare.Run) string {
	return joined(plain(r.Tool), stamp(r.Started), map[bool]string{false: "incomplete"}[r.Complete])
}

// rowHead is what rows of one experiment, name and unit have in common.
func rowHead(r *compare.Row) string {
	name := ""
	if r.Name != r.Bench {
		name = words(r.Name)
	}
	return joined(joinedWith(": ", plain(r.Bench), name), unitText(r.Unit))
}

// change is the relative change of a row of two runs.
func change(r *compare.Row) string {
	if r.Ratio == nil {
		return "–"
	}
	return percent(*r.Ratio - 1)
}

// center is the median of the hosts with their scatter.
func center(r *compare.Row) string {
	if *r.Center == 0 {
		return value(r.Unit, *r.Center)
	}
	return fmt.Sprintf("%s ± %.1f%%", value(r.Unit, *r.Center), 100**r.Deviation/math.Abs(*r.Center))
}

// off is the value of a host with its distance from the median of all.
func off(r *compare.Row, v *compare.Value) string {
	if *r.Center == 0 {
		return value(r.Unit, v.Median)
	}
	return value(r.Unit, v.Median) + " (" + percent(v.Median / *r.Center - 1) + ")"
}

// missingText says how many series are not compared.
func (t *comparison) missingText(n int) string {
	where := "not in all runs"
	if t.pair() {
		where = "in only one run"
	}
	return fmt.Sprintf("%s series %s %s.", units.Count(n), map[bool]string{true: "is", false: "are"}[n == 1], where)
}

// which names the runs that have a series, or those that do not, whatever is shorter.
func (t *comparison) which(r *compare.Row) string {
	var have, lack []string
	for i, v := range r.Values {
		if name := plain(t.Runs[i].Name); v == nil {
			lack = append(lack, name)
		} else {
			have = append(have, name)
		}
	}
	if len(lack) < len(have) {
		return "not " + strings.Join(lack, ", ")
	}
	return "only " + strings.Join(have, ", ")
}

// counted returns the verdicts of the rows that do not differ, with what they mean.
func (t *comparison) counted(n map[compare.Verdict]int) [][2]string {
	within := "within " + limit(t.Threshold)
	rows := [][2]string{
		{string(compare.Same), within},
		{string(compare.Unclear), "the difference is within what runs of one machine show"},
		{string(compare.Untested), "too few samples"},
	}
	if !t.pair() {
		rows = [][2]string{{string(compare.Same), within + " or the scatter of the hosts"}, {string(compare.Divided), "the hosts differ, and none stands out"}}
	}
	return slices.DeleteFunc(rows, func(r [2]string) bool { return n[compare.Verdict(r[0])] == 0 })
}

// limit formats a share as its user gave it: 3%.
func limit(v float64) string {
	if v >= 0.0995 {
		return units.Share(v)
	}
	return fmt.Sprintf("%g%%", math.Round(1e4*v)/100)
}

// counts writes how many series do not differ.
func (t *comparison) counts(n map[compare.Verdict]int) {
	rows := t.counted(n)
	if len(rows) > 0 {
		t.gap()
	}
	for _, r := range rows {
		label := fmt.Sprintf("  %-9s %5s   ", r[0], units.Count(n[compare.Verdict(r[0])]))
		t.hang(label, len(label), "", wrap(r[1], t.style.width()-len(label)))
	}
}

// sources writes how many series have no reference, and the sources of the others.
func (t *comparison) sources() {
	t.gap()
	if t.Unjudged > 0 {
		t.flow(0, t.unjudgedText())
	}
	t.flow(0, "Reference")
	for _, source := range t.allSources() {
		t.flow(2, source)
	}
}

func (t *comparison) unjudgedText() string {
	return units.Things(t.Unjudged, "other series has", "other series have") + " no reference."
}

// allSources are the sources of the references, each once.
func (t *comparison) allSources() (all []string) {
	for i := range t.Rows {
		if source := plain(t.Rows[i].Source); source != "" && !slices.Contains(all, source) {
			all = append(all, source)
		}
	}
	return all
}

// rowText is the conditions of a series.
func rowText(r *compare.Row) string {
	var parts []string
	for _, l := range r.Labels {
		parts = append(parts, labelText(l))
	}
	if len(parts) == 0 {
		return plain(r.Name)
	}
	return strings.Join(parts, ", ")
}

// percent formats a change: +1.2%, -25%, and 0% for less than half of 0.1%.
func percent(v float64) string {
	if math.Abs(v) < 0.0005 {
		return "0%"
	}
	if math.Abs(v) >= 0.0995 {
		return fmt.Sprintf("%+.0f%%", 100*v)
	}
	return fmt.Sprintf("%+.1f%%", 100*v)
}
