package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/internal/units"
)

// comparisonPage returns the page of a comparison: the verdict, what differs, what does not, the runs side by side, and
// all series in folds.
func comparisonPage(t *comparison, tool Tool) webPage {
	n := t.tally()
	foot := Result{Tool: tool}
	d := webPage{Verdict: t.pageVerdict(n), Foot: footText(&foot), Over: nonEmpty("Comparison", units.Things(len(t.Runs), "run", "runs"), t.between(), "pincheck compare")}
	d.Title = d.Verdict.Word + " · pincheck compare"
	refs := &references{}
	for _, source := range t.allSources() {
		refs.number(source)
	}
	worse, other := n[compare.Worse], n[compare.Better]+n[compare.Different]+n[compare.Divided]
	rest := block{ID: "same", Title: "No significant difference"}
	for _, c := range t.counted(n) {
		if v := compare.Verdict(c[0]); v != compare.Divided {
			rest.Facts = append(rest.Facts, field{capital(c[0]) + ": " + units.Count(n[v]), sentence(prose(c[1]))})
		}
	}
	if t.unresolved(n) {
		rest.Texts = append(rest.Texts, moreRuns)
	}
	runs := block{ID: "runs", Title: "Runs", Tables: []sheet{t.runSheet()}}
	if len(t.Hosts) > 0 {
		runs.Tables = append(runs.Tables, t.hostSheet())
	}
	d.add(
		block{ID: "worse", Title: units.Things(worse, "series is worse", "series are worse"), Tables: t.sheets("", compare.Worse)},
		block{ID: "other", Title: units.Things(other, "series differs otherwise", "series differ otherwise"), Tables: t.sheets("", compare.Better, compare.Different, compare.Divided)},
		runs, rest,
		block{ID: "more", Title: "All series", Folds: t.folds(n)},
		block{ID: "method", Title: "Method", Texts: t.method(), Refs: refs.all})
	return d
}

// pageVerdict is the verdict of the text as that of a page.
func (t *comparison) pageVerdict(n map[compare.Verdict]int) verdict {
	color, text := t.concluded(n)
	word, _, _ := strings.Cut(text, ":")
	v := verdict{Word: word, Title: prose(strings.TrimSuffix(text, ".")), Tone: map[ansiColor]tone{green: okay, yellow: warn, red: bad}[color]}
	v.Simulated = !slices.ContainsFunc(t.Runs, func(r compare.Run) bool { return !r.Simulated })
	if t.Verdict == compare.Simulated {
		v.Tone = unclear
	}
	var lede []string
	if t.pair() {
		lede = append(lede, fmt.Sprintf("%s is compared with %s, the baseline.", t.Runs[1].Name, t.Runs[0].Name))
	}
	if missing := n[compare.Missing]; missing > 0 {
		lede = append(lede, t.missingText(missing))
	}
	v.Lede = prose(joinedWith(" ", lede...))
	return v
}

// between is when the runs began.
func (t *comparison) between() string {
	first, last := t.Runs[0].Started, t.Runs[0].Started
	for _, r := range t.Runs {
		if !r.Started.IsZero() && (first.IsZero() || r.Started.Before(first)) {
			first = r.Started
		}
		if r.Started.After(last) {
			last = r.Started
		}
	}
	return joinedWith(" to ", slices.Compact(nonEmpty(stamp(first), stamp(last)))...)
}

// sheets returns the rows of some verdicts, or all that are compared, as a table for each quantity. Title is before the
// captions.
func (t *comparison) sheets(title string, of ...compare.Verdict) (out []sheet) {
	at := map[string]int{}
	for i := range t.Rows {
		r := &t.Rows[i]
		if wanted := len(of) == 0 && r.Verdict != compare.Missing || slices.Contains(of, r.Verdict); !wanted {
			continue
		}
		head := joinedWith(": ", title, rowHead(r))
		if _, known := at[head]; !known {
			at[head] = len(out)
			s := sheet{Caption: prose(head), Text: 2, Head: []string{"Series", "Out of line", "Median", "Verdict"}}
			if t.pair() {
				s.Text, s.Head = 1, []string{"Series", "a: " + t.name(0), "b: " + t.name(1), "Change", "Verdict", "p"}
			}
			out = append(out, s)
		}
		s := &out[at[head]]
		s.Rows = append(s.Rows, t.cells(r))
	}
	return out
}

// name is the name of a run in the head of a column.
func (t *comparison) name(i int) string { return prose(clip(t.Runs[i].Name, 40)) }

func (t *comparison) cells(r *compare.Row) []cell {
	row := []cell{{Text: prose(clip(rowText(r), 160))}}
	if t.pair() {
		p := "–"
		switch {
		case r.P != nil && *r.P < 0.001:
			p = "under 0.001"
		case r.P != nil:
			p = units.Number(*r.P, 2)
		}
		return append(row, cell{Text: prose(value(r.Unit, r.Values[0].Median))}, cell{Text: prose(value(r.Unit, r.Values[1].Median))}, cell{Text: change(r)}, verdictCell(r.Verdict), cell{Text: p})
	}
	var out []string
	for i, v := range r.Values {
		if v != nil && v.Verdict != "" {
			out = append(out, t.Runs[i].Name+" "+off(r, v))
		}
	}
	return append(row, cell{Text: prose(clip(joinedWith("; ", out...), 300))}, cell{Text: prose(center(r))}, verdictCell(r.Verdict))
}

// verdictCell has the verdict with its icon.
func verdictCell(v compare.Verdict) cell {
	tones := map[compare.Verdict]tone{compare.Worse: bad, compare.Better: okay, compare.Different: warn, compare.Divided: warn, compare.Unclear: unclear, compare.Untested: unclear}
	return cell{Text: string(v), Tone: tones[v]}
}

// runSheet has the runs side by side.
func (t *comparison) runSheet() sheet {
	s := sheet{Caption: "What is compared", Text: 3, Head: []string{"Run", "Measured by", "Notes"}}
	for i := range t.Runs {
		r := &t.Runs[i]
		s.Rows = append(s.Rows, []cell{{Text: prose(clip(t.role(i), 80))}, {Text: prose(clip(runText(r), 120))}, {Text: prose(clip(joinedWith("; ", r.Notes...), 300))}})
	}
	return s
}

// hostSheet has the hosts of a fleet, those that are worse in the most series first.
func (t *comparison) hostSheet() sheet {
	s := sheet{Caption: "Hosts", Text: 2, Head: []string{"Host", "Farthest", "Series", "Out of line", "Worse", "Not measured"}}
	for _, h := range slices.SortedStableFunc(slices.Values(t.Hosts), func(a, b compare.Host) int {
		return cmp.Or(cmp.Compare(b.Worse, a.Worse), cmp.Compare(b.OutOfLine, a.OutOfLine))
	}) {
		farthest := ""
		if h.Farthest != nil {
			farthest = prose(clip(plain(t.Rows[*h.Farthest].Bench)+" "+rowText(&t.Rows[*h.Farthest]), 160))
		}
		worse := cell{Text: units.Count(h.Worse)}
		if h.Worse > 0 {
			worse.Tone = bad
		}
		s.Rows = append(s.Rows, []cell{{Text: prose(clip(h.Name, 80))}, {Text: farthest}, {Text: units.Count(h.Series)}, {Text: units.Count(h.OutOfLine)}, worse, {Text: units.Count(h.Missing)}})
	}
	return s
}

// folds have all series that are compared, and those that are not.
func (t *comparison) folds(n map[compare.Verdict]int) (out []fold) {
	if all := t.sheets("All"); len(all) > 0 {
		out = append(out, fold{Title: "Compared", Answer: units.Things(len(t.Rows)-n[compare.Missing], "series", "series"), block: block{Deep: true, Tables: all}})
	}
	if n := n[compare.Missing]; n > 0 {
		out = append(out, fold{Title: "Not compared", Answer: t.missingText(n), block: block{Deep: true, Tables: []sheet{t.missingSheet()}}})
	}
	return out
}

// missingSheet lists the series that not all runs have.
func (t *comparison) missingSheet() sheet {
	s := sheet{Caption: "Not measured by all runs", Text: 2, Head: []string{"Series", "Runs"}}
	for i := range t.Rows {
		if r := &t.Rows[i]; r.Verdict == compare.Missing {
			s.Rows = append(s.Rows, []cell{{Text: prose(clip(rowHead(r)+": "+rowText(r), 160))}, {Text: prose(clip(t.which(r), 160))}})
		}
	}
	return s
}

// method says what counts as a difference.
func (t *comparison) method() []string {
	if t.referenced() {
		return nonEmpty("A series is worse below "+percentOf(1-t.Threshold)+" of its reference, and better above "+percentOf(1/(1-t.Threshold))+".", map[bool]string{true: t.unjudgedText()}[t.Unjudged > 0])
	}
	return []string{prose(fmt.Sprintf("A difference counts from %s of the median on, if it exceeds what repeated runs of one machine show: at most %s of comparisons of a machine with itself report any. p is the probability of such a difference, adjusted for the number of series.",
		limit(t.Threshold), limit(t.Alpha)))}
}
