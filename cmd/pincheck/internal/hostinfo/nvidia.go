package hostinfo

import (
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
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
	// Libraries are the files of libcuda that were found in the usual directories.
	Libraries []DriverLibrary `json:"driver_libraries,omitempty"`
	// HMMDisabled is the parameter uvm_disable_hmm of nvidia_uvm; nil if it is not shown.
	HMMDisabled *bool `json:"hmm_disabled,omitempty"`
}

// Node is a device file. It is not opened.
type Node struct {
	Path string `json:"path"`
	Mode string `json:"mode,omitempty"` // Dcrw-rw-rw-
	// Closed is that its mode and its owner keep this user from opening it.
	Closed bool `json:"closed,omitempty"`
	// OpenError is why it could not be opened where that was tried: "permission denied",
	// "operation not permitted".
	OpenError string `json:"open_error,omitempty"`
}

// DriverLibrary is a libcuda.so.VERSION on the host.
type DriverLibrary struct {
	Path    string `json:"path"`
	Version string `json:"version"` // of the driver: 580.159.04
}

// Board is a GPU that the kernel module lists.
type Board struct {
	Address string `json:"address"` // 0000:00:06.0
	Model   string `json:"model,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	Minor   string `json:"device_minor,omitempty"` // the N of /dev/nvidiaN
}

// IsGPUNode reports whether a path is the device file of a GPU: /dev/nvidia0 and so on.
func IsGPUNode(path string) bool {
	_, ok := numbered(path, "/dev/nvidia")
	return ok
}

// HasGPUNode reports whether the device file of a GPU exists: /dev/nvidia0 and so on, or
// WSL's /dev/dxg.
func (n NVIDIA) HasGPUNode() bool {
	for _, node := range n.Nodes {
		if IsGPUNode(node.Path) || node.Path == "/dev/dxg" {
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
	n.Libraries = readDriverLibraries(f)
	switch value := f.line("sys/module/nvidia_uvm/parameters/uvm_disable_hmm"); value {
	case "Y", "N", "1", "0":
		disabled := value == "Y" || value == "1"
		n.HMMDisabled = &disabled
	}
	return n
}

// driverDirs are the directories in which the driver's libraries are, by distribution, and
// those that container runtimes mount.
var driverDirs = []string{
	"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/lib/wsl/lib",
	"usr/local/nvidia/lib64", "usr/local/cuda/compat",
}

func readDriverLibraries(f files) (out []DriverLibrary) {
	for _, dir := range driverDirs {
		for _, name := range f.names(dir) {
			if version, ok := strings.CutPrefix(name, "libcuda.so."); ok && versionNumber.MatchString(version) {
				out = append(out, DriverLibrary{Path: "/" + dir + "/" + name, Version: version})
			}
		}
	}
	return out
}

func readNodes(f files) []Node {
	var out []Node
	user, errUser := linux.ReadCredentials(f.fsys)
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
			if owner, ok := linux.OwnerOf(info); ok && errUser == nil {
				node.Closed = !user.MayOpen(info.Mode(), owner)
			}
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
