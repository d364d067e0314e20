package hostinfo

import (
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
}

func readVirt(f files, environ []string) Virt {
	release := strings.ToLower(f.line("proc/sys/kernel/osrelease"))
	v := Virt{
		WSL:       strings.Contains(release, "microsoft") || f.exists("dev/dxg"),
		Container: readContainer(f, environ),
	}
	v.Hypervisor = readHypervisor(f)
	if v.WSL {
		v.Hypervisor = "wsl"
	}
	v.VM = v.WSL || v.Hypervisor != "" || parseCPUInfo(f.text("proc/cpuinfo")).HypervisorFlag
	return v
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
	name, _ := lookupEnv(environ, "container")
	return name
}
