package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A plot is an SVG element that is as wide as the page allows: x is in percent and y in pixels, so text has the same
// size at every width and on paper. Left and Right are the margins for text, in pixels.
type plot struct {
	Height, Left, Right int
	Shapes              []shape
}

// A shape is a line, bar, text, polyline or marker of a plot. Its class has its color.
type shape struct {
	Kind, Class      string
	X, X2, Y, Y2     string
	Anchor, DX, Text string
	More             string // muted, behind Text
}

// A trace is one line of a plot, or the bars of one color. Points have the order of their X.
type trace struct {
	Name, Class string
	Points      []point
	Hollow      bool // marks without a line: a GPU that another one's line stands for
}

// A point is one series: its median, lowest and highest sample. For bars and dots X is the number of the category.
type point struct{ X, Y, Low, High float64 }

// A level is a reference, drawn as a dashed line. There is one at most.
type level struct {
	Y    float64
	Text string
}

// A chart is what a plot shows.
type chart struct {
	Traces []trace
	Names  []string // of categories; none for lines over numbers
	Heads  map[int]string
	XText  func(float64) string
	Log    bool // the numbers along the axis double
	XLabel string
	Unit   units.Unit
	Level  *level
}

const (
	textSize  = 12
	lowest    = 210 // the axis of lines, in pixels
	highest   = 22
	steady    = 0.05 // a range below this share of the median is not drawn
	minLabels = 16   // between the middles of two texts, in pixels
)

func px(v float64) string {
	return strconv.FormatFloat(math.Round(math.Round(1e6*v)/1e5)/10, 'f', -1, 64)
}
func inPercent(v float64) string {
	return strconv.FormatFloat(math.Round(1e4*v)/100, 'f', -1, 64) + "%"
}

func (p *plot) line(class, x, x2 string, y, y2 float64) {
	p.Shapes = append(p.Shapes, shape{Kind: "line", Class: class, X: x, X2: x2, Y: px(y), Y2: px(y2)})
}

func (p *plot) text(class, x string, dx int, y float64, anchor, text, more string) {
	p.Shapes = append(p.Shapes, shape{Kind: "text", Class: class, X: x, DX: strconv.Itoa(dx), Y: px(y), Anchor: anchor, Text: text, More: more})
}

// number formats a value with three significant digits.
func (c *chart) number(v float64) string { return units.Number(v/c.Unit.Factor, 3) }

// greatest returns the largest value that is drawn.
func (c *chart) greatest() float64 {
	top := 0.0
	for _, t := range c.Traces {
		for _, p := range t.Points {
			top = max(top, p.Y, p.High)
		}
	}
	if c.Level != nil {
		top = max(top, c.Level.Y)
	}
	return top
}

// drawLines draws lines with marks over numbers. Their names are at their ends.
func drawLines(c chart) *plot {
	p := &plot{Height: lowest + 22}
	if c.XLabel != "" {
		p.Height += 14
	}
	top := c.greatest() / c.Unit.Factor
	step := roundStep(top / 5)
	marks := max(math.Ceil(top/step-1e-9), 1)
	at := func(y float64) float64 {
		return lowest - (lowest-highest)*min(max(y/c.Unit.Factor/step/marks, 0), 1)
	}
	for i := range int(marks) + 1 {
		y, class, text := lowest-(lowest-highest)*float64(i)/marks, "gl", tidy(step*float64(i))
		if i == 0 {
			class = "ax"
		}
		p.line(class, "0", "100%", y, y)
		p.text("m", "0", -8, y+4, "end", text, "")
		p.Left = max(p.Left, int(textWidth(text))+10)
	}
	p.Left = max(p.Left, int(textWidth(c.Unit.Name)))
	p.text("m", "0", -p.Left, 6, "", c.Unit.Name, "")
	var xs []float64
	for _, t := range c.Traces {
		for _, point := range t.Points {
			xs = append(xs, point.X)
		}
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	place := func(x float64) float64 {
		low, high := xs[0], xs[len(xs)-1]
		if c.Log {
			x, low, high = math.Log(x), math.Log(low), math.Log(high)
		}
		if high <= low {
			return 0.5
		}
		return (x - low) / (high - low)
	}
	every := (len(xs) + 4) / 5
	for i := len(xs) - 1; i >= 0; i -= every {
		p.text("m", inPercent(place(xs[i])), 0, lowest+17, "middle", c.XText(xs[i]), "")
	}
	if c.XLabel != "" {
		p.text("m", "50%", 0, lowest+33, "middle", c.XLabel, "")
	}
	type end struct {
		y, at             float64
		class, text, more string
	}
	var ends []end
	if c.Level != nil {
		y := at(c.Level.Y)
		p.line("rf", "0", "100%", y, y)
		ends = append(ends, end{y: y, class: "m", text: c.number(c.Level.Y) + " " + c.Level.Text})
	}
	for _, t := range c.Traces {
		if t.Hollow || len(t.Points) == 0 {
			continue
		}
		var path []string
		for _, point := range t.Points {
			path = append(path, strings.TrimSuffix(inPercent(place(point.X)), "%")+","+px(at(point.Y)))
			if point.High-point.Low > steady*point.Y {
				p.line("rg", inPercent(place(point.X)), inPercent(place(point.X)), at(point.Low), at(point.High))
			}
		}
		p.Shapes = append(p.Shapes, shape{Kind: "path", Class: t.Class, Text: strings.Join(path, " "), Y: strconv.Itoa(p.Height)})
		last := t.Points[len(t.Points)-1]
		ends = append(ends, end{y: at(last.Y), class: "s c " + t.Class, text: c.number(last.Y) + " " + clip(t.Name, 26)})
	}
	slices.SortStableFunc(c.Traces, func(a, b trace) int { return cmp.Compare(b2i(b.Hollow), b2i(a.Hollow)) })
	for _, t := range c.Traces {
		for _, point := range t.Points {
			p.mark(t.Class, t.Hollow, inPercent(place(point.X)), at(point.Y))
		}
	}
	slices.SortStableFunc(ends, func(a, b end) int { return cmp.Compare(a.y, b.y) })
	for i := range ends { // colliding labels move apart, half of the way up
		ends[i].at = ends[i].y
		if i > 0 {
			ends[i].at = max(ends[i].y, ends[i-1].at+minLabels)
		}
	}
	for i := len(ends) - 1; i >= 0; i-- {
		limit := float64(lowest)
		if i < len(ends)-1 {
			limit = ends[i+1].at - minLabels
		}
		ends[i].at = min(ends[i].at, limit)
	}
	for _, e := range ends {
		p.text(e.class, "100%", 10, e.at+4, "", e.text, e.more)
		p.Right = max(p.Right, int(textWidth(e.text))+12)
	}
	return p
}

// b2i returns 1 for true.
func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// mark adds the mark of a class: each color has a shape of its own.
func (p *plot) mark(class string, hollow bool, x string, y float64) {
	kind, style := "circle", "pt"
	switch class {
	case "frm":
		kind = "square"
	case "both":
		kind = "diamond"
	case "alt":
		kind = "triangle"
	}
	if hollow {
		style = "rn"
	}
	p.Shapes = append(p.Shapes, shape{Kind: kind, Class: class, Text: style, X: x, Y: px(y)})
}

// drawBars draws bars from zero, in the order of the categories, with the values at their ends.
func drawBars(c chart) *plot {
	p := &plot{}
	top := c.greatest()
	if top <= 0 {
		top = 1
	}
	at := func(v float64) string { return inPercent(min(max(v/top, 0), 1)) }
	y := 4.0
	if c.Level != nil {
		y = 20
	}
	start := y - 6
	several := len(c.Traces) > 1
	high, gap := 18.0, 12.0
	if several {
		high = 10
	}
	named := map[string]bool{}
	for i, name := range c.Names {
		if head := c.Heads[i]; head != "" {
			p.text("m s", "0", 0, y+11, "head", clip(head, 40), "")
			y += 20
		}
		first := y
		for _, t := range c.Traces {
			for _, point := range t.Points {
				if int(point.X) != i {
					continue
				}
				p.Shapes = append(p.Shapes, shape{Kind: "rect", Class: t.Class, X2: at(point.Y), Y: px(y), Y2: px(high)})
				end := point.Y
				if point.High-point.Low > steady*point.Y {
					p.line("rg", at(point.Low), at(point.High), y+high/2, y+high/2)
					end = max(end, point.High)
				}
				more := ""
				if several && !named[t.Name] {
					named[t.Name], more = true, " "+clip(t.Name, 20)
				}
				text := c.number(point.Y)
				p.text("s", at(end), 7, y+high/2+4, "", text, more)
				p.Right = max(p.Right, int(textWidth(text+more))+14)
				y += high + 3
			}
		}
		if y > first {
			p.text("", "0", 0, (first+y-3)/2+4, "name", clip(name, 26), "")
			p.Left = max(p.Left, int(textWidth(clip(name, 26)))+10)
			y += gap
		}
	}
	p.Height = int(y)
	for i := range p.Shapes { // names begin at the left margin
		if s := &p.Shapes[i]; s.Anchor == "name" || s.Anchor == "head" {
			s.Anchor, s.DX = "", strconv.Itoa(-p.Left)
		}
	}
	if c.Level != nil {
		p.line("rf", at(c.Level.Y), at(c.Level.Y), start, y-6)
		anchor := "end"
		if c.Level.Y < top/2 {
			anchor = "start"
		}
		p.text("", at(c.Level.Y), 0, 9, anchor, c.Level.Text+" "+c.number(c.Level.Y), "")
	}
	return p
}

// drawDots draws a row of dots for each category, one dot for each value. Traces with a name are outliers.
func drawDots(c chart, medians []float64) *plot {
	const row = 76
	p := &plot{Height: row*len(c.Names) + 24}
	low, high := math.Inf(1), c.greatest()
	for _, t := range c.Traces {
		for _, point := range t.Points {
			low = min(low, point.Y)
		}
	}
	step := roundStep((high - low) / 4)
	low, high = max(0, math.Floor(low/step-0.2)*step), math.Ceil(high/step+0.2)*step
	at := func(v float64) string { return inPercent(min(max((v-low)/(high-low), 0), 1)) }
	for v := low; v <= high+step/2; v += step {
		p.line("gl", at(v), at(v), 8, float64(row*len(c.Names)))
		p.text("m", at(v), 0, float64(p.Height-6), "middle", tidy(v), "")
	}
	for i, name := range c.Names {
		y := float64(row*i) + 44
		p.text("", "0", 0, y+4, "name", name, "")
		p.Left = max(p.Left, int(textWidth(name))+14)
		p.line("rf", at(medians[i]), at(medians[i]), y-20, y+20)
		p.text("m", at(medians[i]), 0, y-26, "middle", "median "+c.number(medians[i]), "")
		n, named := 0, 0
		for _, t := range c.Traces {
			for _, point := range t.Points {
				if int(point.X) != i {
					continue
				}
				if t.Name == "" { // dots of equal values stand apart
					p.mark(t.Class, false, at(point.Y), y+float64(n*5%27)-13)
					n++
					continue
				}
				p.mark(t.Class, false, at(point.Y), y)
				dy := []float64{-9, 18}[named%2]
				p.text("s c "+t.Class, at(point.Y), 0, y+dy, "middle", clip(t.Name, 16), " "+c.number(point.Y))
				named++
			}
		}
	}
	for i := range p.Shapes {
		if s := &p.Shapes[i]; s.Anchor == "name" {
			s.Anchor, s.DX = "", strconv.Itoa(-p.Left)
		}
	}
	p.Right = 24
	return p
}

// describe says in words what a chart shows, for readers who do not see it.
func (c *chart) describe() string {
	var parts []string
	for _, t := range c.Traces {
		var values []string
		for _, p := range t.Points[:min(len(t.Points), 24)] {
			name := ""
			if c.Names != nil {
				name = c.Names[int(p.X)]
			} else {
				name = c.XText(p.X)
			}
			values = append(values, name+" "+c.number(p.Y))
		}
		parts = append(parts, joinedWith(": ", t.Name, strings.Join(values, ", ")))
	}
	if c.Level != nil {
		parts = append(parts, fmt.Sprintf("%s: %s", c.Level.Text, c.number(c.Level.Y)))
	}
	return strings.TrimSpace(c.Unit.Name + ". " + strings.Join(parts, "; ") + ".")
}

// roundStep returns the next of 1, 2, 2.5 and 5 times a power of ten.
func roundStep(v float64) float64 {
	if !(v > 0) || math.IsInf(v, 0) {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 2.5, 5} {
		if m*power >= v*(1-1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// tidy formats a mark of an axis, without zeros at the end.
func tidy(v float64) string {
	short, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 6, 64), 64) // of a number: it parses
	return units.Number(short, units.AllDigits)
}

// textWidth is how wide a text is at most, in pixels, whatever font the reader has: the widths are those of DejaVu
// Sans, which is wider than the other common ones.
func textWidth(text string) float64 {
	ems := 0.0
	for _, r := range text {
		switch {
		case strings.ContainsRune("ijl.,:;'|! \u202f\u00a0", r):
			ems += 0.34
		case strings.ContainsRune("ftrI()[]-/", r):
			ems += 0.42
		case r == 'm' || r == 'w' || r == 'M' || r == 'W' || r >= 0x2000:
			ems++
		case r >= 'A' && r <= 'Z' || r == '+' || r == '%':
			ems += 0.84
		default:
			ems += 0.64
		}
	}
	return ems * textSize
}

var perTime = units.Scale{{Factor: 1, Name: "/s"}, {Factor: 1e3, Name: "k/s"}, {Factor: 1e6, Name: "M/s"}, {Factor: 1e9, Name: "G/s"}}

// unitFor returns the unit in which values up to v are written.
func unitFor(u result.Unit, v float64) units.Unit {
	switch u {
	case result.Bytes:
		return units.Memory.Unit(v, 3)
	case result.Seconds:
		return units.Time.Unit(v, 3)
	case result.PerSecond:
		return perTime.Unit(v, 3)
	case result.Ratio, result.Count:
		return units.Unit{Factor: 1}
	}
	return units.Unit{Factor: 1, Name: clip(unitText(u), 24)}
}
