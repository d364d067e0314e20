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
	"github.com/gopinned/pinned/internal/units"
)

// comparisonDocument is a comparison as JSON.
type comparisonDocument struct {
	SchemaVersion int    `json:"schema_version"`
	Command       string `json:"command"`
	Tool          Tool   `json:"tool"`
	*compare.Comparison
}

// WriteComparison writes a comparison as text or JSON, by one call of w.Write. Text has
// lines of the style's width, and 40 columns at least. All shows also the series that are
// the same, which many are not otherwise. The error is that of w, or of another format.
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
	case Text:
		t := &comparison{Comparison: c, Buffer: &b, style: s, width: max(s.width(), numbers+1), all: all}
		t.write()
	default:
		return fmt.Errorf("a comparison is written as text or json, not as %s", f)
	}
	_, err := w.Write(b.Bytes())
	return err
}

const (
	few             = 40 // series, which are all shown
	maxMissingShown = 20
	numbers         = 39 // columns of a pair's numbers
)

// comparison is the text of a comparison.
type comparison struct {
	*compare.Comparison
	*bytes.Buffer
	style Style
	width int
	all   bool
	// stacked: numbers are below the conditions, as there is no room beside them.
	stacked bool
}

// pair reports whether two runs are compared: more are a fleet.
func (t *comparison) pair() bool { return len(t.Runs) == 2 }

// write writes the runs, the rows that differ, the hosts of a fleet, and a summary.
func (t *comparison) write() {
	for i, r := range t.Runs {
		role := ""
		if t.pair() {
			role = []string{"a  ", "b  "}[i]
		}
		when := ""
		if !r.Started.IsZero() {
			when = ", " + r.Started.UTC().Format("2006-01-02 15:04 UTC")
		}
		state := ""
		if !r.Complete {
			state = ", incomplete"
		}
		t.lines(role+t.style.paint(bold, plain(r.Name)), fmt.Sprintf("%s%s%s", plain(r.Tool), when, state))
		for _, n := range r.Notes {
			t.wrapped("   ", plain(n))
		}
	}
	var rows []*compare.Row
	for i := range t.Rows {
		if t.Rows[i].Verdict != compare.Missing {
			rows = append(rows, &t.Rows[i])
		}
	}
	common := len(rows)
	if !t.all && common > few {
		rows = slices.DeleteFunc(rows, func(r *compare.Row) bool { return r.Verdict == compare.Same })
	}
	for _, r := range rows {
		t.stacked = t.stacked || len([]rune(rowText(r)))+3 > t.width-numbers
	}
	group := ""
	for _, r := range rows {
		head := plain(r.Bench)
		if r.Name != r.Bench {
			head += ": " + words(r.Name)
		}
		if unit := unitText(r.Unit); unit != "" {
			head += ", " + unit
		}
		if head != group {
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
	t.missing()
	t.WriteString("\n")
	if !t.pair() && t.Verdict != compare.Simulated {
		t.hosts()
	}
	t.conclude(common)
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
			t.WriteString(t.painted(c, line) + "\n")
		}
		t.WriteString(strings.Repeat(" ", min(indent, 4)) + columns + "\n")
		return
	}
	if c == "" {
		text = "  " + text
	}
	fill := strings.Repeat(" ", max(1, indent-len([]rune(text))))
	t.WriteString(t.painted(c, text) + fill + columns + "\n")
}

// painted is text in a colour, or in none.
func (t *comparison) painted(c ansiColor, text string) string {
	if c == "" {
		return text
	}
	return t.style.paint(c, text)
}

// pairRow writes both medians of a series, their relative change, and the verdict.
func (t *comparison) pairRow(r *compare.Row) {
	change := "–"
	if r.Ratio != nil {
		change = percent(*r.Ratio - 1)
	}
	t.columns(rowText(r), "", fmt.Sprintf("%9s %9s %8s  %s", value(r.Unit, r.Values[0].Median), value(r.Unit, r.Values[1].Median), change, t.verdict(r.Verdict)))
}

// fleetRow writes the median of the hosts with their scatter, and each host that is out of line.
func (t *comparison) fleetRow(r *compare.Row) {
	scatter := ""
	if *r.Center != 0 {
		scatter = fmt.Sprintf(" ± %.1f%%", 100**r.Deviation/math.Abs(*r.Center))
	}
	t.lines("  "+rowText(r), value(r.Unit, *r.Center)+scatter+"  "+t.verdict(r.Verdict))
	for i, v := range r.Values {
		if v == nil || v.Verdict == "" {
			continue
		}
		change := ""
		if *r.Center != 0 {
			change = " (" + percent(v.Median / *r.Center - 1) + ")"
		}
		t.lines("    "+plain(t.Runs[i].Name), value(r.Unit, v.Median)+change+"  "+t.verdict(v.Verdict))
	}
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

// missing lists the series that not all runs have.
func (t *comparison) missing() {
	shown, left := 0, 0
	for i := range t.Rows {
		r := &t.Rows[i]
		var have, lack []string
		for j, v := range r.Values {
			name := plain(t.Runs[j].Name)
			if v == nil {
				lack = append(lack, name)
			} else {
				have = append(have, name)
			}
		}
		if len(lack) == 0 {
			continue
		}
		if shown == maxMissingShown && !t.all {
			left++
			continue
		}
		if shown++; shown == 1 {
			t.WriteString("\nNot measured by all\n")
		}
		which := "only " + strings.Join(have, ", ")
		if len(lack) < len(have) {
			which = "not " + strings.Join(lack, ", ")
		}
		t.wrapped("  ", fmt.Sprintf("%s %s: %s", plain(r.Bench), rowText(r), which))
	}
	if left > 0 {
		t.wrapped("  ", fmt.Sprintf("and %s (--all shows them)", units.Things(left, "other", "others")))
	}
}

// hosts writes for each host in how many series it is out of line.
func (t *comparison) hosts() {
	for _, h := range t.Hosts {
		text := fmt.Sprintf("in line in all of %s", units.Things(h.Series, "series", "series"))
		if h.OutOfLine > 0 {
			text = fmt.Sprintf("out of line in %d of %s, for the worse in %d", h.OutOfLine, units.Things(h.Series, "series", "series"), h.Worse)
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

// conclude says what it comes to, in sentences.
func (t *comparison) conclude(common int) {
	n := map[compare.Verdict]int{}
	for i := range t.Rows {
		n[t.Rows[i].Verdict]++
	}
	if t.Verdict == compare.Simulated {
		t.wrapped("", fmt.Sprintf("Of %s: no verdict. A run is of the simulated GPU, whose copies take the time of the host's processors: such runs differ by what else the host does, and never by a GPU or a link.", units.Things(common, "series", "series")))
		return
	}
	limit := fmt.Sprintf("%g%%", math.Round(1e4*t.Threshold)/100)
	var said []string
	count := func(v compare.Verdict, format string) {
		if n[v] > 0 {
			said = append(said, fmt.Sprintf(format, n[v]))
		}
	}
	if t.pair() {
		count(compare.Worse, "%d worse in b")
		count(compare.Better, "%d better in b")
		count(compare.Different, "%d different")
		count(compare.Unclear, "%d unclear (the medians differ by no more than runs of one machine may)")
		count(compare.Untested, "%d untested (the medians differ, and there are too few samples to be sure)")
		count(compare.Same, "%d the same within "+strings.ReplaceAll(limit, "%", "%%"))
		t.wrapped("", fmt.Sprintf("Of %s: %s.", units.Things(common, "series", "series"), strings.Join(said, ", ")))
		if t.Rows[0].Source != "" {
			t.sources()
			return
		}
		t.wrapped("", "What is worse or better differs by more than runs of one machine do: of a hundred comparisons of such runs one says so. What is unclear may become clear with more runs of each side, one after the other in a file.")
		return
	}
	count(compare.Worse, "%d with a host out of line for the worse")
	count(compare.Different, "%d with a host out of line")
	count(compare.Better, "%d with a host out of line for the better")
	count(compare.Divided, "%d in which the hosts are divided, so that none stands out: which of them are right is not decided")
	count(compare.Same, "%d in line within "+strings.ReplaceAll(limit, "%", "%%")+" or the hosts' scatter")
	t.wrapped("", fmt.Sprintf("Of %s of %d hosts: %s.", units.Things(common, "series", "series"), len(t.Hosts), strings.Join(said, ", ")))
}

// sources writes of which series there is no reference, and where the others are from.
func (t *comparison) sources() {
	if t.Unjudged > 0 {
		t.wrapped("", fmt.Sprintf("Of %s the reference says nothing.", units.Things(t.Unjudged, "other", "others")))
	}
	t.WriteString("The reference is from\n")
	var written []string
	for i := range t.Rows {
		if source := plain(t.Rows[i].Source); !slices.Contains(written, source) {
			written = append(written, source)
			t.wrapped("  ", source)
		}
	}
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
	for _, line := range wrap(text, t.width-len(indent)) {
		t.WriteString(indent + line + "\n")
	}
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

// percent formats a change: +1.2 %, and 0.0 % for less than half of 0.1.
func percent(v float64) string {
	if math.Abs(v) < 0.0005 {
		return "0.0 %"
	}
	if math.Abs(v) >= 9.995 {
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
