package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// A group is the hosts of one severity.
type group struct {
	ID, Count string
	Tone      tone
	Rows      []hostRow
}

// A hostRow is a host in the table of a fleet.
type hostRow struct {
	ID, Host, Word string
	Tone           tone
	Finding, Name  string // the worst finding, and its id
	Rates          []rateCell
	loss           float64 // the greatest one against the median
	of             *Result
}

// A rateCell is the rate of a host's slowest GPU against the median of the fleet.
type rateCell struct {
	Label, Fig, Meter, Tick, More string
	Tone                          tone
	rate                          float64
}

const outlier = 0.05 // hosts that are further below the median are marked

// fleetPage returns the page of several results.
func fleetPage(all []*Result) webPage {
	rows := make([]hostRow, len(all))
	rates := [2][]float64{}
	for i, r := range all {
		rows[i] = newHostRow(fmt.Sprintf("h%d", i+1), r)
		for j, c := range rows[i].Rates {
			if c.rate > 0 {
				rates[j] = append(rates[j], c.rate)
			}
		}
	}
	medians := []float64{result.Summarize(rates[0]).Median, result.Summarize(rates[1]).Median}
	for i := range rows {
		rows[i].against(medians)
	}
	slices.SortStableFunc(rows, func(a, b hostRow) int {
		return cmp.Or(cmp.Compare(toneRank(a.Tone), toneRank(b.Tone)), cmp.Compare(b.loss, a.loss), cmp.Compare(b2i(b.Finding != ""), b2i(a.Finding != "")), cmp.Compare(a.Host, b.Host))
	})
	groups := groupsByTone(rows)
	d := webPage{Title: units.Things(len(all), "host", "hosts") + " · pincheck", Groups: groups, Verdict: fleetVerdict(groups, len(all), medians), Over: fleetOver(all)}
	if len(all) == 0 {
		return d
	}
	d.Foot = footText(all[0])
	d.Sections = append(d.Sections, block{ID: "hosts", Title: "Hosts", Hosts: groups,
		Sub: "Bars: GB/s of the host's slowest GPU, pinned copies. Mark: median of the fleet. ▼: more than 5% below it."})
	across := block{ID: "across", Title: "Across the fleet"}
	if f, ok := spread(rows, medians); ok {
		across.Figures = []figure{f}
	}
	if t := differing(rows); len(t.Rows) > 0 {
		across.Tables = []sheet{t}
	} else {
		across.Texts = []string{"No setting that pincheck reads differs between these hosts."}
	}
	d.Sections = append(d.Sections, across, block{ID: "each", Title: "Each host", Folds: hostFolds(rows)},
		block{ID: "method", Title: "Method", Texts: []string{"A host's rate is that of its slowest GPU, with pinned memory. The page of one host has all of its measurements: run pincheck report with its file alone. 1\u00a0GB is 10⁹ bytes."}})
	return d
}

// newHostRow returns a row, without what other hosts decide.
func newHostRow(id string, r *Result) hostRow {
	v := verdictOf(r)
	row := hostRow{ID: id, Host: hostName(r), Word: v.Word, Tone: v.Tone, of: r}
	if v.Simulated {
		row.Word += ", simulated"
	}
	worst := slices.Clone(r.Findings)
	slices.SortStableFunc(worst, func(a, b doctor.Finding) int { return cmp.Compare(severityRank(a), severityRank(b)) })
	switch {
	case r.Verdict == doctor.Incomplete:
		row.Finding = joinedWith(" ", "Stopped:", prose(r.Stopped))
	case len(worst) > 0:
		same := grouped(worst)[0]
		row.Finding, row.Name = capital(prose(subject(gpusOf(same))+same[0].Summary)), plain(same[0].ID)
		if same[0].Severity == doctor.Note {
			row.Finding = "Note: " + row.Finding
		}
	case r.failures() > 0:
		row.Finding = units.Things(r.failures(), "measurement failed", "measurements failed")
	}
	row.Finding = clip(row.Finding, 160)
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
		c := rateCell{Label: capital(traceName(result.Direction, direction))}
		for _, known := range copiesOf(r) {
			if known.direction == direction && (c.rate == 0 || known.rate < c.rate) {
				c.rate = known.rate
			}
		}
		row.Rates = append(row.Rates, c)
	}
	return row
}

// against compares the rates of a row with the medians.
func (h *hostRow) against(medians []float64) {
	for j := range h.Rates {
		c := &h.Rates[j]
		if c.rate <= 0 {
			continue
		}
		top := max(c.rate, medians[j]) / 0.98
		c.Fig, c.Meter, c.Tick = units.Number(c.rate, 3), inPercent(c.rate/top), inPercent(medians[j]/top)
		loss := 1 - c.rate/medians[j]
		h.loss = max(h.loss, loss)
		if loss > outlier {
			c.More, c.Tone = "▼\u202f"+percentOf(loss), warn
			if h.Tone == bad {
				c.Tone = bad
			}
		}
	}
}

func toneRank(t tone) int { return slices.Index([]tone{bad, warn, unclear, okay}, t) }

// groupsByTone divides sorted rows.
func groupsByTone(rows []hostRow) (groups []group) {
	for _, row := range rows {
		if n := len(groups); n == 0 || groups[n-1].Tone != row.Tone {
			groups = append(groups, group{ID: "g-" + string(row.Tone), Tone: row.Tone})
		}
		g := &groups[len(groups)-1]
		g.Rows = append(g.Rows, row)
	}
	for i := range groups {
		g := &groups[i]
		n := len(g.Rows)
		switch g.Tone {
		case bad:
			g.Count = units.Things(n, "host with problems", "hosts with problems")
		case warn:
			g.Count = units.Things(n, "host with warnings", "hosts with warnings")
		case unclear:
			g.Count = units.Things(n, "incomplete or inconclusive", "incomplete or inconclusive")
		default:
			g.Count = units.Count(n) + " healthy or measured"
			if !slices.ContainsFunc(g.Rows, func(h hostRow) bool { return h.of.Verdict != doctor.Healthy }) {
				g.Count = units.Count(n) + " healthy"
			}
		}
	}
	return groups
}

// fleetVerdict says how many hosts have what.
func fleetVerdict(groups []group, n int, medians []float64) verdict {
	if n == 0 {
		return verdict{Tone: unclear, Title: "No results", Lede: "The files have none."}
	}
	v := verdict{Tone: groups[0].Tone, Word: groups[0].Tone.Word()}
	worst := len(groups[0].Rows)
	have := "have"
	if worst == 1 {
		have = "has"
	}
	var rest []string
	for _, g := range groups[1:] {
		rest = append(rest, g.Count)
	}
	switch v.Tone {
	case bad:
		v.Title = fmt.Sprintf("%d of %d hosts %s problems", worst, n, have)
	case warn:
		v.Title = fmt.Sprintf("%d of %d hosts %s warnings", worst, n, have)
	case unclear:
		v.Title = fmt.Sprintf("%d of %d runs are incomplete or inconclusive", worst, n)
	default:
		v.Title = fmt.Sprintf("None of %d hosts has problems or warnings", n)
		if strings.HasSuffix(groups[0].Count, " healthy") {
			v.Title = fmt.Sprintf("All %d hosts are healthy", n)
		}
	}
	if len(rest) > 0 {
		v.Lede = "Of the others: " + strings.Join(rest, ", ") + "."
	}
	if medians[0] > 0 && medians[1] > 0 {
		v.Lede = joinedWith(" ", v.Lede, prose(fmt.Sprintf("The median host copies %s to each GPU and %s back.", units.Rate(medians[0]), units.Rate(medians[1]))))
	}
	for _, g := range groups {
		v.Simulated = v.Simulated || slices.ContainsFunc(g.Rows, func(h hostRow) bool { return h.of.Facts != nil && h.of.Simulated })
	}
	return v
}

// fleetOver counts hosts and GPUs, and has the time of the runs.
func fleetOver(all []*Result) []string {
	gpus := 0
	var first, last time.Time
	for _, r := range all {
		if r.Facts != nil {
			gpus += len(r.Devices)
		}
		if t := r.Started; !t.IsZero() {
			if first.IsZero() || t.Before(first) {
				first = t
			}
			if t.After(last) {
				last = t
			}
		}
	}
	when := stamp(first)
	if stamp(last) != when {
		when = strings.TrimSuffix(when, " UTC") + " to " + stamp(last)
	}
	return nonEmpty("Fleet", units.Things(len(all), "result", "results")+", "+units.Things(gpus, "GPU", "GPUs"), when, "pincheck report")
}

// spread draws a dot for each host. Only those that are slower than the others have names.
func spread(rows []hostRow, medians []float64) (figure, bool) {
	if medians[0] <= 0 || medians[1] <= 0 {
		return figure{}, false
	}
	others := trace{Class: "weak"}
	c := chart{Names: []string{"To GPU", "From GPU"}, Unit: units.Unit{Factor: 1, Name: "GB/s"}}
	t := sheet{Caption: "Hosts more than 5% below the median, GB/s", Text: 1, Head: []string{"Host", "To GPU", "From GPU"},
		Rows: [][]cell{{{Text: "median"}, {Text: units.Number(medians[0], 3)}, {Text: units.Number(medians[1], 3)}}}}
	slow, rest, named := 0, 0.0, 0
	for _, h := range rows {
		row := []cell{{Links: []link{{h.ID, h.Host}}}}
		for j, cell1 := range h.Rates {
			row = append(row, cell{Text: cmp.Or(cell1.Fig, "–")})
			if cell1.rate <= 0 {
				continue
			}
			p := point{X: float64(j), Y: cell1.rate, Low: cell1.rate, High: cell1.rate}
			if cell1.Tone == "" || named >= 2*maxNamedHosts {
				others.Points = append(others.Points, p)
				rest = max(rest, 1-cell1.rate/medians[j], cell1.rate/medians[j]-1)
				continue
			}
			class := "low wrn"
			if cell1.Tone == bad {
				class = "low"
			}
			named++
			c.Traces = append(c.Traces, trace{Name: h.Host, Class: class, Points: []point{p}})
		}
		if h.loss > outlier {
			slow++
			t.Rows = append(t.Rows, row)
		}
	}
	c.Traces = append([]trace{others}, c.Traces...)
	within := inPercent(math.Ceil(100*rest) / 100)
	title := fmt.Sprintf("All hosts copy within %s of the median", within)
	if slow > 0 {
		verb := "hosts copy"
		if slow == 1 {
			verb = "host copies"
		}
		title = fmt.Sprintf("%d %s more than 5%% slower than the median; the others are within %s", slow, verb, within)
	}
	return figure{ID: "spread", Title: title, What: "GB/s of each host's slowest GPU, pinned memory. Dots: hosts. Dashed: median of the fleet.",
		Desc: c.describe(), Plot: drawDots(c, medians), Table: t}, true
}

// maxNamedHosts is how many outliers have names in each row.
const maxNamedHosts = 6

// settings are what hosts of a fleet should have in common.
var settings = []struct {
	name string
	of   func(r *Result) string
}{
	{"GPUs", gpuModels},
	{"NVIDIA driver", onHost(func(r *Result) string { return r.Host.NVIDIA.DriverVersion })},
	{"CUDA runtime", func(r *Result) string {
		if r.Facts == nil || r.Library == nil {
			return ""
		}
		return r.Library.RuntimeVersion
	}},
	{"PCIe links", func(r *Result) string { return eachGPU(r, linkNow) }},
	{"Persistence mode", func(r *Result) string {
		return eachGPU(r, func(d *doctor.Device) string {
			return onOff(d.Health, func(h *doctor.Health) *bool { return h.Persistence })
		})
	}},
	{"MIG", func(r *Result) string {
		return eachGPU(r, func(d *doctor.Device) string { return onOff(d.Health, func(h *doctor.Health) *bool { return h.MIG }) })
	}},
	{"Kernel", onHost(func(r *Result) string { return r.Host.Kernel.Release })},
	{"System", onHost(func(r *Result) string { return r.Host.Distro.Name })},
	{"CPU", onHost(func(r *Result) string { return r.Host.CPU.Model })},
	{"Usable CPUs", onHost(func(r *Result) string {
		if u := r.Host.CPU.Usable(); u > 0 {
			return strconv.FormatFloat(u, 'g', 4, 64)
		}
		return ""
	})},
	{"NUMA nodes", onHost(func(r *Result) string {
		if n := len(r.Host.NUMA); n > 0 {
			return strconv.Itoa(n)
		}
		return ""
	})},
	{"Memory", onHost(func(r *Result) string {
		if n := r.Host.Memory.Total; n > 0 {
			return units.Bytes(n)
		}
		return ""
	})},
	{"pincheck", func(r *Result) string { return r.Tool.Version }},
}

// onHost returns "" for results that have no host.
func onHost(of func(r *Result) string) func(r *Result) string {
	return func(r *Result) string {
		if r.Facts == nil || r.Host == nil {
			return ""
		}
		return of(r)
	}
}

// eachGPU returns what the GPUs of a host have, each value once.
func eachGPU(r *Result, of func(d *doctor.Device) string) string {
	if r.Facts == nil {
		return ""
	}
	var out []string
	for i := range r.Devices {
		if v := of(&r.Devices[i]); v != "" && !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return strings.Join(out, ", ")
}

func linkNow(d *doctor.Device) string {
	if d.Link == nil || d.Link.Rate == 0 {
		return ""
	}
	return d.Link.Now().String()
}

func onOff(h *doctor.Health, of func(h *doctor.Health) *bool) string {
	if h == nil || of(h) == nil {
		return ""
	}
	return map[bool]string{true: "on", false: "off"}[*of(h)]
}

// differing returns the settings that not all hosts have alike, and which hosts differ.
func differing(rows []hostRow) sheet {
	t := sheet{Caption: "Settings that differ from most hosts", Text: 3, Head: []string{"Setting", "Most hosts", "Others"}}
	for _, s := range settings {
		hosts := map[string][]link{}
		for _, h := range rows {
			if v := clip(plain(s.of(h.of)), 80); v != "" {
				hosts[v] = append(hosts[v], link{h.ID, h.Host})
			}
		}
		if len(hosts) < 2 {
			continue
		}
		values := slices.SortedFunc(maps.Keys(hosts), func(a, b string) int {
			return cmp.Or(cmp.Compare(len(hosts[b]), len(hosts[a])), cmp.Compare(a, b))
		})
		for i, v := range values[1:] {
			row := []cell{{}, {}, {Links: hosts[v][:min(len(hosts[v]), 12)], Lead: prose(v) + ": "}}
			if more := len(hosts[v]) - 12; more > 0 {
				row[2].More = fmt.Sprintf("and %d more", more)
			}
			if i == 0 {
				row[0].Text, row[1].Text = s.name, fmt.Sprintf("%s (%d)", prose(values[0]), len(hosts[values[0]]))
			}
			t.Rows = append(t.Rows, row)
			if i == 7 {
				break
			}
		}
	}
	return t
}

// hostFolds has each host in a fold. Healthy ones share one.
func hostFolds(rows []hostRow) (out []fold) {
	healthy := fold{Tone: okay, block: block{Deep: true}}
	notes := 0
	for _, h := range rows {
		f := fold{Tone: h.Tone, Word: h.Word, Title: h.Host, Answer: h.Finding, block: h.block()}
		if h.Tone != okay {
			out = append(out, f)
			continue
		}
		if f.Answer == "" {
			f.Answer = prose(joined(prefixedBy(h.Rates[0].Fig, " to GPU"), prefixedBy(h.Rates[1].Fig, " from GPU")))
		} else {
			notes++
		}
		healthy.Folds = append(healthy.Folds, f)
	}
	if n := len(healthy.Folds); n > 0 {
		healthy.Title = units.Things(n, "host", "hosts") + " without problems or warnings"
		healthy.Answer = units.Count(notes) + " of them with a note"
		if notes == 0 {
			healthy.Answer = "none of them with a note"
		}
		out = append(out, healthy)
	}
	return out
}

// prefixedBy returns a text and what follows it, or "" for an empty text.
func prefixedBy(s, suffix string) string {
	if s == "" {
		return ""
	}
	return s + suffix
}

// block is what a host's fold holds.
func (h *hostRow) block() block {
	r := h.of
	b := block{ID: h.ID, Deep: true}
	cards, notes := cardsOf(r, h.ID+"-f")
	b.Findings = cards
	for _, n := range notes {
		b.Texts = append(b.Texts, "Note: "+sentence(n.Title)+" ("+n.Name+")")
	}
	if t := gpuTable(r); len(t.Rows) > 0 {
		t.Caption = h.Host + " (" + strings.TrimPrefix(h.ID, "h") + "): " + t.Caption
		b.Tables = []sheet{t}
	}
	for i := range r.Benches {
		if n := &r.Benches[i]; len(n.Answers) > 0 {
			b.Facts = append(b.Facts, field{benchTitle(n.Name), clip(prose(n.Answers[0]), 160)})
		}
	}
	if r.Facts != nil && r.Host != nil {
		b.Texts = append(b.Texts, prose(joinedWith("; ", machineText(r.Host), systemText(r.Host))))
	}
	if len(b.Findings)+len(b.Texts)+len(b.Tables)+len(b.Facts) == 0 {
		b.Texts = []string{"This result has no measurements."}
	}
	return b
}
