package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

// Nodes that are there and cannot be opened. The error tells who denies them:
//
//	permission denied (EACCES)        mode and owner, or a security module where these let everyone
//	operation not permitted (EPERM)   the device control group: of a container, or of a systemd unit
//	no such device or address (ENXIO) no module has the node's major number
//	input/output error (EIO)          the module could not start the GPU
const (
	eacces = "permission denied"
	eperm  = "not permitted"
	enxio  = "no such device or address"
	eio    = "input/output error"
	emfile = "too many open files"
)

// needed reports whether CUDA opens a node.
func needed(path string) bool {
	return path == "/dev/nvidiactl" || path == "/dev/nvidia-uvm" || path == "/dev/dxg" || path == "/dev/nvmap" || path == "/dev/nvhost-gpu" || hostinfo.IsGPUNode(path)
}

// denied lists the nodes that CUDA needs and that were refused with an error.
func (f *Facts) denied(word string) (nodes []hostinfo.Node, texts []string) {
	for _, n := range f.Host.NVIDIA.Nodes {
		if needed(n.Path) && strings.Contains(n.OpenError, word) {
			nodes = append(nodes, n)
			texts = append(texts, n.Path+": "+n.OpenError)
		}
	}
	return nodes, texts
}

// forEveryone reports whether a mode such as Dcrw-rw-rw- lets everyone read and write.
func forEveryone(mode string) bool {
	return strings.HasSuffix(mode, "rw-") || strings.HasSuffix(mode, "rwx")
}

// staleNode also compares the numbers of nodes with those of the modules: /dev/null in the place of a GPU
// opens well.
func staleNode(f *Facts) []Finding {
	_, evidence := f.denied(enxio)
	majors := f.Host.NVIDIA.Majors
	for _, n := range f.Host.NVIDIA.Nodes {
		// 195 is fixed, and that of nvidia-uvm is given when it is loaded.
		want, module := 195, "nvidia"
		if n.Path == "/dev/nvidia-uvm" {
			want, module = majors["nvidia-uvm"], "nvidia_uvm"
		}
		if (hostinfo.IsGPUNode(n.Path) || strings.HasPrefix(n.Path, "/dev/nvidia")) && needed(n.Path) && n.Major > 0 && want > 0 && n.Major != want {
			evidence = append(evidence, fmt.Sprintf("%s has major number %d, and the module %s has %d (/proc/devices)", n.Path, n.Major, module, want))
		}
	}
	if len(evidence) == 0 {
		return nil
	}
	if major := majors["nvidia-uvm"]; major > 0 && !slices.ContainsFunc(evidence, func(text string) bool { return strings.Contains(text, "/proc/devices") }) {
		evidence = append(evidence, fmt.Sprintf("/proc/devices: nvidia-uvm has major number %d", major))
	}
	out := Finding{Summary: "a device node belongs to no driver, or to another one", Evidence: evidence}
	if f.Host.Virt.Container != "" {
		out.because = "container"
	}
	return finding(out)
}

// lsmDenies finds the security module that denies nodes whose mode lets everyone open them.
func lsmDenies(f *Facts) []Finding {
	nodes, evidence := f.denied(eacces)
	if len(nodes) == 0 || slices.ContainsFunc(nodes, func(n hostinfo.Node) bool { return n.Closed || !forEveryone(n.Mode) }) {
		return nil
	}
	s := f.Host.Security
	evidence = append(evidence, "Their mode lets every user open them: "+nodes[0].Mode)
	var out Finding
	switch {
	case isTrue(s.SELinux) || s.SELinux == nil && strings.HasSuffix(s.Confinement, "_t"): // a domain: container_t
		out.Summary, out.because = "SELinux denies the GPU's device nodes, whose mode allows access", "selinux"
		if s.SELinux != nil {
			evidence = append(evidence, "/sys/fs/selinux/enforce is 1")
		}
	case s.Confinement != "" && s.SELinux == nil:
		out.Summary, out.because = "AppArmor denies the GPU's device nodes, whose mode allows access", "apparmor"
	default:
		return nil // nodePermission says that something denies them
	}
	if s.Confinement != "" {
		evidence = append(evidence, "/proc/self/attr/current: "+s.Confinement)
	}
	out.Evidence = evidence
	return finding(out)
}

func nodePermission(f *Facts) []Finding {
	var closed []string
	open := false
	for _, n := range f.Host.NVIDIA.Nodes {
		switch {
		case !needed(n.Path):
		case strings.Contains(n.OpenError, eacces):
			closed = append(closed, n.Path+": "+n.OpenError)
			open = open || forEveryone(n.Mode) && !n.Closed
		case n.Closed && n.OpenError == "":
			closed = append(closed, n.Path+" "+n.Mode)
		}
	}
	if len(closed) == 0 {
		return nil
	}
	out := Finding{Evidence: closed}
	if open {
		out.Against = []string{"the mode of a node lets every user open it: an access control list, a security module or a user namespace denies it"}
	}
	if u := f.Host.User; u != nil {
		out.Evidence = append(out.Evidence, fmt.Sprintf("User %d, group %d, other groups %v", u.UID, u.GID, u.Groups))
	}
	return finding(out)
}

// systemdDenies finds services whose unit gives them no GPU: outside a container nothing else denies devices.
func systemdDenies(f *Facts) []Finding {
	v := f.Host.Virt
	if v.Container != "" {
		return nil
	}
	nodes, evidence := f.denied(eperm)
	out := Finding{}
	switch {
	case v.PrivateDevices && !f.Host.NVIDIA.HasGPUNode():
		out.Summary, out.because = "the systemd unit has its own /dev (PrivateDevices), without the GPU", "private_devices"
		evidence = []string{"/proc/self/mountinfo: /dev is a tmpfs", "The process runs in " + v.Unit}
	case len(nodes) == 0 || v.Unit == "":
		return nil // of a container that does not show, or of a job
	default:
		evidence = append(evidence, "The process runs in "+v.Unit)
	}
	if out.Summary == "" {
		out.Summary = "the systemd unit's device policy (DeviceAllow) denies " + nodes[0].Path
		out.values = findings.Values{"NODE": word(nodes[0].Path)}
	}
	out.Evidence = evidence
	return finding(out)
}

// allowsMajor reports whether a list of version 1 lets a process open devices of a major number.
func allowsMajor(list []string, major string) bool {
	return slices.ContainsFunc(list, func(line string) bool {
		fields := strings.Fields(line) // "c 195:* rw", "a *:* rwm"
		if len(fields) == 3 && !strings.Contains(fields[2], "r") {
			return false // it may be made, and not opened
		}
		return len(fields) >= 2 && (fields[0] == "a" || fields[0] == "c" && (strings.HasPrefix(fields[1], major+":") || strings.HasPrefix(fields[1], "*:")))
	})
}

// notAllowed says which number the list of version 1 lacks, and by which cause; nothing without a list, and if it has all.
func notAllowed(h *hostinfo.Host) (seen, because string) {
	const gpu = "195" // of /dev/nvidia0 and /dev/nvidiactl
	list, uvm := h.Cgroup.DevicesAllowed, fmt.Sprint(h.NVIDIA.Majors["nvidia-uvm"])
	if len(list) == 0 || !h.NVIDIA.HasGPUNode() || h.Virt.WSL {
		return "", ""
	}
	for _, major := range []string{gpu, uvm} {
		if major == "0" || allowsMajor(list, major) {
			continue
		}
		if major == uvm {
			because = "old_major"
		}
		return "devices.list allows " + strings.Join(list[:min(len(list), 6)], ", ") + ", but not c " + major + ":*", because
	}
	return "", ""
}

// deviceCgroup knows what version 1 allows. Version 2 does not show it.
func deviceCgroup(f *Facts) []Finding {
	nodes, evidence := f.denied(eperm)
	n := f.Host.NVIDIA
	out := Finding{Summary: "the device cgroup denies this container the GPU"}
	if seen, because := notAllowed(f.Host); seen != "" {
		evidence, out.because = append(evidence, seen), because
	}
	if len(evidence) == 0 || len(nodes) > 0 && f.Host.Virt.Container == "" && f.Host.Virt.Unit != "" {
		return nil // of systemd
	}
	switch {
	case f.Host.Virt.Container != "":
	case slices.Contains(f.Host.Places(), "slurm"):
		out.Summary, out.because = "Slurm's control group denies this job the GPU", "job"
	default:
		out.Against = []string{"this does not look like a container"}
	}
	if len(nodes) > 0 && !slices.ContainsFunc(nodes, func(n hostinfo.Node) bool { return n.Path != "/dev/nvidia-uvm" }) {
		out.because = "old_major" // the GPU's own node can be opened
	}
	if out.because == "old_major" {
		out.Summary = "the device cgroup denies this container /dev/nvidia-uvm, whose major number may have changed"
		if major := n.Majors["nvidia-uvm"]; major > 0 {
			evidence = append(evidence, fmt.Sprintf("/proc/devices: nvidia-uvm now has major number %d", major))
		}
	}
	out.Evidence = evidence
	return finding(out)
}
