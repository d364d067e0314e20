package hostinfo

import (
	"slices"
	"strings"
)

// InstalledModule is what the disk has of NVIDIA's kernel module, loaded or not.
type InstalledModule struct {
	// ModuleFile is the kernel module for the running kernel; empty if there is none, or it does not show.
	ModuleFile string `json:"module_file,omitempty"`
	// ModuleBuilds are the modules of other kernels, and the versions that DKMS has.
	ModuleBuilds []ModuleBuild `json:"module_builds,omitempty"`
	// ModuleBlocked is the line of modprobe's configuration that keeps the module from loading, after its file.
	ModuleBlocked string `json:"module_blocked,omitempty"`
	// Firmware are the versions of the driver whose firmware (GSP) is installed.
	Firmware []string `json:"firmware_versions,omitempty"`
	// ModulesShown is that the directory of kernel modules shows: what is not found there is missing.
	ModulesShown bool `json:"modules_shown,omitempty"`
}

// ModuleBuild is a build of the module for one kernel. DKMS also has versions that were built for none.
type ModuleBuild struct {
	Path    string `json:"path"`
	Kernel  string `json:"kernel,omitempty"`         // as uname -r
	Version string `json:"driver_version,omitempty"` // of DKMS: 580.95.05
}

// moduleDirs are where packages put kernel modules, below /lib/modules/RELEASE. Ubuntu's signed modules have a
// directory of their branch: kernel/nvidia-580-open.
var moduleDirs = []string{"updates/dkms", "updates", "extra", "extra/nvidia", "weak-updates/nvidia", "kernel/drivers/video",
	"kernel/drivers/video/nvidia", "kernel/nvidia", "misc"}

const (
	modulesDir = "lib/modules"
	dkmsDir    = "var/lib/dkms"
	// maxBuilds and maxKernels limit what is read of a host with many kernels.
	maxBuilds  = 32
	maxKernels = 32
)

func readInstalledModule(f files) (m InstalledModule) {
	release := f.line("proc/sys/kernel/osrelease")
	kernels := f.names(modulesDir)
	m.ModulesShown = len(kernels) > 0
	if release != "" && !strings.Contains(release, "/") {
		m.ModuleFile = moduleOf(f, release)
	}
	for _, kernel := range kernels[:min(len(kernels), maxKernels)] {
		if file := moduleOf(f, kernel); file != "" && kernel != release {
			m.ModuleBuilds = append(m.ModuleBuilds, ModuleBuild{Path: file, Kernel: kernel})
		}
	}
	for _, name := range f.names(dkmsDir) {
		if !strings.HasPrefix(name, "nvidia") {
			continue
		}
		for _, version := range f.names(dkmsDir + "/" + name) {
			if versionNumber.MatchString(version) && len(m.ModuleBuilds) < maxBuilds {
				m.ModuleBuilds = append(m.ModuleBuilds, dkmsBuilds(f, dkmsDir+"/"+name+"/"+version, version)...)
			}
		}
	}
	m.ModuleBlocked = readBlocked(f)
	for _, version := range f.names("lib/firmware/nvidia") { // beside directories of chips, for nouveau
		if versionNumber.MatchString(version) && len(m.Firmware) < maxBuilds {
			m.Firmware = append(m.Firmware, version)
		}
	}
	return m
}

// moduleOf returns the module of a kernel.
func moduleOf(f files, kernel string) string {
	dir := modulesDir + "/" + kernel
	dirs := slices.Clone(moduleDirs)
	for _, name := range f.names(dir + "/kernel") {
		if strings.HasPrefix(name, "nvidia-") {
			dirs = append(dirs, "kernel/"+name)
		}
	}
	for _, below := range dirs {
		for _, suffix := range []string{"", ".xz", ".zst", ".gz"} {
			if name := dir + "/" + below + "/nvidia.ko" + suffix; f.exists(name) {
				return "/" + name
			}
		}
	}
	return ""
}

// dkmsBuilds lists the kernels that DKMS built a version for. A build that failed leaves no directory of its kernel.
func dkmsBuilds(f files, dir, version string) (builds []ModuleBuild) {
	for _, name := range f.names(dir) {
		if name != "source" && name != "build" && len(builds) < maxBuilds {
			builds = append(builds, ModuleBuild{Path: "/" + dir, Kernel: name, Version: version})
		}
	}
	if len(builds) == 0 {
		return []ModuleBuild{{Path: "/" + dir, Version: version}}
	}
	return builds
}

// blockers are lines of modprobe's configuration that keep the module from loading: blacklist only for its aliases,
// by which the kernel loads it at boot.
var blockers = []string{"blacklist nvidia", "alias nvidia off", "install nvidia /bin/false", "install nvidia /bin/true",
	"install nvidia /usr/bin/false", "install nvidia /usr/bin/true"}

func readBlocked(f files) string {
	for _, dir := range []string{modprobeDir, "usr/lib/modprobe.d", "run/modprobe.d", "lib/modprobe.d"} {
		for _, name := range f.names(dir) {
			if !strings.HasSuffix(name, ".conf") {
				continue // modprobe reads no other
			}
			for line := range strings.Lines(f.text(dir + "/" + name)) {
				if text := strings.Join(strings.Fields(line), " "); slices.Contains(blockers, text) {
					return "/" + dir + "/" + name + ": " + text
				}
			}
		}
	}
	return ""
}
