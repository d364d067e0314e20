package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/verify"
)

// paragraph writes text over the whole width, behind a label in a color: without one, the text is in that color.
func (p *page) paragraph(label string, c ansiColor, text string) {
	head := p.style.paint(c, label)
	if label != "" {
		c = ""
	}
	p.hang(head, len(label), c, wrap(plain(text), p.style.width()-len(label)))
}

// verdict writes the verdict and its reason.
func (p *page) verdict(r *Result) {
	label, text, c := verdictText(r)
	if label == "" {
		return
	}
	p.labelled(label, c, label+": "+text+".", p.style.width())
}

// labelled writes text whose first words are a label in a color.
func (p *page) labelled(label string, c ansiColor, text string, width int) {
	lines := wrap(plain(text), width)
	if rest, ok := strings.CutPrefix(lines[0], label); ok {
		lines[0] = p.style.paint(c, label) + rest
	}
	p.hang("", 0, "", lines)
}

// bySeverity returns the findings that are problems or warnings, and the notes.
func (r *Result) bySeverity() (grave, notes []doctor.Finding) {
	for _, f := range r.Findings {
		if f.Severity == doctor.Note {
			notes = append(notes, f)
		} else {
			grave = append(grave, f)
		}
	}
	return grave, notes
}

// Widths of a finding's columns.
const (
	severityWidth = len("Problem  ")
	detailIndent  = 2
	detailWidth   = len("Seen   ")
)

// findings writes each finding: what is wrong, what was seen, the cause, the cost and the fix. Unless the style is
// verbose, findings that are the same of several GPUs are one, with what was seen of the first.
func (p *page) findings(all []doctor.Finding) {
	groups := grouped(all)
	if p.style.Verbose {
		groups = slices.Collect(slices.Chunk(all, 1))
	}
	for _, same := range groups {
		p.gap()
		p.finding(same)
	}
}

func (p *page) finding(same []doctor.Finding) {
	f := same[0]
	label := fmt.Sprintf("%-*s", severityWidth, clip(plain(capital(string(f.Severity))), severityWidth-1))
	id, width := plain(f.ID), p.style.width()-severityWidth
	beside := width - len(id) - 2
	lines := wrap(titleOf(same), max(beside, 1))
	if beside < width/2 { // too narrow for both
		lines = append(wrap(titleOf(same), width), wrap(id, width)...)
	} else {
		lines[0] = pad(lines[0], beside+2) + id
	}
	p.hang(p.style.paint(severityColors[f.Severity], label), severityWidth, "", lines)
	p.details("Seen", sentences(f.Evidence)...)
	p.details("Why", f.Because())
	p.details("Or", f.Alternatives...)
	p.details("Test", f.Settle)
	p.details("Cost", f.Cost)
	p.details("Do", f.Remedy)
}

// titleOf is what findings that are the same say, with the GPUs that they are about.
func titleOf(same []doctor.Finding) string {
	return plain(capital(subject(gpusOf(same)) + same[0].Summary))
}

// details writes paragraphs below a finding, the first beside a label.
func (p *page) details(label string, texts ...string) {
	for _, text := range nonEmpty(texts...) {
		head := strings.Repeat(" ", detailIndent) + p.style.paint(dim, label) + strings.Repeat(" ", detailWidth-len(label))
		p.hang(head, detailIndent+detailWidth, "", stepLines(text, p.style.width()-detailIndent-detailWidth))
		label = ""
	}
}

// notes writes each note in a line or two, with its id.
func (p *page) notes(all []doctor.Finding) {
	groups := grouped(all)
	if len(groups) == 0 {
		return
	}
	p.gap()
	p.WriteString(units.Things(len(groups), "note", "notes") + " (nothing is broken):\n")
	width := 0
	for _, same := range groups {
		width = max(width, min(len(same[0].ID), p.style.width()/2))
	}
	for _, same := range groups {
		p.hang(fmt.Sprintf("  %-*s  ", width, plain(same[0].ID)), width+4, "", wrap(titleOf(same)+".", p.style.width()-width-4))
	}
}

// devices writes a table of the GPUs with what was measured of each, and for verify one of the paths. The command
// devices gets each GPU in full.
func (p *page) devices(r *Result) {
	if r.Command == "devices" {
		for i := range r.Devices {
			if i > 0 || len(r.Findings) > 0 {
				p.gap()
			}
			p.device(&r.Devices[i], false)
		}
		return
	}
	if len(r.Devices) > 0 {
		p.gap()
		p.textTable(gpuTable(r, max(p.style.width()-figuresWidth, longName)))
	}
	var paths []verify.PathReport
	for i := range r.Devices {
		if v := r.Devices[i].Verify; v != nil {
			paths = addPaths(paths, v.Paths)
		}
	}
	if r.Command == "verify" && len(paths) > 0 {
		p.gap()
		p.textTable(pathTable(paths, 0))
	}
	p.deviceErrors(r)
}

// deviceErrors writes what failed on GPUs, and why they were not measured together.
func (p *page) deviceErrors(r *Result) {
	for i := range r.Devices {
		for _, e := range unexplained(r, &r.Devices[i]) {
			if !strings.HasPrefix(e, "GPU ") {
				e = fmt.Sprintf("GPU %d: %s", r.Devices[i].Ordinal, e)
			}
			p.paragraph("Error  ", red, e)
		}
	}
	if t := r.Together; t != nil && len(t.Series) == 0 {
		for _, note := range t.Notes {
			p.paragraph("", dim, "All GPUs at once: "+note)
		}
	}
}

// gpuTable has a row for each GPU, with a name of at most width, and one for all at once.
func gpuTable(r *Result, width int) textTable {
	var rows [][]string
	for i := range r.Devices {
		rows = append(rows, deviceRow(r.Facts, &r.Devices[i], width))
	}
	return newTable(gpuHeaders, append(rows, togetherRows(r)...))
}

// longName is the length of a GPU's name that is printed without "NVIDIA", which all have.
const longName = len("NVIDIA H200 NVL")

// gpuHeaders are those of the table of GPUs.
var gpuHeaders = []string{"GPU", "Link", "To GPU", "From GPU", "Of reference", "Of link", "Verified"}

// figuresWidth is the width of the columns beside the name.
const figuresWidth = len("  PCIe 5.0 x16  55.1 GB/s  55.1 GB/s  Of reference  Verified")

// deviceRow is the row of a GPU in the table of GPUs. The first column is of at most width.
func deviceRow(f *doctor.Facts, d *doctor.Device, width int) []string {
	name := plain(d.Name)
	if len(name) > longName {
		name = strings.TrimPrefix(name, "NVIDIA ")
	}
	row := []string{clip(joinedWith(" ", strconv.Itoa(d.Ordinal), name), width), cmp.Or(linkNow(d), "unknown"), "", "", "", "", ""}
	if d.Bandwidth != nil {
		ofReference, ofLink := math.Inf(1), math.Inf(1)
		for j := range d.Bandwidth.Series {
			s := &d.Bandwidth.Series[j]
			at := slices.Index([]string{result.HostToDevice, result.DeviceToHost}, s.Labels.Get(result.Direction))
			if at < 0 {
				continue
			}
			row[2+at] = units.Rate(s.Median)
			if e := f.Reference(d, s); e != nil {
				ofReference = min(ofReference, s.Median/e.Value)
			}
			if rate := d.LinkRate(); rate > 0 {
				ofLink = min(ofLink, s.Median/rate)
			}
		}
		switch {
		case !math.IsInf(ofReference, 1):
			row[4] = units.Share(ofReference)
		case !math.IsInf(ofLink, 1):
			row[5] = units.Share(ofLink)
		}
	}
	if d.Verify != nil {
		row[6] = units.Data(d.Verify.VerifiedBytes)
	}
	return row
}

// togetherRows is the row of all GPUs that copy at once, if that was measured.
func togetherRows(r *Result) [][]string {
	if r.Together == nil {
		return nil
	}
	row := []string{"both at once", "", "", "", "", "", ""}
	if n := len(r.Devices); n != 2 {
		row[0] = fmt.Sprintf("all %d at once", n)
	}
	found := false
	for _, s := range r.Together.Select(result.View{Series: doctor.TogetherBandwidth, Where: result.Labels{{Key: result.Device, Value: doctor.TogetherSum}}}) {
		if at := slices.Index([]string{result.HostToDevice, result.DeviceToHost}, s.Labels.Get(result.Direction)); at >= 0 {
			row[2+at], found = units.Rate(s.Median), true
		}
	}
	if !found {
		return nil
	}
	return [][]string{row}
}

// footer writes the machine in a line, the references, and where to read on.
func (p *page) footer(r *Result) {
	if r.Facts != nil {
		p.gap()
		if r.Library != nil {
			for _, note := range r.Library.Notes {
				p.paragraph("", "", capital(note)+".")
			}
		}
		line := joined(hostLine(r)...)
		if len(r.Sources) > 0 {
			line = capital(joinedWith(", ", line, "read from "+joinedWith(" and ", r.Sources...)))
		}
		if r.HostName != "" {
			line = joinedWith(": ", r.HostName, line)
		}
		if r.Seconds > 0 {
			line += ". " + units.Seconds(r.Seconds)
		}
		p.paragraph("", "", line+".")
		for _, source := range referenceLines(r) {
			p.paragraph("", "", source)
		}
	}
	said := slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return strings.Contains(f.Remedy, "pincheck --sim") })
	if r.Verdict == doctor.Unusable && !said && (r.Facts == nil || !r.Simulated) {
		p.paragraph("", "", "To try pincheck with a simulated GPU: pincheck --sim")
	}
	if r.Facts != nil && len(r.Sources) > 0 && r.Verdict == doctor.Unknown {
		p.paragraph("", "", "To find out more, run on that machine: pincheck capture")
	}
	if len(r.Findings) == 0 {
		return
	}
	what := "a finding"
	if r.Findings[0].Severity == doctor.Note {
		what = "a note"
	}
	p.paragraph("", "", "To learn about "+what+": pincheck explain "+r.Findings[0].ID)
}

// hostLine describes a host in few words: what its copies depend on, and its system if it has no GPU to show.
func hostLine(r *Result) (parts []string) {
	h := r.Host
	if h == nil {
		h = &hostinfo.Host{}
	}
	if h.CPU.Threads > 0 {
		cpus := units.Things(h.CPU.Threads, "CPU", "CPUs")
		if u := h.CPU.Usable(); u > 0 && u < float64(h.CPU.Threads) {
			cpus = fmt.Sprintf("%g of %s", u, cpus)
		}
		parts = append(parts, cpus)
	}
	if h.Memory.Total > 0 {
		parts = append(parts, units.Bytes(h.Memory.Total))
	}
	if len(r.Devices) == 0 {
		parts = append(parts, h.Distro.Name, prefixed("Linux ", h.Kernel.Release), joined(h.Where()...))
	}
	parts = append(parts, prefixed("driver ", h.NVIDIA.DriverVersion))
	if l := r.Library; l != nil && l.DriverAlone() {
		parts = append(parts, "libcuda alone, CUDA "+l.DriverVersion)
	} else if l != nil {
		parts = append(parts, prefixed("CUDA ", l.RuntimeVersion))
	}
	return parts
}

// referenceLines are the references that GPUs are compared with, each once.
func referenceLines(r *Result) (lines []string) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Bandwidth == nil {
			continue
		}
		rates := map[string]string{} // by direction
		brief := ""
		for j := range d.Bandwidth.Series {
			s := &d.Bandwidth.Series[j]
			if e := r.Reference(d, s); e != nil {
				rates[s.Labels.Get(result.Direction)], brief = units.Rate(e.Value), e.Brief
			}
		}
		to, from := rates[result.HostToDevice], rates[result.DeviceToHost]
		text := to + " each way"
		if to != from {
			text = joined(prefixed("to GPU ", to), prefixed("from GPU ", from))
		}
		if line := fmt.Sprintf("Reference: %s (%s).", text, brief); brief != "" && !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return lines
}
