package main

import (
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/bench"
	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/verify"
)

// simulatedPCI is the PCI address of the simulated GPU.
const simulatedPCI = "0000:06:00.0"

func newSimulation() (*cudasim.Sim, error) {
	return cudasim.New(cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: simulatedPCI}}})
}

// simulatedPlans returns smaller plans: simulated copies and device memory cost the time
// and the memory of the host.
func simulatedPlans(s steps) plans {
	p := plans{
		verify:    verify.Plan{Full: s.full, MaxBytes: 64<<20 + 7},
		bandwidth: bench.LinkPlan{SizeBytes: 16 << 20, Copies: 2, Samples: 3},
	}
	if !s.full {
		p.verify.Variants = 1
		p.verify.MaxBytes = 2<<20 + 1
	}
	return p
}

// simulatedHost returns the facts about the host with the simulated GPU in place of all
// of NVIDIA's. The link is the one that cudasim's copies are timed for: PCIe 5.0 x16.
func simulatedHost(sys system) *hostinfo.Host {
	h := hostinfo.Read(sys.root, sys.environ)
	h.NVIDIA = hostinfo.NVIDIA{}
	h.GPUs = []hostinfo.PCIDevice{{
		Address: simulatedPCI,
		Class:   "0x030200",
		Link:    hostinfo.Link{CurrentSpeed: 32, CurrentWidth: 16, MaxSpeed: 32, MaxWidth: 16},
	}}
	return h
}
