//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"os"
	"path"
	"regexp"
	"strings"
)

var devicePattern = regexp.MustCompile(`^(nvidiactl|nvidia-uvm|nvidia\d+|dxg)$`)

func (f finder) driver() DriverFacts {
	facts := DriverFacts{LibPath: f.libcuda()}
	// Absent without the module, and on WSL, whose driver is Windows' own.
	if text, err := os.ReadFile(f.root + "/proc/driver/nvidia/version"); err == nil {
		facts.KernelModuleVersion = kernelModuleVersion(string(text))
	}
	names, _ := f.readDir("/dev") // unreadable: as good as no device
	for _, name := range names {
		if devicePattern.MatchString(name) {
			facts.DeviceNodes = append(facts.DeviceNodes, "/dev/"+name)
		}
	}
	return facts
}

// libcuda returns where the driver's library lies, "" when it was not found.
func (f finder) libcuda() string {
	mapped, _ := f.mapped(func(base string) bool { return strings.HasPrefix(base, "libcuda.so.") })
	for _, m := range mapped {
		if !m.deleted {
			return m.path
		}
	}
	dirs := append(f.loaderDirs(), f.systemDirs()...)
	// Container runtimes, and NixOS, put the driver in folders of their own.
	dirs = append(dirs, "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/.singularity.d/libs", "/run/opengl-driver/lib")
	for _, dir := range dirs {
		file := path.Join(dir, "libcuda.so.1")
		if info, err := os.Stat(f.root + file); err == nil && info.Mode().IsRegular() {
			return file
		}
	}
	return ""
}
