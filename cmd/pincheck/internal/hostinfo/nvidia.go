package hostinfo

import (
	"cmp"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// NVIDIA describes the parts of NVIDIA's driver on the host.
type NVIDIA struct {
	// DriverVersion is the version of the loaded kernel module: 580.159.04.
	DriverVersion string `json:"driver_version,omitempty"`
	// OpenModule is true for the open kernel module, false for the closed one. ModuleKindUnknown is that only the
	// version shows, in /sys: it may be either.
	OpenModule        bool `json:"open_module,omitempty"`
	ModuleKindUnknown bool `json:"module_kind_unknown,omitempty"`
	// Nodes are the device files: /dev/nvidia0, /dev/nvidiactl, …
	Nodes []Node `json:"device_nodes,omitempty"`
	// NotDevices are files and directories where device files belong: mounts of what the host did not have make them.
	NotDevices []string `json:"not_devices,omitempty"`
	// Modules are the loaded kernel modules of NVIDIA, other drivers of its GPUs, and mlx5_ib.
	Modules []string `json:"kernel_modules,omitempty"`
	// Boards are the GPUs in /proc/driver/nvidia/gpus.
	Boards []Board `json:"boards,omitempty"`
	// Libraries are the files of libcuda that were found in the usual directories.
	Libraries []DriverLibrary `json:"driver_libraries,omitempty"`
	// Majors are the major numbers of the modules' device nodes (/proc/devices): nvidia 195, nvidia-uvm 509.
	Majors map[string]int `json:"majors,omitempty"`
	InstalledModule
	// NVSwitches is how many switches of NVLink are on the PCI bus or have a node.
	NVSwitches int `json:"nvswitches,omitempty"`
	// LicenceServer is that a vGPU has a licence server or a token (gridd.conf); nil if the file does not show.
	LicenceServer *bool `json:"vgpu_licence_server,omitempty"`
	Parameters
	// MPS is the pipe of MPS's control daemon in its usual directory: /tmp/nvidia-mps/control.
	MPS string `json:"mps_control,omitempty"`
}

// Parameters are those of the kernel modules.
type Parameters struct {
	// ExcludedGPUs are the UUIDs that the module was told to leave alone (NVreg_ExcludedGpus), and AssignedGPUs the
	// PCI addresses to which NVreg_AssignGpus limits it.
	ExcludedGPUs []string `json:"excluded_gpus,omitempty"`
	AssignedGPUs []string `json:"assigned_gpus,omitempty"`
	// HMMDisabled is the parameter uvm_disable_hmm of nvidia_uvm; nil if it is not shown.
	HMMDisabled *bool `json:"hmm_disabled,omitempty"`
}

// Node is a device file. It is not opened.
type Node struct {
	Path string `json:"path"`
	Mode string `json:"mode,omitempty"` // Dcrw-rw-rw-
	// Closed is that its mode and its owner keep this user from opening it.
	Closed bool `json:"closed,omitempty"`
	// Major is that of its number: the module of that number answers. 0 is unknown.
	Major int `json:"major,omitempty"`
	// OpenError is why it could not be opened where that was tried: "permission denied",
	// "operation not permitted".
	OpenError string `json:"open_error,omitempty"`
}

// DriverLibrary is a libcuda.so.VERSION on the host.
type DriverLibrary struct {
	Path    string `json:"path"`
	Version string `json:"version"` // of the driver: 580.159.04
	// Searched is that LD_LIBRARY_PATH or /etc/ld.so.conf.d names its directory.
	Searched bool `json:"searched,omitempty"`
	// Linked is that libcuda.so.1 beside it leads to it.
	Linked bool `json:"linked,omitempty"`
}

// Board is a GPU that the kernel module lists.
type Board struct {
	Address string `json:"address"` // 0000:00:06.0
	Model   string `json:"model,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	Minor   string `json:"device_minor,omitempty"` // the N of /dev/nvidiaN
	// Excluded is that the driver was told to leave it alone.
	Excluded bool `json:"excluded,omitempty"`
}

// IsGPUNode reports whether a path is the device file of a GPU: /dev/nvidia0 and so on.
func IsGPUNode(path string) bool {
	_, ok := numbered(path, "/dev/nvidia")
	return ok
}

// GPUNodes returns the paths of the GPUs' device files.
func (n NVIDIA) GPUNodes() (paths []string) {
	for _, node := range n.Nodes {
		if IsGPUNode(node.Path) {
			paths = append(paths, node.Path)
		}
	}
	return paths
}

// HasGPUNode reports whether the device file of a GPU exists: /dev/nvidia0 and so on, or
// WSL's /dev/dxg.
func (n NVIDIA) HasGPUNode() bool {
	return len(n.GPUNodes()) > 0 || n.HasNode("/dev/dxg")
}

// HasNode reports whether a device file exists, such as /dev/nvidiactl.
func (n NVIDIA) HasNode(path string) bool {
	return slices.ContainsFunc(n.Nodes, func(node Node) bool { return node.Path == path })
}

// HasModule reports whether a kernel module is loaded.
func (n NVIDIA) HasModule(name string) bool {
	return slices.Contains(n.Modules, name)
}

func readNVIDIA(f files, environ []string) NVIDIA {
	n := NVIDIA{Modules: parseModules(f.text("proc/modules")), Boards: readBoards(f)}
	n.Nodes, n.NotDevices = readNodes(f)
	n.DriverVersion, n.OpenModule = parseDriverVersion(f.text("proc/driver/nvidia/version"))
	if n.DriverVersion == "" {
		n.DriverVersion = f.line("sys/module/nvidia/version")
		n.ModuleKindUnknown = n.DriverVersion != ""
	}
	n.Libraries = readDriverLibraries(f, environ)
	n.Majors = readMajors(f)
	n.InstalledModule = readInstalledModule(f)
	n.NVSwitches = countSwitches(f)
	n.LicenceServer = readLicence(f)
	n.ExcludedGPUs, n.AssignedGPUs = readExcluded(f), readAssigned(f)
	if f.exists("tmp/nvidia-mps/control") {
		n.MPS = "/tmp/nvidia-mps/control"
	}
	n.HMMDisabled = f.flag("sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
	return n
}

// driverDirs are the directories in which the driver's libraries are, by distribution, and
// those that container runtimes mount.
var driverDirs = []string{
	"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/lib/wsl/lib",
	"usr/local/nvidia/lib64", "usr/local/cuda/compat", "usr/lib/aarch64-linux-gnu/tegra", "usr/lib/aarch64-linux-gnu/nvidia",
	"run/opengl-driver/lib", ".singularity.d/libs", "usr/lib64/nvidia", "usr/lib64-nvidia", "usr/lib/nvidia", "opt/cuda/compat",
	"run/host/usr/lib64", "run/host/usr/lib/x86_64-linux-gnu", // of the host, in Toolbx and Distrobox
}

// searched returns the directories that the loader searches beside its own: those of LD_LIBRARY_PATH, and
// those that /etc/ld.so.conf.d adds to its cache.
func searched(f files, environ []string) (dirs []string) {
	paths, _ := LookupEnv(environ, "LD_LIBRARY_PATH")
	all := strings.Split(paths, ":")
	for _, name := range f.names("etc/ld.so.conf.d") {
		all = append(all, strings.Split(f.text("etc/ld.so.conf.d/"+name), "\n")...)
	}
	for _, dir := range all {
		dir = strings.Trim(strings.TrimSpace(dir), "/")
		if dir != "" && fs.ValidPath(dir) && !slices.Contains(dirs, dir) && len(dirs) < maxSearched {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// maxSearched is more directories than hosts have.
const maxSearched = 64

func readDriverLibraries(f files, environ []string) (out []DriverLibrary) {
	extra := searched(f, environ)
	for _, dir := range libraryDirs(f, extra) {
		for _, name := range f.names(dir) {
			if version, ok := strings.CutPrefix(name, "libcuda.so."); ok && versionNumber.MatchString(version) {
				out = append(out, DriverLibrary{Path: "/" + dir + "/" + name, Version: version, Searched: slices.Contains(extra, dir), Linked: f.realPath(dir+"/libcuda.so.1") == dir+"/"+name})
			}
		}
	}
	return out
}

// libraryDirs returns all directories that may have the driver's libraries, each once.
func libraryDirs(f files, extra []string) []string {
	dirs := slices.Clone(driverDirs)
	add := func(dir string) {
		if fs.ValidPath(dir) && !slices.Contains(dirs, dir) && len(dirs) < 3*maxSearched {
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range extra {
		add(dir)
	}
	for _, name := range f.names("usr/local") { // cuda-12.9
		if strings.HasPrefix(name, "cuda") {
			add("usr/local/" + name + "/compat")
		}
	}
	// Container runtimes mount single files of the driver, also into a root of their own.
	mounts, _ := linux.ReadMounts(f.fsys)
	for _, m := range mounts {
		if strings.HasPrefix(path.Base(m.Point), "libcuda.so.") {
			add(strings.Trim(path.Dir(m.Point), "/"))
		}
	}
	// Flatpak has the driver's libraries in a directory of their version.
	for _, triple := range []string{"x86_64-linux-gnu", "aarch64-linux-gnu"} {
		for _, name := range f.names("usr/lib/" + triple + "/GL") {
			if strings.HasPrefix(name, "nvidia-") {
				add("usr/lib/" + triple + "/GL/" + name + "/lib")
			}
		}
	}
	return dirs
}

func readNodes(f files) (nodes []Node, others []string) {
	user, errUser := linux.ReadCredentials(f.fsys)
	for _, name := range f.names("dev") {
		_, isGPU := numbered(name, "nvidia")
		switch {
		case isGPU, name == "nvidiactl", name == "nvidia-uvm", name == "nvidia-uvm-tools",
			name == "nvidia-modeset", name == "nvidia-nvswitchctl", name == "dxg", name == "nvmap", name == "nvhost-gpu":
		default:
			continue
		}
		node := Node{Path: "/dev/" + name}
		if info, err := fs.Stat(f.fsys, "dev/"+name); err == nil {
			if info.Mode()&fs.ModeDevice == 0 {
				others = append(others, node.Path)
				continue
			}
			node.Mode = info.Mode().String()
			node.Major = linux.MajorOf(info)
			if owner, ok := linux.OwnerOf(info); ok && errUser == nil {
				node.Closed = !user.MayOpen(info.Mode(), owner)
			}
		}
		nodes = append(nodes, node)
	}
	return nodes, others
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

// otherModules are other drivers of NVIDIA GPUs, and that of RDMA, which the fabric of NVLink 5 needs.
var otherModules = []string{"nouveau", "nova_core", "nvgpu", "mlx5_ib"}

// readMajors parses the character devices of /proc/devices: "195 nvidia-frontend".
func readMajors(f files) (majors map[string]int) {
	characters, _, _ := strings.Cut(f.text("proc/devices"), "Block devices:")
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 || !strings.HasPrefix(fields[1], "nvidia") {
			continue
		}
		if n, err := strconv.Atoi(fields[0]); err == nil && n > 0 {
			if majors == nil {
				majors = map[string]int{}
			}
			majors[fields[1]] = n
		}
	}
	return majors
}

// countSwitches counts the bridges of NVIDIA that are neither PCI Express nor a GPU, or their nodes.
func countSwitches(f files) (n int) {
	for _, name := range f.names(linux.PCIDevices) {
		dir := linux.PCIDevices + "/" + name
		if f.line(dir+"/vendor") == vendorNVIDIA && strings.HasPrefix(f.line(dir+"/class"), "0x0680") {
			n++
		}
	}
	nodes := 0
	for _, name := range f.names("dev") {
		if _, ok := numbered(name, "nvidia-nvswitch"); ok {
			nodes++
		}
	}
	return max(n, nodes)
}

// readLicence reads whether a vGPU has where to get its licence from.
func readLicence(f files) *bool {
	text := f.text("etc/nvidia/gridd.conf")
	if text == "" {
		return nil
	}
	served := parseAssignments(text)["ServerAddress"] != "" || len(f.names("etc/nvidia/ClientConfigToken")) > 0
	return &served
}

// parseModules returns the modules in /proc/modules that are for NVIDIA GPUs.
func parseModules(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "nvidia" || strings.HasPrefix(name, "nvidia_") || slices.Contains(otherModules, name) {
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

			Excluded: info["GPU Excluded"] == "Yes",
		})
	}
	return out
}

// readExcluded reads NVreg_ExcludedGpus, and its older name, as the loaded module has them.
func readExcluded(f files) (uuids []string) {
	params := parseColons(f.text("proc/driver/nvidia/params"))
	for _, name := range []string{"ExcludedGpus", "GpuBlacklist"} {
		uuids = append(uuids, splitList(params[name])...)
	}
	return uuids
}

// assignGPUs is a parameter that the module does not show: it is read where it is set.
const assignGPUs = "NVreg_AssignGpus="

// readAssigned reads NVreg_AssignGpus from the kernel's command line, and from the options of modprobe. Its
// addresses may lack the domain and the function, which are 0 then.
func readAssigned(f files) (addresses []string) {
	words := strings.Fields(f.line("proc/cmdline"))
	for i, word := range words {
		words[i] = strings.TrimPrefix(word, "nvidia.")
	}
	for _, name := range f.names(modprobeDir) {
		for line := range strings.Lines(f.text(modprobeDir + "/" + name)) {
			if fields := strings.Fields(line); len(fields) > 2 && fields[0] == "options" && fields[1] == "nvidia" {
				words = append(words, fields[2:]...)
			}
		}
	}
	for _, word := range words {
		list, ok := strings.CutPrefix(word, assignGPUs)
		if !ok {
			continue
		}
		addresses = nil // the last one counts
		for _, address := range splitList(list) {
			addresses = append(addresses, wholeAddress(address))
		}
	}
	return addresses
}

// wholeAddress returns the whole form of a PCI address without a domain, a function, or leading zeros: 4:0 is
// 0000:04:00.0.
func wholeAddress(address string) string {
	slot, function, _ := strings.Cut(address, ".")
	parts := strings.Split(slot, ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	for i, digits := range []int{4, 2, 2} {
		if i < len(parts) {
			parts[i] = strings.Repeat("0", max(0, digits-len(parts[i]))) + parts[i]
		}
	}
	return strings.Join(parts, ":") + "." + cmp.Or(function, "0")
}

// modprobeDir has the options of kernel modules that an administrator sets.
const modprobeDir = "etc/modprobe.d"

// splitList splits a list with commas, which may be in quotes.
func splitList(list string) []string {
	return strings.FieldsFunc(strings.Trim(list, `"' `), func(c rune) bool { return c == ',' || c == ' ' || c == ';' })
}
