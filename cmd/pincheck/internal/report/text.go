package report

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/verify"
)

const labelWidth = 11 // of the left column

// page collects the text. A row is a label and a text.
type page struct {
	*bytes.Buffer
	style Style
}

// width is that of the text to the right of the labels.
func (p *page) width() int { return p.style.width() - labelWidth }

// row writes text beside a bold label, wrapped to the width. Text from outside is made printable.
func (p *page) row(label, format string, args ...any) {
	p.painted(label, bold, plainf(format, args...), "")
}

// note is a row whose text is dim.
func (p *page) note(label, format string, args ...any) {
	p.painted(label, bold, plainf(format, args...), dim)
}

// plainf formats text and makes it printable.
func plainf(format string, args ...any) string { return plain(fmt.Sprintf(format, args...)) }

// painted writes text beside a label, each in a color and made printable. Lines after the first have no label.
func (p *page) painted(label string, labelColor ansiColor, text string, textColor ansiColor) {
	label = plain(label)
	head := p.style.paint(labelColor, label) + strings.Repeat(" ", max(1, labelWidth-len([]rune(label))))
	p.hang(head, labelWidth, textColor, wrap(plain(text), p.width()))
}

// hang writes lines in a color behind a head: those after the first behind an indent.
func (p *page) hang(head string, indent int, c ansiColor, lines []string) {
	for i, line := range lines {
		if i > 0 {
			head = strings.Repeat(" ", indent)
		}
		p.WriteString(strings.TrimRight(head+p.style.paint(c, line), " ") + "\n")
	}
}

// gap writes an empty line.
func (p *page) gap() { p.WriteByte('\n') }

// writeText writes a result as text: the verdict, problems and warnings, the GPUs and what was measured,
// notes, and the machine in a line. Verbose styles have the rest: passed checks, requirements, the library
// search, plots, samples.
func writeText(b *bytes.Buffer, r *Result, s Style) {
	p := &page{b, s}
	switch {
	case r.Command == "version":
		p.tool(r)
		return
	case r.Command == "bench" && len(r.Benches) > 0:
		p.benchPage(r)
		return
	}
	if r.Facts != nil && r.Simulated {
		p.paragraph("", yellow, "Simulated GPU: nothing here was measured on hardware.")
	}
	p.verdict(r)
	grave, notes := r.bySeverity()
	p.findings(grave)
	if r.Facts != nil {
		p.devices(r)
	}
	p.experiments(r, nil)
	if s.Verbose {
		p.findings(notes)
	} else {
		p.notes(notes)
	}
	if len(r.Errors) > 0 {
		p.gap()
	}
	for _, e := range r.Errors {
		p.paragraph("Error  ", red, e)
	}
	if s.Verbose {
		if len(r.Passed) > 0 {
			p.gap()
			p.painted("Passed", green, plain(joined(r.Passed...)), "")
		}
		if r.Facts != nil {
			p.gap()
			p.machine(r)
		}
		p.gap()
		p.tool(r)
	}
	p.footer(r)
}

// machine writes library, host, requirements and each GPU in full.
func (p *page) machine(r *Result) {
	p.library(r.Library, r.Simulated)
	p.host(r.Host)
	p.requirements(r.Requirements)
	if r.Command != "devices" { // it has them above
		for i := range r.Devices {
			p.gap()
			p.device(&r.Devices[i], r.Command == "verify")
		}
	}
	if !(len(r.Findings) > 0 && r.Findings[0].ID == "no_gpu") { // no library helps then
		p.search(r.Search)
	}
}

// tool writes program, version, host and time.
func (p *page) tool(r *Result) {
	name, platform := plain(r.Tool.Name+" "+r.Tool.Version), plain(r.Tool.Platform)
	lines := wrap(name, p.style.width())
	for i, line := range lines {
		if i > 0 {
			p.WriteByte('\n')
		}
		p.WriteString(p.style.paint(bold, line))
	}
	if r.Command == "version" {
		p.WriteString("\n")
		if r.Tool.Revision != "" {
			p.row("revision", "%s", r.Tool.Revision)
		}
		p.row("go", "%s", r.Tool.Go)
		p.row("platform", "%s", r.Tool.Platform)
		return
	}
	if last := lines[len(lines)-1]; platform != "" && len([]rune(last))+2+len([]rune(platform)) <= p.style.width() {
		p.WriteString("  " + p.style.paint(dim, platform))
	}
	p.WriteByte('\n')
	if at := joinedWith(", ", r.HostName, r.Started.UTC().Format("2006-01-02 15:04:05 UTC")); !r.Started.IsZero() {
		p.hang("", 0, dim, wrap(plain(at), p.style.width()))
	}
}

// versionsText names the API in use and the versions.
func versionsText(l *doctor.Library) string {
	if l.DriverAlone() {
		return "CUDA driver alone, for CUDA up to " + l.DriverVersion
	}
	return fmt.Sprintf("CUDA runtime %s, driver for CUDA up to %s", l.RuntimeVersion, l.DriverVersion)
}

// library writes which library is in use, and which others were not taken.
func (p *page) library(l *doctor.Library, simulated bool) {
	if l == nil {
		return
	}
	if simulated {
		p.row("Library", "%s", l.Path)
	} else {
		p.row("Library", "%s (found: %s)", l.Path, l.Found)
	}
	p.row("", "%s", versionsText(l))
	for _, note := range l.Notes {
		p.row("", "%s", note)
	}
	if p.style.Verbose {
		p.attempts(l.Attempts)
	}
}

// attempts lists the libraries that were not taken, and why.
func (p *page) attempts(all []doctor.Attempt) {
	for _, a := range all {
		if a.Error != "" {
			p.note("", "not %s (found: %s): %s", a.Path, a.Found, a.Error)
		}
	}
}

// search writes how a library was searched for, and none was found.
func (p *page) search(s *doctor.Search) {
	if s == nil || len(s.Attempts) == 0 && len(s.Searched) == 0 {
		return
	}
	p.gap()
	p.row("Search", "libraries that were tried, and where they were looked for")
	p.attempts(s.Attempts)
	if len(s.Searched) > 0 {
		p.note("", "looked in: %s", strings.Join(s.Searched, "; "))
	}
}

// host writes system, processors and memory.
func (p *page) host(h *hostinfo.Host) {
	if h == nil {
		return
	}
	label := "Host"
	for _, text := range []string{systemText(h), machineText(h)} {
		if text != "" {
			p.row(label, "%s", text)
			label = ""
		}
	}
}

// systemText is about a host's software.
func systemText(h *hostinfo.Host) string {
	system := []string{h.Distro.Name, prefixed("Linux ", h.Kernel.Release), strings.TrimSpace(h.Libc.Kind + " " + h.Libc.Version)}
	return joined(append(append(system, h.Where()...), prefixed("NVIDIA kernel module ", h.NVIDIA.DriverVersion))...)
}

// machineText is about a host's CPUs and memory.
func machineText(h *hostinfo.Host) string {
	var machine []string
	if h.CPU.Threads > 0 {
		cpus := units.Things(h.CPU.Threads, "CPU", "CPUs")
		if u := h.CPU.Usable(); u > 0 && u < float64(h.CPU.Threads) {
			cpus += fmt.Sprintf(" (%g usable)", u)
		}
		machine = append(machine, joinedWith(" ", cpus, h.CPU.Model))
	}
	if n := len(h.NUMA); n > 0 {
		machine = append(machine, units.Things(n, "NUMA node", "NUMA nodes"))
	}
	if h.Memory.Total > 0 {
		memory := units.Bytes(h.Memory.Total) + " memory"
		if h.Memory.Available > 0 {
			memory += ", " + units.Bytes(h.Memory.Available) + " available"
		}
		machine = append(machine, memory)
	}
	if n, ok := h.Cgroup.Headroom.Finite(); ok && (h.Memory.Available == 0 || n < h.Memory.Available) {
		machine = append(machine, fmt.Sprintf("%s left by the cgroup", units.Bytes(n)))
	}
	return joined(machine...)
}

// joined joins the parts that are not empty, with commas.
func joined(parts ...string) string { return joinedWith(", ", parts...) }

// joinedWith joins the parts that are not empty.
func joinedWith(sep string, parts ...string) string {
	var out []string
	for _, s := range parts {
		if s != "" {
			out = append(out, s)
		}
	}
	return strings.Join(out, sep)
}

// prefixed returns s with a prefix, or "" for an empty s.
func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}

// requirements writes what a GPU needs of the host, and the remedy for what is missing.
func (p *page) requirements(all []doctor.Requirement) {
	if len(all) == 0 {
		return
	}
	p.gap()
	p.row("Needed", "what a GPU needs of this machine")
	width := 0
	name := func(r doctor.Requirement) string { return clip(plain(r.Name), p.width()-9) }
	for _, r := range all {
		width = max(width, len([]rune(name(r))))
	}
	for _, r := range all {
		mark, c := "ok", green
		switch r.State {
		case doctor.Missing:
			mark, c = "MISSING", red
		case doctor.Uncertain:
			mark, c = "unknown", yellow
		}
		indent := strings.Repeat(" ", labelWidth)
		head := fmt.Sprintf("%-*s  ", width, name(r)) + p.style.paint(c, mark) + strings.Repeat(" ", 9-len(mark))
		columns := p.width() - width - 11
		if columns < 20 { // too narrow beside the name: below it
			p.WriteString(indent + strings.TrimRight(head, " ") + "\n")
			head, columns = "  ", p.width()-2
			if r.Detail == "" {
				continue
			}
		}
		p.hang(indent+head, p.style.width()-columns, "", wrap(plain(r.Detail), columns))
	}
}

// unexplained returns the errors of a GPU that no finding shows.
func unexplained(r *Result, d *doctor.Device) []string {
	all := slices.Clone(d.Errors)
	if d.Bandwidth != nil {
		all = slices.Concat(d.Bandwidth.Errors, all)
	}
	return slices.DeleteFunc(all, func(e string) bool {
		return slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return slices.Contains(f.Evidence, e) })
	})
}

// addPaths adds what was verified of one GPU to what was of others.
func addPaths(sum, more []verify.PathReport) []verify.PathReport {
	for _, m := range more {
		at := slices.IndexFunc(sum, func(s verify.PathReport) bool { return s.Path == m.Path })
		if at < 0 {
			sum = append(sum, m)
			continue
		}
		s := &sum[at]
		s.Cases, s.VerifiedBytes, s.Duration = s.Cases+m.Cases, s.VerifiedBytes+m.VerifiedBytes, s.Duration+m.Duration
		s.MismatchCount, s.FailureCount = s.MismatchCount+m.MismatchCount, s.FailureCount+m.FailureCount
		s.LargestBytes = max(s.LargestBytes, m.LargestBytes)
	}
	return sum
}

// pathTable returns the table of what was verified.
func pathTable(paths []verify.PathReport, indent int) textTable {
	var rows [][]string
	for _, path := range paths {
		rows = append(rows, []string{strings.ReplaceAll(string(path.Path), "_", " "), units.Count(path.Cases), units.Bytes(path.LargestBytes), units.Data(path.VerifiedBytes),
			units.Duration(path.Duration), units.Count(path.MismatchCount), units.Count(path.FailureCount)})
	}
	t := newTable([]string{"path", "cases", "largest", "verified", "time", "wrong", "failed"}, rows)
	t.indent = indent
	return t
}

// device writes a GPU with its link, round trips, copies and errors. Detailed adds a table of the
// round trips.
func (p *page) device(d *doctor.Device, detailed bool) {
	p.row(fmt.Sprintf("GPU %d", d.Ordinal), "%s", joined(d.Name, prefixed("compute capability ", d.ComputeCapability)))
	p.row("", "%s, PCI %s", d.UUID, joined(d.PCIBusID, numaText(d)))
	if d.MemoryTotal > 0 {
		p.row("", "memory %s, %s free", units.Bytes(d.MemoryTotal), units.Bytes(d.MemoryFree))
	}
	p.row("", "%s", linkText(d.Link))
	if d.Verify != nil {
		p.roundTrips(d.Verify, detailed)
	}
	if d.Bandwidth != nil {
		p.bandwidth(d)
		for _, e := range d.Bandwidth.Errors {
			p.painted("", bold, plain("error: "+e), red)
		}
	}
	for _, e := range d.Errors {
		p.painted("", bold, plain("error: "+e), red)
	}
}

// numaText names the NUMA node of a GPU, or returns "" if it is unknown.
func numaText(d *doctor.Device) string {
	if d.NUMANode == nil {
		return ""
	}
	return fmt.Sprintf("NUMA node %d", *d.NUMANode)
}

// linkText describes a link: as it is trained, as it could be, and the slowest link above it.
func linkText(l *doctor.Link) string {
	if l == nil {
		return "link unknown: the host does not show it"
	}
	best := fmt.Sprintf("%v, %s each way", l.Best(), units.Rate(l.MaxRate))
	now := fmt.Sprintf("%v, %s each way", l.Now(), units.Rate(l.Rate))
	text := "link " + now
	switch {
	case l.Rate == 0:
		text = "link unknown now, at best " + best
	case l.MaxRate == 0 || l.Rate == l.MaxRate:
	case l.Width == l.MaxWidth:
		text += ", trained down from " + best + " (as idle GPUs are)"
	default:
		text += ", at best " + best
	}
	if b := l.Bottleneck; b != nil {
		text += fmt.Sprintf("; behind bridge %s with %v, %s", b.Address, b.Now(), units.Rate(b.Rate))
	}
	return text
}

// roundTrips writes how many bytes were verified and what did not match. Detailed adds a row for each
// path, each mismatch and each failure.
func (p *page) roundTrips(v *verify.Report, detailed bool) {
	wrong := units.Things(v.MismatchCount, "mismatch", "mismatches")
	trips := units.Things(v.Cases, "round trip", "round trips")
	if v.Cases < v.CasesPlanned {
		trips = fmt.Sprintf("%s of %s", units.Count(v.Cases), units.Things(v.CasesPlanned, "round trip", "round trips"))
	}
	text := fmt.Sprintf("%s, %s verified", trips, units.Data(v.VerifiedBytes))
	if v.Duration > 0 {
		text += " in " + units.Duration(v.Duration)
	}
	text += ", " + wrong
	if v.FailureCount > 0 {
		text += ", " + units.Things(v.FailureCount, "failure", "failures")
	}
	p.row("", "%s", text)
	if detailed {
		p.textTable(pathTable(v.Paths, labelWidth))
		if v.Stale != nil {
			p.note("", "%s", staleText(v.Stale))
		}
		for _, m := range v.Mismatches {
			p.painted("", bold, plain("wrong: "+m.String()), red)
		}
		for _, f := range v.Failures {
			p.painted("", bold, plain("failed: "+f.String()), red)
		}
	}
	for _, s := range v.Skipped {
		p.note("", "skipped %s: %s", units.Things(s.Cases, "case", "cases")+" of "+string(s.Path), s.Reason)
	}
}

// staleText describes what a read found that did not wait for its copy.
func staleText(s *verify.StaleResult) string {
	if !s.Shown() {
		return fmt.Sprintf("reading before synchronising: no old byte seen this time, %s wrong afterwards", units.Count(s.BadAfter))
	}
	return fmt.Sprintf("reading before synchronising: %d of %d bytes looked at were still old; afterwards %s of %s wrong",
		s.StaleBefore, s.SampledBytes, units.Count(s.BadAfter), units.Bytes(s.SizeBytes))
}

// bandwidth writes the rates of pinned copies, as shares of the link if its rate is known.
func (p *page) bandwidth(d *doctor.Device) {
	rate := d.LinkRate()
	for _, s := range d.Bandwidth.Series {
		text := fmt.Sprintf("pinned %s %s", strings.ReplaceAll(s.Labels.Get(result.Direction), "_", " "), units.Rate(s.Median))
		if rate > 0 {
			text += fmt.Sprintf(", %s of the link", units.Share(s.Median/rate))
		} else if d.Link.PathRate() == 0 {
			text += ", link unknown"
		}
		p.row("", "%s (median of %d, %s to %s)", text, len(s.Samples), units.Number(s.Min, 3), units.Number(s.Max, 3))
	}
}

// severityColors are the labels' colors.
var severityColors = map[doctor.Severity]ansiColor{doctor.Problem: red, doctor.Warning: yellow, doctor.Note: dim}

// grouped returns the findings that say the same, of the host or of any GPU, together, in the order of their first.
func grouped(all []doctor.Finding) (groups [][]doctor.Finding) {
	type saying struct{ id, severity, summary string }
	at := map[saying]int{}
	for _, f := range all {
		says := saying{f.ID, string(f.Severity), f.Summary}
		i, known := at[says]
		if !known {
			i = len(groups)
			at[says], groups = i, append(groups, nil)
		}
		groups[i] = append(groups[i], f)
	}
	return groups
}

// gpusOf returns the numbers of the GPUs that findings are about, each once.
func gpusOf(all []doctor.Finding) (gpus []int) {
	for _, f := range all {
		if f.Device != nil {
			gpus = append(gpus, *f.Device)
		}
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// gpuNames names GPUs: "GPU 0", "GPUs 0, 2", "GPUs 0 to 7".
func gpuNames(gpus []int) string {
	n := len(gpus)
	if n == 1 {
		return fmt.Sprintf("GPU %d", gpus[0])
	}
	if n > 2 && gpus[n-1]-gpus[0] == n-1 {
		return fmt.Sprintf("GPUs %d to %d", gpus[0], gpus[n-1])
	}
	return "GPUs " + strings.Trim(strings.ReplaceAll(fmt.Sprint(gpus), " ", ", "), "[]")
}

// subject names GPUs in front of what is said of them, or returns "" for the host.
func subject(gpus []int) string {
	if len(gpus) == 0 {
		return ""
	}
	return gpuNames(gpus) + ": "
}

// verdictText returns the verdict in words, or nothing if there is none.
func verdictText(r *Result) (label, text string, c ansiColor) {
	c = green
	switch r.Verdict {
	case doctor.Healthy:
		label, text = "Healthy", healthyText(r)
	case doctor.Measured:
		label, text = "Measured", unratedText(r)
		if r.Command == "verify" {
			label, text = "Verified", intactText(r)
		}
	case doctor.Unknown:
		label, text, c = "Inconclusive", unknownText(r), yellow
	case doctor.Warnings:
		label, text, c = severityLabel(r, doctor.Warning), problemsText(r), yellow
	case doctor.Problems:
		label, text, c = severityLabel(r, doctor.Problem), problemsText(r), red
	case doctor.Incomplete:
		label, text, c = "Incomplete", "stopped: "+r.Stopped, yellow
		if n := r.count(doctor.Problem); n > 0 {
			text += "; " + units.Things(n, "problem", "problems") + affected(r, doctor.Problem) + " found so far"
		}
	case doctor.Unusable:
		label, text, c = "No usable GPU", "no cause was found", red
		if len(r.Findings) > 0 {
			text = r.Findings[0].Summary
		}
	case doctor.Failed:
		label, text, c = "Failed", "nothing was examined", red
	default:
		return "", "", ""
	}
	return label, text, c
}

// severityLabel is "Problem", or "Problems" where there are several, in the findings and in what failed.
func severityLabel(r *Result, s doctor.Severity) string {
	n := len(grouped(slices.DeleteFunc(slices.Clone(r.Findings), func(f doctor.Finding) bool { return f.Severity != s })))
	if n+r.failures() == 1 {
		return capital(string(s))
	}
	return capital(string(s)) + "s"
}

// maxNamed is how many findings the verdict names; the others are counted.
const maxNamed = 2

// problemsText says what is wrong and where, the gravest first, and counts what it does not name. Each
// GPU is named once, with all that is said of it.
func problemsText(r *Result) string {
	gravest := doctor.Warning
	if r.count(doctor.Problem) > 0 {
		gravest = doctor.Problem
	}
	groups := slices.DeleteFunc(grouped(r.Findings), func(g []doctor.Finding) bool { return g[0].Severity != gravest })
	parts := subjects(groups[:min(maxNamed, len(groups))])
	if n := len(groups) - maxNamed; n > 0 {
		parts = append(parts, units.Things(n, "further "+string(gravest), "further "+string(gravest)+"s"))
	}
	if n := r.count(doctor.Warning); n > 0 && gravest == doctor.Problem {
		parts = append(parts, units.Things(n, "warning", "warnings"))
	}
	if failed := r.failures(); failed > 0 {
		parts = append(parts, units.Things(failed, "measurement failed", "measurements failed"))
	}
	return joinedWith("; ", parts...)
}

// subjects says what is wrong with each GPU, or with several alike, and with the host.
func subjects(groups [][]doctor.Finding) (parts []string) {
	const host = -1
	texts := map[int][]string{} // by GPU
	var order []int
	for _, g := range groups {
		for _, f := range g {
			about := host
			if f.Device != nil {
				about = *f.Device
			}
			if texts[about] == nil {
				order = append(order, about)
			}
			if !slices.Contains(texts[about], f.Summary) {
				texts[about] = append(texts[about], f.Summary)
			}
		}
	}
	type said struct {
		gpus []int // none for the host
		text string
	}
	var all []said
	for _, about := range order {
		text := joinedWith(", and ", texts[about]...)
		if about == host {
			all = append(all, said{nil, text})
		} else if at := slices.IndexFunc(all, func(s said) bool { return s.gpus != nil && s.text == text }); at >= 0 {
			all[at].gpus = append(all[at].gpus, about)
		} else {
			all = append(all, said{[]int{about}, text})
		}
	}
	for _, s := range all {
		slices.Sort(s.gpus)
		parts = append(parts, subject(s.gpus)+s.text)
	}
	return parts
}

// affected names what findings of a severity are about: " (GPU 0 and the host)".
func affected(r *Result, s doctor.Severity) string {
	of := slices.DeleteFunc(slices.Clone(r.Findings), func(f doctor.Finding) bool { return f.Severity != s })
	var parts []string
	if gpus := gpusOf(of); len(gpus) > 0 {
		parts = append(parts, gpuNames(gpus))
	}
	if slices.ContainsFunc(of, func(f doctor.Finding) bool { return f.Device == nil }) {
		parts = append(parts, "the host")
	}
	return " (" + joinedWith(" and ", parts...) + ")"
}

// unknownText says of which GPUs nothing was measured.
func unknownText(r *Result) string {
	var gpus []int
	for i := range r.Devices {
		if d := &r.Devices[i]; d.Verify == nil && d.Bandwidth == nil {
			gpus = append(gpus, d.Ordinal)
		}
	}
	switch {
	case r.Facts != nil && len(r.Sources) > 0:
		return "nothing is wrong in what was read (" + joinedWith(", ", r.Sources...) + "); what it does not contain is unknown"
	case len(gpus) > 0 && len(gpus) < len(r.Devices):
		return "no findings, and " + gpuNames(gpus) + " not measured"
	case len(gpus) == 0 && len(r.Devices) > 0:
		return "no findings, but CUDA does not show all GPUs"
	}
	return "no findings, and nothing was measured"
}

// unratedText says what there is, and that it was not judged.
func unratedText(r *Result) string {
	if len(r.Benches) == 0 {
		if slices.ContainsFunc(r.Devices, func(d doctor.Device) bool { return d.Bandwidth != nil }) {
			return intactText(r) + "; speed not rated: no reference data"
		}
		return intactText(r) + "; speed not measured"
	}
	all := 0
	for i := range r.Benches {
		all += len(r.Benches[i].Series)
	}
	if all == 0 {
		return "nothing: see the notes"
	}
	return units.Things(all, "series", "series") + " in " + units.Seconds(r.Seconds)
}

// healthyText returns what the verdict healthy is based on.
func healthyText(r *Result) string {
	if !slices.ContainsFunc(r.Devices, func(d doctor.Device) bool { return d.Bandwidth != nil }) {
		return intactText(r)
	}
	subject, verb := "GPU 0", "copies"
	switch n := len(r.Devices); {
	case n == 1:
		subject = gpuNames([]int{r.Devices[0].Ordinal})
	case n == 2:
		subject, verb = "both GPUs", "copy"
	default:
		subject, verb = fmt.Sprintf("all %d GPUs", n), "copy"
	}
	return fmt.Sprintf("%s %s at full speed, and %s", subject, verb, intactText(r))
}

// intactText says how many bytes were verified.
func intactText(r *Result) string {
	bytes, skipped := 0, 0
	for _, d := range r.Devices {
		if d.Verify != nil {
			bytes += d.Verify.VerifiedBytes
			skipped += d.Verify.SkippedCases
		}
	}
	text := units.Data(bytes) + " came back intact"
	if skipped > 0 {
		text += fmt.Sprintf(" (%s skipped)", units.Things(skipped, "round trip", "round trips"))
	}
	return text
}
