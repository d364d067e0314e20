package doctor

import (
	"cmp"
	"slices"
)

// A Check is one idea of what can be wrong. Host is called once, Device once for each
// GPU; either may be nil.
type Check struct {
	ID       string
	Title    string   // what it finds, in a few words
	Severity Severity // of its findings, unless they have one of their own
	// Implies are the checks whose findings follow from one of this check: of the same
	// GPU, or any if this one is about the host.
	Implies []string
	// Host and Device return what they find. ID, severity and device may be left empty.
	Host   func(*Facts) []Finding
	Device func(*Facts, *Device) []Finding
}

// Checks returns all checks. The order is that of findings of one severity: first what
// keeps a GPU from being used, in the order in which it should be mended, then wrong bytes
// and failures, then what costs speed, then what costs memory.
func Checks() []Check {
	return slices.Concat(
		accessChecks, libraryChecks, startChecks, visibilityChecks,
		byteChecks, callChecks, refusedChecks, healthChecks,
		linkChecks, copyChecks, numaChecks, pinningChecks, loadChecks,
		budgetChecks, wasteChecks,
	)
}

// Judge runs all checks. It returns the findings by weight, without those that follow from
// others and those whose ids are ignored, and the verdict.
func Judge(f *Facts, ignore ...string) (Verdict, []Finding) {
	found := leaveOut(judge(f), ignore)
	return verdict(f, found), found
}

// judge runs all checks on the facts.
func judge(f *Facts) []Finding {
	all := []Finding{}
	for _, c := range Checks() {
		add := func(found []Finding, device *int) {
			for _, one := range found {
				one.ID, one.Severity, one.Device = c.ID, cmp.Or(one.Severity, c.Severity), device
				all = append(all, one)
			}
		}
		if c.Host != nil {
			add(c.Host(f), nil)
		}
		if c.Device != nil {
			for i := range f.Devices {
				d := &f.Devices[i]
				add(c.Device(f, d), &d.Ordinal)
			}
		}
	}
	return all
}

// leaveOut removes what follows from other findings, and what is ignored: an ignored
// finding hides its followers nevertheless. The rest is sorted by weight.
func leaveOut(all []Finding, ignore []string) []Finding {
	implies := map[string][]string{}
	for _, c := range Checks() {
		implies[c.ID] = c.Implies
	}
	hidden := make([]bool, len(all))
	for i := range all {
		cause := &all[i]
		if hidden[i] {
			continue // its own first cause hides what it would
		}
		for j, other := range all {
			if i == j || !slices.Contains(implies[cause.ID], other.ID) || cause.Device != nil && (other.Device == nil || *other.Device != *cause.Device) {
				continue
			}
			hidden[j] = true
			if !slices.Contains(cause.Followers, other.ID) {
				cause.Followers = append(cause.Followers, other.ID)
			}
		}
	}
	kept := []Finding{}
	for i, one := range all {
		if !hidden[i] && !slices.Contains(ignore, one.ID) {
			kept = append(kept, one)
		}
	}
	slices.SortStableFunc(kept, func(a, b Finding) int { return cmp.Compare(a.Severity.weight(), b.Severity.weight()) })
	return kept
}

// verdict concludes from the findings that are left. A speed without a yardstick is no sign
// of health.
func verdict(f *Facts, found []Finding) Verdict {
	has := func(s Severity) bool {
		return slices.ContainsFunc(found, func(one Finding) bool { return one.Severity == s })
	}
	unjudged := slices.ContainsFunc(f.Devices, func(d Device) bool { return d.measured() && !d.judged() })
	switch {
	case len(f.Devices) == 0:
		return Unusable
	case has(Problem):
		return Problems
	case has(Warning):
		return Warnings
	case unjudged:
		return Measured
	}
	return Healthy
}

// finding returns one finding as a list, for checks that find one thing.
func finding(f Finding) []Finding { return []Finding{f} }
