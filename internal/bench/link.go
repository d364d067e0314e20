package bench

import (
	"cmp"
	"fmt"
	"time"

	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/internal/result"
)

// A LinkPlan shapes [Link]. Zero fields take the values that suit a check, which takes
// about a quarter of a second a device on a fast link. Negative values are errors.
type LinkPlan struct {
	SizeBytes int           // of one copy; 0 means 64 MiB, and larger ones are not faster
	Copies    int           // of a sample; 0 means 8
	Samples   int           // of each direction; 0 means 9
	Budget    time.Duration // of each direction; 0 means half a second
}

// Link is [Bandwidth] with one size and registered memory, for a quick check of each
// device's link.
func Link(p LinkPlan) measure.Experiment {
	e := Bandwidth()
	e.Name, e.Explain, e.Views = "link", nil, e.Views[:1]
	e.Question = "How fast are large copies between pinned memory and the device?"
	e.Plan = func(env measure.Env) ([]measure.Group, error) {
		for _, f := range []struct {
			name  string
			value int
		}{{"size", p.SizeBytes}, {"copies", p.Copies}, {"samples", p.Samples}, {"budget", int(p.Budget)}} {
			if f.value < 0 {
				return nil, fmt.Errorf("%s %d: must not be negative", f.name, f.value)
			}
		}
		if len(env.Devices) == 0 {
			return nil, errNoDevice
		}
		n, copies := cmp.Or(p.SizeBytes, 64<<20), cmp.Or(p.Copies, 8)
		var groups []measure.Group
		for _, dev := range env.Devices {
			rig := &copyRig{workbench: workbench{dev: dev}, kind: registered, n: n}
			var cases []measure.Case
			for _, way := range []string{result.HostToDevice, result.DeviceToHost} {
				c := rig.bandwidth(seriesBandwidth, way, n, copies)
				c.Samples, c.Budget = cmp.Or(p.Samples, 9), cmp.Or(p.Budget, 500*time.Millisecond)
				cases = append(cases, c)
			}
			groups = append(groups, rig.group("registered memory", cases))
		}
		return groups, nil
	}
	return e
}
