package doctor

import (
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
)

// byTexts are the checks that judge facts of texts (nvidia-smi -q, dmesg, lspci): they find by what is written. All
// others conclude from what is missing, or need CUDA.
var byTexts = []string{
	"gpu_off_bus", "nouveau_holds_gpu", "gpu_too_old_for_driver", "gpu_not_initialized", "driver_mismatch", "compute_mode_prohibited",
	"uncorrectable_ecc", "row_remap_failed", "row_remap_pending", "throttled", "locked_memory_clock", "other_processes", "persistence_off",
	"narrow_link", "link_errors", "slot_below_card", "xid",
}

// partial reports whether the facts are of texts: what they lack is unknown.
func (f *Facts) partial() bool { return len(f.Sources) > 0 }

// runs reports whether a check judges these facts.
func (f *Facts) runs(c *Check) bool { return !f.partial() || slices.Contains(byTexts, c.ID) }

// FromTexts returns the facts of texts of these kinds: the host that they show, and what nvidia-smi printed, if it
// did. mismatch is its complaint that library and kernel module differ; empty without one.
func FromTexts(host *hostinfo.Host, report *nvml.Report, mismatch string, kinds ...string) (*Facts, error) {
	f := &Facts{Sources: kinds, Devices: []Device{}}
	if mismatch != "" {
		f.Opening = &Opening{Error: "nvidia-smi: " + mismatch, Code: int(cudart.ErrSystemDriverMismatch)}
	}
	var shown []nvml.GPU
	if report != nil {
		shown = report.GPUs
	}
	for _, g := range shown {
		if g.Error == "" {
			f.Devices = append(f.Devices, Device{Ordinal: len(f.Devices), Name: g.Name, UUID: g.UUID, PCIBusID: g.PCIBusID})
		}
	}
	for _, pci := range host.GPUs {
		known := slices.ContainsFunc(shown, func(g nvml.GPU) bool { return hostinfo.SamePCI(g.PCIBusID, pci.Address) })
		if !known && !pci.OffBus {
			b, _ := boardOf(host, pci)
			f.Devices = append(f.Devices, Device{Ordinal: len(f.Devices), Name: b.Model, UUID: b.UUID, PCIBusID: pci.Address})
		}
	}
	if len(f.Devices) > maxDevices {
		return nil, fmt.Errorf("doctor: %d GPUs: more than %d", len(f.Devices), maxDevices)
	}
	f.SetHost(host)
	if report != nil {
		f.SetHealth(report)
	}
	return f, nil
}
