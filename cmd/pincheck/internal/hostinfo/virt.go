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
	WSL       bool   `json:"wsl,omitempty"`
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
}

func readVirt(f files, environ []string) Virt {
	release := strings.ToLower(f.line("proc/sys/kernel/osrelease"))
	v := Virt{
		WSL:       strings.Contains(release, "microsoft") || f.exists("dev/dxg"),
		Container: readContainer(f, environ),
	}
	v.Sandbox = readSandbox(f)
	if v.Container == "" {
		v.Container = v.Sandbox
	}
	v.Hypervisor = readHypervisor(f)
	v.Board = strings.Trim(f.line("proc/device-tree/model"), "\x00")
	v.Tegra = strings.Contains(v.Board, "Jetson") || strings.Contains(f.text("sys/firmware/devicetree/base/compatible"), "nvidia,tegra") ||
		f.exists("etc/nv_tegra_release") || f.exists("dev/nvmap") || strings.Contains(release, "tegra")
	if v.WSL {
		v.Hypervisor = "wsl"
	}
	v.VM = v.WSL || v.Hypervisor != "" || parseCPUInfo(f.text("proc/cpuinfo")).HypervisorFlag
	if v.VM {
		v.Confidential = readConfidential(f)
	}
	v.Unit = readUnit(f)
	mounts, _ := linux.ReadMounts(f.fsys)
	v.PrivateDevices = v.Unit != "" && v.Container == "" && slices.ContainsFunc(mounts, func(m linux.Mount) bool {
		return m.Point == "/dev" && m.Type == "tmpfs" // the host's is a devtmpfs
	})
	return v
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

// readUnit returns the service in the path of the control group. The manager of a user's services, in which
// programs of a desktop are, is none.
func readUnit(f files) string {
	members, _ := linux.ReadCgroupMembers(f.fsys)
	for _, m := range members {
		for part := range strings.SplitSeq(m.Path, "/") {
			if strings.HasSuffix(part, ".service") && !strings.HasPrefix(part, "user@") {
				return part
			}
		}
	}
	return ""
}

// virtualVendors are words in the firmware's vendor or product of virtual machines. Bare
// metal of the same vendors has other words.
var virtualVendors = []string{
	"QEMU", "KVM", "VMware", "VirtualBox", "innotek", "Xen", "OpenStack",
	"Google Compute Engine", "Virtual Machine", "Bochs", "Firecracker", "Cloud Hypervisor",
}

func readHypervisor(f files) string {
	vendor, product := f.line("sys/class/dmi/id/sys_vendor"), f.line("sys/class/dmi/id/product_name")
	name := strings.TrimSpace(vendor + " " + product)
	// Amazon's metal instances have the same vendor and ".metal" types.
	if strings.HasPrefix(vendor, "Amazon EC2") && !strings.Contains(product, "metal") {
		return name
	}
	for _, word := range virtualVendors {
		if strings.Contains(name, word) {
			return name
		}
	}
	return f.line("sys/hypervisor/type")
}

// cgroupRuntimes are parts of control group paths, with the runtime that uses them.
var cgroupRuntimes = []struct{ part, name string }{
	{"kubepods", "kubernetes"},
	{"docker", "docker"},
	{"libpod", "podman"},
	{"lxc", "lxc"},
	{"containerd", "containerd"},
}

// containerSigns are what other runtimes leave in the environment, or in the root directory.
var containerSigns = []struct{ variable, file, name string }{
	{"APPTAINER_CONTAINER", ".singularity.d", "apptainer"},
	{"SINGULARITY_CONTAINER", "singularity", "apptainer"},
	{"FLATPAK_ID", ".flatpak-info", "flatpak"},
	{"ENROOT_ROOTFS", "", "enroot"},
}

// containerRoots are file systems that the root directories of containers lie on.
var containerRoots = []string{"overlay", "fuse.fuse-overlayfs", "fuse.squashfuse_ll", "fuse.squashfuse"}

func readContainer(f files, environ []string) string {
	if _, ok := lookupEnv(environ, "KUBERNETES_SERVICE_HOST"); ok {
		return "kubernetes"
	}
	switch {
	case f.exists("run/.containerenv"):
		return "podman"
	case f.exists(".dockerenv"):
		return "docker"
	}
	if name := f.line("run/systemd/container"); name != "" {
		return name
	}
	var groups string
	members, _ := linux.ReadCgroupMembers(f.fsys)
	for _, m := range members {
		groups += m.Path + "\n"
	}
	mounts, _ := linux.ReadMounts(f.fsys)
	for _, m := range mounts {
		if m.Type == "cgroup" || m.Type == "cgroup2" {
			groups += m.Root + "\n" // a namespace hides the group's path, not the mount's root
		}
	}
	for _, r := range cgroupRuntimes {
		if strings.Contains(groups, r.part) {
			return r.name
		}
	}
	if name, ok := lookupEnv(environ, "container"); ok {
		return name
	}
	for _, c := range containerSigns {
		_, set := lookupEnv(environ, c.variable)
		if set && c.variable != "" || c.file != "" && f.exists(c.file) {
			return c.name
		}
	}
	for _, m := range mounts {
		if m.Point == "/" && slices.Contains(containerRoots, m.Type) {
			return "container"
		}
	}
	return ""
}
