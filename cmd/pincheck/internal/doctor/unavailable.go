package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/internal/units"
)

// unavailable is error 46 of all GPUs.
func unavailable(f *Facts) []Finding {
	return finding(f.holds(f.start(), f.managed()))
}

// unavailableID has the causes of error 46, of the start and of a call.
const unavailableID = "gpus_unavailable"

// holds adds to a finding of error 46 why GPUs are unavailable: the driver asks for a reset, a process uses them, or
// neither shows. A container does not see the processes of others.
func (f *Facts) holds(out Finding, gpus []*nvml.GPU) Finding {
	idle := len(gpus) > 0
	for _, g := range gpus {
		at := fmt.Sprintf("NVML: GPU %d", g.Index)
		switch {
		case g.Recovery != "" && g.Recovery != "none":
			out.because = "recovery"
			out.Evidence = append(out.Evidence, at+" has the recovery action "+g.Recovery)
		case strings.Contains(g.Error, "needs a reset"):
			out.because = "recovery"
			out.Evidence = append(out.Evidence, at+": "+g.Error)
		case len(g.Processes) > 0:
			out.Evidence = append(out.Evidence, at+" has "+f.holders(g))
		}
		idle = idle && !used(g) && g.ComputeMode != nil && *g.ComputeMode == 0 && !isTrue(g.MIG) && g.Error == ""
	}
	switch {
	case out.because != "":
	case idle && !vgpuName.MatchString(gpus[0].Name):
		out.because = "idle"
		out.Evidence = append(out.Evidence, "NVML: the compute mode is default, MIG is off, and no process has a GPU")
		if f.Host.Virt.Container != "" {
			out.Certainty = Possible
			out.Evidence = append(out.Evidence, "This container does not show processes outside of it")
		}
	}
	return out
}

// holders names the processes on a GPU, as far as their names show.
func (f *Facts) holders(g *nvml.GPU) string {
	text := units.Things(len(g.Processes), "process", "processes")
	for i, p := range g.Processes[:min(len(g.Processes), maxPinners)] {
		text += []string{": ", ", "}[min(i, 1)] + fmt.Sprint(p.PID)
		if k := slices.IndexFunc(f.Processes, func(o Process) bool { return o.PID == p.PID }); k >= 0 {
			text += " (" + f.Processes[k].Name + ")"
		} else if p.Name != "" {
			text += " (" + p.Name + ")"
		}
	}
	return text
}

// whyUnavailable returns the meaning of error 46 on one GPU, and its evidence.
func (f *Facts) whyUnavailable(d *Device) (means meaning, evidence []string) {
	if d.Health == nil {
		return meaning{}, nil
	}
	out := f.holds(Finding{}, []*nvml.GPU{d.Health})
	if out.because == "" || out.Certainty != "" {
		return meaning{}, nil
	}
	return meaning{unavailableID, out.because}, out.Evidence
}
