package report

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A grid is the series of a view in rows by X and columns by Lines.
type grid struct {
	rows    []result.Label
	columns [][]string // the values of Lines in words
	cells   map[[2]int]*result.Series
}

// newGrid sorts series into rows and columns, in the order in which their values occur.
func newGrid(series []*result.Series, v result.View) grid {
	g := grid{cells: map[[2]int]*result.Series{}}
	rows, columns := map[result.Label]int{}, map[string]int{}
	for _, s := range series {
		var parts []string
		for _, key := range v.Lines {
			parts = append(parts, labelText(result.Label{Key: key, Value: s.Labels.Get(key)}))
		}
		x := result.Label{Key: v.X, Value: s.Labels.Get(v.X)}
		row, known := rows[x]
		if !known {
			row = len(g.rows)
			rows[x], g.rows = row, append(g.rows, x)
		}
		name := strings.Join(parts, "\x00")
		column, known := columns[name]
		if !known {
			column = len(g.columns)
			columns[name], g.columns = column, append(g.columns, parts)
		}
		if at := [2]int{row, column}; g.cells[at] == nil {
			g.cells[at] = s
		}
	}
	g.arrange()
	return g
}

// arrange puts columns of one first part next to each other.
func (g *grid) arrange() {
	if len(g.columns) == 0 || len(g.columns[0]) == 0 {
		return
	}
	order := make([]int, len(g.columns)) // old places of the columns
	firstOf := map[string]int{}
	for i, c := range g.columns {
		if order[i] = i; firstOf[c[0]] == 0 {
			firstOf[c[0]] = i + 1
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(firstOf[g.columns[a][0]], firstOf[g.columns[b][0]]) })
	columns, place := make([][]string, len(order)), make([]int, len(order))
	for to, from := range order {
		columns[to], place[from] = g.columns[from], to
	}
	cells := make(map[[2]int]*result.Series, len(g.cells))
	for at, s := range g.cells {
		cells[[2]int{at[0], place[at[1]]}] = s
	}
	g.columns, g.cells = columns, cells
}

// names returns the names of the columns without the parts that all have, and groups of columns above them if two
// parts differ.
func (g grid) names() (groups, names []string) {
	var differ []int
	for k := range g.columns[0] {
		if slices.ContainsFunc(g.columns, func(c []string) bool { return c[k] != g.columns[0][k] }) {
			differ = append(differ, k)
		}
	}
	for _, c := range g.columns {
		var parts []string
		for _, k := range differ {
			parts = append(parts, c[k])
		}
		if len(parts) == 2 {
			groups, parts = append(groups, parts[0]), parts[1:]
		}
		names = append(names, joined(parts...))
	}
	if len(groups) > 0 { // of several columns each, or there is no use
		if len(slices.Compact(slices.Clone(groups))) == len(groups) {
			for i := range names {
				names[i] = joined(groups[i], names[i])
			}
			return nil, names
		}
	}
	return groups, names
}

// numeric reports whether the rows are three or more numbers, in their order.
func (g grid) numeric() bool {
	last := math.Inf(-1)
	for _, l := range g.rows {
		v, err := strconv.ParseFloat(l.Value, 64)
		if err != nil || v <= last {
			return false
		}
		last = v
	}
	return len(g.rows) >= 3
}

// textTable returns the grid as a table, with a row for the references of the last row that has any.
func (g grid) textTable(title string) textTable {
	s := textTable{title: title}
	s.groups, s.columns = g.names()
	reference := textRow{}
	for i, l := range g.rows {
		row := textRow{name: labelText(l)}
		expected := textRow{name: "reference, " + row.name}
		known := false
		for j := range g.columns {
			cell, e := "", ""
			if c := g.cells[[2]int{i, j}]; c != nil {
				cell = value(c.Unit, c.Median)
				if c.Expected != nil {
					e, known = value(c.Unit, c.Expected.Value), true
				}
			}
			row.cells, expected.cells = append(row.cells, cell), append(expected.cells, e)
		}
		s.rows = append(s.rows, row)
		if known {
			reference = expected
		}
	}
	if reference.name != "" {
		s.rows = append(s.rows, reference)
	}
	return s
}

// title returns the title of a table with the unit of its values.
func tableTitle(title string, u result.Unit) string {
	if unit := unitText(u); unit != "" && u != result.Ratio && u != result.Share {
		return joined(title, unit)
	}
	return title
}

// sparse is the number of cells of a table for each series in it from which on there is no table.
const sparse = 16

// view writes a table behind an indent, and adds the series to shown. Verbose styles have a plot as well.
func (p *page) view(b *result.Bench, v result.View, indent int, shown map[*result.Series]bool) {
	series := b.Select(v)
	if len(series) == 0 {
		return
	}
	g := newGrid(series, v)
	if len(g.rows)*len(g.columns) > sparse*len(series) {
		return // hardly a cell has anything: a line a series is shorter
	}
	greatest := 0.0
	for _, s := range g.cells {
		shown[s] = true
		greatest = max(greatest, s.Median)
	}
	p.gap()
	s := g.textTable(tableTitle(plain(v.Title), series[0].Unit))
	s.indent = indent
	p.textTable(s)
	if p.style.Verbose {
		p.plot(g, series[0].Unit, greatest)
	}
}

// A plotLine is a line of a plot.
type plotLine struct{ name, chart, value string }

// plot draws the columns of a grid over its rows where those are numbers, and bars
// otherwise. One value has no plot.
func (p *page) plot(g grid, unit result.Unit, greatest float64) {
	if greatest <= 0 || len(g.cells) < 2 {
		return
	}
	columns := p.width()
	lines := g.bars(unit, greatest, max(min(columns/3, 24), 6))
	if g.numeric() && len(g.rows) <= columns {
		lines = g.charts(unit, greatest, min(max(columns/2/len(g.rows), 1), 3))
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
		p.hang(strings.Repeat(" ", labelWidth), labelWidth, "", wrap(l.name, columns))
		if charts+2+values <= columns {
			p.indented(pad(l.chart, charts) + "  " + l.value)
		} else {
			p.indented(l.chart)
			p.indented(clip(l.value, columns))
		}
	}
}

// charts returns a chart over the rows for each column, with so many blocks a value.
func (g grid) charts(unit result.Unit, greatest float64, wide int) (lines []plotLine) {
	for j, parts := range g.columns {
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
		lines = append(lines, plotLine{joined(parts...), columnChart(values, greatest), "up to " + measured(unit, highest)})
	}
	return lines
}

// bars returns a bar for each value.
func (g grid) bars(unit result.Unit, greatest float64, width int) (lines []plotLine) {
	for i, row := range g.rows {
		for j, parts := range g.columns {
			if s := g.cells[[2]int{i, j}]; s != nil {
				lines = append(lines, plotLine{joined(append([]string{labelText(row)}, parts...)...), rowChart(s.Median, greatest, width), measured(unit, s.Median)})
			}
		}
	}
	return lines
}

// indented writes a line to the right of the labels.
func (p *page) indented(text string) {
	p.WriteString(strings.TrimRight(strings.Repeat(" ", labelWidth)+text, " ") + "\n")
}

// pad appends spaces up to a width in runes.
func pad(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-len([]rune(text))))
}

// figure writes a table of key figures: a line for one row, bars for many where there is room, or a table.
func (p *page) figure(t *result.Table, indent int, bars bool) {
	if len(t.Rows) == 0 || len(t.Columns) == 0 {
		return
	}
	s, values := figureTable(t)
	s.indent = indent
	if len(s.rows) == 1 {
		if !bars || len(s.columns) <= 3 {
			p.flow(indent, s.line())
			return
		}
		s, values = s.flipped(values)
	}
	if bars && t.Unit() != "" && len(s.rows) > 3 && len(s.columns) <= 2 {
		p.bars(s, values)
		return
	}
	p.textTable(s)
}

// figureTable returns key figures as text, and their values: 0 for none. Units that all share are in the title.
func figureTable(t *result.Table) (s textTable, values [][]float64) {
	s.title = plain(t.Title)
	unit := t.Unit()
	switch {
	case unit != result.GBPerSecond:
	case t.Only == result.Alone:
		s.title = joined(s.title, "GB/s")
	default:
		s.title = joinedWith(" ", "GB/s", s.title)
	}
	format := value
	if unit == "" || unit == result.PerSecond {
		format = measured
	}
	for _, c := range t.Columns {
		s.columns = append(s.columns, plain(c))
	}
	for _, r := range t.Rows {
		row := textRow{name: plain(r.Name), note: plain(r.Note), cells: make([]string, len(s.columns))}
		v := make([]float64, len(s.columns))
		for i, c := range r.Cells[:min(len(r.Cells), len(s.columns))] { // a file may have any number
			if c != nil {
				row.cells[i], v[i] = format(c.Unit, c.Value), c.Value
			}
		}
		s.rows, values = append(s.rows, row), append(values, v)
	}
	return s, values
}

// line is a table of one row as a sentence.
func (s textTable) line() string {
	row := s.rows[0]
	var parts []string
	for i, c := range row.cells {
		if c != "" {
			parts = append(parts, joinedWith(" ", s.columns[i], c))
		}
	}
	return joined(joinedWith(": ", joined(s.title, row.name), joined(parts...)), row.note)
}

// flipped is a table of one row with a row for each of its columns.
func (s textTable) flipped(values [][]float64) (textTable, [][]float64) {
	out := textTable{title: s.title, columns: []string{s.rows[0].name}, indent: s.indent}
	var v [][]float64
	for i, name := range s.columns {
		out.rows, v = append(out.rows, textRow{name: name, cells: []string{s.rows[0].cells[i]}}), append(v, []float64{values[0][i]})
	}
	return out, v
}

// flow writes text wrapped to the width, each line behind an indent. Commands in code quotes stay whole.
func (p *page) flow(indent int, text string) {
	p.hang(strings.Repeat(" ", indent), indent, "", wrapCode(plain(text), p.style.width()-indent))
}

// colored is flow in a color.
func (p *page) colored(c ansiColor, text string) {
	p.hang("", 0, c, wrapCode(plain(text), p.style.width()))
}

// heading writes the title of a table above it, if it has no room in its first column, and returns what is left for
// that.
func (p *page) heading(s textTable, room int) (title string) {
	if len([]rune(s.title)) <= room {
		return s.title
	}
	p.hang(strings.Repeat(" ", s.indent), s.indent, dim, wrap(s.title, p.style.width()-s.indent))
	return ""
}

// bars writes a table of one or two columns as bars.
func (p *page) bars(s textTable, values [][]float64) {
	greatest, names, figures := 0.0, 0, 0
	for i, r := range s.rows {
		names = max(names, len([]rune(r.name)))
		for j, c := range r.cells {
			figures, greatest = max(figures, len([]rune(c))), max(greatest, values[i][j])
		}
	}
	columns := len(s.columns)
	room := (p.style.width()-s.indent-2-names)/columns - figures - 4
	if room < 6 || greatest <= 0 {
		p.textTable(s)
		return
	}
	room = min(room, 24)
	line := func(c ansiColor, name string, cell func(j int) (bar, value string)) {
		text := pad(name, 2+names)
		for j := range columns {
			bar, v := cell(j)
			text += "  " + pad(bar, room) + "  " + strings.Repeat(" ", figures-min(figures, len([]rune(v)))) + v
		}
		p.WriteString(strings.Repeat(" ", s.indent) + p.style.paint(c, strings.TrimRight(text, " ")) + "\n")
	}
	title := p.heading(s, 2+names)
	if title != "" || cmp.Or(s.columns...) != "" {
		line(dim, title, func(j int) (string, string) { return s.columns[j], "" })
	}
	for i, r := range s.rows {
		line("", "  "+r.name, func(j int) (string, string) { return rowChart(values[i][j], greatest, room), r.cells[j] })
	}
}

var (
	columnBlocks = []rune("▁▂▃▄▅▆▇█")
	rowBlocks    = []rune("▏▎▍▌▋▊▉█")
)

// columnChart returns a line of one block a value, from zero up to the greatest. Values
// below zero have none.
func columnChart(values []float64, greatest float64) string {
	var b strings.Builder
	for _, v := range values {
		if v <= 0 || greatest <= 0 {
			b.WriteRune(' ')
			continue
		}
		n := int(v / greatest * float64(len(columnBlocks)))
		b.WriteRune(columnBlocks[min(max(n, 0), len(columnBlocks)-1)])
	}
	return b.String()
}

// rowChart returns a bar of at most width blocks.
func rowChart(v, greatest float64, width int) string {
	if v <= 0 || greatest <= 0 {
		return ""
	}
	eighths := min(max(int(v/greatest*float64(8*width)), 1), 8*width)
	bar := strings.Repeat(string(rowBlocks[7]), eighths/8)
	if rest := eighths % 8; rest > 0 {
		bar += string(rowBlocks[rest-1])
	}
	return bar
}
