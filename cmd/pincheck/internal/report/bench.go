package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// bench writes the result of an experiment: the answers first, then its views, then the
// series that no view shows.
func (p *page) bench(b *result.Bench) {
	p.gap()
	p.WriteString(p.style.paint(bold, strings.Join(wrap(plain(b.Name), p.style.width()), "\n")) + "\n")
	if b.Question != "" {
		p.row("Asked", "%s", b.Question)
	}
	label := "Answer"
	for _, a := range b.Answers {
		p.row(label, "%s", a)
		label = ""
	}
	shown := map[*result.Series]bool{}
	for _, v := range b.Views {
		if p.view(b, v, shown); !p.style.Verbose && len(shown) > 0 {
			break
		}
	}
	p.rest(b, shown)
	for _, e := range b.Errors {
		p.painted("Error", red, plain(e), "")
	}
	if !b.Complete {
		p.painted("Stopped", yellow, "before its end: what is above was measured", "")
	}
}

// rest writes the series that are not shown, unless a table was the answer, and how all were measured.
func (p *page) rest(b *result.Bench, shown map[*result.Series]bool) {
	if !p.style.Verbose && len(shown) > 0 {
		if len(b.Errors) > 0 || !b.Complete {
			p.gap()
		}
		return
	}
	var rest []*result.Series
	for i := range b.Series {
		if s := &b.Series[i]; !shown[s] {
			rest = append(rest, s)
		}
	}
	if len(rest) > 0 {
		p.gap()
	}
	for _, s := range rest {
		p.row("", "%s", seriesText(s))
	}
	if len(b.Series) > 0 {
		p.gap()
	}
	p.method(b)
	for _, n := range b.Notes {
		p.note("Note", "%s", n)
	}
}

// method writes how the series were measured.
func (p *page) method(b *result.Bench) {
	if len(b.Series) == 0 {
		return
	}
	minimum, largest, verified, copied := math.MaxInt, 0, 0, 0
	cpuLow, cpuHigh := math.Inf(1), math.Inf(-1)
	var nodes []string
	var unsteady *result.Series
	for i := range b.Series {
		s := &b.Series[i]
		minimum, largest = min(minimum, len(s.Samples)), max(largest, len(s.Samples))
		if s.Verified {
			verified++
		}
		if s.BytesPerSample > 0 {
			copied++
		}
		if c := s.CPUSecondsPerGB; c != nil {
			cpuLow, cpuHigh = min(cpuLow, *c), max(cpuHigh, *c)
		}
		if s.NUMANode != nil && !slices.Contains(nodes, strconv.Itoa(*s.NUMANode)) {
			nodes = append(nodes, strconv.Itoa(*s.NUMANode))
		}
		if unsteady == nil || s.Spread > unsteady.Spread {
			unsteady = s
		}
	}
	samples := units.Count(minimum)
	if largest > minimum {
		samples += " to " + units.Count(largest)
	}
	parts := []string{fmt.Sprintf("medians of %s samples, taken in %s", samples, units.Seconds(b.Seconds))}
	if minimum == 1 && largest == 1 {
		parts[0] = "one sample each, taken in " + units.Seconds(b.Seconds)
	}
	if unsteady.Spread > 0 {
		parts = append(parts, fmt.Sprintf("widest spread %s of the median (%s)", units.Share(unsteady.Spread), nameText(unsteady)))
	}
	if copied > 0 || verified > 0 {
		parts = append(parts, fmt.Sprintf("bytes compared afterwards in %s of %s series", units.Count(verified), units.Count(max(copied, verified))))
	}
	if cpuHigh >= cpuLow {
		text := units.Number(cpuLow, 3)
		if high := units.Number(cpuHigh, 3); high != text {
			text += " to " + high
		}
		parts = append(parts, text+" CPU seconds a GB")
	}
	if len(nodes) > 0 {
		parts = append(parts, "host memory on NUMA node "+strings.Join(nodes, ", "))
	}
	p.note("Method", "%s", strings.Join(parts, "; "))
}

// nameText is a series' name and labels in words.
func nameText(s *result.Series) string {
	parts := []string{words(s.Name)}
	for _, l := range s.Labels {
		parts = append(parts, labelText(l))
	}
	return strings.Join(parts, ", ")
}

// seriesText describes a series in a sentence: conditions, median, range, reference.
func seriesText(s *result.Series) string {
	text := fmt.Sprintf("%s: %s", nameText(s), measured(s.Unit, s.Median))
	if n := len(s.Samples); n > 1 {
		text += fmt.Sprintf(" (median of %s, %s to %s)", units.Count(n), value(s.Unit, s.Min), value(s.Unit, s.Max))
	}
	return text + ", " + expectedText(s)
}

// expectedText compares the median with the reference.
func expectedText(s *result.Series) string {
	e := s.Expected
	if e == nil {
		return "no reference known"
	}
	return fmt.Sprintf("expected %s, from %s", measured(s.Unit, e.Value), e.Source)
}

// A grid is the series of a view in rows by X and columns by Lines.
type grid struct {
	rows, columns []string
	row           []result.Label // of each row
	cells         map[[2]int]*result.Series
}

// newGrid sorts series into rows and columns, in the order in which their values occur.
func newGrid(series []*result.Series, v result.View) grid {
	g := grid{cells: map[[2]int]*result.Series{}}
	at := [2]map[string]int{{}, {}} // of rows and columns
	index := func(known map[string]int, list *[]string, name string) int {
		i, ok := known[name]
		if !ok {
			i = len(*list)
			known[name], *list = i, append(*list, name)
		}
		return i
	}
	for _, s := range series {
		var parts []string
		for _, key := range v.Lines {
			parts = append(parts, labelText(result.Label{Key: key, Value: s.Labels.Get(key)}))
		}
		x := result.Label{Key: v.X, Value: s.Labels.Get(v.X)}
		row := index(at[0], &g.rows, labelText(x))
		if row == len(g.row) {
			g.row = append(g.row, x)
		}
		if at := [2]int{row, index(at[1], &g.columns, joined(parts...))}; g.cells[at] == nil {
			g.cells[at] = s
		}
	}
	return g
}

// numeric reports whether the rows are three or more numbers, in their order.
func (g grid) numeric() bool {
	last := math.Inf(-1)
	for _, l := range g.row {
		v, err := strconv.ParseFloat(l.Value, 64)
		if err != nil || v <= last {
			return false
		}
		last = v
	}
	return len(g.row) >= 3
}

// sparse is the number of cells of a table for each series in it from which on there is no table.
const sparse = 16

// view writes a table and a plot, and adds the series to shown.
func (p *page) view(b *result.Bench, v result.View, shown map[*result.Series]bool) {
	series := b.Select(v)
	if len(series) == 0 {
		return
	}
	g := newGrid(series, v)
	if len(g.rows)*len(g.columns) > sparse*len(series) {
		return // hardly a cell has anything: a line a series is shorter
	}
	unit := series[0].Unit
	p.gap()
	title := v.Title
	if u := unitText(unit); u != "" {
		title += ", " + u
	}
	for i, line := range wrap(plain(title), p.width()) {
		label := ""
		if i == 0 {
			label = "Measured"
		}
		p.painted(label, bold, line, bold)
	}
	t := table{headers: []string{labelKey(v.X)}, with: map[int]bool{}}
	expected := map[int]bool{} // columns with a reference
	var sources []string
	named := map[string]bool{} // sources
	known, greatest := 0, 0.0
	for at, s := range g.cells {
		greatest = max(greatest, s.Median)
		shown[s] = true
		if s.Expected != nil {
			expected[at[1]] = true
			known++
		}
	}
	for i, name := range g.columns {
		t.headers = append(t.headers, name)
		if expected[i] {
			t.with[len(t.headers)] = true
			t.headers = append(t.headers, "expected")
		}
	}
	for i, name := range g.rows {
		row := []string{name}
		for j := range g.columns {
			s := g.cells[[2]int{i, j}]
			cell, e := "", ""
			if s != nil {
				cell, e = value(s.Unit, s.Median), "?"
				if s.Expected != nil {
					e = value(s.Unit, s.Expected.Value)
					if !named[s.Expected.Source] {
						named[s.Expected.Source] = true
						sources = append(sources, s.Expected.Source)
					}
				}
			}
			row = append(row, cell)
			if expected[j] {
				row = append(row, e)
			}
		}
		t.rows = append(t.rows, row)
	}
	p.table(t)
	switch {
	case known == 0:
		p.note("", "no reference known")
	case known < len(g.cells):
		p.note("", "expected: from %s; ? where no reference is known", strings.Join(sources, "; "))
	default:
		p.note("", "expected: from %s", strings.Join(sources, "; "))
	}
	if p.style.Verbose {
		p.plot(g, unit, greatest)
	}
}

// plot draws the columns of a grid over its rows where those are numbers, and bars
// otherwise. A plot of one value is none.
func (p *page) plot(g grid, unit result.Unit, greatest float64) {
	if greatest <= 0 || len(g.cells) < 2 {
		return
	}
	type line struct{ name, chart, value string }
	var lines []line
	columns := p.width()
	if g.numeric() && len(g.rows) <= columns {
		wide := min(max(columns/2/len(g.rows), 1), 3) // blocks a value
		for j, name := range g.columns {
			var values []float64
			highest := math.Inf(-1)
			for i := range g.rows {
				v := 0.0
				if s := g.cells[[2]int{i, j}]; s != nil {
					v = s.Median
					highest = max(highest, v)
				}
				for range wide {
					values = append(values, v)
				}
			}
			lines = append(lines, line{name, columnChart(values, greatest), "up to " + measured(unit, highest)})
		}
	} else {
		for i, name := range g.rows {
			for j, column := range g.columns {
				if s := g.cells[[2]int{i, j}]; s != nil {
					lines = append(lines, line{joined(name, column), rowChart(s.Median, greatest, max(min(columns/3, 24), 6)), measured(unit, s.Median)})
				}
			}
		}
	}
	names, charts, values := 0, 0, 0
	for _, l := range lines {
		names, charts, values = max(names, len([]rune(l.name))), max(charts, len([]rune(l.chart))), max(values, len([]rune(l.value)))
	}
	p.gap()
	beside := names+2+charts+2+values <= columns
	for _, l := range lines {
		if beside {
			p.indented(pad(l.name, names) + "  " + pad(l.chart, charts) + "  " + l.value)
			continue
		}
		for _, text := range wrap(l.name, columns) {
			p.indented(text)
		}
		if charts+2+values <= columns {
			p.indented(pad(l.chart, charts) + "  " + l.value)
		} else {
			p.indented(l.chart)
			p.indented(clip(l.value, columns))
		}
	}
}

// indented writes a line to the right of the labels.
func (p *page) indented(text string) {
	p.WriteString(strings.TrimRight(strings.Repeat(" ", labelWidth)+text, " ") + "\n")
}

// pad appends spaces up to a width in runes.
func pad(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-len([]rune(text))))
}
