package report

import (
	"bytes"
	"fmt"
	"html"
	"html/template"
	"image/color"
	"regexp"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A format is the size of a plot, in CSS pixels at its natural size.
type format struct {
	class         string
	width, height float64
	marks         int     // along the axis at most
	names         float64 // share of the width for the names of bars
}

var (
	wide   = format{class: "wide", width: 760, height: 300, marks: 11, names: 0.3}
	narrow = format{class: "narrow", width: 340, height: 240, marks: 5, names: 0.36}
)

const (
	textSize  = 12
	lineWidth = 1.75
	descent   = 3 // of text, below its line
	barHeight = 15
	barGap    = 12 // between groups
)

// Colours are written as roles, which the style sheet defines for light and dark.
var (
	roleInk  = role(0xe0)
	roleDim  = role(0xe1)
	roleGrid = role(0xe2)
)

const (
	styles    = 8    // colours and glyphs
	bandRole  = 0x80 // a colour of lines, translucent
	faintRole = 0xa0 // the same, where there are many
)

// role is the colour that element replaces by the style sheet's variable.
func role(n uint8) color.NRGBA { return color.NRGBA{0xc0, 0xfe, n, 0xff} }

// styleColor returns the role of a line's style. Styles repeat after eight; then lines are dashed.
func styleColor(style int) color.NRGBA {
	switch style {
	case common:
		return roleDim
	case inked:
		return roleInk
	}
	return role(uint8(style % styles))
}

var glyphs = [styles]draw.GlyphDrawer{
	draw.CircleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}, draw.RingGlyph{},
	draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.CrossGlyph{}, draw.PlusGlyph{},
}

// glyph returns the marker of a line's style.
func glyph(style int) draw.GlyphStyle {
	return draw.GlyphStyle{Color: styleColor(style), Radius: 3, Shape: glyphs[style%styles]}
}

// stroke returns how the line of a style is drawn.
func stroke(style int) draw.LineStyle {
	s := draw.LineStyle{Color: styleColor(style), Width: lineWidth}
	if style >= styles {
		s.Dashes = []vg.Length{1, 3}
	}
	return s
}

// dashed returns how the reference of a style is drawn.
func dashed(style int) draw.LineStyle {
	return draw.LineStyle{Color: styleColor(style), Width: 1.5, Dashes: []vg.Length{6, 4}}
}

var sans = font.Font{Typeface: "Liberation", Variant: "Sans"}

// textStyle returns a style for text that the page's font renders.
func textStyle(c color.Color, size vg.Length, x draw.XAlignment, y draw.YAlignment) text.Style {
	return text.Style{Color: c, Font: font.From(sans, size), XAlign: x, YAlign: y, Handler: plot.DefaultTextHandler}
}

// drawChart draws a chart as an SVG element.
func drawChart(c chart, f format) template.HTML {
	p := plot.New()
	p.BackgroundColor = nil
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Min, a.Max = 0, 1
		a.LineStyle = draw.LineStyle{Color: roleDim, Width: 1}
		a.Tick.LineStyle = draw.LineStyle{Color: roleDim, Width: 1}
		a.Tick.Length = 7 // the labels cover the ends
	}
	p.X.Padding, p.Y.Padding = 0, 6
	p.X.Tick.Label = textStyle(roleDim, textSize, draw.XCenter, draw.YTop)
	p.Y.Tick.Label = textStyle(roleDim, textSize, draw.XRight, draw.YCenter)
	if c.groups != nil {
		return drawBars(p, c, f)
	}
	return drawLines(p, c, f)
}

// drawLines draws lines with the range of their samples, over numbers.
func drawLines(p *plot.Plot, c chart, f format) template.HTML {
	p.X.Tick.Marker = c.x.ticks(f.marks)
	p.Y.Tick.Marker = c.y.ticks(7)
	p.Y.LineStyle.Width, p.Y.Tick.Length = 0, 0
	g := plotter.NewGrid()
	g.Vertical.Width = 0
	g.Horizontal = draw.LineStyle{Color: roleGrid, Width: 1}
	p.Add(g)
	for _, y := range c.expected {
		at := c.places(y.points)
		if y.style == common {
			at = plotter.XYs{{X: 0, Y: at[0].Y}, {X: 1, Y: at[0].Y}}
		}
		p.Add(&plotter.Line{XYs: at, LineStyle: dashed(y.style)})
	}
	band := uint8(bandRole)
	if len(c.lines) > 4 {
		band = faintRole
	}
	for _, l := range c.lines {
		p.Add(&plotter.Polygon{XYs: []plotter.XYs{c.band(l.points)}, Color: role(band + uint8(l.style%styles))})
	}
	for i, l := range c.lines {
		at := c.places(l.points)
		s, g := stroke(l.style), glyph(l.style)
		// Lines further down are wider, so that one which another covers can be seen.
		below := vg.Length(min(len(c.lines)-1-i, 3))
		s.Width += 0.45 * below
		g.Radius += 0.45 * below
		p.Add(&plotter.Line{XYs: at, LineStyle: s}, &plotter.Scatter{XYs: at, GlyphStyle: g})
	}
	return element(c.title, f, f.height, func(all draw.Canvas) {
		above := textStyle(roleDim, textSize, draw.XLeft, draw.YTop)
		all.FillText(above, vg.Point{X: 0, Y: all.Max.Y}, fitting(c.y.label, above, f.width))
		below := textStyle(roleDim, textSize, draw.XRight, draw.YBottom)
		all.FillText(below, vg.Point{X: all.Max.X, Y: descent}, fitting(c.x.label, below, f.width))
		p.Draw(draw.Crop(all, 0, 0, 22, -22))
	})
}

// places are points on the axes.
func (c chart) places(points []point) plotter.XYs {
	var out plotter.XYs
	for _, at := range points {
		out = append(out, plotter.XY{X: c.x.scale.at(at.x), Y: c.y.scale.at(at.y)})
	}
	return out
}

// band is the outline of the range from the lowest to the highest samples.
func (c chart) band(points []point) plotter.XYs {
	var out plotter.XYs
	for _, at := range points {
		out = append(out, plotter.XY{X: c.x.scale.at(at.x), Y: c.y.scale.at(at.high)})
	}
	for i := len(points) - 1; i >= 0; i-- {
		out = append(out, plotter.XY{X: c.x.scale.at(points[i].x), Y: c.y.scale.at(points[i].low)})
	}
	return out
}

// ticks returns the marks of an axis, so many at most.
func (a axis) ticks(limit int) plot.ConstantTicks {
	var out plot.ConstantTicks
	for _, m := range a.scale.every(limit) {
		out = append(out, plot.Tick{Value: a.scale.at(m), Label: a.scale.text(m, a.unit)})
	}
	return out
}

// A bar is one of a chart's, at its place from the top.
type bar struct {
	point
	style    int
	top      float64
	expected []point
}

// bars draws bars with their range and their references.
type bars struct {
	all    []bar
	chart  chart
	height float64
}

// drawBars draws horizontal bars in groups, for conditions that are no numbers.
func drawBars(p *plot.Plot, c chart, f format) template.HTML {
	b := bars{chart: c}
	var names plot.ConstantTicks
	nameStyle := textStyle(roleInk, textSize, draw.XRight, draw.YCenter)
	for group, name := range c.groups {
		first := b.height
		for _, l := range c.lines {
			for _, at := range l.points {
				if int(at.x) != group {
					continue
				}
				one := bar{point: at, style: l.style, top: b.height}
				for _, y := range c.expected {
					for _, e := range y.points {
						if y.line == l.style && int(e.x) == group {
							one.expected = append(one.expected, e)
						}
					}
				}
				b.all = append(b.all, one)
				b.height += barHeight
			}
		}
		if b.height == first { // none here, in this panel
			continue
		}
		names = append(names, plot.Tick{Value: (first + b.height) / 2, Label: twoLines(name, nameStyle, f.names*f.width)})
		b.height += barGap
	}
	b.height -= barGap
	for i := range names {
		names[i].Value = 1 - names[i].Value/b.height
	}
	p.Y.Tick.Label, p.Y.Tick.Marker = nameStyle, names
	p.Y.Padding = 0
	p.X.Tick.Marker = c.y.ticks(min(f.marks, 7))
	p.X.LineStyle.Width, p.X.Tick.Length, p.X.Padding = 0, 0, 5
	g := plotter.NewGrid()
	g.Horizontal.Color = nil
	g.Vertical = draw.LineStyle{Color: roleGrid, Width: 1}
	p.Add(g, b)
	const axisHeight, valueWidth = 54, 44
	return element(c.title, f, b.height+axisHeight, func(all draw.Canvas) {
		below := textStyle(roleDim, textSize, draw.XRight, draw.YBottom)
		all.FillText(below, vg.Point{X: all.Max.X - valueWidth, Y: descent}, fitting(c.y.label, below, f.width-valueWidth))
		p.Draw(draw.Crop(all, 0, -valueWidth, 22, -descent))
	})
}

// fitting cuts a text to a width.
func fitting(name string, s text.Style, width float64) string {
	for n := min(len([]rune(name)), 200); n > 1; n-- {
		if cut := shorten(name, n); s.Width(cut).Points() <= width {
			return cut
		}
	}
	return shorten(name, 1)
}

// twoLines breaks a name that is wider than its place, and cuts what is left over.
func twoLines(name string, s text.Style, width float64) string {
	if s.Width(name).Points() <= width {
		return name
	}
	first := ""
	words := strings.Fields(name)
	for i, w := range words {
		longer := strings.TrimSpace(first + " " + w)
		if s.Width(longer).Points() <= width {
			first = longer
			continue
		}
		if first == "" {
			break
		}
		return first + "\n" + fitting(strings.Join(words[i:], " "), s, width)
	}
	return fitting(name, s, width)
}

// Plot implements plot.Plotter.
func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	at := func(v float64) vg.Length { return x(b.chart.y.scale.at(v)) }
	zero := at(min(max(0, b.chart.y.scale.min), b.chart.y.scale.max))
	value := textStyle(roleInk, textSize-1, draw.XLeft, draw.YCenter)
	for _, one := range b.all {
		top, bottom := y(1-(one.top+1)/b.height), y(1-(one.top+barHeight-1)/b.height)
		middle := (top + bottom) / 2
		end := at(one.y)
		c.FillPolygon(styleColor(one.style), []vg.Point{{X: zero, Y: top}, {X: end, Y: top}, {X: end, Y: bottom}, {X: zero, Y: bottom}})
		low, high := at(one.low), at(one.high)
		if high-low > 1 {
			whisker := draw.LineStyle{Color: roleInk, Width: 1}
			c.StrokeLine2(whisker, low, middle, high, middle)
			c.StrokeLine2(whisker, low, middle-3, low, middle+3)
			c.StrokeLine2(whisker, high, middle-3, high, middle+3)
		}
		for _, e := range one.expected {
			mark := dashed(inked)
			mark.Dashes = []vg.Length{3, 2}
			c.StrokeLine2(mark, at(e.y), top+1, at(e.y), bottom-1)
			high = max(high, at(e.y))
		}
		label := number(one.y/b.chart.y.scale.unit.Factor, 3)
		c.FillText(value, vg.Point{X: max(high, end, zero) + 5, Y: middle}, label)
	}
}

// swatch is what a line or a bar looks like, for a legend.
func swatch(style int, asBar bool) template.HTML {
	f := format{class: "swatch", width: 26, height: 12}
	return element("", f, f.height, func(c draw.Canvas) {
		if asBar {
			c.FillPolygon(styleColor(style), []vg.Point{{X: 7, Y: 0}, {X: 19, Y: 0}, {X: 19, Y: 12}, {X: 7, Y: 12}})
			return
		}
		c.StrokeLine2(stroke(style), 1, 6, 25, 6)
		c.DrawGlyphNoClip(glyph(style), vg.Point{X: 13, Y: 6})
	})
}

// dashedSwatch returns the legend's sample of a reference.
func dashedSwatch(style int) template.HTML {
	f := format{class: "swatch", width: 26, height: 12}
	return element("", f, f.height, func(c draw.Canvas) { c.StrokeLine2(dashed(style), 1, 6, 25, 6) })
}

var (
	styleAttribute = regexp.MustCompile(`style="[^"]*"`) // in text, quotes are escaped
	fontName       = regexp.MustCompile(`font-family:[^;"]*;font-variant:[^;"]*;font-weight:[^;"]*;font-style:[^;"]*;`)
	roleName       = regexp.MustCompile(`(fill|stroke):#C0FE([0-9A-F]{2})`)
)

// element is an SVG element that takes its colours and its font from the style sheet. One
// without a title is for decoration.
func element(title string, f format, height float64, paint func(draw.Canvas)) template.HTML {
	canvas := vgsvg.New(vg.Length(f.width), vg.Length(height))
	paint(draw.New(canvas))
	var b bytes.Buffer
	_, _ = canvas.WriteTo(&b) // a Buffer takes everything
	body := b.String()
	_, body, _ = strings.Cut(body, "xlink\">\n")
	body = styleAttribute.ReplaceAllStringFunc(body, func(s string) string {
		s = fontName.ReplaceAllString(s, "")
		return roleName.ReplaceAllStringFunc(s, func(s string) string {
			m := roleName.FindStringSubmatch(s)
			n, _ := strconv.ParseUint(m[2], 16, 8) // two hexadecimal digits
			switch n := uint8(n); {
			case n == roleInk.B:
				return m[1] + ":var(--ink)"
			case n == roleDim.B:
				return m[1] + ":var(--dim)"
			case n == roleGrid.B:
				return m[1] + ":var(--grid)"
			case n >= faintRole:
				return fmt.Sprintf("%s:var(--c%d);fill-opacity:.08", m[1], n-faintRole)
			case n >= bandRole:
				return fmt.Sprintf("%s:var(--c%d);fill-opacity:.16", m[1], n-bandRole)
			default:
				return fmt.Sprintf("%s:var(--c%d)", m[1], n)
			}
		})
	})
	who := `role="img" aria-label="` + html.EscapeString(title) + `"`
	if title == "" {
		who = `aria-hidden="true"`
	}
	return template.HTML(fmt.Sprintf(`<svg class="%s" viewBox="0 0 %g %g" %s>`, f.class, f.width, height, who) + "\n" + body)
}
