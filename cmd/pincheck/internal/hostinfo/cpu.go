package hostinfo

import (
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// CPU describes the processors of the host, and those that this process may use.
type CPU struct {
	Model   string `json:"model,omitempty"`
	Sockets int    `json:"sockets,omitempty"`
	Cores   int    `json:"cores,omitempty"`   // physical cores
	Threads int    `json:"threads,omitempty"` // logical CPUs that are online

	Allowed        string  `json:"allowed,omitempty"`       // Cpus_allowed_list, such as 0-7,16
	AllowedCount   int     `json:"allowed_count,omitempty"` // number of CPUs in it
	AllowedMems    string  `json:"allowed_mems,omitempty"`  // Mems_allowed_list: NUMA nodes for memory
	Quota          float64 `json:"quota_cpus,omitempty"`    // the cgroup's limit in CPUs, 0 for none
	HypervisorFlag bool    `json:"hypervisor_flag,omitempty"`
	encrypted      string  // tdx or sev, of a virtual machine with encrypted memory
}

// Usable returns how many CPUs' worth of time the process can have: the number of
// allowed CPUs, or the quota if that is less. 0 is unknown.
func (c CPU) Usable() float64 {
	n := float64(c.AllowedCount)
	if n == 0 {
		n = float64(c.Threads)
	}
	if c.Quota > 0 && (n == 0 || c.Quota < n) {
		return c.Quota
	}
	return n
}

// AllowedIn returns how many of the CPUs in a list such as "0-31,64-95" this process may
// use. ok is false if either list is unknown.
func (c CPU) AllowedIn(list string) (n int, ok bool) {
	in, errIn := linux.ParseCPUList(list)
	allowed, errAllowed := linux.ParseCPUList(c.Allowed)
	for _, cpu := range in {
		if slices.Contains(allowed, cpu) {
			n++
		}
	}
	return n, errIn == nil && errAllowed == nil && len(in) > 0 && len(allowed) > 0
}

// MemoryFrom reports whether this process may allocate memory of a NUMA node. ok is false
// if the kernel does not say.
func (c CPU) MemoryFrom(node int) (may, ok bool) {
	nodes, err := linux.ParseCPUList(c.AllowedMems) // of the same form
	return slices.Contains(nodes, node), err == nil && len(nodes) > 0
}

func readCPU(f files, g Cgroup) CPU {
	c := parseCPUInfo(f.text("proc/cpuinfo"))
	if online, err := linux.ReadCPUList(f.fsys, "sys/devices/system/cpu/online"); err == nil && len(online) > 0 {
		c.Threads = len(online)
	}
	status := parseColons(f.text("proc/self/status"))
	allowed, _ := linux.ParseCPUList(status["Cpus_allowed_list"])
	c.Allowed, c.AllowedCount = allowed.String(), len(allowed)
	c.AllowedMems = status["Mems_allowed_list"]
	c.Quota = g.CPUQuota
	return c
}

// confidentialFlags are those of a CPU in a virtual machine whose memory is encrypted.
var confidentialFlags = []string{"tdx_guest", "sev_snp", "sev_es", "sev"}

// parseCPUInfo parses /proc/cpuinfo of x86 and arm64. arm64 has no model name; the
// implementer and part numbers take its place.
func parseCPUInfo(text string) CPU {
	var c CPU
	type core struct{ socket, core string }
	sockets, cores := map[string]bool{}, map[core]bool{}
	var here core
	var implementer, part string
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "processor":
			// On 32-bit arm "Processor" is a model; in lower case it is a number.
			if _, err := strconv.Atoi(value); err == nil {
				c.Threads++
				here = core{}
			}
		case "model name":
			c.Model = value
		case "physical id":
			here.socket = value
			sockets[value] = true
		case "core id":
			here.core = value
			cores[here] = true
		case "flags":
			for flag := range strings.FieldsSeq(value) {
				c.HypervisorFlag = c.HypervisorFlag || flag == "hypervisor"
				if slices.Contains(confidentialFlags, flag) {
					c.encrypted, _, _ = strings.Cut(flag, "_")
				}
			}
		case "CPU implementer":
			implementer = value
		case "CPU part":
			part = value
		}
	}
	c.Sockets, c.Cores = len(sockets), len(cores)
	if c.Model == "" && implementer != "" {
		c.Model = strings.TrimSpace("arm64 implementer " + implementer + " part " + part)
	}
	return c
}

// parseColons parses "Name: value" lines. If a name occurs twice, the first counts.
func parseColons(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		if _, seen := out[name]; !seen {
			out[name] = strings.TrimSpace(value)
		}
	}
	return out
}
