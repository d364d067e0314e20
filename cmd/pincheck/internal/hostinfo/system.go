package hostinfo

import (
	"bytes"
	"regexp"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Kernel is the running kernel.
type Kernel struct {
	Release string `json:"release,omitempty"` // as uname -r: 6.8.0-45-generic
	// Parameters are those of its command line that affect GPUs: nokaslr, iommu=pt.
	Parameters []string `json:"parameters,omitempty"`
	// ClockSource is what the kernel takes the time from: tsc, kvm-clock, hpet.
	ClockSource string `json:"clock_source,omitempty"`
	// Suspended is how often the host was suspended since boot, and resumed.
	Suspended Limit `json:"suspended,omitzero"`
}

// Distro is the distribution in the root directory: in a container, the container's.
type Distro struct {
	ID      string `json:"id,omitempty"`      // debian, alpine
	Version string `json:"version,omitempty"` // 12, 3.20.3
	Name    string `json:"name,omitempty"`    // Debian GNU/Linux 12 (bookworm)
}

// Libc is the C library of the host. The CUDA libraries need glibc 2.17 or later; on
// musl they cannot be loaded.
type Libc struct {
	Kind    string `json:"kind,omitempty"`    // glibc or musl
	Version string `json:"version,omitempty"` // 2.39, glibc only
	Loader  string `json:"loader,omitempty"`  // /lib64/ld-linux-x86-64.so.2
}

// kernelParameters are the parameters that are kept. Others may hold secrets.
var kernelParameters = []string{"nokaslr", "swiotlb", "iommu", "intel_iommu", "amd_iommu", "pci", "pcie_aspm",
	"module.sig_enforce", "lockdown", "nouveau.modeset", "mem_encrypt", "nvidia.NVreg_AssignGpus"}

func readKernel(f files) Kernel {
	k := Kernel{Release: f.line("proc/sys/kernel/osrelease"),
		ClockSource: f.line("sys/devices/system/clocksource/clocksource0/current_clocksource")}
	for word := range strings.FieldsSeq(f.line("proc/cmdline")) {
		name, _, _ := strings.Cut(word, "=")
		if slices.Contains(kernelParameters, name) {
			k.Parameters = append(k.Parameters, word)
		}
	}
	if n, err := linux.ReadInt(f.fsys, "sys/power/suspend_stats/success"); err == nil && n >= 0 {
		k.Suspended = limitOf(n)
	}
	return k
}

func readDistro(f files) Distro {
	text := f.text("etc/os-release")
	if text == "" {
		text = f.text("usr/lib/os-release")
	}
	fields := parseAssignments(text)
	return Distro{ID: fields["ID"], Version: fields["VERSION_ID"], Name: fields["PRETTY_NAME"]}
}

// parseAssignments parses NAME=value and NAME="value" lines.
func parseAssignments(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || name == "" || name[0] == '#' {
			continue
		}
		if n := len(value); n >= 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
			value = value[1 : n-1]
		}
		out[name] = value
	}
	return out
}

// loaders are the dynamic loaders of amd64 and arm64. glibc's come first: a host with
// glibc may have a musl loader as well. On Alpine gcompat puts a file of its own in the
// place of glibc's loader; readLibc detects that by musl's loader.
var loaders = []struct{ path, kind string }{
	{"lib64/ld-linux-x86-64.so.2", "glibc"},
	{"lib/ld-linux-aarch64.so.1", "glibc"},
	{"lib/ld-musl-x86_64.so.1", "musl"},
	{"lib/ld-musl-aarch64.so.1", "musl"},
}

// libcs are the paths of libc.so.6 on the usual distributions.
var libcs = []string{
	"lib/x86_64-linux-gnu/libc.so.6", "lib/aarch64-linux-gnu/libc.so.6",
	"lib64/libc.so.6", "usr/lib/libc.so.6", "lib/libc.so.6",
}

// glibcBanner matches what libc.so.6 prints when it is run.
var glibcBanner = regexp.MustCompile(`GNU C Library \([^)\n]{0,100}\) (?:stable|development) release version (\d+\.\d+)`)

func readLibc(f files) Libc {
	for _, l := range loaders {
		if !f.exists(l.path) {
			continue
		}
		out := Libc{Kind: l.kind, Loader: "/" + l.path}
		if l.kind != "glibc" {
			return out
		}
		for _, name := range libcs {
			if m := glibcBanner.FindStringSubmatch(f.text(name)); m != nil {
				out.Version = m[1]
				return out
			}
		}
		for _, m := range loaders {
			if m.kind == "musl" && f.exists(m.path) {
				return Libc{Kind: "musl", Loader: "/" + m.path} // a glibc shim on a musl system
			}
		}
		return out
	}
	return Libc{}
}

// parseLimits parses /proc/PID/limits and returns the soft limits by name.
func parseLimits(text string) map[string]Limit {
	out := map[string]Limit{}
	for line := range strings.Lines(text) {
		// The name ends before two or more spaces.
		name, rest, ok := strings.Cut(line, "  ")
		if !ok {
			continue
		}
		if fields := strings.Fields(rest); len(fields) >= 2 {
			if l := parseLimit(fields[0]); l.Known {
				out[name] = l
			}
		}
	}
	return out
}

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

// Security is what may refuse a device or a kernel module whatever the files' modes say.
type Security struct {
	// SELinux is that it enforces its policy; nil if it does not show. Confinement is the domain of SELinux or
	// the profile of AppArmor that the process runs in: container_t, docker-default.
	SELinux     *bool  `json:"selinux_enforcing,omitempty"`
	Confinement string `json:"confinement,omitempty"`
	// SecureBoot is that the firmware lets only signed code boot: the kernel then takes no unsigned modules.
	SecureBoot *bool `json:"secure_boot,omitempty"`
	// Lockdown has the value "none", "integrity" or "confidentiality".
	Lockdown string `json:"lockdown,omitempty"`
}

func readSecurity(f files) (s Security) {
	s.SELinux = f.flag("sys/fs/selinux/enforce")
	context := strings.Trim(f.line("proc/self/attr/current"), "\x00")
	if fields := strings.Split(context, ":"); len(fields) >= 4 {
		context = fields[2] // of user:role:type:level
	}
	if context != "unconfined" {
		s.Confinement = context
	}
	// Four bytes of attributes, and one with the value.
	const secureBoot = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
	if value := []byte(f.text(secureBoot)); len(bytes.TrimRight(value, "\n")) >= 5 {
		on := value[4] == 1 || value[4] == '1' // of a recording
		s.SecureBoot = &on
	}
	if _, chosen, ok := strings.Cut(f.line("sys/kernel/security/lockdown"), "["); ok {
		s.Lockdown, _, _ = strings.Cut(chosen, "]")
	}
	return s
}

// User is whom the process runs as. Names are left out.
type User struct {
	UID    int   `json:"uid"`
	GID    int   `json:"gid"`
	Groups []int `json:"groups,omitempty"`
	// SysNice is the capability to move pages between NUMA nodes, and AnyFile that to
	// open files whatever their mode.
	SysNice bool `json:"cap_sys_nice,omitempty"`
	AnyFile bool `json:"cap_dac_override,omitempty"`
}

func readUser(f files) *User {
	c, err := linux.ReadCredentials(f.fsys)
	if err != nil {
		return nil
	}
	return &User{UID: c.UID, GID: c.GID, Groups: c.Groups, SysNice: c.Has(linux.CapSysNice), AnyFile: c.Has(linux.CapDACOverride)}
}
