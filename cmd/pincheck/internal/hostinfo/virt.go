package hostinfo

import (
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Virt describes the virtual machine and the container that the process is in.
type Virt struct {
	// VM is true if the host is known to be a virtual machine.
	VM bool `json:"vm,omitempty"`
	// Hypervisor is the firmware's name of the machine: "QEMU Standard PC",
	// "Amazon EC2", "wsl", "xen".
	Hypervisor string `json:"hypervisor,omitempty"`
	// Container is docker, podman, kubernetes, lxc, containerd or another name of
	// a container runtime; empty if no container is detected.
	Container string `json:"container,omitempty"`
	// Service is colab, kaggle or another service that rents out notebooks or containers.
	Service string `json:"service,omitempty"`
	WSL     bool   `json:"wsl,omitempty"`
	// DockerDesktop is that Docker runs in the virtual machine of Docker Desktop.
	DockerDesktop bool `json:"docker_desktop,omitempty"`
	// Mapped is that root of the process's user namespace is another user of the host: a container
	// of LXC without privileges, or a rootless one.
	Mapped bool `json:"user_namespace,omitempty"`
	// Sandbox is gvisor where that kernel serves the process: it shows neither the PCI bus nor modules.
	Sandbox string `json:"sandbox,omitempty"`
	// Tegra is that the GPU is part of the chip, as in a Jetson: it is on no bus, and another driver
	// serves it. Board is the device tree's model.
	Tegra bool   `json:"tegra,omitempty"`
	Board string `json:"board,omitempty"`
	// Confidential is tdx or sev in a virtual machine whose memory is encrypted.
	Confidential string `json:"confidential,omitempty"`
	// Unit is the systemd service that the process is in, whose /dev is its own with PrivateDevices.
	Unit           string `json:"systemd_unit,omitempty"`
	PrivateDevices bool   `json:"private_devices,omitempty"`
	// Evidence has the file with its line, or the variable, that shows a field above, by the field's name here.
	Evidence map[string]string `json:"evidence,omitempty"`
}

// maxEvidence is how much of a line is kept, in bytes.
const maxEvidence = 200

// found notes what shows a field.
func (v *Virt) found(field, evidence string) {
	if evidence == "" {
		return
	}
	evidence = strings.ToValidUTF8(evidence[:min(len(evidence), maxEvidence)], "?")
	if v.Evidence == nil {
		v.Evidence = map[string]string{}
	}
	v.Evidence[field] = evidence
}

func readVirt(f files, environ []string) (v Virt) {
	signs := readSigns(f, environ)
	v.readContainer(signs)
	v.readService(signs)
	v.readKernel(f)
	v.readMachine(f)
	v.readUnit(f, signs)
	v.Mapped = mappedRoot(f)
	if v.Mapped {
		v.found("user_namespace", "/proc/self/uid_map: "+strings.Join(strings.Fields(f.line("proc/self/uid_map")), " "))
	}
	return v
}

// mappedRoot reports whether the first user of the namespace, or all of it, is another user of the host.
func mappedRoot(f files) bool {
	fields := strings.Fields(f.line("proc/self/uid_map"))
	return len(fields) == 3 && fields[1] != "0"
}

// readKernel finds whose kernel serves the process, which is not that of a Linux machine in WSL and gVisor.
func (v *Virt) readKernel(f files) {
	release := f.line("proc/sys/kernel/osrelease")
	switch {
	case strings.Contains(strings.ToLower(release), "microsoft"):
		v.WSL = true
		v.found("wsl", "/proc/sys/kernel/osrelease: "+release)
	case f.exists("dev/dxg"):
		v.WSL = true
		v.found("wsl", "/dev/dxg")
	}
	if v.Sandbox = readSandbox(f); v.Sandbox != "" {
		v.found("sandbox", "/proc/version: "+f.line("proc/version"))
		if v.Container == "" {
			v.Container = v.Sandbox
			v.found("container", v.Evidence["sandbox"])
		}
	}
	if strings.Contains(release, "linuxkit") {
		v.DockerDesktop = true
		v.found("docker_desktop", "/proc/sys/kernel/osrelease: "+release)
	}
}

// tegraFiles are there on a Jetson alone.
var tegraFiles = []string{"etc/nv_tegra_release", "dev/nvmap"}

// readMachine finds the machine's hypervisor, or its board.
func (v *Virt) readMachine(f files) {
	v.Hypervisor = readHypervisor(f)
	switch {
	case v.WSL:
		v.Hypervisor = "wsl"
	case v.Hypervisor != "" && f.exists("sys/class/dmi/id/sys_vendor"):
		v.found("hypervisor", "/sys/class/dmi/id: "+v.Hypervisor)
	case v.Hypervisor != "":
		v.found("hypervisor", "/sys/hypervisor/type: "+v.Hypervisor)
	}
	flag := parseCPUInfo(f.text("proc/cpuinfo")).HypervisorFlag
	v.VM = v.WSL || v.Hypervisor != "" || flag
	if v.VM {
		v.Confidential = readConfidential(f)
	}
	if v.VM && v.Hypervisor == "" {
		v.found("vm", "/proc/cpuinfo: flags: hypervisor")
	}
	v.Board = strings.Trim(f.line("proc/device-tree/model"), "\x00")
	switch compatible, release := f.text("sys/firmware/devicetree/base/compatible"), f.line("proc/sys/kernel/osrelease"); {
	case strings.Contains(v.Board, "Jetson"):
		v.found("tegra", "/proc/device-tree/model: "+v.Board)
	case strings.Contains(compatible, "nvidia,tegra"):
		v.found("tegra", "/sys/firmware/devicetree/base/compatible: nvidia,tegra")
	case strings.Contains(strings.ToLower(release), "tegra"):
		v.found("tegra", "/proc/sys/kernel/osrelease: "+release)
	default:
		if i := slices.IndexFunc(tegraFiles, f.exists); i >= 0 {
			v.found("tegra", "/"+tegraFiles[i])
		}
	}
	v.Tegra = v.Evidence["tegra"] != ""
}

// readSandbox knows gVisor by its kernel, whose version does not change.
func readSandbox(f files) string {
	version := f.line("proc/version")
	if strings.Contains(version, "Sun Jan 10 15:06:54 PST 2016") || strings.Contains(strings.ToLower(version), "gvisor") ||
		version == "" && f.line("proc/sys/kernel/osrelease") == "4.4.0" {
		return "gvisor"
	}
	return ""
}

// readConfidential returns how the memory of a virtual machine is encrypted. The host's CPUs have the
// flags of SEV too.
func readConfidential(f files) string {
	flags := parseCPUInfo(f.text("proc/cpuinfo")).encrypted
	switch {
	case flags == "tdx" || f.exists("dev/tdx_guest"):
		return "tdx"
	case flags == "sev" || f.exists("dev/sev-guest"):
		return "sev"
	}
	return ""
}

// readUnit finds the service in the path of the control group. The manager of a user's services, in which
// programs of a desktop are, is none.
func (v *Virt) readUnit(f files, signs *signs) {
	for _, group := range signs.groups {
		for part := range strings.SplitSeq(group, "/") {
			if v.Unit == "" && strings.HasSuffix(part, ".service") && !strings.HasPrefix(part, "user@") {
				v.Unit = part
				v.found("systemd_unit", "/proc/self/cgroup: "+group)
			}
		}
	}
	v.PrivateDevices = v.Unit != "" && v.Container == "" && slices.ContainsFunc(signs.mounts, func(m linux.Mount) bool {
		return m.Point == "/dev" && m.Type == "tmpfs" // the host's is a devtmpfs
	})
	if v.PrivateDevices {
		v.found("private_devices", "/proc/self/mountinfo: tmpfs on /dev")
	}
}

// virtualVendors are words in the firmware's vendor or product of virtual machines, with the hypervisor's name. Bare
// metal of the same vendors has other words.
var virtualVendors = []struct{ word, name string }{
	{"Google Compute Engine", "Google Compute Engine"},
	{"OpenStack", "OpenStack"},
	{"QEMU", "KVM or QEMU"},
	{"KVM", "KVM"},
	{"VMware", "VMware"},
	{"VirtualBox", "VirtualBox"},
	{"innotek", "VirtualBox"},
	{"Xen", "Xen"},
	{"Virtual Machine", "Hyper-V"},
	{"Bochs", "Bochs"},
	{"Firecracker", "Firecracker"},
	{"Cloud Hypervisor", "Cloud Hypervisor"},
}

func readHypervisor(f files) string {
	vendor, product := f.line("sys/class/dmi/id/sys_vendor"), f.line("sys/class/dmi/id/product_name")
	name := strings.TrimSpace(vendor + " " + product)
	// Amazon's metal instances have the same vendor and ".metal" types.
	if strings.HasPrefix(vendor, "Amazon EC2") && !strings.Contains(product, "metal") {
		return name
	}
	for _, v := range virtualVendors {
		if strings.Contains(name, v.word) {
			return name
		}
	}
	return f.line("sys/hypervisor/type")
}

// guestOf returns a virtual machine in words, by the firmware's name of it.
func guestOf(hypervisor string) string {
	if strings.HasPrefix(hypervisor, "Amazon EC2") {
		return "guest of Amazon EC2"
	}
	for _, v := range virtualVendors {
		if strings.Contains(strings.ToLower(hypervisor), strings.ToLower(v.word)) {
			return "guest of " + v.name
		}
	}
	return ""
}
