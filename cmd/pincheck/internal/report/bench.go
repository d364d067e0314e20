package report

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// benchPage writes what experiments found: the verdict, the answers with their key figures, and on what they are based.
func (p *page) benchPage(r *Result) {
	if r.Verdict != doctor.Measured {
		p.verdict(r)
	}
	alone := len(r.Benches) == 1
	first := &r.Benches[0]
	if len(first.Answers) > 0 {
		p.colored(bold, first.Answers[0])
	}
	if r.Facts != nil && r.Simulated {
		p.colored(yellow, "Simulated GPU: nothing below was measured on hardware.")
	}
	if alone {
		p.experiment(first)
	} else {
		p.flow(0, measuredText(r))
		p.experiments(r, first)
	}
	if p.style.Verbose {
		if alone {
			p.bench(first)
		}
		if r.Facts != nil {
			p.gap()
			p.machine(r)
		}
	}
	if len(r.Errors) > 0 {
		p.gap()
	}
	for _, e := range r.Errors {
		p.painted("Error", red, plain(e), "")
	}
	p.gap()
	if alone {
		p.flow(0, measuredText(r))
	}
	p.references(r)
	p.more(r, alone)
}

// more says how to see the rest.
func (p *page) more(r *Result, alone bool) {
	notes := 0
	for i := range r.Benches {
		notes += len(r.Benches[i].Notes)
	}
	rest := "All series and their spread"
	if notes > 0 {
		rest = "All series, their spread and " + units.Things(notes, "note", "notes")
	}
	switch {
	case p.style.Verbose:
	case alone && notes == 0:
		p.flow(0, rest+": --verbose. As a page with plots: --format html")
	case alone:
		p.flow(0, rest+": --verbose")
		p.flow(0, "As a page with plots: --format html")
	default:
		p.flow(0, "One experiment in full: pincheck bench NAME. As a page: --format html")
		p.flow(0, rest+": --verbose")
	}
}

// experiments writes for each experiment its answer and its key figures, or all of it if the style is verbose. The first
// answer of one may have been written.
func (p *page) experiments(r *Result, written *result.Bench) {
	if len(r.Benches) > 0 && !p.style.Verbose {
		p.gap()
	}
	for i := range r.Benches {
		b := &r.Benches[i]
		if p.style.Verbose {
			p.bench(b)
			continue
		}
		answer := ""
		switch {
		case b == written && len(b.Answers) > 1:
			answer = b.Answers[1]
		case len(b.Answers) > 0:
			answer = b.Answers[0]
		case len(b.Errors) == 0:
			answer = "Nothing was measured."
		}
		name := plain(b.Name)
		if len([]rune(name)) >= labelWidth {
			p.colored(bold, name)
			name = ""
		}
		p.painted(name, bold, answer, "")
		for j := range b.Figures {
			if t := &b.Figures[j]; t.Only != result.Alone {
				p.figure(t, labelWidth+2, false)
			}
		}
		p.ended(b)
	}
}

// experiment writes the answers after the first one, and the figures of one experiment.
func (p *page) experiment(b *result.Bench) {
	for i, a := range b.Answers {
		if i > 0 {
			p.flow(0, a)
		}
	}
	main := slices.DeleteFunc(slices.Clone(b.Views), func(v result.View) bool { return !v.Main })
	if len(main) == 0 && len(b.Figures) == 0 { // an older pincheck measured
		main = b.Views[:min(1, len(b.Views))]
	}
	shown := map[*result.Series]bool{}
	if !p.style.Verbose { // which has all views below
		for _, v := range main {
			p.view(b, v, 0, shown)
		}
	}
	for i := range b.Figures {
		if t := &b.Figures[i]; t.Only != result.Summary {
			p.gap()
			p.figure(t, 0, true)
		}
	}
	if !p.style.Verbose && len(shown) == 0 && len(b.Figures) == 0 {
		p.unseen(b, shown)
	}
	p.ended(b)
}

// ended writes what failed, and whether an experiment was stopped.
func (p *page) ended(b *result.Bench) {
	for _, e := range b.Errors {
		p.painted("Error", red, plain(e), "")
	}
	if !b.Complete {
		p.painted("Stopped", yellow, "before its end: what is shown was measured", "")
	}
}

// measuredText names the GPUs, and says how much was measured.
func measuredText(r *Result) string {
	var all []*result.Series
	for i := range r.Benches {
		for j := range r.Benches[i].Series {
			all = append(all, &r.Benches[i].Series[j])
		}
	}
	var parts []string
	if len(r.Benches) > 1 {
		parts = append(parts, units.Things(len(r.Benches), "experiment", "experiments"))
	}
	parts = append(parts, units.Count(len(all))+" series")
	if len(r.Benches) == 1 && len(all) > 0 {
		parts = append(parts, samplesText(all), comparedText(all))
	}
	return joinedWith(" ", gpuLines(r), joined(parts...)+". "+units.Seconds(r.Seconds)+".")
}

// gpuLines names the GPUs with their links, those that are the same together.
func gpuLines(r *Result) string {
	if r.Facts == nil {
		return ""
	}
	var texts []string
	gpus := map[string][]int{}
	for i := range r.Devices {
		d := &r.Devices[i]
		text := d.Name + prefixed(", ", linkNow(d))
		if gpus[text] == nil {
			texts = append(texts, text)
		}
		gpus[text] = append(gpus[text], d.Ordinal)
	}
	for i, text := range texts {
		texts[i] = subject(gpus[text]) + text + "."
	}
	return strings.Join(texts, " ")
}

// samplesText is of how many samples the medians are.
func samplesText(all []*result.Series) string {
	fewest, most := math.MaxInt, 0
	for _, s := range all {
		fewest, most = min(fewest, len(s.Samples)), max(most, len(s.Samples))
	}
	switch {
	case most <= 1:
		return "one sample each"
	case fewest == most:
		return "medians of " + units.Count(most) + " samples"
	}
	return "medians of " + units.Count(fewest) + " to " + units.Count(most) + " samples"
}

// comparedText is of how many series the bytes were compared, "" if none copies any.
func comparedText(all []*result.Series) string {
	verified, copied := 0, 0
	for _, s := range all {
		if s.Verified {
			verified++
		}
		if s.BytesPerSample > 0 || s.Verified {
			copied++
		}
	}
	switch {
	case copied == 0:
		return ""
	case verified == copied:
		return "all bytes compared"
	}
	return "bytes compared in " + units.Count(verified) + " of " + units.Things(copied, "series", "series")
}

// rowOf matches what differs between the rows of one source: direction, size and rate.
var rowOf = regexp.MustCompile(`, (host to device|device to host|both)|, [0-9.]+ [KMG]iB|: (median of [0-9]+, )?[0-9.]+( to [0-9.]+)? GB/s( reported)?`)

// references writes the sources of all references, once each.
func (p *page) references(r *Result) {
	var sources []string
	for i := range r.Benches {
		for _, s := range r.Benches[i].Series {
			if e := s.Expected; e != nil {
				if source := rowOf.ReplaceAllString(e.Source, ""); !slices.Contains(sources, source) {
					sources = append(sources, source)
				}
			}
		}
	}
	switch {
	case len(sources) > 0:
		p.flow(0, "Reference: "+strings.Join(sources, "; "))
	case (r.Facts == nil || !r.Simulated) && slices.ContainsFunc(r.Benches, func(b result.Bench) bool { return b.Name == "bandwidth" }):
		p.flow(0, "No reference for this GPU and link.")
	}
}

// bench writes all of an experiment: question and answers, views with plots, the series in no view, how all were
// measured, and notes.
func (p *page) bench(b *result.Bench) {
	p.gap()
	p.WriteString(p.style.paint(bold, strings.Join(wrap(plain(b.Name), p.style.width()), "\n")) + "\n")
	if b.Question != "" {
		p.row("Asked", "%s", b.Question)
	}
	label := "Answer"
	for _, a := range b.Answers {
		p.row(label, "%s", a)
		label = ""
	}
	shown := map[*result.Series]bool{}
	for _, v := range b.Views {
		p.view(b, v, labelWidth, shown)
	}
	p.unseen(b, shown)
	if len(b.Series) > 0 {
		p.gap()
		p.method(b)
	}
	for _, n := range b.Notes {
		p.note("Note", "%s", n)
	}
	p.ended(b)
}

// unseen writes the series that no view shows.
func (p *page) unseen(b *result.Bench, shown map[*result.Series]bool) {
	first := true
	for i := range b.Series {
		if s := &b.Series[i]; !shown[s] {
			if first {
				p.gap()
			}
			first = false
			p.row("", "%s", seriesText(s))
		}
	}
}

// method writes how the series were measured.
func (p *page) method(b *result.Bench) {
	cpuLow, cpuHigh := math.Inf(1), math.Inf(-1)
	var nodes []string
	var all []*result.Series
	unsteady := &b.Series[0]
	for i := range b.Series {
		s := &b.Series[i]
		all = append(all, s)
		if c := s.CPUSecondsPerGB; c != nil {
			cpuLow, cpuHigh = min(cpuLow, *c), max(cpuHigh, *c)
		}
		if s.NUMANode != nil && !slices.Contains(nodes, strconv.Itoa(*s.NUMANode)) {
			nodes = append(nodes, strconv.Itoa(*s.NUMANode))
		}
		if s.Spread > unsteady.Spread {
			unsteady = s
		}
	}
	parts := []string{samplesText(all) + ", taken in " + units.Seconds(b.Seconds)}
	if unsteady.Spread > 0 {
		parts = append(parts, fmt.Sprintf("widest spread %s of the median (%s)", units.Share(unsteady.Spread), nameText(unsteady)))
	}
	if text := comparedText(all); text != "" {
		parts = append(parts, text)
	}
	if cpuHigh >= cpuLow {
		text := units.Number(cpuLow, 3)
		if high := units.Number(cpuHigh, 3); high != text {
			text += " to " + high
		}
		parts = append(parts, text+" CPU seconds a GB")
	}
	if len(nodes) > 0 {
		parts = append(parts, "host memory on NUMA node "+strings.Join(nodes, ", "))
	}
	p.note("Method", "%s", strings.Join(parts, "; "))
}

// nameText is a series' name and labels in words.
func nameText(s *result.Series) string {
	parts := []string{words(s.Name)}
	for _, l := range s.Labels {
		parts = append(parts, labelText(l))
	}
	return strings.Join(parts, ", ")
}

// seriesText describes a series in a sentence: conditions, median, range, reference.
func seriesText(s *result.Series) string {
	text := fmt.Sprintf("%s: %s", nameText(s), measured(s.Unit, s.Median))
	if n := len(s.Samples); n > 1 {
		text += fmt.Sprintf(" (median of %s, %s to %s)", units.Count(n), value(s.Unit, s.Min), value(s.Unit, s.Max))
	}
	if e := s.Expected; e != nil {
		text += fmt.Sprintf(", reference %s", measured(s.Unit, e.Value))
	}
	return text
}
