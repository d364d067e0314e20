package probe

import (
	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/verify"
)

// simulatedPCI is the PCI address of the simulated GPU.
const simulatedPCI = "0000:06:00.0"

// NewSimulation returns the simulated GPU of --sim.
func NewSimulation() (*cudasim.Sim, error) {
	return cudasim.New(cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: simulatedPCI}}})
}

// PlansFor returns the plans of the steps. Those for the simulated GPU are smaller:
// simulated copies and device memory cost the time and the memory of the host.
func PlansFor(s Steps, simulated bool) Plans {
	if !simulated {
		return Plans{Verify: verify.Plan{Full: s.Full}}
	}
	p := Plans{
		Verify:    verify.Plan{Full: s.Full, MaxBytes: 64<<20 + 7},
		Bandwidth: bench.LinkPlan{SizeBytes: 8 << 20, Copies: 2, Samples: 3},
		Together:  bench.LinkPlan{SizeBytes: 8 << 20, Copies: 2, Samples: 3},
	}
	if !s.Full {
		p.Verify.Variants = 1
		p.Verify.MaxBytes = 2<<20 + 1
	}
	return p
}

// SimulatedHost returns the facts about a host with the simulated GPU instead of all of
// NVIDIA's. The link is the one that cudasim's copies are timed for: PCIe 5.0 x16.
func SimulatedHost(h *hostinfo.Host) *hostinfo.Host {
	h.NVIDIA = hostinfo.NVIDIA{}
	h.GPUs = []hostinfo.PCIDevice{{
		Address: simulatedPCI,
		Class:   "0x030200",
		Link:    hostinfo.Link{CurrentSpeed: 32, CurrentWidth: 16, MaxSpeed: 32, MaxWidth: 16},
	}}
	return h
}
