package doctor

import (
	"cmp"
	"slices"
	"sync"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cudart"
)

// A Check searches for one kind of finding. Host is called once, Device once for each GPU;
// either may be nil.
type Check struct {
	ID string // of its findings: cmd/pincheck/internal/findings has a page of this name, with title and severity
	// Suppresses are the ids of findings that a finding of this check suppresses, because they
	// follow from it: on the same GPU, or everywhere if the finding is about the host.
	Suppresses []string
	// Explains are the codes with which CUDA fails to start that it can be the cause of: it is a
	// hypothesis then, of which compete keeps the surest. Success stands for no code.
	Explains []cudart.Code
	// Host and Device return what they find, without ID and device, and without what the page has.
	Host   func(*Facts) []Finding
	Device func(*Facts, *Device) []Finding
}

// A group is a list of checks about one subject.
type group struct {
	name   string
	checks []Check
	// examined reports whether the facts contain the data that most of the checks need.
	examined func(*Facts) bool
}

// groups are all checks. Findings of one severity are in this order: causes that keep a GPU
// from being used, in the order in which to fix them; mismatches and failures; speed; memory.
var groups = sync.OnceValue(func() []group {
	devices := func(has func(*Device) bool) func(*Facts) bool {
		return func(f *Facts) bool {
			return len(f.Devices) > 0 && !slices.ContainsFunc(f.Devices, func(d Device) bool { return !has(&d) })
		}
	}
	// An unreadable file is no proof: what a group looks at has to show.
	host := func(shows func(*hostinfo.Host) bool) func(*Facts) bool {
		return func(f *Facts) bool { return f.Host != nil && shows(f.Host) }
	}
	copied := devices((*Device).measured)
	return []group{
		{"GPU access", accessChecks, devices(func(*Device) bool { return true })},
		{"libraries", libraryChecks, func(f *Facts) bool { return f.Library != nil }},
		{"starting CUDA", startChecks, func(f *Facts) bool { return f.Library != nil }},
		{"visible GPUs", visibilityChecks, devices(func(*Device) bool { return true })},
		{"data integrity", byteChecks, devices(func(d *Device) bool { return d.proved() && d.Verify.FailureCount == 0 })},
		{"calls", callChecks, copied},
		{"pinning limits", refusedChecks, host(func(h *hostinfo.Host) bool { return h.Kernel.Release != "" && h.Memory.MaxMappings.Known })},
		{"kernel log", loggedChecks, host(func(h *hostinfo.Host) bool { return h.KernelLog.Shown })},
		{"GPU state", healthChecks, devices(func(d *Device) bool { return d.Health != nil })},
		{"link", linkChecks, func(f *Facts) bool {
			return copied(f) && !slices.ContainsFunc(f.Devices, func(d Device) bool { return !f.compared(&d) })
		}},
		{"small and pageable copies", copyChecks, devices(func(d *Device) bool { return d.Trials != nil })},
		{"CPUs and NUMA", numaChecks, host(func(h *hostinfo.Host) bool { return len(h.NUMA) > 0 && h.CPU.Allowed != "" })},
		{"pinning speed", pinningChecks, devices(func(d *Device) bool { return d.Trials != nil })},
		{"files", loadChecks, host(func(h *hostinfo.Host) bool { return len(h.Mounts) > 0 })},
		{"memory budget", budgetChecks, host(func(h *hostinfo.Host) bool { return h.Memory.Total > 0 && h.Memory.Available > 0 })},
		{"programs' memory", wasteChecks, func(f *Facts) bool { return len(f.Processes) > 0 }},
	}
})

// Title is what the check finds, in a few words.
func (c Check) Title() string { return c.page().Title }

// Severity is the severity of the check's findings, unless they have one of their own.
func (c Check) Severity() Severity { return Severity(c.page().Severity) }

func (c Check) page() findings.Page {
	if p, ok := findings.Get(c.ID); ok {
		return *p
	}
	return findings.Page{}
}

// Checks returns all checks, in the order of findings of one severity.
func Checks() []Check { return checks() }

var checks = sync.OnceValue(func() (all []Check) {
	for _, g := range groups() {
		all = append(all, g.checks...)
	}
	return all
})

// Passed returns the names of the check groups that had data and found no warning or problem, not even one that
// follows from another.
func Passed(f *Facts, found []Finding) []string {
	passed := []string{}
	for _, g := range groups() {
		bad := slices.ContainsFunc(found, func(one Finding) bool {
			return one.Severity.AtLeast(Warning) && slices.ContainsFunc(g.checks, func(c Check) bool { return c.ID == one.ID || slices.Contains(one.Suppressed, c.ID) })
		})
		if !bad && !f.partial() && g.examined(f) {
			passed = append(passed, g.name)
		}
	}
	return passed
}

// unread is the host of facts that have none: nothing is known of it, as where no file can be read.
var unread = &hostinfo.Host{}

// Evaluate runs all checks. It returns the verdict, and the findings by severity, without
// suppressed and ignored ones.
func Evaluate(f *Facts, ignore ...string) (Verdict, []Finding) {
	if f.Host == nil {
		known := *f
		known.Host, f = unread, &known
	}
	found := leaveOut(compete(f, findAll(f)), ignore, len(f.Devices) > 0)
	return verdict(f, found, ignore), found
}

// compete leaves of the hypotheses about why CUDA does not start the surest, and of equally sure ones the
// first: the checks are in the order in which things depend on each other. The others become its followers, and
// its alternatives if they are as sure, unless it is certain or they follow from it. What cannot be the cause of the code that CUDA
// failed with does not take part: it is left out if it is a guess, and stays beside the winner if it is certain.
func compete(f *Facts, all []Finding) []Finding {
	code, failed := f.startCode()
	if !failed {
		return all
	}
	explains := map[string][]cudart.Code{}
	for _, c := range Checks() {
		explains[c.ID] = c.Explains
	}
	var hypotheses, otherFindings []Finding
	for _, one := range all {
		switch codes := explains[one.ID]; {
		case codes == nil || one.Device != nil || !one.Severity.AtLeast(Warning):
			otherFindings = append(otherFindings, one)
		case slices.Contains(codes, code), one.ID == failedOpenID:
			hypotheses = append(hypotheses, one)
		case one.Certainty == Certain:
			otherFindings = append(otherFindings, one)
		}
	}
	if len(hypotheses) == 0 {
		return otherFindings
	}
	sureness := func(one Finding) int {
		if one.ID == failedOpenID { // which says what the code means, and yields to any likely cause of it
			return max(one.Certainty.rank(), Likely.rank())
		}
		return one.Certainty.rank()
	}
	slices.SortStableFunc(hypotheses, func(a, b Finding) int { return cmp.Compare(sureness(a), sureness(b)) })
	winner := hypotheses[0]
	won := []Finding{}
	following := suppressedBy(winner.ID, func(string) bool { return false })
	for _, one := range hypotheses {
		equal := one.Certainty == winner.Certainty
		if one.ID == winner.ID && equal { // of several GPUs
			won = append(won, one)
			continue
		}
		won[0].follow(one.ID)
		if equal && winner.Certainty != Certain && !slices.Contains(following, one.ID) {
			won[0].Alternatives = append(won[0].Alternatives, one.ID+": "+one.Summary)
		}
	}
	return append(won, otherFindings...)
}

// startCode returns the code with which CUDA failed to start, Success for a failure without one. failed is
// false if it started, and if that is not known.
func (f *Facts) startCode() (code cudart.Code, failed bool) {
	switch {
	case len(f.Devices) > 0:
		return 0, false
	case f.Opening != nil:
		return cudart.Code(f.Opening.Code), true
	case f.CUDADevices != nil:
		return cudart.ErrNoDevice, true
	}
	return 0, f.Requirements != nil
}

// findAll runs all checks on the facts.
func findAll(f *Facts) []Finding {
	all, places := []Finding{}, f.Host.Places()
	for _, c := range Checks() {
		if !f.runs(&c) {
			continue
		}
		add := func(found []Finding, d *Device) {
			for _, one := range found {
				one.ID, one.Severity = c.ID, cmp.Or(one.Severity, c.Severity())
				if d != nil {
					one.Device = &d.Ordinal
					f.addXids(&one, d)
				}
				one.near(d)
				one.describe(places...)
				all = append(all, one)
			}
		}
		if c.Host != nil {
			add(c.Host(f), nil)
		}
		if c.Device != nil {
			for i := range f.Devices {
				d := &f.Devices[i]
				add(c.Device(f, d), d)
			}
		}
	}
	return all
}

// leaveOut removes suppressed and ignored findings, and sorts the rest by severity. An ignored
// finding suppresses others all the same. Where CUDA shows GPUs (usable), missing_gpus follows from nothing: it is
// about those that no other finding has.
func leaveOut(all []Finding, ignore []string, usable bool) []Finding {
	hidden := make([]bool, len(all))
	found := func(id string) bool {
		return slices.ContainsFunc(all, func(one Finding) bool { return one.ID == id })
	}
	for i := range all {
		cause := &all[i]
		if hidden[i] {
			continue // the finding that suppresses it suppresses those that follow, too
		}
		suppressed := suppressedBy(cause.ID, found)
		for j, other := range all {
			if i == j || !slices.Contains(suppressed, other.ID) || usable && other.ID == missingID || cause.Device != nil && (other.Device == nil || *other.Device != *cause.Device) {
				continue
			}
			hidden[j] = true
			cause.follow(other.ID)
		}
	}
	remaining := []Finding{}
	for i, one := range all {
		if !hidden[i] && !slices.Contains(ignore, one.ID) {
			remaining = append(remaining, one)
		}
	}
	slices.SortStableFunc(remaining, func(a, b Finding) int { return cmp.Compare(a.Severity.weight(), b.Severity.weight()) })
	return remaining
}

// suppressedBy returns the ids that a finding suppresses: those of its check, and those of each
// suppressed check that has a finding itself.
func suppressedBy(id string, found func(id string) bool) (ids []string) {
	all := Checks()
	var follow func(id string)
	follow = func(id string) {
		i := slices.IndexFunc(all, func(c Check) bool { return c.ID == id })
		if i < 0 {
			return
		}
		for _, next := range all[i].Suppresses {
			if !slices.Contains(ids, next) {
				ids = append(ids, next)
				if found(next) {
					follow(next)
				}
			}
		}
	}
	follow(id)
	return ids
}

// verdict returns the verdict for the remaining findings. Health needs proof: each GPU on the bus is accounted for,
// and of every GPU that is examined the bytes came back right, and its speed was compared with a reference.
func verdict(f *Facts, found []Finding, ignore []string) Verdict {
	has := func(s Severity) bool {
		return slices.ContainsFunc(found, func(one Finding) bool { return one.Severity == s })
	}
	some := func(is func(*Device) bool) bool {
		return slices.ContainsFunc(f.Devices, func(d Device) bool { return is(&d) })
	}
	switch {
	case len(f.Devices) == 0 && !f.NotStarted() && !f.partial():
		return Unusable
	case has(Problem):
		return Problems
	case has(Warning):
		return Warnings
	case f.partial(), len(f.Devices) == 0, some(func(d *Device) bool { return !d.measured() && !d.proved() }), !f.accounted(found, ignore):
		return Unknown
	case some(func(d *Device) bool { return !d.proved() || !f.compared(d) }):
		return Measured
	}
	return Healthy
}

// first returns the first element of a list that is wanted. ok is false if it has none.
func first[T any](all []T, wanted func(T) bool) (one T, ok bool) {
	if i := slices.IndexFunc(all, wanted); i >= 0 {
		return all[i], true
	}
	return one, false
}

// finding returns one finding as a list, for checks that find one thing.
func finding(f Finding) []Finding { return []Finding{f} }

// summarized returns a finding with a summary of its own and evidence; its page has the rest. Without evidence it returns
// nil.
func summarized(summary string, evidence ...string) []Finding {
	if len(evidence) == 0 {
		return nil
	}
	return finding(Finding{Summary: summary, Evidence: evidence})
}

// seen is summarized where the page has the summary, too.
func seen(evidence ...string) []Finding { return summarized("", evidence...) }

// follow notes that another finding follows from this one.
func (f *Finding) follow(id string) {
	if id != f.ID && !slices.Contains(f.Suppressed, id) {
		f.Suppressed = append(f.Suppressed, id)
	}
}
