package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A group is the hosts of one tone in the table of a fleet.
type group struct {
	ID, Count, what string
	Tone            tone
	Rows            []hostRow
}

// A hostRow is a host, with the rates of its slowest GPU against the medians of the fleet.
type hostRow struct {
	verdict
	ID, Host      string
	Finding, Name string // the worst finding, and its id
	Rates         [2]tile
	rates         [2]float64
	loss          float64 // the greater one
	of            *Result
}

const (
	outlier       = 0.05 // hosts that are further below the median are marked
	maxNamedHosts = 6    // have names in each row of the spread
	maxOthers     = 12   // hosts named for one value of a setting
)

// fleetPage returns the page of several results.
func fleetPage(all []*Result) webPage {
	d := webPage{Title: units.Things(len(all), "host", "hosts") + " · pincheck", Verdict: verdict{Tone: unclear, Title: "No results", Lede: "The files have none."}}
	if len(all) == 0 {
		return d
	}
	rows := make([]hostRow, len(all))
	var rates [2][]float64
	gpus, first, last := 0, all[0].Started, all[0].Started
	for i, r := range all {
		rows[i] = newHostRow(fmt.Sprintf("h%d", i+1), r)
		for j, v := range rows[i].rates {
			if v > 0 {
				rates[j] = append(rates[j], v)
			}
		}
		gpus += len(r.gpus())
		first, last = slices.MinFunc([]time.Time{first, r.Started}, time.Time.Compare), slices.MaxFunc([]time.Time{last, r.Started}, time.Time.Compare)
		d.Verdict.Simulated = d.Verdict.Simulated || rows[i].Simulated
	}
	medians := []float64{result.Summarize(rates[0]).Median, result.Summarize(rates[1]).Median}
	for i := range rows {
		rows[i].against(medians)
	}
	rank := func(t tone) int { return slices.Index([]tone{bad, warn, unclear, okay}, t) }
	slices.SortStableFunc(rows, func(a, b hostRow) int {
		return cmp.Or(cmp.Compare(rank(a.Tone), rank(b.Tone)), cmp.Compare(b.loss, a.loss), cmp.Compare(b2i(a.Finding == ""), b2i(b.Finding == "")), cmp.Compare(a.Host, b.Host))
	})
	d.Groups = groupsByTone(rows)
	worst := d.Groups[0]
	n := len(worst.Rows)
	switch d.Verdict.Tone = worst.Tone; worst.Tone {
	case okay: // so all are
		d.Verdict.Title = fmt.Sprintf("All %d hosts are %s", n, worst.what)
		if n == 2 {
			d.Verdict.Title = "Both hosts are " + worst.what
		}
	case unclear:
		d.Verdict.Title = fmt.Sprintf("%d of %d runs are %s", n, len(all), worst.what)
	default:
		have := map[bool]string{true: "has", false: "have"}[n == 1]
		d.Verdict.Title = fmt.Sprintf("%d of %d hosts %s", n, len(all), strings.Replace(worst.what, "with", have, 1))
	}
	var rest []string
	for _, g := range d.Groups[1:] {
		rest = append(rest, g.Count)
	}
	d.Verdict.Lede = prefixed("Of the others: ", strings.Join(rest, ", "))
	if medians[0] > 0 && medians[1] > 0 {
		d.Verdict.Lede = prose(joinedWith(". ", d.Verdict.Lede, fmt.Sprintf("The median host copies %s to each GPU and %s back.", units.Rate(medians[0]), units.Rate(medians[1]))))
	}
	d.Over, d.Foot = nonEmpty("Fleet", units.Things(len(all), "result", "results")+", "+units.Things(gpus, "GPU", "GPUs"), joinedWith(" to ", nonEmpty(slices.Compact([]string{stamp(first), stamp(last)})...)...), "pincheck report"), footText(all[0])
	across := block{ID: "across", Title: "Across the fleet", Figures: spread(rows, medians)}
	if t := differing(rows); len(t.Rows) > 0 {
		across.Tables = []sheet{t}
	} else {
		across.Texts = []string{"No setting that pincheck reads differs between these hosts."}
	}
	d.Sections = []block{
		{ID: "hosts", Title: "Hosts", Hosts: d.Groups, Sub: "Bars: GB/s of the host's slowest GPU, pinned copies. Mark: median of the fleet. ▼: more than 5% below it."},
		across, {ID: "each", Title: "Each host", Folds: hostFolds(rows)},
		{ID: "method", Title: "Method", Texts: []string{"A host's rate is that of its slowest GPU, with pinned memory; 1\u00a0GB is 10⁹ bytes. The page of one host has all of its measurements: run pincheck report with its file alone."}},
	}
	return d
}

// newHostRow returns a row, without what other hosts decide.
func newHostRow(id string, r *Result) hostRow {
	h := hostRow{verdict: verdictOf(r), ID: id, Host: hostName(r), of: r}
	if h.Simulated {
		h.Word += ", simulated"
	}
	groups := grouped(r.Findings)
	switch {
	case r.Verdict == doctor.Incomplete:
		h.Finding = "Stopped by " + r.Stopped
	case len(groups) > 0:
		h.Finding, h.Name = titleOf(groups[0]), plain(groups[0][0].ID)
		if groups[0][0].Severity == doctor.Note {
			h.Finding = "Note: " + h.Finding
		}
	case r.failures() > 0:
		h.Finding = units.Things(r.failures(), "measurement failed", "measurements failed")
	}
	h.Finding = clip(prose(h.Finding), 160)
	copies := copiesOf(r)
	for j, direction := range directions[:2] {
		slow, _, _ := slowestOf(copies, direction)
		h.Rates[j].Label, h.rates[j] = capital(nameOf("", direction)), slow.rate
	}
	return h
}

// against compares the rates of a host with the medians.
func (h *hostRow) against(medians []float64) {
	for j, v := range h.rates {
		if v <= 0 {
			continue
		}
		t := &h.Rates[j]
		t.Fig = units.Number(v, 3)
		t.meter(v, medians[j])
		loss := 1 - v/medians[j]
		if h.loss = max(h.loss, loss); loss > outlier {
			t.More, t.Tone = "▼\u202f"+percentOf(loss), warn
			if h.Tone == bad {
				t.Tone = bad
			}
		}
	}
}

// groupsByTone divides sorted rows.
func groupsByTone(rows []hostRow) (groups []group) {
	for _, h := range rows {
		if n := len(groups); n == 0 || groups[n-1].Tone != h.Tone {
			groups = append(groups, group{ID: "g-" + string(h.Tone), Tone: h.Tone})
		}
		g := &groups[len(groups)-1]
		g.Rows = append(g.Rows, h)
	}
	for i := range groups {
		g := &groups[i]
		if g.what = whatHosts[g.Tone]; slices.ContainsFunc(g.Rows, func(h hostRow) bool { return h.of.Verdict == doctor.Measured }) {
			g.what = "healthy or measured"
		}
		g.Count = units.Count(len(g.Rows)) + " " + g.what
	}
	return groups
}

var whatHosts = map[tone]string{bad: "with problems", warn: "with warnings", unclear: "incomplete or inconclusive", okay: "healthy"}

// spread draws a dot for each host. Only those that are slower than the others have names.
func spread(rows []hostRow, medians []float64) []figure {
	if medians[0] <= 0 || medians[1] <= 0 {
		return nil
	}
	others := trace{Class: "weak"}
	c := chart{Names: []string{"To GPU", "From GPU"}, Unit: units.Unit{Factor: 1, Name: "GB/s"}, Traces: []trace{others}}
	f := figure{ID: "spread", What: "GB/s of each host's slowest GPU, pinned memory. Dots: hosts. Dashed: median of the fleet. The table of hosts has the values."}
	slow, rest := 0, 0.0
	for _, h := range rows {
		for j, v := range h.rates {
			p := point{X: float64(j), Y: v, Low: v, High: v}
			switch {
			case v <= 0:
			case h.Rates[j].Tone != "" && len(c.Traces) <= 2*maxNamedHosts:
				c.Traces = append(c.Traces, trace{Name: h.Host, Class: map[tone]string{bad: "low", warn: "low wrn"}[h.Rates[j].Tone], Points: []point{p}})
			default:
				c.Traces[0].Points = append(c.Traces[0].Points, p)
				if h.Rates[j].Tone == "" {
					rest = max(rest, math.Abs(1-v/medians[j]))
				}
			}
		}
		slow += b2i(h.loss > outlier)
	}
	within := inPercent(math.Ceil(100*rest) / 100)
	f.Title = fmt.Sprintf("All hosts copy within %s of the median", within)
	if slow > 0 {
		f.Title = fmt.Sprintf("%s more than 5%% slower than the median; the others are within %s", units.Things(slow, "host copies", "hosts copy"), within)
	}
	f.Desc, f.Plot = c.describe(), drawDots(c, medians)
	return []figure{f}
}

// settings are what hosts of a fleet should have in common, "" where it is not known.
var settings = []struct {
	name string
	of   func(r *Result) string
}{
	{"GPUs", gpuModels},
	{"PCIe links", func(r *Result) string { return eachGPU(r, ", ", linkNow) }},
	{"Persistence mode", switched(func(h *nvml.GPU) *bool { return h.Persistence })},
	{"MIG", switched(func(h *nvml.GPU) *bool { return h.MIG })},
	{"NVIDIA driver", func(r *Result) string { return r.Host.NVIDIA.DriverVersion }},
	{"CUDA runtime", func(r *Result) string {
		if r.Library == nil {
			return ""
		}
		return r.Library.RuntimeVersion
	}},
	{"Kernel", func(r *Result) string { return r.Host.Kernel.Release }},
	{"System", func(r *Result) string { return r.Host.Distro.Name }},
	{"CPU", func(r *Result) string { return r.Host.CPU.Model }},
	{"Usable CPUs", func(r *Result) string { return nonZero(fmt.Sprintf("%g", r.Host.CPU.Usable())) }},
	{"NUMA nodes", func(r *Result) string { return nonZero(fmt.Sprint(len(r.Host.NUMA))) }},
	{"Memory", func(r *Result) string { return nonZero(units.Bytes(r.Host.Memory.Total)) }},
	{"pincheck", func(r *Result) string { return r.Tool.Version }},
}

func nonZero(text string) string {
	if text == "0" || text == "0 B" {
		return ""
	}
	return text
}

// switched returns what the GPUs of a host have switched on or off.
func switched(of func(h *nvml.GPU) *bool) func(r *Result) string {
	return func(r *Result) string {
		return eachGPU(r, ", ", func(d *doctor.Device) string {
			if d.Health == nil || of(d.Health) == nil {
				return ""
			}
			return map[bool]string{true: "on", false: "off"}[*of(d.Health)]
		})
	}
}

// differing returns the settings that not all hosts have alike, and which hosts differ.
func differing(rows []hostRow) sheet {
	t := sheet{Caption: "Settings that differ from most hosts", Text: 3, Head: []string{"Setting", "Most hosts", "Others"}}
	for _, s := range settings {
		hosts := map[string][]link{}
		for _, h := range rows {
			if h.of.Facts == nil || h.of.Host == nil {
				continue
			}
			if v := clip(plain(s.of(h.of)), 80); v != "" {
				hosts[v] = append(hosts[v], link{h.ID, h.Host})
			}
		}
		values := slices.SortedFunc(maps.Keys(hosts), func(a, b string) int { return cmp.Or(cmp.Compare(len(hosts[b]), len(hosts[a])), cmp.Compare(a, b)) })
		for i, v := range values[min(len(values), 1):min(len(values), 8)] {
			row := []cell{{Text: s.name}, {}, {Lead: prose(v) + ": ", Links: hosts[v][:min(len(hosts[v]), maxOthers)]}}
			if more := len(hosts[v]) - maxOthers; more > 0 {
				row[2].More = fmt.Sprintf("and %d more:", more)
			}
			if i == 0 {
				row[1].Text = fmt.Sprintf("%s (%d)", prose(values[0]), len(hosts[values[0]]))
			}
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}

// hostFolds has each host in a fold. Healthy ones share one.
func hostFolds(rows []hostRow) (out []fold) {
	healthy, notes := fold{Tone: okay, block: block{Deep: true}}, 0
	for _, h := range rows {
		f := fold{Tone: h.Tone, Word: h.Word, Title: h.Host, Answer: h.Finding, block: h.block()}
		if h.Tone != okay {
			out = append(out, f)
			continue
		}
		if f.Answer != "" {
			notes++
		} else if h.Rates[0].Fig != "" && h.Rates[1].Fig != "" {
			f.Answer = h.Rates[0].Fig + " to GPU, " + h.Rates[1].Fig + " from GPU"
		}
		healthy.Folds = append(healthy.Folds, f)
	}
	if n := len(healthy.Folds); n > 0 {
		healthy.Title, healthy.Answer = units.Things(n, "host", "hosts")+" without problems or warnings", units.Count(notes)+" with notes"
		out = append(out, healthy)
	}
	return out
}

// block is what a host's fold holds.
func (h *hostRow) block() block {
	cards, notes := cardsOf(h.of, h.ID+"-f")
	b := block{ID: h.ID, Deep: true, Findings: cards, Tables: gpuSheet(h.of), Texts: nonEmpty(h.Lede)}
	for _, n := range notes {
		b.Texts = append(b.Texts, fmt.Sprintf("Note: %s (%s)", sentence(n.Title), n.Name))
	}
	for i := range b.Tables {
		b.Tables[i].Caption = fmt.Sprintf("%s (%s): %s", h.Host, strings.TrimPrefix(h.ID, "h"), b.Tables[i].Caption)
	}
	for _, n := range h.of.Benches {
		if len(n.Answers) > 0 {
			b.Facts = append(b.Facts, field{benchTitle(n.Name), clip(prose(n.Answers[0]), 160)})
		}
	}
	if h.of.Facts != nil && h.of.Host != nil {
		b.Texts = append(b.Texts, prose(joinedWith("; ", machineText(h.of.Host), systemText(h.of.Host))))
	}
	return b
}
