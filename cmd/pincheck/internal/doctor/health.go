package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/internal/units"
)

// healthChecks judge what NVML reports. Errors of memory that programs meet are in
// cudaerrors.go.
var healthChecks = []Check{
	{ID: "row_remap_failed", Suppresses: []string{"row_remap_pending"}, Device: remapFailed},
	{ID: "row_remap_pending", Device: remapPending},
	{ID: "memory_spares_used_up", Device: sparesUsedUp},
	{ID: "inforom_corrupted", Device: corruptedInfoROM},
	{ID: "throttled", Device: throttled},
	{ID: "locked_memory_clock", Device: lockedMemoryClock},
	{ID: "other_processes", Device: otherProcesses},
	{ID: "persistence_off", Host: persistenceOff},
}

func isTrue(b *bool) bool { return b != nil && *b }

func remapFailed(_ *Facts, d *Device) []Finding {
	if d.Health == nil || !isTrue(d.Health.RemapFailed) {
		return nil
	}
	return seen("NVML: a row remapping failed")
}

func remapPending(_ *Facts, d *Device) []Finding {
	if d.Health == nil || !isTrue(d.Health.RemapPending) {
		return nil
	}
	out := Finding{Evidence: []string{"NVML: retired pages or remapped rows are pending"}}
	if n := d.Health.RetiredPages; n != nil {
		out.Evidence = append(out.Evidence, units.Things(*n, "retired page", "retired pages"))
	}
	return finding(out)
}

// warm is below what any GPU is slowed down at for its heat, in degrees Celsius: 75 is the lowest target of a card.
const warm = 70

// slowing are the reasons that slow a GPU down against its purpose. Idle, application
// clocks and the power limit are what it was set to.
var slowing = []string{"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}

func throttled(_ *Facts, d *Device) []Finding {
	if d.Health == nil {
		return nil
	}
	reasons := slices.DeleteFunc(slices.Clone(d.Health.Throttle), func(r string) bool { return !slices.Contains(slowing, r) })
	if len(reasons) == 0 {
		return capped(d.Health)
	}
	out := Finding{Evidence: []string{"NVML: " + strings.Join(reasons, ", ")}}
	if t := d.Health.Temperature; t > 0 {
		out.Evidence = append(out.Evidence, fmt.Sprintf("%d °C", t))
	}
	switch t := d.Health.Temperature; {
	case slices.Contains(reasons, "hw_power_brake_slowdown"):
		out.because = "power_brake"
	case t > 0 && t < warm && slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(r, "thermal") }):
		out.because = "limit"
	case t > 0 && t < warm || !slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(r, "thermal") }):
		out.because = "signal"
	}
	return finding(out)
}

// deeplyCapped is the share of its highest clock that a GPU at full load keeps at its own power limit.
const deeplyCapped = 0.5

// capped finds a power limit that is far below what the GPU is made for. Whether that is on purpose NVML does
// not say.
func capped(h *nvml.GPU) []Finding {
	if !slices.Contains(h.Throttle, "sw_power_cap") || slices.Contains(h.Throttle, "gpu_idle") || h.SMClock == 0 || float64(h.SMClock) >= deeplyCapped*float64(h.SMClockMax) {
		return nil
	}
	return finding(Finding{
		Severity: Note,
		Summary:  fmt.Sprintf("the power limit holds the GPU's clock at %s of its maximum", units.Share(float64(h.SMClock)/float64(h.SMClockMax))),
		Evidence: []string{fmt.Sprintf("NVML: sw_power_cap, %d of %d MHz", h.SMClock, h.SMClockMax)},
		because:  "power_cap",
	})
}

func lockedMemoryClock(_ *Facts, d *Device) []Finding {
	h := d.Health
	if h == nil || h.MemoryClock == 0 || float64(h.MemoryClock) >= 0.8*float64(h.MemoryClockMax) ||
		!slices.Contains(h.Throttle, "applications_clocks_setting") || slices.Contains(h.Throttle, "gpu_idle") {
		return nil
	}
	return seen(fmt.Sprintf("NVML: %d of %d MHz, applications_clocks_setting", h.MemoryClock, h.MemoryClockMax))
}

func otherProcesses(_ *Facts, d *Device) []Finding {
	if d.Health == nil || len(d.Health.Processes) == 0 {
		return nil
	}
	var evidence []string
	for _, p := range d.Health.Processes[:min(len(d.Health.Processes), 8)] {
		evidence = append(evidence, strings.TrimSpace(fmt.Sprintf("Process %d %s: %s", p.PID, p.Name, units.Bytes(p.Memory))))
	}
	return summarized(fmt.Sprintf("%s this GPU", units.Things(len(d.Health.Processes), "other process uses", "other processes use")), evidence...)
}

func persistenceOff(f *Facts) []Finding {
	var off []string
	for _, d := range f.Devices {
		if d.Health != nil && d.Health.Persistence != nil && !*d.Health.Persistence {
			off = append(off, fmt.Sprintf("GPU %d", d.Ordinal))
		}
	}
	if len(off) == 0 || f.Host.Virt.WSL {
		return nil
	}
	return seen("NVML: " + strings.Join(off, ", "))
}

func corruptedInfoROM(_ *Facts, d *Device) []Finding {
	if d.Health == nil || !isTrue(d.Health.InfoROMCorrupted) {
		return nil
	}
	return seen(fmt.Sprintf("NVML: GPU %d: the checksum of the InfoROM is wrong", d.Health.Index))
}

// maxRetired is the number of pages that a GPU before Ampere can retire.
const maxRetired = 64

func sparesUsedUp(_ *Facts, d *Device) []Finding {
	h := d.Health
	switch {
	case h == nil:
	case h.BanksWithoutSpares != nil && *h.BanksWithoutSpares > 0:
		return summarized(units.Things(*h.BanksWithoutSpares, "memory bank has", "memory banks have")+" no spare row left",
			fmt.Sprintf("NVML: row remapper histogram of GPU %d: none is %d", h.Index, *h.BanksWithoutSpares))
	case h.RetiredPages != nil && *h.RetiredPages >= maxRetired:
		return seen(fmt.Sprintf("NVML: GPU %d has %d retired pages, of at most %d", h.Index, *h.RetiredPages, maxRetired))
	}
	return nil
}
