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

// maxFigures is how many plots a page has at most.
const maxFigures = 6

// A plan is a plot that the page has if the series are there, with a title that is the answer to a question.
type plan struct {
	bench, series string
	where         result.Labels
	x             string // the label along the axis, or the categories
	at            string // of this label the largest value counts, or the smallest for a Where of "least"
	by            string // the label with the colors
	heads         string // the label that divides categories
	level         string // the category that is the reference for the others
	// Title is made of the values of two categories or colors: a compares with b.
	a, b    string
	title   func(f *facts) string
	what    string
	support []string // ids of findings that the plot supports
	lines   bool     // wants three or more numbers along the axis
}

// facts are what a title may say: the values of the first trace by the category, and the numbers along the axis.
type facts struct {
	plan   *plan
	unit   result.Unit
	of     map[string]float64
	first  trace
	groups []gpuGroup
	xText  func(float64) string
	at     string // the text of the largest value
}

// faster compares a with b: "6.3 times as fast as", "as fast as" or "at 80% of the speed of".
func faster(a, b float64) string {
	switch r := a / b; {
	case r >= 1.05:
		return timesText(r) + " times as fast as"
	case r > 0.95:
		return "as fast as"
	default:
		return "at " + percentOf(r) + " of the speed of"
	}
}

// versus returns a title that compares the two categories of a plan.
func versus(format string) func(f *facts) string {
	return func(f *facts) string {
		a, b := f.of[f.plan.a], f.of[f.plan.b]
		if a <= 0 || b <= 0 {
			return ""
		}
		return fmt.Sprintf(format, faster(a, b))
	}
}

const both = "both"

// plans are in the order of their weight.
var plans = []plan{
	{bench: "bandwidth", series: "bandwidth", where: result.Labels{{Key: result.Memory, Value: "registered"}}, x: result.Size, by: result.Direction, lines: true,
		title: sizesTitle, what: "by size of a copy, pinned memory",
		support: []string{"narrow_link", "slow_link", "narrow_upstream", "slow_copies", "asymmetric_copies", "slow_small_copies", "busy", "far_cpus", "far_memory", "pages_far", "throttled", "locked_memory_clock", "link_errors", "impossible_rate"}},
	{bench: "bandwidth", series: "bandwidth", x: result.Memory, at: result.Size, by: result.Direction, a: "registered", b: "pageable",
		title: versus("Pinned memory uploads %s pageable memory"), what: "by kind of host memory", support: []string{"write_combined_slow", "slow_copies", "pages_far"}},
	{bench: "alloc", series: "pin_rate", x: result.Method, at: result.Size, a: "hostmem", b: "cuda_host_alloc",
		title: versus("hostmem.Alloc pins %s cudaHostAlloc"), what: "pinned by method", support: []string{"slow_pinning", "few_cpus", "thp_off", "fragmented_memory"}},
	{bench: "files", series: "file_to_device", x: result.Method, at: result.Size, heads: "cache", level: "pinned", a: "staged", b: "mmap",
		title: versus("Staging uploads a cached file %s mmap"), what: "from a file by method", support: []string{"weights_on_network", "weights_mapped", "small_read_ahead"}},
	{bench: "overlap", series: "piped_rate", where: result.Labels{{Key: "pieces", Value: "16_pieces"}}, x: "streams", by: result.Direction, lines: true,
		title: streamsTitle, what: "by number of streams, copies in 16 pieces with GPU work after each"},
	{bench: "loader", series: "samples", where: result.Labels{{Key: "source", Value: "memory"}, {Key: "gpu_work", Value: "no"}}, x: "workers", by: result.Memory, lines: true,
		title: loaderTitle, what: "by number of workers, in memory, no GPU work, the fastest kind of copy", support: []string{"few_cpus"}},
	{bench: "loader", series: "samples", where: result.Labels{{Key: "source", Value: "memory"}, {Key: "gpu_work", Value: "no"}}, x: result.Memory, at: "workers",
		title: loaderTitle, what: "in memory, no GPU work, the fastest kind of copy", support: []string{"few_cpus"}},
	{bench: "frames", series: "round_trip", x: result.Method, at: result.Size, a: "reused", b: "allocated_anew",
		title: versus("Reused pinned buffers move frames %s new pageable ones"), what: "both ways by method"},
	{bench: "blocks", series: "blocks_bandwidth", where: result.Labels{{Key: result.Direction, Value: result.HostToDevice}, {Key: result.Size, Value: "4096"}}, x: result.Method, at: result.Blocks, a: "quickest", b: "copy_each",
		title: versus("One batch uploads blocks of 4 KiB %s single copies"), what: "to GPU, blocks of 4 KiB"},
	{bench: "managed", series: "managed_bandwidth", where: result.Labels{{Key: "advice", Value: "none"}}, x: result.Method, at: result.Size, a: "prefetch_to_device", b: "gpu_faults",
		title: versus("Prefetching moves managed memory %s page faults"), what: "managed memory by method"},
	{bench: "memory", series: "kept_per_byte", x: result.Method,
		title: keptTitle, what: "Bytes kept for each byte requested, at the worst size", support: []string{"rounded_pins"}},
	{bench: "latency", series: "latency", where: result.Labels{{Key: result.Direction, Value: result.HostToDevice}}, x: result.Method, at: "least " + result.Size,
		title: latencyTitle, what: "for one copy to GPU", support: []string{"slow_small_copies"}},
}

// sizesTitle says from which size on copies are fast, or which GPU is slow.
func sizesTitle(f *facts) string {
	if n := len(f.groups); n > 1 {
		slow, fast := f.groups[n-1], f.groups[0]
		verb := "copies"
		if len(slow.gpus) > 1 {
			verb = "copy"
		}
		return fmt.Sprintf("%s %s at %s of the speed of %s", gpuNames(slow.gpus), verb, percentOf(slow.rate/fast.rate), gpuNames(fast.gpus))
	}
	p := f.first.Points
	top := slices.MaxFunc(p, func(a, b point) int { return cmp.Compare(a.Y, b.Y) }).Y
	from := p[slices.IndexFunc(p, func(q point) bool { return q.Y >= 0.9*top })]
	if from.X == p[0].X {
		return fmt.Sprintf("Copies of every size measured reach 90%% of %s GB/s", units.Number(top, 3))
	}
	return fmt.Sprintf("Copies reach full speed from %s up, and %s of it at %s", f.xText(from.X), percentOf(p[0].Y/top), f.xText(p[0].X))
}

func streamsTitle(f *facts) string {
	p := f.first.Points
	best := slices.MaxFunc(p, func(a, b point) int { return cmp.Compare(a.Y, b.Y) })
	if best.X == p[0].X || p[0].Y <= 0 {
		return "More streams do not make copies with GPU work faster"
	}
	return fmt.Sprintf("With GPU work after each piece, %s streams copy %s one", f.xText(best.X), faster(best.Y, p[0].Y))
}

func loaderTitle(f *facts) string {
	pinned, pageable := f.of["pinned"], f.of["pageable"]
	if pinned <= 0 || pageable <= 0 {
		return ""
	}
	return fmt.Sprintf("With %s, pinned memory feeds the GPU %s pageable memory", f.at, faster(pinned, pageable))
}

func keptTitle(f *facts) string {
	if f.of["cuda_host_alloc"] <= 0 || f.of["hostmem"] <= 0 {
		return ""
	}
	return fmt.Sprintf("cudaHostAlloc keeps up to %s bytes for each byte requested, hostmem.Alloc %s",
		units.Number(f.of["cuda_host_alloc"], 3), units.Number(f.of["hostmem"], 3))
}

func latencyTitle(f *facts) string {
	if f.of["issued"] <= 0 || f.of["synchronize"] <= 0 {
		return ""
	}
	return fmt.Sprintf("A copy of %s takes %s to issue and %s until it is done", f.at, units.Seconds(f.of["issued"]), units.Seconds(f.of["synchronize"]))
}

// A gpuGroup is GPUs whose copies are within 3% of each other.
type gpuGroup struct {
	gpus []int
	rate float64
}

const alike = 0.03

// groupsOf divides GPUs by their rates, the fastest first.
func groupsOf(rates map[int]float64) (groups []gpuGroup) {
	gpus := make([]int, 0, len(rates))
	for gpu := range rates {
		gpus = append(gpus, gpu)
	}
	slices.SortFunc(gpus, func(a, b int) int { return cmp.Or(cmp.Compare(rates[b], rates[a]), cmp.Compare(a, b)) })
	for _, gpu := range gpus {
		if n := len(groups); n == 0 || rates[gpu] < (1-alike)*groups[n-1].rate {
			groups = append(groups, gpuGroup{rate: rates[gpu]})
		}
		last := &groups[len(groups)-1]
		last.gpus = append(last.gpus, gpu)
	}
	for i := range groups {
		slices.Sort(groups[i].gpus)
	}
	return groups
}

// figures returns the plots of a result, and the views that they show. With problems and warnings they are those that
// support them.
func figures(benches []result.Bench, findings []string) []figure {
	var out []figure
	drawn := map[string]bool{} // benches that have a plot
	series := map[string]bool{}
	for i := range plans {
		p := &plans[i]
		supports := slices.ContainsFunc(p.support, func(id string) bool { return slices.Contains(findings, id) })
		if len(findings) > 0 && !supports || len(out) == maxFigures {
			continue
		}
		for j := range benches {
			b := &benches[j]
			if b.Name != p.bench || p.bench != "bandwidth" && drawn[p.bench] {
				continue
			}
			if f, ok := p.draw(b); ok && !series[f.Title] {
				out = append(out, f)
				drawn[p.bench], series[f.Title] = true, true
				break
			}
		}
	}
	if len(findings) > 0 {
		return out
	}
	for j := range benches { // experiments without a plan: their first view, and their first answer
		b := &benches[j]
		if drawn[b.Name] || len(b.Views) == 0 || len(out) == maxFigures {
			continue
		}
		v := b.Views[0]
		p := plan{series: v.Series, where: v.Where, x: v.X, what: "by " + labelKey(v.X), lines: numericValues(b.Select(v), v.X) >= 3,
			title: func(*facts) string { return cmp.Or(answerOf(b), v.Title) }}
		if len(v.Lines) > 0 {
			p.by = v.Lines[len(v.Lines)-1]
		}
		if f, ok := p.draw(b); ok {
			out = append(out, f)
		}
	}
	return out
}

// answerOf returns the first answer, if it is short enough to be a title.
func answerOf(b *result.Bench) string {
	if len(b.Answers) > 0 && len(b.Answers[0]) <= 120 {
		return strings.TrimSuffix(b.Answers[0], ".")
	}
	return ""
}

// numericValues returns how many different numbers a label has, 0 if a value is none. Those of devices are names.
func numericValues(all []*result.Series, key string) int {
	seen := map[float64]bool{}
	for _, s := range all {
		v, err := strconv.ParseFloat(s.Labels.Get(key), 64)
		if err != nil || !isFinite(v) || key == result.Device {
			return 0
		}
		seen[v] = true
	}
	return len(seen)
}

// first returns the first GPU of series, and all of them.
func devicesOf(all []*result.Series) (gpus []int) {
	for _, s := range all {
		if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil && !slices.Contains(gpus, n) {
			gpus = append(gpus, n)
		}
	}
	slices.Sort(gpus)
	return gpus
}

// draw makes the plot of a plan. ok is false if the series are not there.
func (p *plan) draw(b *result.Bench) (f figure, ok bool) {
	all := b.Select(result.View{Series: p.series, Where: p.where})
	all = slices.DeleteFunc(all, func(s *result.Series) bool {
		return len(s.Samples) == 0 || s.Unit != all[0].Unit || !isFinite(s.Median)
	})
	if len(all) == 0 || p.lines && numericValues(all, p.x) < 3 {
		return f, false
	}
	unit := all[0].Unit
	at, atText := p.at, ""
	if key, least := strings.CutPrefix(p.at, "least "); at != "" {
		at, all = key, extreme(all, key, least)
		atText = condition(key, all[0].Labels.Get(key))
	}
	gpus := devicesOf(all)
	c := chart{XText: func(v float64) string {
		return labelText(result.Label{Key: p.x, Value: strconv.FormatFloat(v, 'f', -1, 64)})
	}}
	fs := &facts{plan: p, unit: unit, of: map[string]float64{}, xText: c.XText, at: cmp.Or(atText, lastOf(all, p.x))}
	if p.by == result.Direction && p.lines {
		fs.groups = groupsOf(ratesOf(all, p.x))
	}
	where := ""
	switch {
	case len(fs.groups) > 1:
		c.Traces = p.perGroup(all, fs.groups)
		where = "to GPU"
	default:
		if len(gpus) > 1 && p.x != result.Device {
			where = fmt.Sprintf("GPU %d", gpus[0])
		}
		c.Traces, c.Names, c.Heads = p.traces(all, gpus)
	}
	if len(c.Traces) == 0 || len(c.Traces) > maxTraces || len(c.Names) > maxBars {
		return f, false
	}
	top := 0.0
	for _, s := range all {
		top = max(top, s.Median)
		if e := s.Expected; e != nil && s.Labels.Get(result.Direction) != result.Both && (c.Level == nil || e.Value > c.Level.Y) && e.Value > 0 {
			c.Level = &level{e.Value, "reference"} // that of the largest size
		}
	}
	n := 0
	for _, t := range c.Traces {
		n += len(t.Points)
	}
	if !(top > 0) || n < 2 { // one value is no plot
		return f, false
	}
	c.Unit = unitFor(unit, top)
	fs.first = c.Traces[0]
	for _, name := range p.keysOf(all) {
		fs.of[name] = p.valueOf(all, gpus, name)
	}
	if title := p.title(fs); title != "" {
		f.Title = prose(title)
	} else {
		return f, false
	}
	if p.lines {
		low, high := math.Inf(1), 0.0
		for _, point := range c.Traces[0].Points {
			low, high = min(low, point.X), max(high, point.X)
		}
		c.Log = low > 0 && (strings.HasSuffix(p.x, "_bytes") || high >= 8*low)
		if !strings.HasSuffix(p.x, "_bytes") {
			c.XLabel = labelKey(p.x)
		}
		f.Desc = c.describe()
		f.Plot = drawLines(c)
	} else {
		if p.level != "" {
			p.toLevel(&c)
		}
		if len(c.Names) == 0 {
			return f, false
		}
		f.Desc = c.describe()
		f.Plot = drawBars(c)
	}
	what := p.what
	if c.Unit.Name != "" {
		what = c.Unit.Name + " " + p.what
		if unit == result.PerSecond {
			what = rateName(c.Unit.Name, p.series) + " " + p.what
		}
	}
	hollow := ""
	if slices.ContainsFunc(c.Traces, func(t trace) bool { return t.Hollow }) {
		hollow = "Hollow marks: " + gpuNames(gpus[1:])
		where = "Lines: " + where
		f.What = prose(joinedWith(". ", capital(joined(what, atText)), where, hollow) + ".")
	} else {
		f.What = prose(capital(joined(what, atText, where)) + ".")
	}
	keys := []string{result.Device, p.by}
	if p.by == result.Device {
		keys = keys[1:]
	}
	f.Table = viewTable(b, result.View{Title: p.what, Series: p.series, Where: p.where, X: p.x, Lines: varying(keys, all)}, all)
	return f, true
}

// rateName is the unit of a rate of things: M samples/s.
func rateName(unit, things string) string {
	return strings.TrimSpace(strings.TrimSuffix(unit, "/s") + " " + words(things) + "/s")
}

const (
	maxTraces = 9  // of a plot
	maxBars   = 24 // categories
)

// lastOf returns the text of the largest number of a label.
func lastOf(all []*result.Series, key string) string {
	return condition(key, extreme(all, key, false)[0].Labels.Get(key))
}

// condition formats a label so that it is understood alone: 4 workers, 64 MiB.
func condition(key, value string) string {
	text := labelText(result.Label{Key: key, Value: value})
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		text += " " + labelKey(key)
	}
	return text
}

// extreme returns the series with the largest number of a label, or with the least.
func extreme(all []*result.Series, key string, least bool) []*result.Series {
	value := func(s *result.Series) float64 {
		v, err := strconv.ParseFloat(s.Labels.Get(key), 64)
		if err != nil || !isFinite(v) {
			return math.Inf(-1)
		}
		if least {
			return -v
		}
		return v
	}
	best := math.Inf(-1)
	for _, s := range all {
		best = max(best, value(s))
	}
	return slices.DeleteFunc(slices.Clone(all), func(s *result.Series) bool { return value(s) != best })
}

// ratesOf returns the rate of each GPU to the device, at the largest number of a label.
func ratesOf(all []*result.Series, x string) map[int]float64 {
	rates := map[int]float64{}
	to := slices.DeleteFunc(slices.Clone(all), func(s *result.Series) bool { return s.Labels.Get(result.Direction) != result.HostToDevice })
	for _, s := range extreme(to, x, false) {
		if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil {
			rates[n] = s.Median
		}
	}
	return rates
}

// colors are the classes of directions, and of other traces in their order.
var (
	colors  = map[string]string{result.HostToDevice: "to", result.DeviceToHost: "frm", result.Both: "both", "pinned": "to", "pageable": "weak"}
	classes = []string{"to", "frm", "alt", "both", "weak"}
)

// traceName is the name of a color.
func traceName(key, value string) string {
	switch value {
	case result.HostToDevice:
		return "to GPU"
	case result.DeviceToHost:
		return "from GPU"
	case result.Both:
		return "both ways"
	}
	return labelText(result.Label{Key: key, Value: value})
}

// traces returns the lines or bars of the first GPU, and hollow marks for the others of lines.
func (p *plan) traces(all []*result.Series, gpus []int) (out []trace, names []string, heads map[int]string) {
	byKey := map[[2]string]int{}
	place := map[string]int{}
	var order []*result.Series
	sums := map[string]float64{}
	for _, s := range all {
		key := p.category(s)
		if _, known := sums[key]; !known {
			sums[key], order = 0, append(order, s)
		}
		if d := s.Labels.Get(result.Direction); d == "" || d == result.HostToDevice {
			sums[key] = max(sums[key], s.Median)
		}
	}
	if !p.lines {
		if p.x != result.Device { // sorted; GPUs have an order
			slices.SortStableFunc(order, func(a, b *result.Series) int {
				if p.heads != "" && a.Labels.Get(p.heads) != b.Labels.Get(p.heads) {
					return cmp.Compare(indexOf(all, p.heads, a), indexOf(all, p.heads, b))
				}
				return cmp.Compare(sums[p.category(b)], sums[p.category(a)])
			})
		}
		heads = map[int]string{}
		last := ""
		for i, s := range order {
			place[p.category(s)] = i
			names = append(names, nameOf(p.x, s.Labels.Get(p.x)))
			if head := s.Labels.Get(p.heads); p.heads != "" && head != last {
				heads[i], last = headText(head), head
			}
		}
	}
	for _, s := range all {
		gpu, device := s.Labels.Get(result.Device), ""
		if n, err := strconv.Atoi(gpu); err == nil && len(gpus) > 0 && n != gpus[0] && p.x != result.Device {
			if !p.lines {
				continue
			}
			device = gpu
		}
		color := s.Labels.Get(p.by)
		if !p.lines && p.by == result.Direction && color == result.Both {
			continue
		}
		i, known := byKey[[2]string{color, device}]
		if !known {
			i = len(out)
			byKey[[2]string{color, device}] = i
			class := colors[color]
			if class == "" {
				class = classes[len(out)%len(classes)]
			}
			name := ""
			if p.by != "" {
				name = traceName(p.by, color)
			}
			out = append(out, trace{Name: name, Class: class, Hollow: device != ""})
		}
		x := float64(place[p.category(s)])
		if p.lines {
			x, _ = strconv.ParseFloat(s.Labels.Get(p.x), 64) // numericValues has parsed it
		}
		out[i].add(point{x, s.Median, min(s.Min, s.Median), max(s.Max, s.Median)})
	}
	if p.by == "" {
		out = p.highlight(out, names, order)
	}
	for i := range out {
		slices.SortFunc(out[i].Points, func(a, b point) int { return cmp.Compare(a.X, b.X) })
	}
	return out, names, heads
}

// add adds a point. Of several at one place the fastest counts.
func (t *trace) add(p point) {
	if i := slices.IndexFunc(t.Points, func(q point) bool { return q.X == p.X }); i >= 0 {
		if p.Y > t.Points[i].Y {
			t.Points[i] = p
		}
		return
	}
	t.Points = append(t.Points, p)
}

// highlight gives the categories that the title compares a color, and the others grey.
func (p *plan) highlight(all []trace, names []string, order []*result.Series) []trace {
	if len(all) != 1 || p.a == "" {
		return all
	}
	one, other := trace{Class: "one"}, trace{Class: "weak"}
	for _, point := range all[0].Points {
		value := order[int(point.X)].Labels.Get(p.x)
		first := p.heads == "" || order[int(point.X)].Labels.Get(p.heads) == order[0].Labels.Get(p.heads)
		if first && (value == p.a || value == p.b) {
			one.Points = append(one.Points, point)
		} else {
			other.Points = append(other.Points, point)
		}
	}
	return slices.DeleteFunc([]trace{one, other}, func(t trace) bool { return len(t.Points) == 0 })
}

// category returns the key of a series among the categories.
func (p *plan) category(s *result.Series) string {
	return s.Labels.Get(p.heads) + "\x00" + s.Labels.Get(p.x)
}

// indexOf returns which value of a label a series has, in the order of the series.
func indexOf(all []*result.Series, key string, s *result.Series) int {
	return slices.IndexFunc(all, func(o *result.Series) bool { return o.Labels.Get(key) == s.Labels.Get(key) })
}

// headText names where a file is.
func headText(value string) string {
	switch value {
	case "resident":
		return "In the page cache"
	case "cold":
		return "Not cached"
	}
	return capital(words(value))
}

// nameOf is the name of a kind of memory or of a method, as users know it.
func nameOf(key, value string) string {
	switch value {
	case "cuda_host_alloc":
		return "cudaHostAlloc"
	case "hostmem":
		return "hostmem.Alloc"
	case "staged":
		return "pageable, staged"
	case "fanout":
		return "staged, all GPUs"
	}
	return labelText(result.Label{Key: key, Value: value})
}

// toLevel makes a reference of one category.
func (p *plan) toLevel(c *chart) {
	for i, t := range c.Traces {
		for j, point := range t.Points {
			if c.Names[int(point.X)] == p.level {
				c.Level = &level{point.Y, "link"}
				c.Traces[i].Points = slices.Delete(t.Points, j, j+1)
				c.Names = slices.Clone(c.Names)
				if head := c.Heads[int(point.X)]; head != "" && c.Heads[int(point.X)+1] == "" {
					c.Heads[int(point.X)+1] = head
				}
				delete(c.Heads, int(point.X))
				return
			}
		}
	}
}

// keysOf returns the values of the label along the axis, or of the colors of lines.
func (p *plan) keysOf(all []*result.Series) (keys []string) {
	key := p.x
	if p.lines {
		key = p.by
	}
	for _, s := range all {
		if v := s.Labels.Get(key); !slices.Contains(keys, v) && len(keys) < maxBars {
			keys = append(keys, v)
		}
	}
	return keys
}

// valueOf returns the value of a category, or of a line at its end.
func (p *plan) valueOf(all []*result.Series, gpus []int, name string) float64 {
	key := p.x
	if p.lines {
		key, all = p.by, extreme(all, p.x, false)
	}
	v := 0.0
	head := ""
	for _, s := range all {
		if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil && len(gpus) > 0 && n != gpus[0] || s.Labels.Get(key) != name {
			continue
		}
		if p.by == result.Direction && !p.lines && s.Labels.Get(result.Direction) != result.HostToDevice {
			continue
		}
		if head == "" {
			head = s.Labels.Get(p.heads)
		}
		if s.Labels.Get(p.heads) == head {
			v = max(v, s.Median)
		}
	}
	return v
}

// perGroup returns a line for each group of GPUs, of copies to the device: the slowest stand out.
func (p *plan) perGroup(all []*result.Series, groups []gpuGroup) (out []trace) {
	for i, g := range groups {
		if len(groups) > 4 && i > 0 && i < len(groups)-3 {
			continue
		}
		t := trace{Name: gpuNames(g.gpus), Class: "low"}
		if i == 0 {
			t.Class = "weak"
		} else if i < len(groups)-1 {
			t.Class = "low wrn"
		}
		for _, s := range all {
			if s.Labels.Get(result.Device) == strconv.Itoa(g.gpus[0]) && s.Labels.Get(result.Direction) == result.HostToDevice {
				x, _ := strconv.ParseFloat(s.Labels.Get(p.x), 64) // numericValues has parsed it
				t.add(point{x, s.Median, min(s.Min, s.Median), max(s.Max, s.Median)})
			}
		}
		slices.SortFunc(t.Points, func(a, b point) int { return cmp.Compare(a.X, b.X) })
		out = append(out, t)
	}
	return out
}

// varying returns those of keys of which the series have several values.
func varying(keys []string, all []*result.Series) (out []string) {
	for _, key := range keys {
		if slices.ContainsFunc(all, func(s *result.Series) bool { return s.Labels.Get(key) != all[0].Labels.Get(key) }) {
			out = append(out, key)
		}
	}
	return out
}

// viewTable returns a view as a table: medians, and where samples differ by more than 5% their range.
func viewTable(b *result.Bench, v result.View, all []*result.Series) sheet {
	if len(all) == 0 {
		return sheet{}
	}
	g := newGrid(all, v)
	if len(g.rows)*len(g.columns) > sparse*len(all) {
		return listTable(v.Title, all)
	}
	t := sheet{Caption: prose(joined(v.Title, unitText(all[0].Unit))), Text: 1, Head: []string{labelKey(v.X)}}
	for _, name := range g.columns {
		t.Head = append(t.Head, prose(cmp.Or(clip(name, 80), "value")))
	}
	for i, name := range g.rows {
		row := []cell{{Text: prose(clip(name, 80))}}
		for j := range g.columns {
			row = append(row, seriesCell(g.cells[[2]int{i, j}]))
		}
		t.Rows = append(t.Rows, row)
	}
	var known []string
	for _, s := range all {
		if e := s.Expected; e != nil {
			if text := value(s.Unit, e.Value); !slices.Contains(known, text) && len(known) < 4 {
				known = append(known, text)
			}
		}
	}
	if len(known) > 0 {
		t.Caption += ". Reference: " + strings.Join(known, ", ")
	}
	return t
}

// listTable is a table of series that have no rows and columns in common.
func listTable(title string, all []*result.Series) sheet {
	t := sheet{Caption: prose(title), Text: 1, Head: []string{"Series", "Median"}}
	for _, s := range all {
		c := seriesCell(s)
		c.Text = prose(measured(s.Unit, s.Median))
		t.Rows = append(t.Rows, []cell{{Text: prose(clip(nameText(s), 160))}, c})
	}
	return t
}

// seriesCell returns the median of a series, and its range if that is wide.
func seriesCell(s *result.Series) cell {
	if s == nil || len(s.Samples) == 0 {
		return cell{Text: "–"}
	}
	c := cell{Text: prose(value(s.Unit, s.Median))}
	if len(s.Samples) > 1 && s.Max-s.Min > steady*math.Abs(s.Median) {
		c.More = prose(value(s.Unit, s.Min) + " to " + value(s.Unit, s.Max))
	}
	return c
}
