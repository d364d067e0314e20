package doctor

import (
	"fmt"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/internal/units"
)

// wasteChecks find memory that is pinned and not used.
var wasteChecks = []Check{
	{ID: "rounded_pins", Host: roundedPins},
}

// minRounded is from where on rounding is worth a change.
const minRounded = 1 << 30

func roundedPins(f *Facts) (out []Finding) {
	for _, p := range f.Processes {
		if p.Rounded < minRounded {
			continue
		}
		one := Finding{
			Summary:  fmt.Sprintf("process %d (%s) pins %s in blocks rounded to powers of two", p.PID, p.Name, units.Bytes(p.Rounded)),
			Evidence: []string{fmt.Sprintf("/proc/%d/smaps: %s, %s pinned in total", p.PID, units.Things(p.RoundedBlocks, "rounded block", "rounded blocks"), units.Bytes(p.Pinned))},
			values:   findings.Values{"size": units.Bytes(p.Rounded / 2)},
		}
		var names []string
		for _, fw := range p.Frameworks {
			names = append(names, fw.Name)
			if fw.Rounds && fw.Setting != "" && !fw.Set {
				one.because, one.values["the framework"] = "setting", fw.Name+": "+fw.Setting
			}
		}
		if len(names) > 0 {
			one.Evidence = append(one.Evidence, "It uses "+strings.Join(names, ", "))
		}
		out = append(out, one)
	}
	return out
}
