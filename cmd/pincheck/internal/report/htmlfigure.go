package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A plan is a plot that a page has if its series are there. Its title is an answer, made of what is drawn: a compares
// with b, unless the plan has a title of its own.
type plan struct {
	bench, series string
	where         result.Labels
	x             string // lines over numbers if there are three, or else categories
	at            string // of this label only the largest number is drawn
	by            string // the label with the colors
	heads         string // the label that divides the categories
	level         string // the category that is the reference of the others
	a, b          string // of x, or of by for lines
	answer        string // with %s for how a compares with b
	title         func(d *drawn) string
	what          string
	findings      []string // that it supports
}

// inMemory are samples that cost the loader nothing to make.
var inMemory = result.Labels{{Key: "source", Value: "memory"}, {Key: "gpu_work", Value: "no"}}

// plans are in the order of their weight.
var plans = []plan{
	{bench: "bandwidth", series: "bandwidth", where: result.Labels{{Key: result.Memory, Value: "registered"}}, x: result.Size, by: result.Direction, title: sizesTitle, what: "by size of a copy, pinned memory",
		findings: strings.Fields("narrow_link slow_link narrow_upstream slow_copies asymmetric_copies slow_small_copies busy far_cpus far_memory pages_far throttled locked_memory_clock link_errors impossible_rate")},
	{bench: "bandwidth", series: "bandwidth", x: result.Memory, at: result.Size, by: result.Direction, a: "registered", b: "pageable",
		answer: "Pinned memory uploads %s pageable memory", what: "by kind of host memory", findings: strings.Fields("write_combined_slow slow_copies pages_far")},
	{bench: "alloc", series: "pin_rate", x: result.Method, at: result.Size, a: "hostmem", b: "cuda_host_alloc",
		answer: "hostmem.Alloc pins %s cudaHostAlloc", what: "pinned, by method", findings: strings.Fields("slow_pinning few_cpus thp_off fragmented_memory")},
	{bench: "files", series: "file_to_device", x: result.Method, at: result.Size, heads: "cache", level: "pinned", a: "staged", b: "mmap",
		answer: "Staging uploads a cached file %s mmap", what: "from a file, by method", findings: strings.Fields("weights_on_network weights_mapped small_read_ahead")},
	{bench: "overlap", series: "piped_rate", where: result.Labels{{Key: "pieces", Value: "16_pieces"}}, x: "streams", by: result.Direction, a: "8", b: "1",
		answer: "With GPU work after each piece, 8 streams copy %s one", what: "of copies in 16 pieces with GPU work after each"},
	{bench: "loader", series: "samples", where: inMemory, x: "workers", by: result.Memory, a: "pinned", b: "pageable",
		answer: "Pinned memory feeds the GPU %s pageable memory", what: "from memory, no GPU work, the fastest kind of copy", findings: []string{"few_cpus"}},
	{bench: "frames", series: "round_trip", x: result.Method, at: result.Size, a: "reused", b: "allocated_anew",
		answer: "Reused pinned buffers move frames %s new pageable ones", what: "both ways, by method"},
	{bench: "blocks", series: "blocks_bandwidth", where: result.Labels{{Key: result.Direction, Value: result.HostToDevice}, {Key: result.Size, Value: "4096"}}, x: result.Method, at: result.Blocks, a: "quickest", b: "copy_each",
		answer: "One batch uploads blocks of 4 KiB %s single copies", what: "to GPU, by method"},
	{bench: "managed", series: "managed_bandwidth", where: result.Labels{{Key: "advice", Value: "none"}}, x: result.Method, at: result.Size, a: "prefetch_to_device", b: "gpu_faults",
		answer: "Prefetching moves managed memory %s page faults", what: "managed memory, by method"},
}

// drawn is a plot in the making, and what its title may say. Of has values of the first GPU, to the device, by category
// and by color.
type drawn struct {
	chart
	lines  bool
	of     map[string]float64
	groups []gpuGroup
	gpus   []int
	head   string // of the first categories
	traces map[kind]int
	places map[category]int // in the order of their series
	values map[category]float64
}

// A category is a bar, with what stands above it.
type category struct{ head, x string }

// faster compares a with b: "6.3 times as fast as", "as fast as" or "at 80% of the speed of".
func faster(a, b float64) string {
	switch r := a / b; {
	case r >= 1.05:
		return units.Number(r, 2) + " times as fast as"
	case r > 0.95:
		return "as fast as"
	default:
		return "at " + percentOf(r) + " of the speed of"
	}
}

func byRate(a, b point) int { return cmp.Compare(a.Y, b.Y) }

// sizesTitle says from which size on copies are fast, or which GPU is slow.
func sizesTitle(d *drawn) string {
	if n := len(d.groups); n > 1 {
		return capital(slowest("", d.groups))
	}
	p := d.Traces[0].Points
	top := slices.MaxFunc(p, byRate).Y
	full := p[slices.IndexFunc(p, func(q point) bool { return q.Y >= 0.9*top })]
	if full.X == p[0].X {
		return fmt.Sprintf("Copies of every size measured reach %s of full speed", percentOf(p[0].Y/top))
	}
	return fmt.Sprintf("Copies reach full speed from %s up, and %s of it at %s", d.XText(full.X), percentOf(p[0].Y/top), d.XText(p[0].X))
}

// slowest compares the slowest GPUs with the fastest.
func slowest(when string, groups []gpuGroup) string {
	slow, fast := groups[len(groups)-1], groups[0]
	return fmt.Sprintf("%scopies to %s run at %s of the speed of those to %s", when, gpuNames(slow.gpus), percentOf(slow.rate/fast.rate), gpuNames(fast.gpus))
}

// A gpuGroup is GPUs whose copies are within 3% of each other.
type gpuGroup struct {
	gpus []int
	rate float64
}

const alike = 0.03

// groupsOf divides GPUs by their rates to the device, the fastest first.
func groupsOf(all []*result.Series) (groups []gpuGroup) {
	rates := map[int]float64{}
	for _, s := range all {
		if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil && s.Labels.Get(result.Direction) == result.HostToDevice {
			rates[n] = s.Median
		}
	}
	for _, gpu := range slices.SortedFunc(maps.Keys(rates), func(a, b int) int { return cmp.Or(cmp.Compare(rates[b], rates[a]), cmp.Compare(a, b)) }) {
		if n := len(groups); n == 0 || rates[gpu] < (1-alike)*groups[n-1].rate {
			groups = append(groups, gpuGroup{rate: rates[gpu]})
		}
		g := &groups[len(groups)-1]
		g.gpus = append(g.gpus, gpu)
		slices.Sort(g.gpus)
	}
	return groups
}

// maxFigures is how many plots a page has at most.
const maxFigures = 6

// figures returns the plots of experiments. With problems and warnings they are those that support them.
func figures(benches []result.Bench, findings []string) (out []figure) {
	known := map[string]bool{} // experiments that have a plot
	add := func(p *plan, b *result.Bench) {
		if f, ok := p.draw(b); ok && len(out) < maxFigures {
			out, known[b.Name] = append(out, f), true
		}
	}
	for i := range plans {
		p := &plans[i]
		at := slices.IndexFunc(benches, func(b result.Bench) bool { return b.Name == p.bench })
		if at >= 0 && (len(findings) == 0 || slices.ContainsFunc(p.findings, func(id string) bool { return slices.Contains(findings, id) })) {
			add(p, &benches[at])
		}
	}
	for i := range benches { // without a plan: the first view, and the first answer
		b := &benches[i]
		if known[b.Name] || len(b.Views) == 0 || len(findings) > 0 {
			continue
		}
		v, title := b.Views[0], b.Views[0].Title
		if len(b.Answers) > 0 && len(b.Answers[0]) <= 120 {
			title = strings.TrimSuffix(b.Answers[0], ".")
		}
		p := plan{series: v.Series, where: v.Where, x: v.X, what: "by " + labelKey(v.X), title: func(*drawn) string { return title }}
		if len(v.Lines) > 0 {
			p.by = v.Lines[len(v.Lines)-1]
		}
		add(&p, b)
	}
	return out
}

const (
	maxTraces = 9  // of a plot
	maxBars   = 24 // categories
	maxPoints = 200
)

// numberOf returns the number that a label has. That of a device is a name.
func numberOf(s *result.Series, key string) (float64, bool) {
	v, err := strconv.ParseFloat(s.Labels.Get(key), 64)
	return v, err == nil && isFinite(v) && key != result.Device
}

// largest returns the series with the largest number of a label, or all if it has none.
func largest(all []*result.Series, key string) []*result.Series {
	best := math.Inf(-1)
	for _, s := range all {
		if v, ok := numberOf(s, key); ok {
			best = max(best, v)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(s *result.Series) bool {
		v, ok := numberOf(s, key)
		return ok && v != best
	})
}

// draw makes the plot of a plan. ok is false if there is nothing to compare.
func (p plan) draw(b *result.Bench) (f figure, ok bool) {
	all := slices.DeleteFunc(b.Select(result.View{Series: p.series, Where: p.where}), func(s *result.Series) bool { return len(s.Samples) == 0 })
	if len(all) == 0 {
		return f, false
	}
	d := &drawn{of: map[string]float64{}, traces: map[kind]int{}, places: map[category]int{}, values: map[category]float64{}}
	low, table := 0.0, all
	low, d.lines = p.asLines(all)
	if _, numeric := numberOf(all[0], p.x); numeric && !d.lines && p.by != "" && p.title == nil { // too few for lines
		p.at, p.x, p.by = p.x, p.by, ""
	}
	if p.at != "" {
		all = largest(all, p.at)
	}
	if !d.lines {
		table = all
	}
	d.XText = func(v float64) string {
		return labelText(result.Label{Key: p.x, Value: strconv.FormatFloat(v, 'f', -1, 64)})
	}
	p.fill(d, all)
	if !d.comparable() {
		return f, false
	}
	d.Unit = unitFor(all[0].Unit, d.greatest())
	if all[0].Unit == result.PerSecond {
		d.Unit.Name = rateName(d.Unit.Name, p.series)
	}
	if f.Title = prose(p.titleOf(d)); f.Title == "" {
		return f, false
	}
	f.What, f.Desc = prose(capital(joined(joinedWith(" ", d.Unit.Name, p.what), p.conditions(d, all), d.gpusText()))+"."), prose(d.describe())
	d.Log = low > 0 && (strings.HasSuffix(p.x, "_bytes") || len(distinctNumbers(table, p.x)) > 3)
	f.Plot = map[bool]func(chart) *plot{true: drawLines, false: drawBars}[d.lines](d.chart)
	f.Table = viewTable(result.View{Title: p.what, X: p.x, Lines: p.columns(table)}, table)
	return f, true
}

// comparable reports whether a plot shows two values or more, and not too many.
func (d *drawn) comparable() bool {
	points := 0
	for _, t := range d.Traces {
		points += len(t.Points)
	}
	return points > 1 && d.greatest() > 0 && len(d.Traces) <= maxTraces && len(d.places) <= maxBars
}

// titleOf is the answer, "" for none.
func (p *plan) titleOf(d *drawn) string {
	switch {
	case p.title != nil:
		return p.title(d)
	case d.of[p.a] > 0 && d.of[p.b] > 0:
		return fmt.Sprintf(p.answer, faster(d.of[p.a], d.of[p.b]))
	}
	return ""
}

// distinctNumbers returns the numbers that series have at a label, ascending.
func distinctNumbers(all []*result.Series, key string) []float64 {
	var xs []float64
	for _, s := range all {
		if x, ok := numberOf(s, key); ok {
			xs = append(xs, x)
		}
	}
	slices.Sort(xs)
	return slices.Compact(xs)
}

// asLines reports whether series can be lines: of one unit, over three numbers or more. It returns the lowest number.
func (p *plan) asLines(all []*result.Series) (lowest float64, ok bool) {
	other := func(s *result.Series) bool {
		_, ok := numberOf(s, p.x)
		return !ok || s.Unit != all[0].Unit
	}
	xs := distinctNumbers(all, p.x)
	if slices.ContainsFunc(all, other) || len(xs) < 3 || len(xs) > maxPoints {
		return 0, false
	}
	return xs[0], true
}

// referenceOf returns the reference of the first series that has one, nil for none. That of both directions is twice as
// high as the others.
func referenceOf(all []*result.Series) *level {
	for _, s := range all {
		if e := s.Expected; e != nil && e.Value > 0 && s.Labels.Get(result.Direction) != result.Both {
			return &level{e.Value, "reference"}
		}
	}
	return nil
}

// conditions are what all that is drawn has in common, in words.
func (p *plan) conditions(d *drawn, all []*result.Series) string {
	where := ""
	if d.lines && !strings.HasSuffix(p.x, "_bytes") {
		where = "by number of " + labelKey(p.x)
	}
	if p.at != "" {
		where = condition(p.at, all[0].Labels.Get(p.at))
	}
	if len(d.gpus) > 1 && p.x != result.Device && len(d.groups) < 2 {
		where = joined(where, fmt.Sprintf("GPU %d", d.gpus[0]))
	}
	return where
}

// gpusText says for which GPUs lines and marks stand.
func (d *drawn) gpusText() string {
	switch {
	case len(d.groups) > 1:
		return "to GPU"
	case len(d.gpus) > 1 && d.lines:
		return "hollow marks: " + gpuNames(d.gpus[1:])
	}
	return ""
}

// columns are the keys that tell the rows of a table with one value of x apart.
func (p *plan) columns(table []*result.Series) (keys []string) {
	for _, key := range []string{p.heads, result.Device, p.by} {
		if key != "" && key != p.x && !slices.Contains(keys, key) && slices.ContainsFunc(table, func(s *result.Series) bool { return s.Labels.Get(key) != table[0].Labels.Get(key) }) {
			keys = append(keys, key)
		}
	}
	return keys
}

// A kind tells traces apart.
type kind struct {
	name, class string
	hollow      bool
}

// kindOf returns the trace of a series. ok is false if it has none.
func (p *plan) kindOf(d *drawn, s *result.Series) (k kind, ok bool) {
	direction, x, gpu := s.Labels.Get(result.Direction), s.Labels.Get(p.x), d.indexOf(s)
	if len(d.groups) > 1 {
		return d.groupKind(gpu, direction)
	}
	k.name = s.Labels.Get(p.by)
	k.class, k.hollow = colors[k.name], gpu > 0 && d.lines
	switch {
	case !d.lines && (gpu > 0 || p.by == result.Direction && direction == result.Both):
		return k, false
	case p.level != "" && x == p.level:
		d.Level = &level{s.Median, "link"}
		return k, false
	case p.by == "":
		k.class = "weak"
		if s.Labels.Get(p.heads) == d.head && (x == p.a || x == p.b || p.a == "") {
			k.class = "one"
		}
	}
	return k, true
}

// indexOf returns the place of a series' GPU, 0 if it names none.
func (d *drawn) indexOf(s *result.Series) int {
	if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil && len(d.gpus) > 0 {
		return slices.Index(d.gpus, n)
	}
	return 0
}

// groupKind is the trace of a group of GPUs: copies to its first one. Of many groups the fastest and the slowest have one.
func (d *drawn) groupKind(gpu int, direction string) (k kind, ok bool) {
	g := slices.IndexFunc(d.groups, func(g gpuGroup) bool { return len(d.gpus) > 0 && g.gpus[0] == d.gpus[gpu] })
	if g < 0 || direction != result.HostToDevice || g > 0 && g < len(d.groups)-3 {
		return k, false
	}
	return kind{name: gpuNames(d.groups[g].gpus), class: []string{"weak", "low wrn"}[min(g, 1)]}, true
}

// fill adds the traces of the first GPU. The GPUs that its lines stand for have hollow marks, unless their rates differ:
// then each group of GPUs has a line.
func (p *plan) fill(d *drawn, all []*result.Series) {
	at := largest(all, p.x)
	if d.lines && p.by == result.Direction {
		d.groups = groupsOf(at)
	}
	for _, s := range all {
		if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil && !slices.Contains(d.gpus, n) && p.x != result.Device {
			d.gpus = append(d.gpus, n)
		}
	}
	slices.Sort(d.gpus)
	d.head = all[0].Labels.Get(p.heads)
	for _, s := range all {
		if k, ok := p.kindOf(d, s); ok {
			p.place(d, k, s)
		}
	}
	if d.Level = cmp.Or(d.Level, referenceOf(at)); !d.lines {
		p.sort(d)
	}
}

// place adds a series to its trace.
func (p *plan) place(d *drawn, k kind, s *result.Series) {
	c := category{s.Labels.Get(p.heads), s.Labels.Get(p.x)}
	if direction := s.Labels.Get(result.Direction); !k.hollow && (direction == "" || direction == result.HostToDevice) && c.head == d.head {
		d.of[k.name], d.of[c.x] = max(d.of[k.name], s.Median), max(d.of[c.x], s.Median)
	}
	i, known := d.traces[k]
	if !known {
		i, d.traces[k] = len(d.Traces), len(d.Traces)
		d.Traces = append(d.Traces, trace{Name: nameOf(p.by, k.name), Class: cmp.Or(k.class, classes[i%len(classes)]), Hollow: k.hollow})
	}
	v := point{Y: s.Median, Low: min(s.Min, s.Median), High: max(s.Max, s.Median)}
	if d.lines {
		v.X, _ = numberOf(s, p.x)
	} else {
		if _, known := d.places[c]; !known {
			d.places[c] = len(d.places)
		}
		v.X = float64(d.places[c])
		if d.values[c] == 0 { // those of the first color sort
			d.values[c] = s.Median
		}
	}
	d.Traces[i].add(v)
}

// sort gives the bars their order and names: the greatest first, below the heads.
func (p *plan) sort(d *drawn) {
	order := slices.SortedFunc(maps.Keys(d.places), func(a, b category) int {
		if p.x == result.Device { // GPUs have an order
			return cmp.Compare(d.places[a], d.places[b])
		}
		return cmp.Or(cmp.Compare(b2i(a.head != d.head), b2i(b.head != d.head)), strings.Compare(a.head, b.head), cmp.Compare(d.values[b], d.values[a]), cmp.Compare(d.places[a], d.places[b]))
	})
	moved := make([]float64, len(order))
	for i, c := range order {
		moved[d.places[c]] = float64(i)
		d.Names = append(d.Names, nameOf(p.x, c.x))
		if d.Heads = append(d.Heads, ""); i == 0 || c.head != order[i-1].head {
			d.Heads[i] = nameOf(p.heads, c.head)
		}
	}
	for _, t := range d.Traces {
		for j := range t.Points {
			t.Points[j].X = moved[int(t.Points[j].X)]
		}
	}
}

// add adds a point. Of several at one place the fastest counts.
func (t *trace) add(p point) {
	i, found := slices.BinarySearchFunc(t.Points, p, func(a, b point) int { return cmp.Compare(a.X, b.X) })
	if !found {
		t.Points = slices.Insert(t.Points, i, p)
	} else if p.Y > t.Points[i].Y {
		t.Points[i] = p
	}
}

// colors are the classes of directions and of kinds of memory; others have the classes in their order.
var (
	colors  = map[string]string{result.HostToDevice: "to", result.DeviceToHost: "frm", result.Both: "both", "pinned": "to", "pageable": "weak"}
	classes = []string{"to", "frm", "alt", "both", "weak"}
	named   = map[string]string{result.HostToDevice: "to GPU", result.DeviceToHost: "from GPU", result.Both: "both ways", "cuda_host_alloc": "cudaHostAlloc",
		"hostmem": "hostmem.Alloc", "staged": "pageable, staged", "fanout": "staged, all GPUs", "resident": "In the page cache", "cold": "Not cached"}
)

// nameOf is the name of a label's value as users know it.
func nameOf(key, value string) string {
	return cmp.Or(named[value], labelText(result.Label{Key: key, Value: value}))
}

// condition formats a label so that it is understood alone: 4 workers, 64 MiB.
func condition(key, value string) string {
	text := labelText(result.Label{Key: key, Value: value})
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		text += " " + labelKey(key)
	}
	return text
}

// rateName is the unit of a rate of things: M samples/s.
func rateName(unit, things string) string {
	return strings.TrimSpace(strings.TrimSuffix(unit, "/s") + " " + words(things) + "/s")
}

// viewTable returns a view as a table: medians, and where samples differ by more than 5% their range. Series that have
// hardly a row or column in common are listed.
func viewTable(v result.View, all []*result.Series) sheet {
	t, text := sheet{Caption: prose(joined(v.Title, unitText(all[0].Unit))), Text: 1}, value
	if slices.ContainsFunc(all, func(s *result.Series) bool { return s.Unit != all[0].Unit }) {
		t.Caption, text = prose(v.Title), measured
	}
	g := newGrid(all, v)
	if v.Series == restOf || len(g.rows)*len(g.columns) > sparse*len(all) {
		t.Head = []string{"Series", "Median"}
		for _, s := range all {
			t.Rows = append(t.Rows, []cell{{Text: prose(clip(nameText(s), 160))}, seriesCell(s, measured)})
		}
		return t
	}
	t.Head = []string{labelKey(v.X)}
	for _, name := range g.columns {
		t.Head = append(t.Head, prose(cmp.Or(clip(joined(name...), 80), "value")))
	}
	for i, label := range g.rows {
		row := []cell{{Text: prose(clip(labelText(label), 80))}}
		for j := range g.columns {
			row = append(row, seriesCell(g.cells[[2]int{i, j}], text))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// restOf is the name of a view of series that no other view shows.
const restOf = "further series"

// seriesCell returns the median of a series, and its range if that is wide.
func seriesCell(s *result.Series, text func(result.Unit, float64) string) cell {
	if s == nil || len(s.Samples) == 0 {
		return cell{Text: "–"}
	}
	c := cell{Text: prose(text(s.Unit, s.Median))}
	if s.Max-s.Min > steady*math.Abs(s.Median) {
		c.More = prose(value(s.Unit, s.Min) + " to " + value(s.Unit, s.Max))
	}
	return c
}
