package findlib

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

// A Driver lists the parts of NVIDIA's driver on a host.
type Driver struct {
	LibPath             string   // libcuda.so.1, "" if it was not found
	KernelModuleVersion string   // "580.159.04", "" if no module is loaded
	DeviceNodes         []string // /dev/nvidiactl, /dev/nvidia0, /dev/dxg, …
}

// driverDirs are the directories in which container runtimes and NixOS put the
// driver's libraries, besides the dynamic loader's.
var driverDirs = []string{"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/.singularity.d/libs", "/run/opengl-driver/lib"}

var devicePattern = regexp.MustCompile(`^(nvidiactl|nvidia-uvm|nvidia\d+|dxg)$`)

// Driver searches for the parts of NVIDIA's driver.
func (h Host) Driver() Driver {
	d := Driver{LibPath: h.libcuda()}
	// Absent without the module, and on WSL, where the driver is Windows' own.
	if text, err := os.ReadFile(h.root + "/proc/driver/nvidia/version"); err == nil {
		d.KernelModuleVersion = kernelModuleVersion(string(text))
	}
	names, _ := h.readDir("/dev") // cannot be read: then no device can be opened either
	for _, name := range names {
		if devicePattern.MatchString(name) {
			d.DeviceNodes = append(d.DeviceNodes, "/dev/"+name)
		}
	}
	return d
}

// libcuda returns the path of the driver's library, "" if it was not found.
func (h Host) libcuda() string {
	mapped, _ := h.mapped(func(base string) bool { return strings.HasPrefix(base, "libcuda.so.") })
	for _, m := range mapped {
		if !m.Deleted {
			return m.Path
		}
	}
	for _, dir := range slices.Concat(h.loaderDirs(), driverDirs) {
		file := path.Join(dir, "libcuda.so.1") // the name that libcudart loads
		if info, err := os.Stat(h.root + file); err == nil && info.Mode().IsRegular() {
			return file
		}
	}
	return ""
}

// moduleVersion is the version in the first line of /proc/driver/nvidia/version.
var moduleVersion = regexp.MustCompile(`\b\d{2,}\.\d+(?:\.\d+)*\b`)

// kernelModuleVersion returns 580.159.04 for the text of that file.
func kernelModuleVersion(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return moduleVersion.FindString(line)
}
