package hostinfo

import (
	"io/fs"
	"regexp"
	"slices"
	"strings"
)

// NVIDIA describes the parts of NVIDIA's driver on the host.
type NVIDIA struct {
	// DriverVersion is the version of the loaded kernel module: 580.159.04.
	DriverVersion string `json:"driver_version,omitempty"`
	// OpenModule is true for the open kernel module, false for the closed one.
	OpenModule bool `json:"open_module,omitempty"`
	// Nodes are the device files: /dev/nvidia0, /dev/nvidiactl, …
	Nodes []Node `json:"device_nodes,omitempty"`
	// Modules are the loaded kernel modules of NVIDIA, and nouveau.
	Modules []string `json:"kernel_modules,omitempty"`
	// Boards are the GPUs in /proc/driver/nvidia/gpus.
	Boards []Board `json:"boards,omitempty"`
}

// Node is a device file. It is not opened.
type Node struct {
	Path string `json:"path"`
	Mode string `json:"mode,omitempty"` // Dcrw-rw-rw-
}

// Board is a GPU that the kernel module lists.
type Board struct {
	Address string `json:"address"` // 0000:00:06.0
	Model   string `json:"model,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	Minor   string `json:"device_minor,omitempty"` // the N of /dev/nvidiaN
}

// HasGPUNode reports whether the device file of a GPU exists: /dev/nvidia0 and so on, or
// WSL's /dev/dxg.
func (n NVIDIA) HasGPUNode() bool {
	for _, node := range n.Nodes {
		if _, ok := numbered(node.Path, "/dev/nvidia"); ok || node.Path == "/dev/dxg" {
			return true
		}
	}
	return false
}

// HasNode reports whether a device file exists, such as /dev/nvidiactl.
func (n NVIDIA) HasNode(path string) bool {
	return slices.ContainsFunc(n.Nodes, func(node Node) bool { return node.Path == path })
}

// HasModule reports whether a kernel module is loaded.
func (n NVIDIA) HasModule(name string) bool {
	return slices.Contains(n.Modules, name)
}

func readNVIDIA(f files) NVIDIA {
	n := NVIDIA{Nodes: readNodes(f), Modules: parseModules(f.text("proc/modules")), Boards: readBoards(f)}
	n.DriverVersion, n.OpenModule = parseDriverVersion(f.text("proc/driver/nvidia/version"))
	if n.DriverVersion == "" {
		n.DriverVersion = f.line("sys/module/nvidia/version")
	}
	return n
}

func readNodes(f files) []Node {
	var out []Node
	for _, name := range f.names("dev") {
		_, isGPU := numbered(name, "nvidia")
		switch {
		case isGPU, name == "nvidiactl", name == "nvidia-uvm", name == "nvidia-uvm-tools",
			name == "nvidia-modeset", name == "nvidia-nvswitchctl", name == "dxg":
		default:
			continue
		}
		node := Node{Path: "/dev/" + name}
		if info, err := fs.Stat(f.fsys, "dev/"+name); err == nil {
			node.Mode = info.Mode().String()
		}
		out = append(out, node)
	}
	return out
}

// versionNumber matches driver versions: 580.159.04, 535.54, 470.256.02.
var versionNumber = regexp.MustCompile(`^\d{2,4}\.\d+(\.\d+)?$`)

// parseDriverVersion parses the NVRM line of /proc/driver/nvidia/version. In it the
// version comes after a name, which the closed and the open module write differently.
func parseDriverVersion(text string) (version string, open bool) {
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "NVRM version:") {
			continue
		}
		for field := range strings.FieldsSeq(line) {
			if versionNumber.MatchString(field) {
				return field, strings.Contains(line, "Open Kernel Module")
			}
		}
	}
	return "", false
}

// parseModules returns the modules in /proc/modules that are for NVIDIA GPUs.
func parseModules(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "nouveau" || name == "nvidia" || strings.HasPrefix(name, "nvidia_") {
			out = append(out, name)
		}
	}
	return out
}

func readBoards(f files) []Board {
	const dir = "proc/driver/nvidia/gpus"
	var out []Board
	for _, address := range f.names(dir) {
		info := parseColons(f.text(dir + "/" + address + "/information"))
		out = append(out, Board{
			Address: address,
			Model:   info["Model"],
			UUID:    info["GPU UUID"],
			Minor:   info["Device Minor"],
		})
	}
	return out
}
