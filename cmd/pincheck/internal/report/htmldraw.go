package report

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A drawing is an SVG element, which the template plot writes. Its colours and its font are those of the
// style sheet: a class such as c3 is the colour of the fourth line. One without a title is for decoration.
type drawing struct {
	Class, Title  string
	Width, Height float64
	Shapes        []shape
	Texts         []plotText
}

// A shape is a path that is filled, or drawn as a line of a width.
type shape struct {
	Class, Path string
	Stroke      float64
	Dashes      string
}

// A plotText is text of a plot. Its class says on which side of X it is.
type plotText struct {
	X, Y        float64 // Y is its base line
	Class, Text string
}

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
	valueSize = 11 // of the values at bars
	rise      = 4  // from the middle of a text to its base line
	lineWidth = 1.75
	barHeight = 15
	barGap    = 12 // between groups
	styles    = 8  // colours and markers
)

// styleClass returns the class of a style's colour. Styles repeat after eight; then lines are dashed.
func styleClass(style int) string {
	switch style {
	case common:
		return "dim"
	case inked:
		return "ink"
	}
	return "c" + strconv.Itoa(style%styles)
}

// A pen writes a path. Tenths of a pixel are exact enough.
type pen struct{ strings.Builder }

func (p *pen) add(command byte, at ...float64) {
	p.WriteByte(command)
	for i, v := range at {
		if i > 0 {
			p.WriteByte(' ')
		}
		p.WriteString(strconv.FormatFloat(tenths(v), 'f', -1, 64))
	}
}

// tenths rounds to tenths. It rounds to millionths first: a value between two tenths is the same on processors
// that fuse a multiplication with an addition and on those that do not.
func tenths(v float64) float64 { return math.Round(math.Round(1e6*v)/1e5) / 10 }

// polygon returns the path of a closed outline, or of an open line.
func polygon(closed bool, points ...[2]float64) string {
	var p pen
	for i, at := range points {
		p.add("ML"[min(i, 1)], at[0], at[1])
	}
	if closed {
		p.WriteByte('Z')
	}
	return p.String()
}

// segment returns the path from one place to another.
func segment(x1, y1, x2, y2 float64) string {
	return polygon(false, [2]float64{x1, y1}, [2]float64{x2, y2})
}

// box returns the path of a rectangle.
func box(x1, y1, x2, y2 float64) string {
	return polygon(true, [2]float64{x1, y1}, [2]float64{x2, y1}, [2]float64{x2, y2}, [2]float64{x1, y2})
}

// markers returns the path of a style's marker at each place, and whether it is filled. Colours alone do not
// tell lines apart for every reader, and not on every printer.
func markers(style int, r float64, places ...[2]float64) (path string, filled bool) {
	var p pen
	kind := style % styles
	for _, at := range places {
		x, y := at[0], at[1]
		switch kind {
		case 0, 3: // disc, ring
			p.add('M', x-r, y)
			p.add('a', r, r, 0, 1, 0, 2*r, 0)
			p.add('a', r, r, 0, 1, 0, -2*r, 0)
			p.WriteByte('Z')
		case 1, 4:
			p.WriteString(box(x-r, y-r, x+r, y+r))
		case 2, 5:
			p.WriteString(polygon(true, [2]float64{x, y - 1.2*r}, [2]float64{x + 1.1*r, y + r}, [2]float64{x - 1.1*r, y + r}))
		case 6:
			p.WriteString(segment(x-r, y-r, x+r, y+r) + segment(x-r, y+r, x+r, y-r))
		case 7:
			p.WriteString(segment(x-1.2*r, y, x+1.2*r, y) + segment(x, y-1.2*r, x, y+1.2*r))
		}
	}
	return p.String(), kind < 3
}

// line adds a line of a class.
func (d *drawing) line(class, path string, width float64, dashes string) {
	d.Shapes = append(d.Shapes, shape{class + " line", path, tenths(width), dashes})
}

// fill adds a surface of a class.
func (d *drawing) fill(class, path string) {
	d.Shapes = append(d.Shapes, shape{Class: class, Path: path})
}

// text adds text. Side is start, middle or end: where X is in it.
func (d *drawing) text(x, y float64, side, class, text string) {
	if text != "" {
		d.Texts = append(d.Texts, plotText{tenths(x), tenths(y), strings.TrimSpace(side + " " + class), text})
	}
}

// stroke draws a line in a style, with its markers.
func (d *drawing) stroke(style int, width, radius float64, line, marked [][2]float64) {
	dashes := ""
	if style >= styles {
		dashes = "1 3"
	}
	d.line(styleClass(style), polygon(false, line...), width, dashes)
	path, filled := markers(style, radius, marked...)
	if filled {
		d.fill(styleClass(style), path)
	} else {
		d.line(styleClass(style), path, 1.25, "")
	}
}

const dashed = "6 4" // a reference

// drawChart draws a chart.
func drawChart(c chart, f format) *drawing {
	d := &drawing{Class: f.class, Title: c.title, Width: f.width}
	if c.groups != nil {
		d.bars(c, f)
	} else {
		d.Height = f.height
		d.lines(c, f)
	}
	return d
}

// A mark is one of an axis: its place from 0 to 1, and its text.
type mark struct {
	at   float64
	text string
}

// marks returns the marks of an axis, so many at most, and so few that their texts fit beside one another
// into a length. A length of 0 is for an axis that goes up.
func (a axis) marks(limit int, length float64) []mark {
	for ; ; limit-- {
		var out []mark
		end, fits := math.Inf(-1), true
		for _, m := range a.scale.every(limit) {
			one := mark{a.scale.at(m), a.scale.text(m, a.unit)}
			half := textWidth(one.text, textSize) / 2
			fits = fits && (length == 0 || one.at*length-half > end)
			end = one.at*length + half + 6
			out = append(out, one)
		}
		if fits || limit <= 2 {
			return out
		}
	}
}

// lines draws lines with the range of their samples, over numbers.
func (d *drawing) lines(c chart, f format) {
	ys := c.y.marks(7, 0)
	left := 0.0
	for _, m := range ys {
		left = max(left, textWidth(m.text, textSize)+8)
	}
	top, right, bottom := 30.0, f.width-8, f.height-42
	at := func(x, y float64) [2]float64 {
		return [2]float64{left + (right-left)*c.x.scale.at(x), bottom - (bottom-top)*c.y.scale.at(y)}
	}
	for _, m := range ys {
		y := bottom - (bottom-top)*m.at
		d.line("grid", segment(left, y, right, y), 1, "")
		d.text(left-8, y+rise, "end", "dim", m.text)
	}
	d.line("dim", segment(left, bottom, right, bottom), 1, "")
	for _, m := range c.x.marks(f.marks, right-left) {
		x := left + (right-left)*m.at
		d.line("dim", segment(x, bottom, x, bottom+4), 1, "")
		half := textWidth(m.text, textSize) / 2
		d.text(min(max(x, half), f.width-half), bottom+18, "middle", "dim", m.text)
	}
	d.text(0, textSize, "start", "dim", fitting(c.y.label, textSize, f.width))
	d.text(f.width, f.height-5, "end", "dim", fitting(c.x.label, textSize, f.width))
	for _, y := range c.expected {
		var places [][2]float64
		for _, p := range y.points {
			places = append(places, at(p.x, p.y))
		}
		if y.style == common {
			places = [][2]float64{{left, places[0][1]}, {right, places[0][1]}}
		}
		d.line(styleClass(y.style), polygon(false, places...), 1.5, dashed)
	}
	band := " band"
	if len(c.lines) > 4 {
		band = " faint"
	}
	for _, l := range c.lines {
		var around [][2]float64
		for _, p := range l.points {
			around = append(around, at(p.x, p.high))
		}
		for _, p := range slices.Backward(l.points) {
			around = append(around, at(p.x, p.low))
		}
		d.fill(styleClass(l.style)+band, polygon(true, around...))
	}
	for i, l := range c.lines {
		var places [][2]float64
		for _, p := range l.points {
			places = append(places, at(p.x, p.y))
		}
		// Lines further down are wider, so that one which another covers can be seen.
		below := 0.45 * float64(min(len(c.lines)-1-i, 3))
		d.stroke(l.style, lineWidth+below, 3+below, places, places)
	}
}

// bars draws horizontal bars in groups, for conditions that are no numbers.
func (d *drawing) bars(c chart, f format) {
	const top = 6.0
	var named, valued float64 // widths of names and values
	value := func(p point) string { return number(p.y/c.y.scale.unit.Factor, 3) }
	for _, name := range c.groups {
		for _, line := range twoLines(name, textSize, f.names*f.width) {
			named = max(named, textWidth(line, textSize)+8)
		}
	}
	for _, l := range c.lines {
		for _, p := range l.points {
			valued = max(valued, textWidth(value(p), valueSize)+8)
		}
	}
	left, right := named, f.width-valued
	at := func(v float64) float64 { return left + (right-left)*c.y.scale.at(v) }
	zero := at(min(max(0, c.y.scale.min), c.y.scale.max))
	y := top
	var bars drawing // over the grid, whose height is known at the end
	for group, name := range c.groups {
		first := y
		for _, l := range c.lines {
			for _, p := range l.points {
				if int(p.x) != group {
					continue
				}
				reach := bars.bar(p, l.style, y, zero, at)
				for _, e := range c.expected {
					for _, known := range e.points {
						if e.line == l.style && int(known.x) == group {
							x := at(known.y)
							bars.line("ink", segment(x, y+1, x, y+barHeight-1), 1.5, "3 2")
							reach = max(reach, x)
						}
					}
				}
				bars.text(reach+5, y+barHeight/2+rise, "start", "value", value(p))
				y += barHeight
			}
		}
		if y == first { // none here, in this panel
			continue
		}
		names := twoLines(name, textSize, f.names*f.width)
		for i, line := range names {
			middle := (first+y)/2 + 14*(float64(i)-float64(len(names)-1)/2)
			bars.text(left-8, middle+rise, "end", "", line)
		}
		y = max(y, first+14*float64(len(names))) + barGap
	}
	bottom := y - barGap + 6
	d.Height = bottom + 40
	for _, m := range c.y.marks(min(f.marks, 7), right-left) {
		x := left + (right-left)*m.at
		d.line("grid", segment(x, 0, x, bottom), 1, "")
		half := textWidth(m.text, textSize) / 2
		d.text(min(max(x, half), f.width-half), bottom+15, "middle", "dim", m.text)
	}
	d.text(right, d.Height-5, "end", "dim", fitting(c.y.label, textSize, right))
	d.Shapes, d.Texts = append(d.Shapes, bars.Shapes...), append(d.Texts, bars.Texts...)
}

// bar draws one bar with the range of its samples. It returns where it ends.
func (d *drawing) bar(p point, style int, y, zero float64, at func(float64) float64) float64 {
	end, low, high := at(p.y), at(p.low), at(p.high)
	d.fill(styleClass(style), box(zero, y+1, end, y+barHeight-1))
	if high-low > 1 {
		middle := y + barHeight/2.0
		d.line("ink", segment(low, middle, high, middle)+segment(low, middle-3, low, middle+3)+segment(high, middle-3, high, middle+3), 1, "")
	}
	return max(end, high, zero)
}

// swatch is what a line or a bar looks like, for a legend.
func swatch(style int, asBar bool) *drawing {
	d := &drawing{Class: "swatch", Width: 26, Height: 12}
	if asBar {
		d.fill(styleClass(style), box(7, 0, 19, 12))
	} else {
		d.stroke(style, lineWidth, 3, [][2]float64{{1, 6}, {25, 6}}, [][2]float64{{13, 6}})
	}
	return d
}

// dashedSwatch returns the legend's sample of a reference.
func dashedSwatch(style int) *drawing {
	d := &drawing{Class: "swatch", Width: 26, Height: 12}
	d.line(styleClass(style), segment(1, 6, 25, 6), 1.5, dashed)
	return d
}

// same reports whether two drawings look the same.
func (d *drawing) same(o *drawing) bool { return slices.Equal(d.Shapes, o.Shapes) }

// textWidth is how wide a text is at most, whatever font the reader has: the widths are those of DejaVu Sans,
// which is wider than the other common ones.
func textWidth(text string, size float64) float64 {
	ems := 0.0
	for _, r := range text {
		switch {
		case strings.ContainsRune("ijl.,:;'|! \u202f\u00a0", r):
			ems += 0.34
		case strings.ContainsRune("ftrI()[]-/", r):
			ems += 0.42
		case strings.ContainsRune("mwMW@%→…", r):
			ems += 1
		case r >= 'A' && r <= 'Z' || r == '+' || r == '=' || r == '−' || r == '<' || r == '>' || r == '&':
			ems += 0.84
		case r < 0x2000:
			ems += 0.64
		default:
			ems++
		}
	}
	return ems * size
}

// fitting cuts a text to a width.
func fitting(name string, size, width float64) string {
	for n := min(utf8.RuneCountInString(name), 200); n > 1; n-- {
		if cut := shorten(name, n); textWidth(cut, size) <= width {
			return cut
		}
	}
	return shorten(name, 1)
}

// twoLines breaks a name that is wider than its place, and cuts what is left over.
func twoLines(name string, size, width float64) []string {
	words := strings.Fields(name)
	n := len(words)
	for n > 1 && textWidth(strings.Join(words[:n], " "), size) > width {
		n--
	}
	if n >= len(words) || textWidth(words[0], size) > width {
		return []string{fitting(name, size, width)}
	}
	return []string{strings.Join(words[:n], " "), fitting(strings.Join(words[n:], " "), size, width)}
}
