package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A figure is one view of an experiment: plots, what their lines mean, and a table.
type figure struct {
	Title string
	// TableLabel is the name of the table as a landmark of the page.
	TableLabel string
	Note       string // what the plots leave out
	Legend     []entry
	Panels     []panel
	Table      seriesTable
}

// ExpandTable reports whether the table is initially expanded: there is no plot, and it has at most 24 rows.
func (f figure) ExpandTable() bool { return len(f.Panels) == 0 && len(f.Table.Rows) <= shortTable }

const shortTable = 24

// An entry of a legend.
type entry struct {
	Swatch *drawing
	Text   string
}

// A panel is one plot, at two sizes of which one is shown. Narrow alone serves panels side
// by side.
type panel struct {
	Title        string
	Wide, Narrow *drawing
}

// A chart is what a panel shows.
type chart struct {
	title    string // for those who do not see it
	x, y     axis
	groups   []string // names of the groups of bars; none for lines
	lines    []line
	expected []expectation
}

// An axis has a label, and a scale that all panels of a figure share.
type axis struct {
	label string
	unit  result.Unit
	scale scale
}

// A line is points that belong together. For bars, x is the number of the group.
type line struct {
	name   string
	style  int
	points []point
}

// A point is one series: its median, lowest and highest sample.
type point struct{ x, y, low, high float64 }

// A reference is what is known of such hardware.
type expectation struct {
	points []point // x and y; one for a value along the whole axis
	text   string
	line   int // the style of the line it belongs to
	style  int // its own
}

// Styles of references that are not those of a line.
const (
	common = -1 - iota
	inked
)

const (
	maxLines  = 8  // in a panel, before it is divided
	maxStyles = 16 // drawn at all
	maxBars   = 60
	maxPanels = 12
)

// figures returns the views of an experiment, and then what they do not show, as tables.
func figures(b *result.Bench) []figure {
	var out []figure
	shown := map[*result.Series]bool{}
	for _, v := range b.Views {
		for _, same := range byUnit(b.Select(v)) {
			for _, s := range same {
				shown[s] = true
			}
			out = append(out, newFigure(v, same))
		}
	}
	rest := map[string][]*result.Series{}
	var names []string
	for i := range b.Series {
		if s := &b.Series[i]; !shown[s] {
			if rest[s.Name] == nil {
				names = append(names, s.Name)
			}
			rest[s.Name] = append(rest[s.Name], s)
		}
	}
	for _, name := range names {
		title := words(name)
		if len(b.Views) > 0 {
			title += ": further series"
		}
		out = append(out, figure{Title: title, Table: newTable(result.View{}, rest[name])})
	}
	return out
}

// byUnit divides series: values of several units share no axis.
func byUnit(all []*result.Series) [][]*result.Series {
	var out [][]*result.Series
	place := map[result.Unit]int{}
	for _, s := range all {
		at, known := place[s.Unit]
		if !known {
			at = len(out)
			place[s.Unit], out = at, append(out, nil)
		}
		out[at] = append(out[at], s)
	}
	return out
}

// newFigure shows series of one unit.
func newFigure(v result.View, all []*result.Series) figure {
	f := figure{Title: clean(cmp.Or(v.Title, words(v.Series))), Table: newTable(v, all)}
	if v.X == "" {
		return f
	}
	var drawn []*result.Series
	for _, s := range all {
		if st, ok := stats(s); ok && drawable(st.Median) && drawable(st.Min) && drawable(st.Max) {
			drawn = append(drawn, s)
		}
	}
	if len(drawn) == 0 {
		f.Note = "No values to plot."
		return f
	}
	p := newLayout(v, drawn)
	if n := len(p.names); n > maxStyles {
		f.Note = fmt.Sprintf("%d of %d lines are drawn; the table has all.", maxStyles, n)
		if p.bars {
			f.Note = fmt.Sprintf("%d of %d kinds of bars are drawn; the table has all.", maxStyles, n)
		}
	}
	for _, part := range p.parts {
		c := p.chart(part, drawn)
		if p.bars && len(c.groups)*len(c.lines) > maxBars {
			f.Note = "Too many values for bars: see the table."
			return f
		}
		title := strings.Join(part.title, ", ")
		c.title = cmp.Or(title, f.Title)
		drawnPanel := panel{Title: title, Narrow: drawChart(c, narrow)}
		if len(p.parts) == 1 {
			drawnPanel.Wide = drawChart(c, wide)
		}
		f.Panels = append(f.Panels, drawnPanel)
		for _, y := range c.expected {
			e := entry{Swatch: dashedSwatch(y.style), Text: y.text}
			if !slices.ContainsFunc(f.Legend, func(o entry) bool { return o.Text == e.Text && o.Swatch.same(e.Swatch) }) {
				f.Legend = append(f.Legend, e)
			}
		}
	}
	var lines []entry
	for i, name := range p.names[:min(len(p.names), maxStyles)] {
		if name != "" {
			lines = append(lines, entry{Swatch: swatch(i, p.bars), Text: name})
		}
	}
	f.Legend = append(lines, f.Legend...)
	return f
}

// stats returns the statistics of a series, and whether it has any.
func stats(s *result.Series) (result.Stats, bool) {
	if len(s.Samples) == 0 {
		return s.Stats, s.Stats != result.Stats{}
	}
	finite := slices.ContainsFunc(s.Samples, func(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) })
	return result.Summarize(s.Samples), finite
}

// drawable reports whether a value can be on an axis.
func drawable(v float64) bool {
	abs := math.Abs(v)
	return v == 0 || abs > 1e-18 && abs < 1e18 // false for NaN
}

// A layout divides the series of a view into panels and lines.
type layout struct {
	view    result.View
	bars    bool
	keys    []string // of the labels that tell lines apart
	names   []string // of the lines, in the order of their styles
	parts   []part
	x, y    axis
	groups  []string
	groupOf map[string]int
}

// A part is the series of one panel.
type part struct {
	title []string
	where result.Labels
}

// newLayout divides the series of a view into panels, groups and lines.
func newLayout(v result.View, all []*result.Series) *layout {
	p := &layout{view: v, groupOf: map[string]int{}}
	xs := map[float64]bool{}
	for _, s := range all {
		value := s.Labels.Get(v.X)
		x, err := strconv.ParseFloat(value, 64)
		if err != nil || !drawable(x) || v.X == result.Device { // numbers of devices are names
			p.bars = true
		}
		xs[x] = true
		if _, ok := p.groupOf[value]; !ok {
			p.groupOf[value] = len(p.groups)
			p.groups = append(p.groups, p.groupName(value))
		}
	}
	p.bars = p.bars || len(xs) == 1
	p.keys = varying(v.Lines, all)
	if p.ambiguous(all) {
		p.keys = varying(append(slices.Clone(v.Lines), otherKeys(v, all)...), all)
	}
	p.parts = []part{{}}
	if key, values := p.divide(all); key != "" {
		p.parts = nil
		p.keys = slices.DeleteFunc(p.keys, func(k string) bool { return k == key })
		for _, value := range values {
			p.parts = append(p.parts, part{[]string{condition(key, value)}, result.Labels{{Key: key, Value: value}}})
		}
	}
	p.names = distinct(all, p.lineName)
	p.axes(all)
	return p
}

// groupName returns the words for a value of the axis.
func (p *layout) groupName(value string) string {
	if _, err := strconv.ParseFloat(value, 64); err == nil || value == "true" || value == "false" {
		return condition(p.view.X, value)
	}
	return labelValue(p.view.X, value)
}

// ambiguous reports whether two series are on the same position of the same line.
func (p *layout) ambiguous(all []*result.Series) bool {
	seen := map[[2]string]bool{}
	for _, s := range all {
		at := [2]string{p.lineName(s), s.Labels.Get(p.view.X)}
		if seen[at] {
			return true
		}
		seen[at] = true
	}
	return false
}

// divide returns the label by which lines are divided into panels, if there are too many
// for one, and its values.
func (p *layout) divide(all []*result.Series) (string, []string) {
	if p.lineCount(all, p.keys) <= maxLines || len(p.keys) < 2 {
		return "", nil
	}
	best, values := "", []string(nil)
	for _, key := range p.keys {
		rest := slices.DeleteFunc(slices.Clone(p.keys), func(k string) bool { return k == key })
		of := valuesOf(key, all)
		if len(of) > maxPanels || p.lineCount(all, rest) > maxLines {
			continue
		}
		if best == "" || len(of) < len(values) {
			best, values = key, of
		}
	}
	return best, values
}

// lineCount returns how many lines a panel would have if these keys named them.
func (p *layout) lineCount(all []*result.Series, keys []string) int {
	seen := map[string]bool{}
	for _, s := range all {
		seen[nameBy(s, keys)] = true
	}
	return len(seen)
}

// lineName returns the words for a series in the legend.
func (p *layout) lineName(s *result.Series) string { return nameBy(s, p.keys) }

// nameBy names conditions. Of several, those that are false are left out.
func nameBy(s *result.Series, keys []string) string {
	var parts, not []string
	for _, key := range keys {
		value := s.Labels.Get(key)
		if value == "false" && len(keys) > 1 {
			not = append(not, labelKey(key))
			continue
		}
		parts = append(parts, shorten(condition(key, value), 60))
	}
	if len(parts) == 0 && len(not) > 0 {
		return shorten("none of "+strings.Join(not, ", "), 120)
	}
	return strings.Join(parts, ", ")
}

// varying returns those of keys of which the series have several values.
func varying(keys []string, all []*result.Series) []string {
	var out []string
	for _, key := range keys {
		if !slices.Contains(out, key) && len(valuesOf(key, all)) > 1 {
			out = append(out, key)
		}
	}
	return out
}

// valuesOf returns the values of a key, each once, in the order of the series.
func valuesOf(key string, all []*result.Series) []string {
	return distinct(all, func(s *result.Series) string { return s.Labels.Get(key) })
}

// distinct returns the texts of series, each once, in their order.
func distinct(all []*result.Series, text func(*result.Series) string) (out []string) {
	known := make(map[string]bool, len(all))
	for _, s := range all {
		if t := text(s); !known[t] {
			known[t] = true
			out = append(out, t)
		}
	}
	return out
}

// maxKeys is the number of labels that tell series apart: each is a column of their table.
const maxKeys = 24

// otherKeys returns the keys of labels that a view does not name.
func otherKeys(v result.View, all []*result.Series) []string {
	var out []string
	for _, s := range all {
		for _, l := range s.Labels {
			if l.Key != v.X && !slices.Contains(v.Lines, l.Key) && !slices.Contains(out, l.Key) {
				if out = append(out, l.Key); len(out) == maxKeys {
					return out
				}
			}
		}
	}
	return out
}

// axes sets the labels and the scales from all that is drawn.
func (p *layout) axes(all []*result.Series) {
	var xs, ys []float64
	for _, s := range all {
		st, _ := stats(s)
		ys = append(ys, st.Median, st.Min, st.Max)
		if s.Expected != nil && drawable(s.Expected.Value) {
			ys = append(ys, s.Expected.Value)
		}
		if x, err := strconv.ParseFloat(s.Labels.Get(p.view.X), 64); err == nil {
			xs = append(xs, x)
		}
	}
	unit := all[0].Unit
	name := shorten(words(all[0].Name), 40)
	p.y = axis{unit: unit, scale: linearScale(ys, unit)}
	amount := unit == result.Seconds || unit == result.Bytes || unit == result.PerSecond
	if low, high := slices.Min(ys), slices.Max(ys); !p.bars && amount && low > 0 && high > 20*low {
		p.y.scale = logScale(low, high, base(unit), true)
	}
	p.y.label = strings.TrimSuffix(name+", "+p.y.scale.unitName(unit), ", ")
	if p.y.scale.log {
		p.y.label += " (log scale)"
	}
	if p.bars {
		return
	}
	xUnit := result.Count
	p.x.label = shorten(labelKey(p.view.X), 40)
	if strings.HasSuffix(p.view.X, "_bytes") {
		xUnit = result.Bytes
		p.x.label += ", bytes"
	}
	p.x.unit = xUnit
	slices.Sort(xs)
	xs = slices.Compact(xs)
	if low, high := xs[0], xs[len(xs)-1]; low > 0 && (xUnit == result.Bytes || high >= 32*low) {
		p.x.scale = logScale(low, high, 2, false)
		p.x.label += " (log scale)"
	} else {
		p.x.scale = linearRange(xs)
	}
}

// base returns the base of logarithms for a unit.
func base(u result.Unit) float64 {
	if u == result.Bytes {
		return 2
	}
	return 10
}

// chart returns what a panel shows.
func (p *layout) chart(in part, all []*result.Series) chart {
	c := chart{x: p.x, y: p.y}
	if p.bars {
		c.groups = p.groups
	}
	here := map[string][]*result.Series{} // by the names of their lines
	for _, s := range all {
		if !slices.ContainsFunc(in.where, func(l result.Label) bool { return s.Labels.Get(l.Key) != l.Value }) {
			name := p.lineName(s)
			here[name] = append(here[name], s)
		}
	}
	for style, name := range p.names[:min(len(p.names), maxStyles)] {
		l := line{name: name, style: style}
		var known []*result.Series
		for _, s := range here[name] {
			st, _ := stats(s)
			l.points = append(l.points, point{p.position(s), st.Median, min(st.Min, st.Median), max(st.Max, st.Median)})
			if s.Expected != nil && drawable(s.Expected.Value) {
				known = append(known, s)
			}
		}
		if len(l.points) == 0 {
			continue
		}
		slices.SortStableFunc(l.points, func(a, b point) int { return cmp.Compare(a.x, b.x) })
		c.lines = append(c.lines, l)
		c.expect(p, style, known)
	}
	return c
}

// position returns the position of a series along the axis.
func (p *layout) position(s *result.Series) float64 {
	value := s.Labels.Get(p.view.X)
	if p.bars {
		return float64(p.groupOf[value])
	}
	x, _ := strconv.ParseFloat(value, 64) // newLayout has parsed it
	return x
}

// expect adds the references of a line. Values that are the same everywhere are drawn
// along the whole axis, once for all lines.
func (c *chart) expect(p *layout, style int, known []*result.Series) {
	sources := map[string][]*result.Series{}
	var order []string
	for _, s := range known {
		if sources[s.Expected.Source] == nil {
			order = append(order, s.Expected.Source)
		}
		sources[s.Expected.Source] = append(sources[s.Expected.Source], s)
	}
	for _, source := range order[:min(len(order), maxStyles)] {
		of := sources[source]
		first := of[0].Expected.Value
		y := expectation{line: style, style: style}
		if p.bars {
			y.style = inked
		}
		if !slices.ContainsFunc(of, func(s *result.Series) bool { return s.Expected.Value != first }) {
			y.text = "expected " + round(first, p.y.unit) + ": " + shorten(clean(source), 120)
			if !p.bars {
				y.style = common
			}
		} else {
			y.text = "expected: " + shorten(clean(source), 120)
		}
		for _, s := range of {
			y.points = append(y.points, point{x: p.position(s), y: s.Expected.Value})
		}
		slices.SortStableFunc(y.points, func(a, b point) int { return cmp.Compare(a.x, b.x) })
		if y.style == common {
			y.points = y.points[:1]
			if slices.ContainsFunc(c.expected, func(o expectation) bool { return o.style == common && o.text == y.text }) {
				continue
			}
		}
		c.expected = append(c.expected, y)
	}
}
