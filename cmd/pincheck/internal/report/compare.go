package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
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
		e := json.NewEncoder(&b)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		if err := e.Encode(comparisonDocument{SchemaVersion, "compare", tool, c}); err != nil {
			return err
		}
		_, err := w.Write(printable.JSON(b.Bytes()))
		return err
	case HTML:
		d := comparisonPage(&comparison{Comparison: c}, tool)
		return d.write(w)
	case Text:
		t := &comparison{Comparison: c, page: page{&b, s}, width: max(s.width(), numbers+1), all: all}
		t.write()
		return s.write(w, b.String())
	default:
		return fmt.Errorf("a comparison has no format %q", string(f))
	}
}

const numbers = 39 // columns of a pair's numbers

// comparison is the text of a comparison.
type comparison struct {
	*compare.Comparison
	page
	width int
	all   bool
	// stacked: numbers are below the conditions, as there is no room beside them.
	stacked bool
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
	t.labelled(label, c, text, t.width)
	t.runs()
	t.rows()
	if !t.pair() && t.Verdict != compare.Simulated {
		t.WriteString("\n")
		t.hosts()
	}
	if t.Verdict != compare.Simulated {
		t.counts(n)
	}
	t.missing(n[compare.Missing])
	if t.referenced() {
		t.sources()
	} else if t.unresolved(n) {
		t.wrapped("", moreRuns)
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
	for i, r := range t.Runs {
		role := ""
		if t.pair() {
			role = []string{"a  ", "b  "}[i]
		}
		t.lines(role+t.style.paint(bold, plain(r.Name)), runText(&r))
		for _, n := range r.Notes {
			t.wrapped("   ", plain(n))
		}
	}
}

// runText says by what and when a run was measured.
func runText(r *compare.Run) string {
	return joined(plain(r.Tool), stamp(r.Started), map[bool]string{false: "incomplete"}[r.Complete])
}

// rows writes the rows that differ, or all.
func (t *comparison) rows() {
	var rows []*compare.Row
	for i := range t.Rows {
		if r := &t.Rows[i]; differs(r) || t.all && r.Verdict != compare.Missing {
			rows = append(rows, r)
		}
	}
	for _, r := range rows {
		t.stacked = t.stacked || len([]rune(rowText(r)))+3 > t.width-numbers
	}
	group := ""
	for _, r := range rows {
		if head := rowHead(r); head != group {
			group = head
			t.WriteString("\n")
			t.head(head)
		}
		if t.pair() {
			t.pairRow(r)
		} else {
			t.fleetRow(r)
		}
	}
}

// differs reports whether a row is worse, better or different.
func differs(r *compare.Row) bool {
	return !slices.Contains([]compare.Verdict{compare.Missing, compare.Same, compare.Unclear, compare.Untested, compare.Simulated}, r.Verdict)
}

// rowHead is what rows of one experiment, name and unit have in common.
func rowHead(r *compare.Row) string {
	name := ""
	if r.Name != r.Bench {
		name = words(r.Name)
	}
	return joined(joinedWith(": ", plain(r.Bench), name), unitText(r.Unit))
}

// head writes the head of a group, with those of the columns at its end.
func (t *comparison) head(text string) {
	if !t.pair() {
		t.wrapped("", text)
		return
	}
	t.columns(text, bold, fmt.Sprintf("%9s %9s %8s", "a", "b", "change"))
}

// columns writes text and the columns of numbers beside it, or below it.
func (t *comparison) columns(text string, c ansiColor, columns string) {
	indent := t.width - numbers
	if t.stacked {
		for i, line := range wrap(text, t.width-2) {
			if i > 0 || c == "" {
				line = "  " + line
			}
			t.WriteString(t.style.paint(c, line) + "\n")
		}
		t.WriteString(strings.Repeat(" ", min(indent, 4)) + columns + "\n")
		return
	}
	if c == "" {
		text = "  " + text
	}
	fill := strings.Repeat(" ", max(1, indent-len([]rune(text))))
	t.WriteString(t.style.paint(c, text) + fill + columns + "\n")
}

// pairRow writes both medians of a series, their relative change, and the verdict.
func (t *comparison) pairRow(r *compare.Row) {
	t.columns(rowText(r), "", fmt.Sprintf("%9s %9s %8s  %s", value(r.Unit, r.Values[0].Median), value(r.Unit, r.Values[1].Median), change(r), t.verdict(r.Verdict)))
}

// change is the relative change of a row of two runs.
func change(r *compare.Row) string {
	if r.Ratio == nil {
		return "–"
	}
	return percent(*r.Ratio - 1)
}

// fleetRow writes the median of the hosts with their scatter, and each host that is out of line.
func (t *comparison) fleetRow(r *compare.Row) {
	t.lines("  "+rowText(r), center(r)+"  "+t.verdict(r.Verdict))
	for i, v := range r.Values {
		if v != nil && v.Verdict != "" {
			t.lines("    "+plain(t.Runs[i].Name), off(r, v)+"  "+t.verdict(v.Verdict))
		}
	}
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

// verdict colours a verdict. Same needs no word.
func (t *comparison) verdict(v compare.Verdict) string {
	switch v {
	case compare.Same:
		return t.style.paint(dim, "same")
	case compare.Simulated:
		return t.style.paint(dim, "–")
	case compare.Worse:
		return t.style.paint(red, string(v))
	case compare.Better:
		return t.style.paint(green, string(v))
	}
	return t.style.paint(yellow, string(v))
}

// missing says how many series not all runs have, or lists them.
func (t *comparison) missing(n int) {
	if n == 0 {
		return
	}
	t.WriteString("\n")
	if !t.all {
		t.wrapped("", t.missingText(n)+" To list all series: --all")
		return
	}
	t.WriteString("Not measured by all\n")
	for i := range t.Rows {
		if r := &t.Rows[i]; r.Verdict == compare.Missing {
			t.wrapped("  ", fmt.Sprintf("%s %s: %s", plain(r.Bench), rowText(r), t.which(r)))
		}
	}
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

// hosts writes for each host in how many series it is out of line.
func (t *comparison) hosts() {
	for _, h := range t.Hosts {
		text := fmt.Sprintf("in line in %s", units.Things(h.Series, "series", "series"))
		if h.OutOfLine > 0 {
			text = fmt.Sprintf("out of line in %d of %s, worse in %d", h.OutOfLine, units.Things(h.Series, "series", "series"), h.Worse)
		}
		if h.Farthest != nil {
			r := &t.Rows[*h.Farthest]
			text += fmt.Sprintf("; farthest: %s %s", plain(r.Bench), rowText(r))
		}
		if h.Missing > 0 {
			text += fmt.Sprintf("; %d not measured", h.Missing)
		}
		t.lines(t.style.paint(bold, plain(h.Name)), text)
	}
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
		t.WriteString("\n")
	}
	for _, r := range rows {
		label := fmt.Sprintf("  %-9s %5s   ", r[0], units.Count(n[compare.Verdict(r[0])]))
		t.hang(label, len(label), "", wrap(r[1], t.width-len(label)))
	}
}

// sources writes how many series have no reference, and the sources of the others.
func (t *comparison) sources() {
	t.WriteString("\n")
	if t.Unjudged > 0 {
		t.wrapped("", t.unjudgedText())
	}
	t.WriteString("Reference\n")
	for _, source := range t.allSources() {
		t.wrapped("  ", source)
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

// lines writes a label and a text behind it, or below where it does not fit. The label
// may be coloured.
func (t *comparison) lines(label, text string) {
	if length := len([]rune(uncoloured(label))) + 2 + len([]rune(uncoloured(text))); length <= t.width {
		t.WriteString(label + "  " + text + "\n")
		return
	}
	indent := label[:len(label)-len(strings.TrimLeft(label, " "))]
	t.wrapped(indent, label)
	t.wrapped(indent+"  ", text)
}

// wrapped writes text in lines of the width, each with an indent.
func (t *comparison) wrapped(indent, text string) {
	t.hang(indent, len(indent), "", wrap(text, t.width-len(indent)))
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

// uncoloured removes the escape sequences of Style.paint.
func uncoloured(s string) string {
	var b strings.Builder
	for s != "" {
		before, after, found := strings.Cut(s, "\x1b[")
		b.WriteString(before)
		if !found {
			break
		}
		_, s, _ = strings.Cut(after, "m")
	}
	return b.String()
}
