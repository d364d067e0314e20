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

// hostPage returns the page of one result.
func hostPage(r *Result) webPage {
	v := verdictOf(r)
	refs := &references{}
	d := webPage{Title: joinedWith(": ", hostName(r), v.Word) + " · pincheck", Verdict: v, Foot: footText(r),
		Over: nonEmpty(hostName(r), gpuModels(r), stamp(r.Started), prefixed("pincheck ", plain(r.Command)))}
	cards, notes := cardsOf(r, "f")
	ids := []string{}
	for _, f := range r.Findings {
		if f.Severity != doctor.Note && len(r.Benches) > 0 {
			ids = append(ids, f.ID)
		}
	}
	add := func(b block, show bool) {
		if show {
			d.Sections = append(d.Sections, b)
		}
	}
	tiles := tilesOf(r, refs)
	findings := block{ID: "findings", Title: countText(cards), Findings: cards}
	key := block{ID: "figures", Title: "Key figures", Quiet: len(cards) == 0, Tiles: tiles}
	add(findings, len(cards) > 0)
	add(key, len(tiles) > 0)
	open := len(cards) == 0 && len(notes) <= maxNotes
	if open {
		add(block{ID: "notes", Title: units.Things(len(notes), "note", "notes"), Sub: "Nothing is broken; these cost time, or are worth knowing.", Findings: notes}, len(notes) > 0)
	}
	plots := block{ID: "plots", Title: "Measurements", Sub: "A dashed line is a reference. Thin lines are the range of the samples where it exceeds 5%."}
	plots.Figures = slices.Concat(gpuFigures(r), figures(r.Benches, ids))
	plots.Figures = plots.Figures[:min(len(plots.Figures), maxFigures)]
	for i := range plots.Figures {
		plots.Figures[i].ID = fmt.Sprintf("p%d", i+1)
	}
	if len(ids) > 0 {
		plots.Title = "Measurements behind the findings"
	}
	add(plots, len(plots.Figures) > 0)
	if !open {
		folded := block{ID: "notes", Title: units.Things(len(notes), "note", "notes"), Keep: true}
		for _, n := range notes {
			folded.Folds = append(folded.Folds, fold{Title: n.Title, Answer: n.Cost, block: block{Deep: true, Findings: []card{n}}})
		}
		add(folded, len(notes) > 0)
	}
	machine := block{ID: "machine", Title: "Machine", Facts: fieldsOf(r)}
	if t := gpuTable(r); len(t.Rows) > 0 {
		machine.Tables = []sheet{t}
	}
	if t := needs(r); len(t.Rows) > 0 {
		machine.Tables = append(machine.Tables, t)
	}
	add(machine, len(machine.Facts)+len(machine.Tables) > 0)
	more := block{ID: "more", Title: "All measurements and checks", Folds: foldsOf(r)}
	add(more, len(more.Folds) > 0)
	method := block{ID: "method", Title: "Method and references", Texts: methodText(r), Refs: refs.all}
	add(method, len(method.Texts)+len(method.Refs) > 0)
	return d
}

// maxNotes is how many notes are open if nothing is worse.
const maxNotes = 3

// hostName names a host, or says that it has no name.
func hostName(r *Result) string { return cmp.Or(clip(plain(r.HostName), 80), "unnamed host") }

func nonEmpty(all ...string) []string {
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

// gpuModels counts the GPUs by their names: 2 × NVIDIA H200.
func gpuModels(r *Result) string {
	if r.Facts == nil {
		return ""
	}
	var names, out []string
	count := map[string]int{}
	for i := range r.Devices {
		name := cmp.Or(plain(r.Devices[i].Name), "unnamed GPU")
		if count[name]++; count[name] == 1 {
			names = append(names, name)
		}
	}
	for _, name := range names[:min(len(names), 4)] {
		if count[name] > 1 {
			name = fmt.Sprintf("%d × %s", count[name], name)
		}
		out = append(out, name)
	}
	return strings.Join(out, ", ")
}

// verdictOf returns the verdict: severity and one clause, and the evidence.
func verdictOf(r *Result) verdict {
	v := verdict{Simulated: r.Facts != nil && r.Simulated}
	var lede []string
	worst := slices.Clone(r.Findings)
	slices.SortStableFunc(worst, func(a, b doctor.Finding) int { return cmp.Compare(severityRank(a), severityRank(b)) })
	groups := grouped(worst)
	named := func(word string, severity doctor.Severity) {
		for i, g := range groups {
			if g[0].Severity != severity {
				continue
			}
			v.Title = where(word, g) + ": " + prose(g[0].Summary)
			lede = append(lede, sentence(prose(g[0].Cost)))
			if next := i + 1; next < len(groups) && groups[next][0].Severity != doctor.Note {
				lede = append(lede, sentence("also: "+subject(gpusOf(groups[next]))+prose(groups[next][0].Summary)))
			}
			return
		}
		v.Title = word + ": " + units.Things(r.failures(), "measurement failed", "measurements failed")
	}
	switch r.Verdict {
	case doctor.Healthy:
		v.Tone, v.Word, v.Title = okay, "Healthy", "Healthy: "+gpusText(r, "copies", "copy")+" at full speed"
	case doctor.Measured:
		v.Tone, v.Word = okay, "Measured"
		v.Title = "Measured: " + measuredClause(r)
	case doctor.Warnings:
		v.Tone, v.Word = warn, "Warning"
		named("Warning", doctor.Warning)
	case doctor.Problems:
		v.Tone, v.Word = bad, "Problem"
		named("Problem", doctor.Problem)
	case doctor.Unusable:
		v.Tone, v.Word, v.Title = bad, "No usable GPU", "No usable GPU"
		if len(groups) > 0 {
			v.Title += ": " + prose(groups[0][0].Summary)
			lede = append(lede, sentence(prose(groups[0][0].Cost)))
		}
	case doctor.Incomplete:
		v.Tone, v.Word, v.Title = unclear, "Incomplete", joinedWith(": ", "Incomplete", prefixed("stopped by ", prose(r.Stopped)))
		lede = append(lede, "What is here was measured before that.")
		if len(groups) > 0 {
			lede = append(lede, sentence("until then: "+subject(gpusOf(groups[0]))+prose(groups[0][0].Summary)))
		}
	case doctor.Failed:
		v.Tone, v.Word, v.Title = bad, "Failed", "Failed: nothing was examined"
	case doctor.Unknown:
		v.Tone, v.Word, v.Title = unclear, "Inconclusive", "Inconclusive: "+unknownText(r)
	default:
		v.Tone, v.Word, v.Title = unclear, "Not evaluated", joinedWith(": ", "Not evaluated", gpuModels(r))
	}
	lede = append(lede, bytesText(r), shareText(r))
	if n := r.count(doctor.Note); n > 0 {
		lede = append(lede, sentence(units.Things(n, "note follows", "notes follow")))
	}
	if len(r.Benches) == 1 && len(r.Benches[0].Answers) > 0 {
		lede = append(lede, sentence(prose(r.Benches[0].Answers[0])))
	}
	v.Lede = joinedWith(" ", lede...)
	return v
}

func severityRank(f doctor.Finding) int { return slices.Index(doctor.Severities(), f.Severity) }

// where names the GPUs of findings: Problem on GPU 1.
func where(word string, same []doctor.Finding) string {
	if gpus := gpusOf(same); len(gpus) > 0 {
		return word + " on " + gpuNames(gpus)
	}
	return word
}

// gpusText counts the GPUs in front of a verb.
func gpusText(r *Result, one, many string) string {
	n := 0
	if r.Facts != nil {
		n = len(r.Devices)
	}
	switch n {
	case 1:
		return "the GPU " + one
	case 2:
		return "both GPUs " + many
	}
	return fmt.Sprintf("all %d GPUs %s", n, many)
}

// measuredClause says what a run without a verdict on its speed has.
func measuredClause(r *Result) string {
	series := 0
	for i := range r.Benches {
		series += len(r.Benches[i].Series)
	}
	if series == 0 {
		return "no reference for the speed of the copies"
	}
	return units.Things(len(r.Benches), "experiment", "experiments") + ", " + units.Things(series, "series", "series")
}

// bytesText says whether the bytes came back.
func bytesText(r *Result) string {
	bytes, wrong, failed, skipped := 0, 0, 0, 0
	if r.Facts != nil {
		for i := range r.Devices {
			if v := r.Devices[i].Verify; v != nil {
				bytes, wrong, failed, skipped = bytes+v.VerifiedBytes, wrong+v.MismatchCount, failed+v.FailureCount, skipped+v.SkippedCases
			}
		}
	}
	text := ""
	switch {
	case wrong > 0 || failed > 0:
		text = units.Things(wrong, "round trip", "round trips") + " came back wrong and " + units.Count(failed) + " failed."
	case bytes > 0:
		text = "Every byte of " + prose(units.Data(bytes)) + " came back intact."
	}
	if skipped > 0 {
		text = joinedWith(" ", text, sentence(units.Things(skipped, "round trip was skipped", "round trips were skipped")))
	}
	return text
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
	switch {
	case high == 0:
		return ""
	case percentOf(low) == percentOf(high):
		return "Pinned copies reach " + percentOf(low) + of
	}
	return "Pinned copies reach " + strings.TrimSuffix(percentOf(low), "%") + " to " + percentOf(high) + of
}

// countText counts problems and warnings.
func countText(cards []card) string {
	n := map[tone]int{}
	for _, c := range cards {
		n[c.Tone]++
	}
	var parts []string
	if n[bad] > 0 {
		parts = append(parts, units.Things(n[bad], "problem", "problems"))
	}
	if n[warn] > 0 {
		parts = append(parts, units.Things(n[warn], "warning", "warnings"))
	}
	return strings.Join(parts, ", ")
}

// cardsOf returns the problems and warnings, and the notes. Findings that say the same of several GPUs are one.
func cardsOf(r *Result, prefix string) (cards, notes []card) {
	failed := slices.Clone(r.Errors)
	if r.Facts != nil {
		failed = append(failed, r.DeviceErrors...)
		for i := range r.Devices {
			for _, e := range unexplained(r, &r.Devices[i]) {
				failed = append(failed, fmt.Sprintf("GPU %d: %s", r.Devices[i].Ordinal, e))
			}
		}
	}
	for i := range r.Benches {
		for _, e := range r.Benches[i].Errors {
			failed = append(failed, r.Benches[i].Name+": "+e)
		}
	}
	for i, same := range grouped(r.Findings) {
		f := same[0]
		gpus := ""
		if all := gpusOf(same); len(all) > 0 {
			gpus = gpuNames(all) + ": "
		}
		c := card{ID: fmt.Sprintf("%s%d", prefix, i+1), Name: plain(f.ID), Title: prose(gpus + f.Summary), Tone: toneOf(f.Severity),
			Seen: seen(same), Why: sentence(prose(f.Because())), Or: f.Alternatives, Settle: f.Settle, Cost: sentence(prose(f.Cost)), Do: f.Remedy}
		if n := 6; len(c.Seen) > n+1 {
			c.Seen, c.More = c.Seen[:n], c.Seen[n:]
		}
		if gpus == "" {
			c.Title = capital(c.Title)
		}
		c.Wide = slices.ContainsFunc(stepsOf(c.Do), func(s step) bool { return len(s.Command) > 40 })
		if c.Tone == remark {
			notes = append(notes, c)
		} else {
			cards = append(cards, c)
		}
	}
	if len(failed) > 0 {
		cards = append(cards, card{ID: prefix + "0", Title: units.Things(len(failed), "measurement failed", "measurements failed"), Tone: bad, Seen: failed})
	}
	return cards, notes
}

// seen returns what was seen of findings that say the same of several GPUs: of which, unless it is the same of all.
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

// copiesOf returns the rates of pinned copies: those of the check, or of the largest size of the experiment.
func copiesOf(r *Result) (out []copyRate) {
	links := map[int]float64{}
	if r.Facts != nil {
		for i := range r.Devices {
			d := &r.Devices[i]
			links[d.Ordinal] = d.Link.PathRate()
			if l := d.Link; slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return f.ID == "narrow_link" }) && l != nil && l.Width < l.MaxWidth {
				links[d.Ordinal] = l.MaxRate // what it should be
			}
		}
	}
	take := func(gpu int, s *result.Series) {
		direction := s.Labels.Get(result.Direction)
		c := copyRate{gpu: gpu, direction: direction, rate: s.Median}
		if e := s.Expected; e != nil && e.Value > 0 {
			c.against, c.source = e.Value, e.Source
		} else if direction != result.Both {
			c.against = links[gpu]
		}
		if s.Median > 0 && !slices.ContainsFunc(out, func(o copyRate) bool { return o.gpu == gpu && o.direction == direction }) {
			out = append(out, c)
		}
	}
	for i := range r.Benches {
		b := &r.Benches[i]
		pinned := b.Select(result.View{Series: "bandwidth", Where: result.Labels{{Key: result.Memory, Value: "registered"}}})
		if b.Name != "bandwidth" || len(pinned) == 0 {
			continue
		}
		for _, s := range extreme(pinned, result.Size, false) {
			if n, err := strconv.Atoi(s.Labels.Get(result.Device)); err == nil {
				take(n, s)
			}
		}
	}
	if r.Facts != nil {
		for i := range r.Devices {
			d := &r.Devices[i]
			for j := range bandwidthOf(d) {
				take(d.Ordinal, &d.Bandwidth.Series[j])
			}
		}
	}
	return out
}

func bandwidthOf(d *doctor.Device) []result.Series {
	if d.Bandwidth == nil {
		return nil
	}
	return d.Bandwidth.Series
}

// references are numbered, and cited in full once.
type references struct{ all []string }

// number returns the number of a reference.
func (r *references) number(source string) string {
	if source == "" {
		return ""
	}
	source = prose(source)
	i := slices.Index(r.all, source)
	if i < 0 {
		i, r.all = len(r.all), append(r.all, source)
	}
	return strconv.Itoa(i + 1)
}

// tilesOf returns the key figures, six at most. A tile shows the slowest GPU.
func tilesOf(r *Result, refs *references) (tiles []tile) {
	gravest := tone("")
	if r.count(doctor.Problem) > 0 {
		gravest = bad
	} else if r.count(doctor.Warning) > 0 {
		gravest = warn
	}
	copies := copiesOf(r)
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost, result.Both} {
		of := slices.DeleteFunc(slices.Clone(copies), func(c copyRate) bool { return c.direction != direction })
		if len(of) == 0 {
			continue
		}
		slices.SortStableFunc(of, func(a, b copyRate) int { return cmp.Compare(a.rate, b.rate) })
		slow, fast := of[0], of[len(of)-1]
		t := tile{Label: capital(traceName(result.Direction, direction)), Fig: units.Number(slow.rate, 3), Unit: "GB/s"}
		if slow.against > 0 {
			t.meter(slow.rate, slow.against)
			t.Against = percentOf(slow.rate/slow.against) + " of " + prose(units.Rate(slow.against))
			t.At, t.More = refs.number(slow.source), "reference"
			if slow.source == "" {
				t.More = "what the link carries"
			}
			if slow.slow() {
				t.Tone = gravest
			}
		}
		if slow.rate < (1-alike)*fast.rate {
			t.More = fmt.Sprintf("GPU %d; GPU %d: %s", slow.gpu, fast.gpu, units.Number(fast.rate, 3))
		}
		tiles = append(tiles, t)
	}
	for i := range r.Benches {
		b := &r.Benches[i]
		switch b.Name {
		case "alloc":
			tiles = appendRatio(tiles, b, "Pinning, threaded", "pin_rate", result.Size, result.Method, "hostmem", "cuda_host_alloc", "cudaHostAlloc")
		case "bandwidth":
			tiles = appendRatio(tiles, b, "Pageable, staged", "bandwidth", result.Size, result.Memory, "staged", "pageable", "cudaMemcpy")
		case "loader":
			tiles = appendRatio(tiles, b, "Loader", "samples", "workers", result.Memory, "pinned", "pageable", "pageable")
		}
	}
	if text := verifiedText(r); text != "" && len(tiles) < maxFigures {
		tiles = append(tiles, tile{Label: "Verified", Fig: text, Against: bytesWrong(r), More: "bytes compared after a round trip"})
	}
	return tiles[:min(len(tiles), maxFigures)]
}

// meter sets the bar of a tile and its tick.
func (t *tile) meter(v, against float64) {
	top := max(v, against) / 0.98
	t.Meter, t.Tick = inPercent(v/top), inPercent(against/top)
}

// appendRatio adds a tile that compares two values of a label.
func appendRatio(tiles []tile, b *result.Bench, label, series, at, key, a, c, name string) []tile {
	all := b.Select(result.View{Series: series})
	if len(all) == 0 {
		return tiles
	}
	best := func(value string) float64 {
		v := 0.0
		for _, s := range extreme(all, at, false) {
			if d := s.Labels.Get(result.Direction); s.Labels.Get(key) == value && (d == "" || d == result.HostToDevice) {
				v = max(v, s.Median)
			}
		}
		return v
	}
	v, other := best(a), best(c)
	if !(v > 0 && other > 0) {
		return tiles
	}
	u := unitFor(all[0].Unit, v)
	t := tile{Label: label, Fig: units.Number(v/u.Factor, 3), Unit: u.Name, Against: timesText(v/other) + "× " + name, More: units.Number(other/u.Factor, 3) + " " + u.Name + " " + name}
	if all[0].Unit == result.PerSecond {
		t.Unit = rateName(u.Name, series)
	}
	t.meter(v, other)
	return append(tiles, t)
}

func verifiedText(r *Result) string {
	bytes := 0
	if r.Facts != nil {
		for i := range r.Devices {
			if v := r.Devices[i].Verify; v != nil {
				bytes += v.VerifiedBytes
			}
		}
	}
	if bytes == 0 {
		return ""
	}
	return prose(units.Data(bytes))
}

func bytesWrong(r *Result) string {
	wrong := 0
	for i := range r.Devices {
		if v := r.Devices[i].Verify; v != nil {
			wrong += v.MismatchCount
		}
	}
	return units.Things(wrong, "mismatch", "mismatches")
}

// gpuFigures compare GPUs, if there are three or more: each alone, and all at once.
func gpuFigures(r *Result) (out []figure) {
	var alone []result.Series
	for _, c := range copiesOf(r) {
		if c.direction != result.Both {
			s := single("bandwidth", result.Labels{{Key: result.Device, Value: strconv.Itoa(c.gpu)}, {Key: result.Direction, Value: c.direction}}, result.GBPerSecond, c.rate)
			if c.source != "" {
				s.Expected = &result.Expected{Value: c.against, Source: c.source}
			}
			alone = append(alone, *s)
		}
	}
	draw := func(all []result.Series, when, what string) {
		b := result.Bench{Series: all}
		rates := ratesOf(b.Select(result.View{Series: "bandwidth"}), result.Direction)
		if len(rates) < 3 {
			return
		}
		p := plan{series: "bandwidth", x: result.Device, by: result.Direction, what: "by GPU, pinned memory, " + what, title: func(*facts) string {
			groups := groupsOf(rates)
			if len(groups) == 1 {
				return fmt.Sprintf("%sll %d GPUs copy within 3%% of each other", when+map[bool]string{true: "A", false: "a"}[when == ""], len(rates))
			}
			slow, fast := groups[len(groups)-1], groups[0]
			return capital(fmt.Sprintf("%scopies to %s run at %s of the speed of those to %s", when, gpuNames(slow.gpus), percentOf(slow.rate/fast.rate), gpuNames(fast.gpus)))
		}}
		if f, ok := p.draw(&b); ok {
			out = append(out, f)
		}
	}
	draw(alone, "", "each GPU alone")
	if r.Facts != nil && r.Together != nil {
		var at []result.Series
		for _, s := range r.Together.Select(result.View{Series: doctor.TogetherBandwidth}) {
			if s.Labels.Get(result.Device) != doctor.TogetherSum {
				one := *s
				one.Name = "bandwidth"
				at = append(at, one)
			}
		}
		draw(at, "At once, ", "all GPUs at once")
	}
	return out
}

// gpuTable has a row for each GPU.
func gpuTable(r *Result) sheet {
	t := sheet{Caption: "The GPUs; pinned copies in GB/s", Text: 2, Head: []string{"GPU", "Link", "To GPU", "From GPU", "Both ways", "Verified", "Mismatches"}}
	if r.Facts == nil {
		return sheet{}
	}
	copies := copiesOf(r)
	for i := range r.Devices {
		d := &r.Devices[i]
		row := []cell{{Text: strconv.Itoa(d.Ordinal) + "\u00a0\u00a0" + clip(plain(d.Name), 60)}, {Text: "unknown"}}
		if d.Link != nil && d.Link.Rate > 0 {
			row[1].Text = d.Link.Now().String()
			if d.Link.Bottleneck != nil {
				row[1].More = "behind " + d.Link.Bottleneck.Now().String()
			}
		}
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost, result.Both} {
			c := cell{Text: "–"}
			for _, known := range copies {
				if known.gpu == d.Ordinal && known.direction == direction {
					c.Text = units.Number(known.rate, 3)
					if known.slow() && r.Verdict != doctor.Healthy {
						c.Tone, c.More = warn, percentOf(known.rate/known.against)
					}
				}
			}
			row = append(row, c)
		}
		verified, wrong := cell{Text: "–"}, cell{Text: "–"}
		if v := d.Verify; v != nil {
			verified.Text, wrong.Text = prose(units.Data(v.VerifiedBytes)), units.Count(v.MismatchCount)
			if v.MismatchCount > 0 {
				wrong.Tone = bad
			}
		}
		t.Rows = append(t.Rows, append(row, verified, wrong))
	}
	return t.withoutEmpty()
}

// withoutEmpty drops columns of numbers that have a dash in every row.
func (t sheet) withoutEmpty() sheet {
	for j := len(t.Head) - 1; j >= t.Text; j-- {
		if !slices.ContainsFunc(t.Rows, func(row []cell) bool { return row[j].Text != "–" }) {
			t.Head = slices.Delete(t.Head, j, j+1)
			for i := range t.Rows {
				t.Rows[i] = slices.Delete(t.Rows[i], j, j+1)
			}
		}
	}
	return t
}

// needs is what a GPU needs of the host, if none can be used.
func needs(r *Result) sheet {
	if r.Facts == nil {
		return sheet{}
	}
	t := sheet{Caption: "What a GPU needs of this machine", Text: 3, Head: []string{"Requirement", "State", "Found"}}
	for _, q := range r.Requirements {
		state := cell{Text: "present"}
		switch q.State {
		case doctor.Missing:
			state = cell{Text: "missing", Tone: bad}
		case doctor.Uncertain:
			state = cell{Text: "unknown", Tone: warn}
		}
		t.Rows = append(t.Rows, []cell{{Text: prose(q.Name)}, state, {Text: prose(q.Detail)}})
	}
	return t
}

// fieldsOf is what is known of the machine.
func fieldsOf(r *Result) (out []field) {
	if r.Facts == nil {
		return nil
	}
	add := func(name, value string) {
		if value = prose(value); value != "" {
			out = append(out, field{name, value})
		}
	}
	var mig, addresses, memory []string
	links := map[string]bool{}
	var linked []string
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.PCIBusID != "" {
			addresses = append(addresses, d.PCIBusID)
		}
		if m := joined(units.Bytes(d.MemoryTotal), prefixed("compute capability ", d.ComputeCapability)); d.MemoryTotal > 0 && !slices.Contains(memory, m) {
			memory = append(memory, m)
		}
		if strings.HasPrefix(d.UUID, "MIG-") || d.Health != nil && d.Health.MIG != nil && *d.Health.MIG {
			mig = append(mig, fmt.Sprintf("GPU %d (%s)", d.Ordinal, d.UUID))
		}
		if text := linkText(d.Link); d.Link != nil && !links[text] {
			links[text] = true
			linked = append(linked, strings.TrimPrefix(text, "link "))
		}
	}
	add("GPUs", joinedWith("; ", joined(gpuModels(r), strings.Join(memory, ", ")), prefixed("PCI ", strings.Join(addresses, ", "))))
	add("MIG", prefixed("on: ", strings.Join(mig, ", ")))
	add("Link", strings.Join(linked, "; "))
	if h := r.Host; h != nil {
		add("CPU and memory", machineText(h))
		add("System", systemText(h))
		if id := h.Env["SLURM_JOB_ID"]; id != "" {
			add("Runs in", "Slurm job "+id)
		}
	}
	if l := r.Library; l != nil {
		add("CUDA", joined(versionsText(l), l.Path))
	}
	return out
}

// foldsOf has every measurement as a table, and what was checked.
func foldsOf(r *Result) (out []fold) {
	for i := range r.Benches {
		b := &r.Benches[i]
		f := fold{Title: benchTitle(b.Name), block: block{Deep: true}}
		if len(b.Answers) > 0 {
			f.Answer = clip(prose(b.Answers[0]), 160)
		} else if len(b.Series) == 0 {
			f.Answer = "Nothing was measured"
		}
		if !b.Complete {
			f.Answer = joinedWith(" ", "Incomplete.", f.Answer)
		}
		for _, a := range b.Answers {
			f.Texts = append(f.Texts, prose(a))
		}
		f.Texts = append(f.Texts, prosed(b.Notes)...)
		f.Tables = tablesOf(b)
		out = append(out, f)
	}
	if r.Facts != nil {
		out = append(out, checkFolds(r)...)
	}
	for i := range out { // tables of one caption in several folds have names of their own
		for j := range out[i].Tables {
			out[i].Tables[j].Caption = joinedWith(": ", out[i].Title, out[i].Tables[j].Caption)
		}
	}
	return out
}

func prosed(all []string) (out []string) {
	for _, s := range all {
		out = append(out, sentence(prose(s)))
	}
	return out
}

// benchTitle names an experiment in a fold.
func benchTitle(name string) string {
	switch name {
	case "bandwidth":
		return "Copies"
	case "latency":
		return "Small copies"
	case "memory":
		return "Memory kept"
	case "alloc":
		return "Pinning"
	case "overlap":
		return "Blocking and overlap"
	case "calls":
		return "CUDA calls"
	case "managed":
		return "Managed memory"
	}
	return cmp.Or(capital(clip(words(name), 60)), "Unnamed")
}

// tablesOf returns the views of an experiment, and what they do not show.
func tablesOf(b *result.Bench) (out []sheet) {
	shown := map[*result.Series]bool{}
	for _, v := range b.Views {
		byUnit := map[result.Unit][]*result.Series{}
		var order []result.Unit
		for _, s := range b.Select(v) {
			shown[s] = true
			if byUnit[s.Unit] == nil {
				order = append(order, s.Unit)
			}
			byUnit[s.Unit] = append(byUnit[s.Unit], s)
		}
		for _, u := range order {
			out = append(out, viewTable(b, v, byUnit[u]))
		}
	}
	var rest []*result.Series
	for i := range b.Series {
		if !shown[&b.Series[i]] {
			rest = append(rest, &b.Series[i])
		}
	}
	if len(rest) > 0 {
		out = append(out, listTable("further series", rest))
	}
	return out
}

// checkFolds has what was verified, what passed, and what was read of the machine.
func checkFolds(r *Result) (out []fold) {
	var paths []verify.PathReport
	trips, bytes, mismatches := 0, 0, 0
	var notes []string
	for i := range r.Devices {
		v := r.Devices[i].Verify
		if v == nil {
			continue
		}
		trips, bytes, mismatches = trips+v.Cases, bytes+v.VerifiedBytes, mismatches+v.MismatchCount
		paths = addPaths(paths, v.Paths)
		for _, s := range v.Skipped {
			notes = append(notes, fmt.Sprintf("GPU %d: skipped %s of %s: %s", r.Devices[i].Ordinal, units.Things(s.Cases, "case", "cases"), s.Path, s.Reason))
		}
		for _, m := range v.Mismatches {
			notes = append(notes, fmt.Sprintf("GPU %d: %s", r.Devices[i].Ordinal, m.String()))
		}
		for _, f := range v.Failures {
			notes = append(notes, fmt.Sprintf("GPU %d: %s", r.Devices[i].Ordinal, f.String()))
		}
		if v.Stale != nil {
			notes = append(notes, fmt.Sprintf("GPU %d: %s", r.Devices[i].Ordinal, staleText(v.Stale)))
		}
	}
	if trips > 0 || len(notes) > 0 {
		f := fold{Title: "Verification", Answer: fmt.Sprintf("%s, %s, %s", units.Things(trips, "round trip", "round trips"), prose(units.Data(bytes)), units.Things(mismatches, "mismatch", "mismatches"))}
		if len(paths) > 0 {
			f.Tables = []sheet{sheetOf("Round trips of all GPUs", pathTable(paths))}
		}
		f.Texts = prosed(notes)
		out = append(out, f)
	}
	if t := r.Together; t != nil {
		f := fold{Title: "All GPUs at once", Answer: togetherText(t), block: block{Texts: prosed(t.Notes)}}
		f.Tables = tablesOf(&result.Bench{Series: t.Series, Views: []result.View{{Title: "pinned copies at once", Series: doctor.TogetherBandwidth, X: result.Device, Lines: []string{result.Direction}}}})
		out = append(out, f)
	}
	if len(r.Passed) > 0 {
		out = append(out, fold{Title: "Checks that passed", Answer: units.Things(len(r.Passed), "group of checks", "groups of checks") + " found no problem and no warning",
			block: block{Texts: []string{sentence(prose(joined(r.Passed...)))}}})
	}
	var library []string
	answer := "none was found"
	if l := r.Library; l != nil {
		answer = joined(l.Path, prefixed("found: ", l.Found))
		library = append(library, l.Notes...)
		library = append(library, attemptTexts(l.Attempts)...)
	}
	if s := r.Search; s != nil {
		library = append(library, attemptTexts(s.Attempts)...)
		library = append(library, prefixed("looked in: ", strings.Join(s.Searched, "; ")))
	}
	for i := range r.Devices {
		library = append(library, prefixed(fmt.Sprintf("GPU %d: ", r.Devices[i].Ordinal), r.Devices[i].UUID))
	}
	if r.Library != nil || len(library) > 0 {
		out = append(out, fold{Title: "Library search and identifiers", Answer: prose(answer), block: block{Texts: nonEmpty(prosed(library)...)}})
	}
	return out
}

// sheetOf returns a table of the text as one of the page.
func sheetOf(caption string, t table) sheet {
	out := sheet{Caption: caption, Text: 1, Head: t.headers}
	for _, row := range t.rows {
		var cells []cell
		for _, text := range row {
			cells = append(cells, cell{Text: prose(text)})
		}
		out.Rows = append(out.Rows, cells)
	}
	return out
}

func attemptTexts(all []doctor.Attempt) (out []string) {
	for _, a := range all {
		if a.Error != "" {
			out = append(out, fmt.Sprintf("not %s (found: %s): %s", a.Path, a.Found, a.Error))
		}
	}
	return out
}

// togetherText says what the copies of all GPUs at once reach.
func togetherText(b *result.Bench) string {
	var parts []string
	for _, s := range b.Select(result.View{Series: doctor.TogetherBandwidth, Where: result.Labels{{Key: result.Device, Value: doctor.TogetherSum}}}) {
		parts = append(parts, prose(units.Rate(s.Median))+" "+traceName(result.Direction, s.Labels.Get(result.Direction)))
	}
	return cmp.Or(joined(parts...), "not measured")
}

// methodText says how the series were measured.
func methodText(r *Result) (out []string) {
	least, most, compared, copied := math.MaxInt, 0, 0, 0
	for _, l := range r.series() {
		s := l.Series
		if len(s.Samples) == 0 || s.Unit == result.Count {
			continue
		}
		least, most = min(least, len(s.Samples)), max(most, len(s.Samples))
		copied += b2i(s.BytesPerSample > 0)
		compared += b2i(s.Verified)
	}
	if most == 0 {
		return nil
	}
	samples := units.Count(most)
	if least < most {
		samples = units.Count(least) + " to " + samples
	}
	text := fmt.Sprintf("Figures are medians of %s samples; 1 GB is 10⁹ bytes, 1 KiB 1,024.", samples)
	if most == 1 {
		text = "Each figure is one sample; 1 GB is 10⁹ bytes, 1 KiB 1,024."
	}
	if compared > 0 {
		text += fmt.Sprintf(" The bytes of %s of %s series of copies were compared afterwards.", units.Count(compared), units.Count(max(copied, compared)))
	}
	if r.Seconds > 0 {
		text += " The run took " + units.Seconds(r.Seconds) + "."
	}
	return []string{prose(text)}
}

// footText names the program.
func footText(r *Result) string {
	return plain(joined(strings.TrimSpace(r.Tool.Name+" "+r.Tool.Version), r.Tool.Platform))
}
