package hostinfo

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// PCIDevice is an NVIDIA GPU on the PCI bus, bound to a driver or not.
type PCIDevice struct {
	Address  string `json:"address"`             // 0000:00:06.0
	DeviceID string `json:"device_id,omitempty"` // 0x2335
	Class    string `json:"class"`               // 0x030200
	Driver   string `json:"driver,omitempty"`    // nvidia, nouveau, vfio-pci
	// Override is driver_override: the only driver that the kernel binds the device to. Empty without one.
	Override string `json:"driver_override,omitempty"`
	// VirtualFunction is that the device is a part of another one (SR-IOV), for a virtual machine.
	VirtualFunction bool   `json:"virtual_function,omitempty"`
	NUMANode        *int   `json:"numa_node"` // null if the firmware does not say (-1)
	CPUs            string `json:"local_cpus,omitempty"`
	Link            Link   `json:"link"`
	// Upstream are the links from the device's slot up to the root port, the
	// nearest first. Most virtual machines have none.
	Upstream []Link `json:"upstream,omitempty"`
	// OffBus is that the device answers nothing: its configuration space reads as ones.
	OffBus bool `json:"off_bus,omitempty"`
	DevicePower
	MemoryWindow
	// Errors are those that the kernel has counted on the link (AER); nil if it does not.
	Errors *LinkErrors `json:"link_errors,omitempty"`
	// IOMMU is the type of its IOMMU group: DMA, DMA-FQ, identity; empty if unknown.
	IOMMU string `json:"iommu,omitempty"`
}

// DevicePower is the power state of a device: D0 for one that is on, D3cold for one without power; empty if unknown.
// Asleep is that the kernel or bbswitch has switched it off: it answers nothing, and wakes when it is used, or when
// bbswitch switches it on (SwitchedOff).
type DevicePower struct {
	PowerState  string `json:"power_state,omitempty"`
	Asleep      bool   `json:"asleep,omitempty"`
	SwitchedOff bool   `json:"switched_off,omitempty"`
}

// MemoryWindow is the window (BAR) of a GPU's memory. The firmware may give it no address. Its size in bytes is 0 if
// it is unknown.
type MemoryWindow struct {
	NoWindow bool `json:"no_memory_window,omitempty"`
	Window   int  `json:"memory_window_bytes,omitempty"`
}

// Dir returns the device's directory.
func (d PCIDevice) Dir() string { return "/" + linux.PCIDevices + "/" + d.Address }

// LinkErrors are errors of a PCI Express link since boot.
type LinkErrors struct {
	Correctable int `json:"correctable"` // repeated by the hardware, which costs time
	NonFatal    int `json:"nonfatal"`
	Fatal       int `json:"fatal"`
}

// Link is a PCI Express link. An idle GPU trains its link down to save power, so Current
// may be low until there is work.
type Link struct {
	Address      string  `json:"address,omitempty"` // of the bridge, for upstream links
	CurrentSpeed float64 `json:"current_gt_per_s,omitempty"`
	CurrentWidth int     `json:"current_width,omitempty"`
	MaxSpeed     float64 `json:"max_gt_per_s,omitempty"`
	MaxWidth     int     `json:"max_width,omitempty"`
	// TargetSpeed is the speed above which this end does not train (Link Control 2); 0 if the configuration space
	// does not show it, as to users other than root.
	TargetSpeed float64 `json:"target_gt_per_s,omitempty"`
	// Sleeps is that this end may let the link sleep (ASPM); nil if it does not show.
	Sleeps *bool `json:"aspm,omitempty"`
}

// Now returns what the link is trained to now.
func (l Link) Now() PCIe { return PCIe{l.CurrentSpeed, l.CurrentWidth} }

// Best returns what the device can train to.
func (l Link) Best() PCIe { return PCIe{l.MaxSpeed, l.MaxWidth} }

// Made returns the best link of a GPU and its slot: the lower maximum of the two ends. It is
// unknown if the host does not show the GPU's maximum.
func (d PCIDevice) Made() PCIe {
	made := d.Link.Best()
	if made.Rate() == 0 {
		return PCIe{}
	}
	if len(d.Upstream) > 0 && d.Upstream[0].Best().Rate() > 0 { // the nearest bridge is the slot
		slot := d.Upstream[0].Best()
		made.Speed, made.Width = min(made.Speed, slot.Speed), min(made.Width, slot.Width)
	}
	return made
}

// PCIe is the speed and the width of a PCI Express link. The zero value is unknown.
type PCIe struct {
	Speed float64 // GT/s a lane
	Width int     // lanes
}

// generations are the speeds of the generations in GT/s, from 1 on.
var generations = []float64{2.5, 5, 8, 16, 32, 64}

// Generation returns the generation of a speed, 0 for speeds that none has.
func (l PCIe) Generation() int { return 1 + slices.Index(generations, l.Speed) }

// Version returns the generation in words: "PCIe 5.0", and "65 GT/s" for a speed that none has.
func (l PCIe) Version() string {
	if g := l.Generation(); g > 0 {
		return "PCIe " + strconv.Itoa(g) + ".0"
	}
	return fmt.Sprintf("%g GT/s", l.Speed)
}

// String returns "PCIe 5.0 x16".
func (l PCIe) String() string { return fmt.Sprintf("%s x%d", l.Version(), l.Width) }

// ParsePCIe parses what String returns of a generation: "PCIe 5.0 x16".
func ParsePCIe(text string) (PCIe, error) {
	_, lanes, _ := strings.Cut(text, " x")
	width, err := strconv.Atoi(lanes)
	for _, speed := range generations {
		if l := (PCIe{speed, width}); err == nil && width > 0 && l.String() == text {
			return l, nil
		}
	}
	return PCIe{}, fmt.Errorf("%q is no PCI Express link such as PCIe 5.0 x16", text)
}

// Rate returns what the link can carry each way in GB/s, after the encoding of its generation
// and before packet headers: 8b/10b up to generation 2, 128b/130b up to 5, and flits of 242 in
// 256 bytes from 6 on. 32 GT/s x16 is 63.0 GB/s. 0 is unknown.
func (l PCIe) Rate() float64 {
	if l.Speed <= 0 || l.Width <= 0 {
		return 0
	}
	encoding := 128.0 / 130
	switch {
	case l.Speed <= 5:
		encoding = 8.0 / 10
	case l.Speed >= 64:
		encoding = 242.0 / 256
	}
	return l.Speed * float64(l.Width) * encoding / 8
}

const vendorNVIDIA = "0x10de"

// noAnswer is the vendor and the device in the configuration space, which the kernel asks the device for each time, if
// no device answers: one that sleeps does not either.
const noAnswer = "\xff\xff\xff\xff"

func readGPUs(f files) []PCIDevice {
	var out []PCIDevice
	switchedOff := bbswitch(f)
	for _, name := range f.names(linux.PCIDevices) {
		address, err := linux.ParsePCIAddress(name)
		dir := address.Dir()
		if err != nil || f.line(dir+"/vendor") != vendorNVIDIA {
			continue
		}
		class := f.line(dir + "/class")
		if !strings.HasPrefix(class, "0x03") { // not a display controller, but audio or a bridge
			continue
		}
		cpus, _ := address.LocalCPUs(f.fsys)
		d := PCIDevice{
			Address:  name,
			Class:    class,
			DeviceID: f.line(dir + "/device"),
			CPUs:     cpus.String(),
			Link:     readLink(f, dir),
			Upstream: readUpstream(f, dir),
			Errors:   readLinkErrors(f, dir),
			IOMMU:    f.line(dir + "/iommu_group/type"),
		}
		d.Window, d.NoWindow = window(f, dir)
		d.PowerState = f.line(dir + "/power_state")
		d.SwitchedOff = slices.Contains(switchedOff, name)
		d.Asleep = d.SwitchedOff || d.PowerState == "D3cold" || f.line(dir+"/power/runtime_status") == "suspended"
		d.OffBus = !d.Asleep && strings.HasPrefix(f.text(dir+"/config"), noAnswer)
		if driver, err := fs.ReadLink(f.fsys, dir+"/driver"); err == nil {
			d.Driver = path.Base(driver)
		}
		if override := f.line(dir + "/driver_override"); override != "(null)" {
			d.Override = override
		}
		if _, err := fs.ReadLink(f.fsys, dir+"/physfn"); err == nil {
			d.VirtualFunction = true
		}
		if node, err := address.NUMANode(f.fsys); err == nil && node != linux.NoNode {
			n := int(node)
			d.NUMANode = &n
		}
		out = append(out, d)
	}
	return out
}

// readUpstream goes from the device's real directory, .../0000:00:01.0/0000:01:00.0, up
// through its bridges.
func readUpstream(f files, dir string) []Link {
	var out []Link
	for p := path.Dir(f.realPath(dir)); ; p = path.Dir(p) {
		if _, err := linux.ParsePCIAddress(path.Base(p)); err != nil {
			return out
		}
		l := readLink(f, p)
		l.Address = path.Base(p)
		if l.Now().Rate() > 0 || l.Best().Rate() > 0 {
			out = append(out, l)
		}
	}
}

// bbswitch lists the GPUs that the module bbswitch of laptops has switched off: "0000:01:00.0 OFF".
func bbswitch(f files) (off []string) {
	for line := range strings.Lines(f.text("proc/acpi/bbswitch")) {
		if fields := strings.Fields(line); len(fields) == 2 && fields[1] == "OFF" {
			off = append(off, fields[0])
		}
	}
	return off
}

// window reads BAR 1, the window of a GPU's memory: its size, and whether it has no address. The file resource has a
// line of start, end and flags for each BAR; BAR 0 has the registers, and one that is known to be set shows that the
// lines can be trusted. A window that the kernel found no room for begins at 0, with its size as its end or without.
func window(f files, dir string) (size int, none bool) {
	lines := strings.Split(f.text(dir+"/resource"), "\n")
	if len(lines) < 2 {
		return 0, false
	}
	var bars [2][3]uint64
	for i := range bars {
		fields := strings.Fields(lines[i])
		if len(fields) != 3 {
			return 0, false
		}
		for k, field := range fields {
			n, err := strconv.ParseUint(field, 0, 64)
			if err != nil {
				return 0, false
			}
			bars[i][k] = n
		}
	}
	registers, memory := bars[0], bars[1]
	unset := registers[0] == 0 && registers[1] > 0 // a guest's firmware may give none of them an address
	if registers[0] == 0 && !unset || memory[1] < memory[0] || memory[1]-memory[0] >= 1<<60 {
		return 0, false
	}
	if memory[1] > 0 {
		size = int(memory[1] - memory[0] + 1)
	}
	return size, memory[0] == 0
}

// readLinkErrors returns nil if the kernel counts no errors of the device.
func readLinkErrors(f files, dir string) *LinkErrors {
	var e LinkErrors
	known := false
	for _, kind := range []struct {
		file, total string
		to          *int
	}{
		{"aer_dev_correctable", "TOTAL_ERR_COR", &e.Correctable},
		{"aer_dev_nonfatal", "TOTAL_ERR_NONFATAL", &e.NonFatal},
		{"aer_dev_fatal", "TOTAL_ERR_FATAL", &e.Fatal},
	} {
		if counters, err := linux.ReadCounters(f.fsys, dir+"/"+kind.file); err == nil {
			known = true
			*kind.to = counters[kind.total]
		}
	}
	if !known {
		return nil
	}
	return &e
}

func readLink(f files, dir string) Link {
	l := Link{
		CurrentSpeed: parseSpeed(f.line(dir + "/current_link_speed")),
		CurrentWidth: parseWidth(f.line(dir + "/current_link_width")),
		MaxSpeed:     parseSpeed(f.line(dir + "/max_link_speed")),
		MaxWidth:     parseWidth(f.line(dir + "/max_link_width")),
		TargetSpeed:  targetSpeed(f.text(dir + "/config")),
	}
	for _, state := range []string{"l0s_aspm", "l1_aspm"} {
		if on := f.flag(dir + "/link/" + state); on != nil && (l.Sleeps == nil || *on) {
			l.Sleeps = on
		}
	}
	return l
}

// The list of capabilities in a configuration space, and what is read of PCI Express's.
const (
	capabilitiesAt   = 0x34
	expressID        = 0x10
	linkControl2At   = 0x30
	configHeader     = 0x40 // all that users other than root can read
	maxCapabilities  = 48
	recordedConfig   = 0x100
	hexConfigPrefix  = "config "
	targetSpeedField = 0xf
)

// targetSpeed returns the speed in Link Control 2 of a configuration space, 0 if it does not show.
func targetSpeed(config string) float64 {
	config = binaryConfig(config)
	if len(config) <= configHeader {
		return 0
	}
	at := int(config[capabilitiesAt])
	for range maxCapabilities {
		if at < configHeader || at+linkControl2At >= len(config) {
			return 0
		}
		if config[at] == expressID {
			if n := int(config[at+linkControl2At] & targetSpeedField); n >= 1 && n <= len(generations) {
				return generations[n-1]
			}
			return 0
		}
		at = int(config[at+1])
	}
	return 0
}

// binaryConfig returns the configuration space of a recording, which has it as text, in bytes.
func binaryConfig(config string) string {
	digits, ok := strings.CutPrefix(config, hexConfigPrefix)
	if !ok {
		return config
	}
	b, err := hex.DecodeString(strings.TrimSpace(digits))
	if err != nil {
		return ""
	}
	return string(b)
}

// textConfig is the form of a configuration space in a recording.
func textConfig(config []byte) []byte {
	if bytes.HasPrefix(config, []byte(noAnswer)) {
		return config[:len(noAnswer)]
	}
	return []byte(hexConfigPrefix + hex.EncodeToString(config[:min(len(config), recordedConfig)]) + "\n")
}

// parseSpeed parses "32.0 GT/s PCIe", and "8 GT/s" of older kernels. Anything else, such
// as "Unknown", is 0.
func parseSpeed(s string) float64 {
	fields := strings.Fields(s)
	if len(fields) < 2 || fields[1] != "GT/s" {
		return 0
	}
	speed, err := strconv.ParseFloat(fields[0], 64)
	if err != nil || !(speed > 0 && speed < 1e4) {
		return 0
	}
	return speed
}

// parseWidth parses a number of lanes. Devices without a link report 0 or 255.
func parseWidth(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 32 {
		return 0
	}
	return n
}

// GPU returns the device with a PCI address, in the form of CUDA or of sysfs.
func (h *Host) GPU(address string) (PCIDevice, bool) {
	for _, d := range h.GPUs {
		if SamePCI(d.Address, address) {
			return d, true
		}
	}
	return PCIDevice{}, false
}

// SamePCI reports whether two PCI addresses are the same, in the form of CUDA, of sysfs or
// of NVML. What is no address is the same as nothing.
func SamePCI(a, b string) bool {
	if len(a) == len(b) && !strings.EqualFold(a, b) {
		return false // numbers of as many digits
	}
	x, err := linux.ParsePCIAddress(a)
	if err != nil {
		return false
	}
	y, err := linux.ParsePCIAddress(b)
	return err == nil && x == y
}
