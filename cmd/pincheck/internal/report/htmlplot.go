package report

import (
	"cmp"
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

// A shape is a line, bar, text, polyline or mark of a plot. Its class has its color.
type shape struct {
	Kind, Class, X, X2, Y, Y2 string
	Anchor, DX, Text, More    string // More is muted, behind Text
}

// A trace is one line of a plot, or the bars of one color. Points have the order of their X.
type trace struct {
	Name, Class string
	Points      []point
	Hollow      bool // marks without a line: a GPU that another one's line stands for
}

// A point is one series: its median, lowest and highest sample. For bars and dots X is the number of the category.
type point struct{ X, Y, Low, High float64 }

// A level is the reference, drawn as a dashed line.
type level struct {
	Y    float64
	Text string
}

// A chart is what a plot shows. Names are those of categories, and Heads what stands above them; lines have neither.
type chart struct {
	Traces       []trace
	Names, Heads []string
	XText        func(float64) string
	Log          bool // the numbers along the axis double
	Unit         units.Unit
	Level        *level
}

const (
	textSize  = 12
	lowest    = 210 // the axis of lines, in pixels
	highest   = 22
	minLabels = 16   // between two texts, in pixels
	steady    = 0.05 // a range below this share of the median is not drawn
)

func px(v float64) string {
	return strconv.FormatFloat(math.Round(math.Round(1e6*v)/1e5)/10, 'f', -1, 64)
}

func inPercent(v float64) string {
	return strconv.FormatFloat(math.Round(1e4*min(max(v, 0), 1))/100, 'f', -1, 64) + "%"
}

func (p *plot) line(class, x, x2 string, y, y2 float64) {
	p.Shapes = append(p.Shapes, shape{Kind: "line", Class: class, X: x, X2: x2, Y: px(y), Y2: px(y2)})
}

func (p *plot) text(class, x string, dx int, y float64, anchor, text, more string) {
	p.Shapes = append(p.Shapes, shape{Kind: "text", Class: class, X: x, DX: strconv.Itoa(dx), Y: px(y), Anchor: anchor, Text: text, More: more})
}

// mark adds the mark of a class: each color has a form of its own.
func (p *plot) mark(t *trace, x string, y float64) {
	kind := cmp.Or(map[string]string{"frm": "square", "both": "diamond", "alt": "triangle"}[t.Class], "circle")
	p.Shapes = append(p.Shapes, shape{Kind: kind, Class: t.Class, Text: []string{"pt", "rn"}[b2i(t.Hollow)], X: x, Y: px(y)})
}

// b2i returns 1 for true.
func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// number formats a value with three significant digits.
func (c *chart) number(v float64) string { return units.Number(v/c.Unit.Factor, 3) }

// greatest returns the largest value that is drawn.
func (c *chart) greatest() (top float64) {
	if c.Level != nil {
		top = c.Level.Y
	}
	for _, t := range c.Traces {
		for _, p := range t.Points {
			top = max(top, p.High)
		}
	}
	return top
}

// wide reports whether the range of a point is drawn.
func (p point) wide() bool { return p.High-p.Low > steady*p.Y }

// drawLines draws lines with marks over numbers. Their names are at their ends.
func drawLines(c chart) *plot {
	p := &plot{Height: lowest + 22, Left: int(textWidth(c.Unit.Name))}
	top := c.greatest() / c.Unit.Factor
	step := roundStep(top / 5)
	marks := max(math.Ceil(top/step-1e-9), 1)
	at := func(y float64) float64 { return lowest - (lowest-highest)*min(max(y/c.Unit.Factor/step/marks, 0), 1) }
	for i := range int(marks) + 1 {
		v := step * float64(i)
		p.line([]string{"ax", "gl"}[b2i(i > 0)], "0", "100%", at(v*c.Unit.Factor), at(v*c.Unit.Factor))
		p.text("m", "0", -8, at(v*c.Unit.Factor)+4, "end", tidy(v), "")
		p.Left = max(p.Left, int(textWidth(tidy(v)))+10)
	}
	p.text("m", "0", -p.Left, 6, "", c.Unit.Name, "")
	var xs []float64
	for _, t := range c.Traces {
		for _, point := range t.Points {
			xs = append(xs, point.X)
		}
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	place := func(x float64) string {
		low, high := xs[0], xs[len(xs)-1]
		if c.Log {
			x, low, high = math.Log(x), math.Log(low), math.Log(high)
		}
		if high <= low {
			return "50%"
		}
		return inPercent((x - low) / (high - low))
	}
	for i := len(xs) - 1; i >= 0; i -= (len(xs) + 4) / 5 {
		p.text("m", place(xs[i]), 0, lowest+17, "middle", c.XText(xs[i]), "")
	}
	var ends []lineEnd
	if c.Level != nil {
		p.line("rf", "0", "100%", at(c.Level.Y), at(c.Level.Y))
		ends = append(ends, lineEnd{at(c.Level.Y), "m", c.number(c.Level.Y) + " " + c.Level.Text})
	}
	slices.SortStableFunc(c.Traces, func(a, b trace) int { return cmp.Compare(b2i(b.Hollow), b2i(a.Hollow)) }) // those below
	for i := range c.Traces {
		t := &c.Traces[i]
		var path []string
		for _, point := range t.Points {
			path = append(path, strings.TrimSuffix(place(point.X), "%")+","+px(at(point.Y)))
			if point.wide() && !t.Hollow {
				p.line("rg", place(point.X), place(point.X), at(point.Low), at(point.High))
			}
		}
		if !t.Hollow {
			p.Shapes = append(p.Shapes, shape{Kind: "path", Class: t.Class, Text: strings.Join(path, " "), Y: strconv.Itoa(p.Height)})
			last := t.Points[len(t.Points)-1]
			ends = append(ends, lineEnd{at(last.Y), "s c " + t.Class, c.number(last.Y) + " " + clip(t.Name, 26)})
		}
		for _, point := range t.Points {
			p.mark(t, place(point.X), at(point.Y))
		}
	}
	p.nameEnds(ends)
	return p
}

// A lineEnd is the text at the end of a line.
type lineEnd struct {
	y           float64
	class, text string
}

// nameEnds writes texts to the right of the lines. Those that collide move apart: down, and up again from the axis.
func (p *plot) nameEnds(ends []lineEnd) {
	slices.SortStableFunc(ends, func(a, b lineEnd) int { return cmp.Compare(a.y, b.y) })
	for i := 1; i < len(ends); i++ {
		ends[i].y = max(ends[i].y, ends[i-1].y+minLabels)
	}
	for i, limit := len(ends)-1, float64(lowest); i >= 0; i, limit = i-1, ends[i].y-minLabels {
		ends[i].y = min(ends[i].y, limit)
		p.text(ends[i].class, "100%", 10, ends[i].y+4, "", ends[i].text, "")
		p.Right = max(p.Right, int(textWidth(ends[i].text))+12)
	}
}

// drawBars draws bars from zero, with the values at their ends.
func drawBars(c chart) *plot {
	p := &plot{}
	top := max(c.greatest(), math.SmallestNonzeroFloat64)
	for _, name := range c.Names {
		p.Left = max(p.Left, int(textWidth(clip(name, 26)))+10)
	}
	at := func(v float64) string { return inPercent(v / top) }
	y, high := 4+16*float64(b2i(c.Level != nil)), 18-8*float64(b2i(len(c.Traces) > 1))
	start := y - 6
	named := map[string]bool{}
	for i, name := range c.Names {
		if c.Heads[i] != "" {
			p.text("m s", "0", -p.Left, y+11, "", clip(c.Heads[i], 40), "")
			y += 20
		}
		first := y
		for _, t := range c.Traces {
			for _, point := range t.Points {
				if int(point.X) != i {
					continue
				}
				p.Shapes = append(p.Shapes, shape{Kind: "rect", Class: t.Class, X2: at(point.Y), Y: px(y), Y2: px(high)})
				end, more := point.Y, ""
				if point.wide() {
					p.line("rg", at(point.Low), at(point.High), y+high/2, y+high/2)
					end = point.High
				}
				if !named[t.Name] && t.Name != "" {
					named[t.Name], more = true, " "+clip(t.Name, 20)
				}
				p.text("s", at(end), 7, y+high/2+4, "", c.number(point.Y), more)
				p.Right = max(p.Right, int(textWidth(c.number(point.Y)+more))+14)
				y += high + 3
			}
		}
		p.text("", "0", -p.Left, (first+y-3)/2+4, "", clip(name, 26), "")
		y += 12
	}
	p.Height = int(y)
	if c.Level != nil {
		p.line("rf", at(c.Level.Y), at(c.Level.Y), start, y-6)
		p.text("", at(c.Level.Y), 0, 9, []string{"end", "start"}[b2i(c.Level.Y < top/2)], c.Level.Text+" "+c.number(c.Level.Y), "")
	}
	return p
}

// drawDots draws a row of dots for each category, around the medians. Traces with a name are outliers.
func drawDots(c chart, medians []float64) *plot {
	const row = 76
	p := &plot{Height: row*len(c.Names) + 24, Right: 24}
	low, high := math.Inf(1), c.greatest()
	for _, t := range c.Traces {
		for _, point := range t.Points {
			low = min(low, point.Y)
		}
	}
	step := roundStep((high - low) / 4)
	low, high = max(0, math.Floor(low/step-0.2)*step), math.Ceil(high/step+0.2)*step
	at := func(v float64) string { return inPercent((v - low) / (high - low)) }
	for v := low; v <= high+step/2; v += step {
		p.line("gl", at(v), at(v), 8, float64(row*len(c.Names)))
		p.text("m", at(v), 0, float64(p.Height-6), "middle", tidy(v), "")
	}
	for _, name := range c.Names {
		p.Left = max(p.Left, int(textWidth(name))+14)
	}
	for i, name := range c.Names {
		y := float64(row*i) + 44
		p.text("", "0", -p.Left, y+4, "", name, "")
		p.line("rf", at(medians[i]), at(medians[i]), y-20, y+20)
		p.text("m", at(medians[i]), 0, y-26, "middle", "median "+c.number(medians[i]), "")
		named := 0
		for j := range c.Traces {
			t := &c.Traces[j]
			for n, point := range t.Points {
				if int(point.X) != i {
					continue
				}
				if t.Name == "" { // dots of equal values stand apart
					p.mark(t, at(point.Y), y+float64(n*5%27)-13)
					continue
				}
				p.mark(t, at(point.Y), y)
				p.text("s c "+t.Class, at(point.Y), 0, y+[]float64{-9, 18}[named%2], "middle", clip(t.Name, 16), " "+c.number(point.Y))
				named++
			}
		}
	}
	return p
}

// describe says in words what a chart shows, for readers who do not see it.
func (c *chart) describe() string {
	parts := []string{c.Unit.Name}
	for _, t := range c.Traces {
		var values []string
		for _, p := range t.Points[:min(len(t.Points), maxBars)] {
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
		parts = append(parts, c.Level.Text+" "+c.number(c.Level.Y))
	}
	return joinedWith("; ", parts...) + "."
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
func textWidth(text string) (width float64) {
	for _, r := range text {
		switch {
		case strings.ContainsRune("ijl.,:;'|! \u202f\u00a0ftrI()[]-/", r):
			width += 0.42 * textSize
		case r == 'm' || r == 'w' || r >= 'A' && r <= 'Z' || r == '+' || r == '%' || r >= 0x2000:
			width += 0.9 * textSize
		default:
			width += 0.64 * textSize
		}
	}
	return width
}

// unitFor returns the unit in which values up to v are written.
func unitFor(u result.Unit, v float64) units.Unit {
	switch u {
	case result.Bytes:
		return units.Memory.Unit(v, 3)
	case result.Seconds:
		return units.Time.Unit(v, 3)
	case result.PerSecond:
		return units.Scale{{Factor: 1, Name: "/s"}, {Factor: 1e3, Name: "k/s"}, {Factor: 1e6, Name: "M/s"}, {Factor: 1e9, Name: "G/s"}}.Unit(v, 3)
	case result.Ratio, result.Count:
		return units.Unit{Factor: 1}
	}
	return units.Unit{Factor: 1, Name: clip(unitText(u), 24)}
}
