package hostinfo

import (
	"slices"
	"strings"
)

// Power is what the host saves power for, and how.
type Power struct {
	// Laptop is that the chassis is a portable one, or that a battery supplies the host.
	Laptop bool `json:"laptop,omitempty"`
	// OnBattery is that a battery supplies it now; nil if it has none, or that does not show.
	OnBattery *bool `json:"on_battery,omitempty"`
	// ASPM is the policy by which the kernel lets PCI Express links sleep: default, performance, powersave.
	ASPM string `json:"aspm_policy,omitempty"`
}

// portable are the types of chassis that are laptops, tablets and convertibles (SMBIOS).
var portable = []string{"8", "9", "10", "14", "30", "31", "32"}

// maxSupplies is more power supplies than hosts have.
const maxSupplies = 16

func readPower(f files) (p Power) {
	const dir = "sys/class/power_supply"
	mains, battery, discharging := "", false, false
	names := f.names(dir)
	for _, name := range names[:min(len(names), maxSupplies)] {
		supply := dir + "/" + name
		switch kind := f.line(supply + "/type"); {
		case f.line(supply+"/scope") == "Device": // of a mouse
		case kind == "Battery":
			battery = true
			discharging = discharging || f.line(supply+"/status") == "Discharging"
		case kind == "Mains" && mains != "1":
			mains = f.line(supply + "/online")
		}
	}
	p.Laptop = battery || slices.Contains(portable, f.line("sys/class/dmi/id/chassis_type"))
	if battery && (mains != "" || discharging) {
		on := mains == "0" || mains == "" && discharging
		p.OnBattery = &on
	}
	if _, chosen, ok := strings.Cut(f.line("sys/module/pcie_aspm/parameters/policy"), "["); ok {
		p.ASPM, _, _ = strings.Cut(chosen, "]")
	}
	return p
}
