package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/kernellog"
	"github.com/gopinned/pinned/internal/units"
)

// The kernel's log is evidence of other findings first. Xids that no other finding has are one of their own.
var loggedChecks = []Check{{ID: "xid", Host: loggedXids}}

// either returns the findings of the first check that has some.
func either(checks ...func(*Facts) []Finding) func(*Facts) []Finding {
	return func(f *Facts) []Finding {
		for _, check := range checks {
			if found := check(f); len(found) > 0 {
				return found
			}
		}
		return nil
	}
}

// logged returns the messages of a kind; of any GPU for an empty address.
func (f *Facts) logged(kind kernellog.Kind, address string) (events []kernellog.Event) {
	for _, e := range f.Host.KernelLog.Events {
		if e.Kind == kind && (address == "" || hostinfo.SamePCI(e.Address, address)) {
			events = append(events, e)
		}
	}
	return events
}

// loggedXid returns the Xids of a GPU that are of a class.
func (f *Facts) loggedXid(class kernellog.Class, address string) (events []kernellog.Event) {
	for _, e := range f.logged(kernellog.KindXid, address) {
		if kernellog.Lookup(e.Xid).Class == class {
			events = append(events, e)
		}
	}
	return events
}

const (
	maxMessage   = 200 // bytes of a message in evidence
	maxMessages  = 3   // messages in evidence
	longAgo      = 24 * time.Hour
	daysFromThen = 48 * time.Hour
)

// said returns messages as evidence, each with its number and the age of the last one.
func said(events []kernellog.Event) (texts []string) {
	for _, e := range events[:min(len(events), maxMessages)] {
		text := strings.ToValidUTF8(e.Text[:min(len(e.Text), maxMessage)], "")
		if !strings.HasPrefix(text, "NVRM") {
			text = "kernel: " + text
		}
		var notes []string
		if e.Count > 1 {
			notes = append(notes, units.Things(e.Count, "time", "times"))
		}
		switch {
		case e.Age != nil:
			notes = append(notes, ageText(*e.Age))
		case e.When != "":
			notes = append(notes, e.When)
		}
		if len(notes) > 0 {
			text += " (" + strings.Join(notes, ", last ") + ")"
		}
		texts = append(texts, text)
	}
	return texts
}

// ageText returns an age in whole units: 3 h ago.
func ageText(seconds float64) string {
	switch d := time.Duration(seconds * float64(time.Second)); {
	case d >= daysFromThen:
		return fmt.Sprintf("%d days ago", d/(24*time.Hour))
	case d >= 2*time.Hour:
		return fmt.Sprintf("%d h ago", d/time.Hour)
	case d >= 2*time.Minute:
		return fmt.Sprintf("%d min ago", d/time.Minute)
	default:
		return fmt.Sprintf("%d s ago", d/time.Second)
	}
}

// answers reports whether a GPU answered when these facts were read: CUDA or NVML shows it, or its configuration
// is on the bus.
func (f *Facts) answers(address string) bool {
	if pci, ok := f.Host.GPU(address); ok {
		return !pci.OffBus && !pci.Asleep
	}
	return f.works(address)
}

// works reports whether CUDA or NVML shows a GPU.
func (f *Facts) works(address string) bool {
	return slices.ContainsFunc(f.Devices, func(d Device) bool {
		return hostinfo.SamePCI(d.PCIBusID, address) && (!f.partial() || d.Health != nil)
	})
}

// loggedOffBus finds GPUs of texts that fell off the bus by the kernel's log, or by nvidia-smi. Of a host the
// configuration space tells.
func loggedOffBus(f *Facts) (out []Finding) {
	if !f.partial() {
		return nil
	}
	var addresses []string
	for _, e := range slices.Concat(f.logged(kernellog.KindXid, ""), f.logged(kernellog.KindOffBus, "")) {
		if isOff := e.Kind == kernellog.KindOffBus || kernellog.Lookup(e.Xid).Class == kernellog.Bus; isOff && e.Address != "" && !slices.Contains(addresses, e.Address) {
			addresses = append(addresses, e.Address)
		}
	}
	for _, address := range addresses {
		if f.answers(address) {
			continue
		}
		out = append(out, Finding{Summary: fmt.Sprintf("the GPU at %s fell off the bus", address), Evidence: f.offBusEvidence(address)})
	}
	if f.NVML == nil {
		return out
	}
	for _, g := range f.NVML.GPUs {
		if strings.Contains(g.Error, lostError) && !slices.ContainsFunc(addresses, func(a string) bool { return hostinfo.SamePCI(a, g.PCIBusID) }) {
			out = append(out, Finding{Summary: fmt.Sprintf("the GPU at %s is lost", g.PCIBusID), Evidence: []string{"nvidia-smi: " + g.Error}, Certainty: Likely})
		}
	}
	return out
}

// lostError is in nvidia-smi's words for a GPU that answers nothing.
const lostError = "GPU is lost"

// offBusEvidence are the messages about a GPU that fell off the bus.
func (f *Facts) offBusEvidence(address string) []string {
	return said(append(f.loggedXid(kernellog.Bus, address), f.logged(kernellog.KindOffBus, address)...))
}

// loggedInit finds GPUs that the kernel module could not start, by its own words. Those that work were started later.
func loggedInit(f *Facts) []Finding {
	var out Finding
	var failed []string
	for _, e := range f.logged(kernellog.KindInit, "") {
		if f.works(e.Address) || len(f.offBusEvidence(e.Address)) > 0 && e.Address != "" {
			continue
		}
		if !slices.Contains(failed, e.Address) {
			failed = append(failed, e.Address)
		}
		out.Evidence = append(out.Evidence, said([]kernellog.Event{e})...)
	}
	if len(failed) == 0 || len(f.Devices) > 0 && !f.partial() || len(f.logged(kernellog.KindNeedsOpen, "")) > 0 {
		return nil
	}
	out.Summary = "the driver could not initialize the GPU (RmInitAdapter)"
	if failed[0] != "" {
		out.Summary = fmt.Sprintf("the driver could not initialize the GPU at %s (RmInitAdapter)", strings.Join(failed, ", "))
	}
	window := slices.DeleteFunc(f.logged(kernellog.KindWindow, ""), func(e kernellog.Event) bool { return e.Address != "" && !slices.Contains(failed, e.Address) })
	if len(window) > 0 {
		out.because, out.Evidence = "window", append(said(window), out.Evidence...)
	}
	out.Evidence = out.Evidence[:min(len(out.Evidence), 4)]
	return finding(out)
}

// loggedMismatch finds a library and a kernel module of different versions by the module's own words.
func loggedMismatch(f *Facts) []Finding {
	events := f.logged(kernellog.KindMismatch, "")
	if !f.partial() || len(events) == 0 || slices.ContainsFunc(f.Devices, func(d Device) bool { return d.Health != nil }) {
		return nil // nvidia-smi's library has the module's version
	}
	return finding(Finding{Evidence: said(events), Certainty: Likely})
}

// loggedUnsupported finds GPUs that the kernel module refuses by its own words.
func loggedUnsupported(f *Facts) []Finding {
	events := slices.DeleteFunc(append(f.logged(kernellog.KindNeedsOpen, ""), f.logged(kernellog.KindUnsupported, "")...), func(e kernellog.Event) bool { return f.works(e.Address) })
	if len(events) == 0 || len(f.Devices) > 0 && !f.partial() {
		return nil
	}
	out := Finding{Summary: "the loaded driver does not support this GPU", Evidence: said(events), because: "logged"}
	switch {
	case events[0].Kind == kernellog.KindNeedsOpen:
		out.because, out.values = "closed", findings.Values{"architecture": "Blackwell or later"}
	case strings.Contains(events[0].Text, "open nvidia.ko"):
		out.because = "open"
	}
	return finding(out)
}

// loggedLinkErrors finds errors of PCI Express in the log of texts, which have no counters. Corrected ones are a
// sign where there are many, as the kernel prints a part of them.
func loggedLinkErrors(f *Facts) []Finding {
	if !f.partial() {
		return nil
	}
	out := Finding{Summary: "the PCIe link of a GPU has errors"}
	var events []kernellog.Event
	for _, e := range f.logged(kernellog.KindAER, "") {
		fatal := strings.HasPrefix(e.Severity, "Uncorrected")
		if !f.aboveGPU(e) || !fatal && e.Count < maxLoggedErrors {
			continue
		}
		if strings.HasSuffix(e.Severity, "(Fatal)") {
			out.Severity = Problem
		}
		events = append(events, e)
	}
	if len(events) == 0 {
		return nil
	}
	out.Evidence = said(events)
	return finding(out)
}

// maxLoggedErrors are corrected errors that the kernel printed: it prints ten in five seconds at most.
const maxLoggedErrors = 50

// aboveGPU reports whether an error is of a GPU, or of a bridge above one.
func (f *Facts) aboveGPU(e kernellog.Event) bool {
	if strings.HasPrefix(e.Text, "nvidia ") {
		return true
	}
	return slices.ContainsFunc(f.Host.GPUs, func(g hostinfo.PCIDevice) bool {
		return hostinfo.SamePCI(g.Address, e.Address) || slices.ContainsFunc(g.Upstream, func(l hostinfo.Link) bool { return hostinfo.SamePCI(l.Address, e.Address) })
	})
}

// xidSeverity is the severity of a class. What a program did is a note: it accuses no hardware.
var xidSeverity = map[kernellog.Class]Severity{
	"program": Note, "engine": Warning, "firmware": Problem, "memory": Problem, "bus": Problem, "nvlink": Warning, "init": Problem,
}

// severityOf returns the severity of a Xid. One that needs nothing is a note, and one that ends only work a warning.
func severityOf(x kernellog.Xid) Severity {
	s := xidSeverity[x.Class]
	switch {
	case x.Action == "nothing":
		return Note
	case s == Problem && x.Action != "reset the GPU" && x.Action != "turn the machine off and on":
		return Warning
	}
	return s
}

// milder returns the next milder severity.
func milder(s Severity) Severity {
	if s == Problem {
		return Warning
	}
	return Note
}

// loggedXids makes a finding of each class of Xids of a GPU that no other finding has.
func loggedXids(f *Facts) (out []Finding) {
	type group struct {
		address string
		class   kernellog.Class
	}
	var order []group
	groups := map[group][]kernellog.Event{}
	for _, e := range f.logged(kernellog.KindXid, "") {
		g := group{e.Address, kernellog.Lookup(e.Xid).Class}
		if groups[g] == nil {
			order = append(order, g)
		}
		groups[g] = append(groups[g], e)
	}
	for _, g := range order {
		events := groups[g]
		graver := slices.ContainsFunc(order, func(o group) bool { return o.address == g.address && xidSeverity[o.class] == Problem })
		if g.class == kernellog.Information || f.explained(g.class, g.address) || g.class == kernellog.Program && graver && consequences(events) {
			continue
		}
		out = append(out, f.xidFinding(g.address, g.class, events))
	}
	return out
}

// consequences reports whether Xids are only those that follow from others: work that was removed.
func consequences(events []kernellog.Event) bool {
	return !slices.ContainsFunc(events, func(e kernellog.Event) bool { return e.Xid != 43 && e.Xid != 45 })
}

// xidFinding makes the finding of a class of Xids of a GPU, the gravest first.
func (f *Facts) xidFinding(address string, class kernellog.Class, events []kernellog.Event) Finding {
	slices.SortStableFunc(events, func(a, b kernellog.Event) int {
		return severityOf(kernellog.Lookup(a.Xid)).weight() - severityOf(kernellog.Lookup(b.Xid)).weight()
	})
	x := kernellog.Lookup(events[0].Xid)
	out := Finding{
		Severity: severityOf(x),
		Summary:  fmt.Sprintf("Xid %d of the GPU at %s: %s", x.Number, address, x.Meaning),
		Evidence: said(events),
		because:  string(class),
	}
	if len(events) > 1 {
		out.Summary += ", and " + units.Things(len(events)-1, "other Xid", "other Xids")
	}
	for _, e := range events {
		for _, o := range f.logged(kernellog.KindOOM, "") {
			if o.PID == e.PID && o.PID > 0 {
				out.Evidence = append(out.Evidence, said([]kernellog.Event{o})...)
			}
		}
	}
	out.Evidence = append(out.Evidence, "NVIDIA's catalog of Xids says: "+x.Action)
	if class != kernellog.Program { // such as "GPU recovery action changed … (GPU Reset Required)"
		out.Evidence = append(out.Evidence, said(f.loggedXid(kernellog.Information, address))...)
	}
	proved := slices.ContainsFunc(f.Devices, func(d Device) bool { return hostinfo.SamePCI(d.PCIBusID, address) && d.proved() })
	if !proved {
		return out
	}
	out.Evidence = append(out.Evidence, "The GPU works now")
	out.Severity = milder(out.Severity)
	if age := events[0].Age; age != nil && *age > longAgo.Seconds() {
		out.Severity = Note
	}
	return out
}

// explained reports whether another finding has the Xids of a class of a GPU as its evidence.
func (f *Facts) explained(class kernellog.Class, address string) bool {
	if class == kernellog.Bus && (len(offBus(f)) > 0 || len(loggedOffBus(f)) > 0) || class == kernellog.Init && len(loggedInit(f)) > 0 {
		return true
	}
	return slices.ContainsFunc(f.Devices, func(d Device) bool {
		if !hostinfo.SamePCI(d.PCIBusID, address) {
			return false
		}
		return slices.ContainsFunc(evidenced, func(e evidencedBy) bool { return e.class == class && len(e.find(f, &d)) > 0 })
	})
}

// An evidencedBy is a check of a GPU whose findings have the Xids of a class as evidence.
type evidencedBy struct {
	id    string
	class kernellog.Class
	find  func(*Facts, *Device) []Finding
}

var evidenced = []evidencedBy{
	{"uncorrectable_ecc", kernellog.Memory, uncorrectableECC},
	{"row_remap_failed", kernellog.Memory, remapFailed},
	{"row_remap_pending", kernellog.Memory, remapPending},
	{"nvlink_error", kernellog.NVLink, reported("nvlink_error", "")},
	{"gpu_fault", kernellog.Program, reported("gpu_fault", "")},
}

// addXids adds Xids to the evidence of the finding of a GPU.
func (f *Facts) addXids(one *Finding, d *Device) {
	for _, e := range evidenced {
		if e.id == one.ID {
			one.Evidence = append(one.Evidence, said(f.loggedXid(e.class, d.PCIBusID))...)
		}
	}
}
