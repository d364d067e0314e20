package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/verify"
)

// maxNotes is how many notes are open if nothing is worse.
const maxNotes = 3

// hostPage returns the page of one result.
func hostPage(r *Result) webPage {
	refs := &references{}
	d := webPage{Verdict: verdictOf(r), Foot: footText(r), Over: nonEmpty(hostName(r), gpuModels(r), stamp(r.Started), prefixed("pincheck ", plain(r.Command)))}
	d.Title = joinedWith(": ", hostName(r), d.Verdict.Word) + " · pincheck"
	cards, notes := cardsOf(r, "f")
	var ids []string // of findings that plots have to support
	for _, f := range r.Findings {
		if f.Severity != doctor.Note {
			ids = append(ids, f.ID)
		}
	}
	count := func(t tone, one, many string) string {
		if n := len(slices.DeleteFunc(slices.Clone(cards), func(c card) bool { return c.Tone != t })); n > 0 {
			return units.Things(n, one, many)
		}
		return ""
	}
	listed := block{ID: "notes", Title: units.Things(len(notes), "note", "notes"), Sub: "Nothing is broken; these cost time, or are worth knowing.", Findings: notes}
	folded := block{}
	if len(cards) > 0 || len(notes) > maxNotes {
		listed, folded = block{}, block{ID: "notes", Title: listed.Title, Keep: true}
		for _, n := range notes {
			folded.Folds = append(folded.Folds, fold{Title: n.Title, Answer: n.Cost, block: block{Deep: true, Findings: []card{n}}})
		}
	}
	plots := block{ID: "plots", Title: "Measurements", Sub: "A dashed line is a reference. Thin lines are the range of the samples where it exceeds 5%."}
	plots.Figures = append(gpuFigures(r), figures(r.Benches, ids)...)
	plots.Figures = plots.Figures[:min(len(plots.Figures), maxFigures)]
	for i := range plots.Figures {
		plots.Figures[i].ID = fmt.Sprintf("p%d", i+1)
	}
	tiles := tilesOf(r, refs)
	d.add(
		block{ID: "findings", Title: joined(count(bad, "problem", "problems"), count(warn, "warning", "warnings")), Findings: cards},
		block{ID: "figures", Title: "Key figures", Quiet: len(cards) == 0, Tiles: tiles}, listed, plots, folded,
		block{ID: "machine", Title: "Machine", Tables: gpuSheet(r), Facts: fieldsOf(r)},
		block{ID: "more", Title: "All measurements and checks", Folds: foldsOf(r)},
		block{ID: "method", Title: "Method and references", Texts: methodText(r), Refs: refs.all})
	return d
}

func hostName(r *Result) string { return cmp.Or(clip(plain(r.HostName), 80), "unnamed host") }

func footText(r *Result) string {
	return plain(joined(strings.TrimSpace(r.Tool.Name+" "+r.Tool.Version), r.Tool.Platform))
}

func nonEmpty(all ...string) []string {
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

// gpus returns the GPUs of a result, which may have no facts.
func (r *Result) gpus() []doctor.Device {
	if r.Facts == nil {
		return nil
	}
	return r.Devices
}

// eachGPU joins what the GPUs of a result have, each text once.
func eachGPU(r *Result, sep string, of func(d *doctor.Device) string) string {
	var out []string
	for i := range r.gpus() {
		if v := plain(of(&r.Devices[i])); v != "" && !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return strings.Join(out, sep)
}

// gpuModels counts the GPUs by their names: 2 × NVIDIA H200.
func gpuModels(r *Result) string {
	return eachGPU(r, ", ", func(d *doctor.Device) string {
		n := 0
		for _, other := range r.Devices {
			n += b2i(other.Name == d.Name)
		}
		return strings.TrimPrefix(fmt.Sprintf("%d × %s", n, cmp.Or(d.Name, "unnamed GPU")), "1 × ")
	})
}

// verified sums what was verified of all GPUs.
func (r *Result) verified() (sum verify.Report) {
	for _, d := range r.gpus() {
		if v := d.Verify; v != nil {
			sum.Cases, sum.VerifiedBytes = sum.Cases+v.Cases, sum.VerifiedBytes+v.VerifiedBytes
			sum.MismatchCount, sum.FailureCount = sum.MismatchCount+v.MismatchCount, sum.FailureCount+v.FailureCount
		}
	}
	return sum
}

// verdictOf returns the verdict: severity and one clause, and the evidence.
func verdictOf(r *Result) verdict {
	word, clause, color := verdictText(r)
	v := verdict{Word: word, Tone: map[ansiColor]tone{green: okay, yellow: warn, red: bad}[color], Simulated: r.Facts != nil && r.Simulated}
	var lede []string
	groups := grouped(r.Findings)
	switch {
	case word == "":
		v.Tone, v.Word, clause = unclear, "Not evaluated", gpuModels(r)
	case r.Verdict == doctor.Unknown:
		v.Tone = unclear
	case r.Verdict == doctor.Incomplete:
		v.Tone, lede = unclear, []string{"What is here was measured before that."}
	case color != green && len(groups) > 0: // the first alone; the others follow
		if r.Verdict != doctor.Unusable {
			v.Word = v.Tone.Word()
		}
		word, clause, lede = joinedWith(" on ", v.Word, strings.TrimSuffix(subject(gpusOf(groups[0])), ": ")), groups[0][0].Summary, []string{sentence(groups[0][0].Cost)}
		if len(groups) > 1 && groups[1][0].Severity != doctor.Note {
			lede = append(lede, sentence("also: "+titleOf(groups[1])))
		}
	}
	lede = append(lede, tripsText(r, clause))
	lede = append(lede, shareText(r))
	if len(r.Benches) == 1 && len(r.Benches[0].Answers) > 0 {
		lede = append(lede, sentence(r.Benches[0].Answers[0]))
	}
	v.Title, v.Lede = prose(joinedWith(": ", cmp.Or(word, v.Word), clause)), prose(joinedWith(" ", lede...))
	return v
}

// tripsText says what round trips showed, unless that was said.
func tripsText(r *Result, said string) string {
	sum := r.verified()
	wrong, failed := "", ""
	if sum.MismatchCount > 0 {
		wrong = units.Things(sum.MismatchCount, "round trip", "round trips") + " came back wrong."
	}
	if sum.FailureCount > 0 {
		failed = units.Things(sum.FailureCount, "round trip", "round trips") + " failed."
	}
	if text := joinedWith(" ", wrong, failed); text != "" || sum.VerifiedBytes == 0 || strings.Contains(said, intactText(r)) {
		return text
	}
	return sentence(intactText(r))
}

// shareText says how much of its reference each pinned copy reaches.
func shareText(r *Result) string {
	low, high, of := math.Inf(1), 0.0, " of the reference."
	for _, c := range copiesOf(r) {
		if c.against > 0 {
			low, high = min(low, c.rate/c.against), max(high, c.rate/c.against)
		}
		if c.source == "" {
			of = " of what the link carries."
		}
	}
	share := percentOf(high)
	if high == 0 {
		return ""
	}
	if least := percentOf(low); least != share {
		share = strings.TrimSuffix(least, "%") + " to " + share
	}
	return "Pinned copies reach " + share + of
}

// cardsOf returns the problems and warnings with what failed, and the notes.
func cardsOf(r *Result, prefix string) (cards, notes []card) {
	for i, same := range grouped(r.Findings) {
		f := same[0]
		c := card{ID: fmt.Sprintf("%s%d", prefix, i+1), Name: plain(f.ID), Title: prose(titleOf(same)), Tone: toneOf(f.Severity),
			Seen: sentences(seen(same)), Why: sentence(prose(f.Because())), Or: f.Alternatives, Settle: f.Settle, Cost: sentence(prose(f.Cost)), Do: f.Remedy}
		if n := 6; len(c.Seen) > n+1 {
			c.Seen, c.More = c.Seen[:n], c.Seen[n:]
		}
		c.Wide = slices.ContainsFunc(stepsOf(c.Do), func(s step) bool { return len(s.Command) > 40 })
		if c.Tone == remark {
			notes = append(notes, c)
		} else {
			cards = append(cards, c)
		}
	}
	failed := slices.Clone(r.Errors)
	if r.Facts != nil {
		failed = append(failed, r.DeviceErrors...)
	}
	for i := range r.gpus() {
		for _, e := range unexplained(r, &r.Devices[i]) {
			failed = append(failed, fmt.Sprintf("GPU %d: %s", r.Devices[i].Ordinal, e))
		}
	}
	for _, b := range r.Benches {
		for _, e := range b.Errors {
			failed = append(failed, b.Name+": "+e)
		}
	}
	if len(failed) > 0 {
		cards = append(cards, card{ID: prefix + "0", Title: units.Things(len(failed), "measurement failed", "measurements failed"), Tone: bad, Seen: failed})
	}
	return cards, notes
}

// seen returns the evidence of findings that are the same for several GPUs. Evidence that differs names its GPU.
func seen(same []doctor.Finding) (out []string) {
	if !slices.ContainsFunc(same, func(f doctor.Finding) bool { return !slices.Equal(f.Evidence, same[0].Evidence) }) {
		return same[0].Evidence
	}
	for _, f := range same {
		for _, e := range f.Evidence {
			out = append(out, subject(gpusOf([]doctor.Finding{f}))+e)
		}
	}
	return out
}

// A copyRate is the rate of a GPU's pinned copies in one direction.
type copyRate struct {
	gpu           int
	direction     string
	rate, against float64
	source        string // of the reference; empty if it is what the link carries
}

// slow reports whether a rate is below what it should be. A link carries more than its copies.
func (c *copyRate) slow() bool {
	return c.rate < 0.9*c.against && (c.source != "" || c.rate < 0.75*c.against)
}

// copiesOf returns the rates of pinned copies: of the largest size of the experiment, or those of the check.
func copiesOf(r *Result) (out []copyRate) {
	all, links := pinnedCopies(r)
	for _, m := range all {
		gpu, err := strconv.Atoi(m.Labels.Get(result.Device))
		c := copyRate{gpu: gpu, direction: m.Labels.Get(result.Direction), rate: m.Median}
		if e := m.expected; e != nil && e.Value > 0 {
			c.against, c.source = e.Value, e.Source
		} else if c.direction != result.Both {
			c.against = links[gpu]
		}
		if err == nil && c.rate > 0 && !slices.ContainsFunc(out, func(o copyRate) bool { return o.gpu == gpu && o.direction == c.direction }) {
			out = append(out, c)
		}
	}
	return out
}

// A measuredCopy is a series with its reference, nil for none.
type measuredCopy struct {
	*result.Series
	expected *result.Expected
}

// pinnedCopies returns the series of pinned copies, those of the experiment first, and what the link of each GPU carries,
// or should.
func pinnedCopies(r *Result) (all []measuredCopy, links map[int]float64) {
	for i := range r.Benches {
		if b := &r.Benches[i]; b.Name == "bandwidth" {
			for _, s := range largest(b.Select(result.View{Series: "bandwidth", Where: result.Labels{{Key: result.Memory, Value: "registered"}}}), result.Size) {
				all = append(all, measuredCopy{s, s.Expected})
			}
		}
	}
	links = map[int]float64{}
	for _, d := range r.gpus() {
		links[d.Ordinal] = d.LinkRate()
		narrow := slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return f.ID == "narrow_link" && f.Device != nil && *f.Device == d.Ordinal })
		if narrow && d.Link != nil {
			links[d.Ordinal] = d.Link.MaxRate
		}
		for j := 0; d.Bandwidth != nil && j < len(d.Bandwidth.Series); j++ {
			s := d.Bandwidth.Series[j]
			s.Labels = s.Labels.With(result.Device, strconv.Itoa(d.Ordinal))
			m := measuredCopy{Series: &s}
			if !narrow {
				m.expected = r.Reference(&d, &s)
			}
			all = append(all, m)
		}
	}
	return all, links
}

// slowestOf returns the slowest and the fastest of the copies in a direction. ok is false if there are none.
func slowestOf(copies []copyRate, direction string) (slow, fast copyRate, ok bool) {
	for _, c := range copies {
		if c.direction == direction {
			if !ok || c.rate < slow.rate {
				slow = c
			}
			if !ok || c.rate > fast.rate {
				fast = c
			}
			ok = true
		}
	}
	return slow, fast, ok
}

var directions = []string{result.HostToDevice, result.DeviceToHost, result.Both}

// references are numbered, and cited in full once.
type references struct{ all []string }

// number returns the number of a reference.
func (r *references) number(source string) string {
	if source = prose(source); source == "" {
		return ""
	}
	i := slices.Index(r.all, source)
	if i < 0 {
		i, r.all = len(r.all), append(r.all, source)
	}
	return strconv.Itoa(i + 1)
}

// A ratio is a tile that compares two values of a label, at the largest number of another.
type ratio struct{ bench, series, at, key, a, b, label, name string }

var ratios = []ratio{
	{"alloc", "pin_rate", result.Size, result.Method, "hostmem", "cuda_host_alloc", "Pinning, threaded", "cudaHostAlloc"},
	{"bandwidth", "bandwidth", result.Size, result.Memory, "staged", "pageable", "Pageable, staged", "cudaMemcpy"},
	{"loader", "samples", "workers", result.Memory, "pinned", "pageable", "Loader", "pageable"},
}

// tilesOf returns the key figures, six at most. A tile shows the slowest GPU.
func tilesOf(r *Result, refs *references) (tiles []tile) {
	copies := copiesOf(r)
	for _, direction := range directions {
		if slow, fast, ok := slowestOf(copies, direction); ok {
			tiles = append(tiles, copyTile(r, slow, fast, refs))
		}
	}
	for _, q := range ratios {
		if i := slices.IndexFunc(r.Benches, func(b result.Bench) bool { return b.Name == q.bench }); i >= 0 {
			tiles = append(tiles, q.tiles(&r.Benches[i])...)
		}
	}
	if sum := r.verified(); sum.VerifiedBytes > 0 {
		tiles = append(tiles, tile{Label: "Verified", Fig: prose(units.Data(sum.VerifiedBytes)), Against: units.Things(sum.MismatchCount, "mismatch", "mismatches"), More: "bytes compared after a round trip"})
	}
	return tiles[:min(len(tiles), maxFigures)]
}

// copyTile shows copies in one direction.
func copyTile(r *Result, slow, fast copyRate, refs *references) tile {
	t := tile{Label: capital(nameOf("", slow.direction)), Fig: units.Number(slow.rate, 3), Unit: "GB/s"}
	if slow.against > 0 {
		t.meter(slow.rate, slow.against)
		t.Against, t.At, t.More = percentOf(slow.rate/slow.against)+" of "+prose(units.Rate(slow.against)), refs.number(slow.source), "reference"
		if slow.source == "" {
			t.More = "what the link carries"
		}
	}
	if slow.slow() && len(r.Findings) > 0 {
		t.Tone = toneOf(r.Findings[0].Severity)
	}
	if slow.rate < (1-alike)*fast.rate {
		t.More = fmt.Sprintf("GPU %d; GPU %d: %s", slow.gpu, fast.gpu, units.Number(fast.rate, 3))
	}
	return t
}

// tiles returns the tile of a ratio, or none if one of its values was not measured.
func (q *ratio) tiles(b *result.Bench) []tile {
	best, unit := map[string]float64{}, result.Unit("")
	for _, s := range largest(b.Select(result.View{Series: q.series}), q.at) {
		if d := s.Labels.Get(result.Direction); d == "" || d == result.HostToDevice {
			best[s.Labels.Get(q.key)], unit = max(best[s.Labels.Get(q.key)], s.Median), s.Unit
		}
	}
	v, other := best[q.a], best[q.b]
	if !(v > 0 && other > 0) {
		return nil
	}
	u := unitFor(unit, v)
	t := tile{Label: q.label, Fig: units.Number(v/u.Factor, 3), Unit: u.Name, Against: units.Number(v/other, 2) + "× " + q.name, More: units.Number(other/u.Factor, 3) + " " + u.Name + " " + q.name}
	if unit == result.PerSecond {
		t.Unit = rateName(u.Name, q.series)
	}
	t.meter(v, other)
	return []tile{t}
}

// meter sets the bar of a tile and its tick.
func (t *tile) meter(v, against float64) {
	top := max(v, against) / 0.98
	t.Meter, t.Tick = inPercent(v/top), inPercent(against/top)
}

// gpuFigures compare GPUs, if there are three or more: each alone, and all at once.
func gpuFigures(r *Result) (out []figure) {
	draw := func(b *result.Bench, series, when, what string) {
		groups := groupsOf(b.Select(result.View{Series: series}))
		p := plan{series: series, x: result.Device, by: result.Direction, what: "by GPU, pinned memory, " + what, title: func(*drawn) string {
			if len(groups) < 2 {
				return capital(when + "the GPUs copy within 3% of each other")
			}
			return capital(slowest(when, groups))
		}}
		if f, ok := p.draw(b); ok && len(r.gpus()) > 2 {
			out = append(out, f)
		}
	}
	alone := result.Bench{}
	for _, c := range copiesOf(r) {
		if c.direction != result.Both {
			alone.Series = append(alone.Series, result.Single("alone", result.Labels{{Key: result.Device, Value: strconv.Itoa(c.gpu)}, {Key: result.Direction, Value: c.direction}}, result.GBPerSecond, c.rate))
		}
	}
	draw(&alone, "alone", "", "each GPU alone")
	if r.Facts != nil && r.Together != nil {
		each := *r.Together
		each.Series = slices.DeleteFunc(slices.Clone(each.Series), func(s result.Series) bool { return s.Labels.Get(result.Device) == doctor.TogetherSum })
		draw(&each, doctor.TogetherBandwidth, "at once, ", "all GPUs at once")
	}
	return out
}

// gpuSheet is the table of GPUs.
func gpuSheet(r *Result) []sheet {
	if len(r.gpus()) == 0 {
		return nil
	}
	t := gpuTable(r, 80)
	out := sheet{Caption: "The GPUs, with pinned copies", Text: 2, Head: append([]string{t.title}, t.columns...)}
	for _, row := range t.rows {
		cells := []cell{{Text: prose(row.name)}}
		for _, text := range row.cells {
			cells = append(cells, cell{Text: prose(text)})
		}
		out.Rows = append(out.Rows, cells)
	}
	return []sheet{out}
}

// linkNow is the link of a GPU as it is trained, or "".
func linkNow(d *doctor.Device) string {
	if d.Link == nil || d.Link.Rate == 0 {
		return ""
	}
	return d.Link.Now().String()
}

// fieldsOf is what is known of the machine.
func fieldsOf(r *Result) (out []field) {
	add := func(name, value string) {
		if value = prose(value); value != "" {
			out = append(out, field{name, value})
		}
	}
	add("GPUs", joinedWith("; ", joined(gpuModels(r), eachGPU(r, ", ", func(d *doctor.Device) string {
		return joined(map[bool]string{true: units.Bytes(d.MemoryTotal)}[d.MemoryTotal > 0], prefixed("compute capability ", d.ComputeCapability))
	})), prefixed("PCI ", eachGPU(r, ", ", func(d *doctor.Device) string { return d.PCIBusID }))))
	add("Link", eachGPU(r, "; ", func(d *doctor.Device) string { return strings.TrimPrefix(linkText(d.Link), "link ") }))
	if r.Facts != nil && r.Host != nil {
		add("CPU and memory", machineText(r.Host))
		add("System", systemText(r.Host))
	}
	if r.Facts != nil && r.Library != nil {
		add("CUDA", joined(versionsText(r.Library), r.Library.Path))
	}
	return out
}

// benchTitles name experiments in folds.
var benchTitles = map[string]string{"bandwidth": "Copies", "latency": "Small copies", "memory": "Memory kept", "alloc": "Pinning", "overlap": "Blocking and overlap", "calls": "CUDA calls", "managed": "Managed memory"}

func benchTitle(name string) string {
	return cmp.Or(benchTitles[name], capital(clip(words(name), 60)), "Unnamed")
}

// foldsOf has every measurement as a table, and what was checked.
func foldsOf(r *Result) (out []fold) {
	add := func(title, answer string, texts []string, tables ...sheet) {
		f := fold{Title: title, Answer: clip(prose(answer), 160), block: block{Deep: true, Tables: tables}}
		for _, t := range texts {
			f.Texts = append(f.Texts, sentence(prose(t)))
		}
		for j := range tables { // of one caption in several folds: each has a name of its own
			tables[j].Caption = title + ": " + tables[j].Caption
		}
		out = append(out, f)
	}
	for i := range r.Benches {
		b := &r.Benches[i]
		answer := map[bool]string{false: "Incomplete."}[b.Complete]
		if len(b.Answers) > 0 {
			answer = joinedWith(" ", answer, b.Answers[0])
		}
		add(benchTitle(b.Name), cmp.Or(answer, units.Things(len(b.Series), "series", "series")), slices.Concat(b.Answers, b.Notes), tablesOf(b)...)
	}
	verified := result.Bench{Views: []result.View{{Title: "bytes compared", Series: "verified", X: "path", Lines: []string{result.Device}}}}
	for _, l := range r.series() {
		if l.bench == "verify" && (l.Name == "verified" || l.Name != "round_trips" && l.Median > 0) {
			verified.Series = append(verified.Series, *l.Series)
		}
	}
	if sum := r.verified(); len(verified.Series) > 0 {
		add("Verification", fmt.Sprintf("%s, %s, %s", units.Things(sum.Cases, "round trip", "round trips"), units.Data(sum.VerifiedBytes), units.Things(sum.MismatchCount, "mismatch", "mismatches")), nil, tablesOf(&verified)...)
	}
	if r.Facts == nil {
		return out
	}
	if t := r.Together; t != nil {
		var rates []string
		for _, s := range t.Select(result.View{Series: doctor.TogetherBandwidth, Where: result.Labels{{Key: result.Device, Value: doctor.TogetherSum}}}) {
			rates = append(rates, units.Rate(s.Median)+" "+nameOf("", s.Labels.Get(result.Direction)))
		}
		add("All GPUs at once", cmp.Or(joined(rates...), "not measured"), t.Notes, tablesOf(&result.Bench{Series: t.Series, Views: []result.View{{Title: "pinned copies", Series: doctor.TogetherBandwidth, X: result.Device, Lines: []string{result.Direction}}}})...)
	}
	if len(r.Passed) > 0 {
		add("Checks that passed", units.Things(len(r.Passed), "group of checks", "groups of checks")+" found no problem and no warning", []string{joined(r.Passed...)})
	}
	return out
}

// tablesOf returns the views of an experiment, and what they do not show.
func tablesOf(b *result.Bench) (out []sheet) {
	shown := map[*result.Series]bool{}
	for _, v := range b.Views {
		if all := b.Select(v); len(all) > 0 {
			out = append(out, viewTable(v, all))
			for _, s := range all {
				shown[s] = true
			}
		}
	}
	var rest []*result.Series
	for i := range b.Series {
		if !shown[&b.Series[i]] {
			rest = append(rest, &b.Series[i])
		}
	}
	if len(rest) > 0 {
		out = append(out, viewTable(result.View{Title: restOf, Series: restOf}, rest))
	}
	return out
}

// methodText says how the series were measured.
func methodText(r *Result) []string {
	least, most := math.MaxInt, 0
	for _, s := range r.series() {
		if n := len(s.Samples); s.bench != "verify" && n > 0 {
			least, most = min(least, n), max(most, n)
		}
	}
	if most == 0 {
		return nil
	}
	samples := units.Things(most, "sample", "samples")
	if least < most {
		samples = units.Count(least) + " to " + samples
	}
	return []string{prose(fmt.Sprintf("Figures are medians of %s, taken in %s; 1 GB is 10⁹ bytes, 1 KiB 1,024.", samples, units.Seconds(r.Seconds)))}
}
