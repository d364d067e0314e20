package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

// what names what a probe was doing, for "... does not return".
func (p *Probe) what() string {
	if p.Call != "" {
		call := p.Call
		if p.Device != nil { // it is said before
			call = strings.ReplaceAll(call, fmt.Sprintf(" on device %d", *p.Device), "")
		}
		if p.Stage == StageTogether {
			call += ", with all GPUs at once,"
		}
		return call
	}
	return cmp.Or(stageTexts[p.Stage], "a call into the driver")
}

// stageTexts are what a probe does in a stage.
var stageTexts = map[Stage]string{
	StageOpen: "opening the CUDA library", StageMemory: "reading the amount of free memory", StageRoundTrips: "a round trip", StageWaiting: "waiting for other GPUs",
	StageCopies: "the measurement of copies", StageTogether: "the measurement with all GPUs at once", StageNVML: "the management library (NVML)",
}

// whole names all that a probe does. Described is whether the finding names the GPU.
func (p *Probe) whole(described bool) string {
	switch {
	case p.Device != nil && described:
		return "the examination of this GPU"
	case p.Device != nil:
		return fmt.Sprintf("the examination of GPU %d", *p.Device)
	case p.Stage == StageTogether, p.Stage == StageOpen:
		return stageTexts[p.Stage]
	case p.Stage == StageNVML:
		return "reading " + stageTexts[p.Stage]
	}
	return "this run"
}

// seen is the evidence of a probe: how far it was, and how it ended. D is its GPU, or nil.
func (p *Probe) seen(d *Device, ended string) (texts []string) {
	if p.Stage == StageRoundTrips && d != nil && d.Verify != nil {
		texts = append(texts, fmt.Sprintf("%s of %s had completed", units.Count(d.Verify.Cases), units.Things(d.Verify.CasesPlanned, "round trip", "round trips")))
		if p.After != "" {
			texts[0] += ", the last one " + p.After
		}
	}
	return append(texts, fmt.Sprintf("%s, %s after %s began", ended, units.Seconds(p.Seconds), p.whole(d != nil)))
}

// of returns the GPU that a probe is about, or nil if it was not described.
func (p *Probe) of(f *Facts) *Device {
	for i := range f.Devices {
		if p.Device != nil && f.Devices[i].Ordinal == *p.Device {
			return &f.Devices[i]
		}
	}
	return nil
}

// probesOf returns the probes about a GPU, or those about none, that ended in a state.
func (f *Facts) probesOf(d *Device, state ProbeState) (all []*Probe) {
	for i := range f.Probes {
		if p := &f.Probes[i]; p.State == state && p.of(f) == d {
			all = append(all, p)
		}
	}
	return all
}

func hung(f *Facts) []Finding {
	out := hungDevice(f, nil)
	if f.Opening != nil && strings.Contains(f.Opening.Error, notReturned) && len(out) == 0 {
		out = append(out, hangs("a call into the driver", f.Opening.Error))
	}
	return out
}

// hungDevice finds what did not return in the examination of a GPU; of nil, elsewhere.
func hungDevice(f *Facts, d *Device) (out []Finding) {
	for _, p := range f.probesOf(d, ProbeHung) {
		one := hangs(p.what(), p.seen(d, p.Detail+"; abandoned")...)
		if p.Call == "" { // all of its process is silent
			one.because = "silent"
		}
		out = append(out, one)
	}
	for _, p := range f.probesOf(d, ProbeUnfinished) {
		out = append(out, Finding{
			Severity: Note,
			Summary:  p.what() + " had not returned when the run ended",
			Evidence: p.seen(d, p.Detail),
			because:  "unfinished",
		})
	}
	return out
}

func hangs(what string, evidence ...string) Finding {
	return Finding{Summary: what + " does not return", Evidence: evidence, because: "no_return"}
}

// crashedDevice finds what ended the process that examined a GPU; of nil, another one.
func crashedDevice(f *Facts, d *Device) (out []Finding) {
	for _, p := range f.probesOf(d, ProbeCrashed) {
		out = append(out, Finding{Summary: p.what() + " ends the process", Evidence: p.seen(d, p.Detail), because: "fault"})
	}
	for _, p := range f.probesOf(d, ProbeKilled) {
		out = append(out, Finding{Summary: "the process for " + p.whole(d != nil) + " was killed", Evidence: p.seen(d, p.Detail), because: "killed"})
	}
	return out
}

// NotStarted reports whether a process that was to examine this machine could not be started, so that nothing is known
// of CUDA.
func (f *Facts) NotStarted() bool {
	return slices.ContainsFunc(f.Probes, func(p Probe) bool { return p.State == ProbeNotStarted })
}

const notStartedID = "process_not_started"

// killedOpening says how the process that starts CUDA was killed, if it was.
func (f *Facts) killedOpening() string {
	for _, p := range f.probesOf(nil, ProbeKilled) {
		if p.Name != "nvml" {
			return capital(p.what()) + ": " + p.Detail
		}
	}
	return ""
}

// crashes lists how processes of this program ended early.
func (f *Facts) crashes() (reasons []string) {
	for _, p := range f.Probes {
		if p.State == ProbeCrashed {
			reasons = append(reasons, p.Detail)
		}
	}
	return reasons
}

// unstarted lists why processes could not be started, each reason once.
func (f *Facts) unstarted() (reasons []string) {
	for _, p := range f.Probes {
		if p.State == ProbeNotStarted && !slices.Contains(reasons, p.Detail) {
			reasons = append(reasons, p.Detail)
		}
	}
	return reasons
}
