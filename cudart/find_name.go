//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"path"
	"regexp"
	"strconv"
	"strings"
)

// libcudartSonames are the names that the loader searches for, newest first.
var libcudartSonames = [...]string{"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"}

// A libcudart's file name: libcudart.so, libcudart.so.12, libcudart.so.12.4.127,
// and libcudart-d0da41ae.so.11.0 as tools that bundle libraries rename it.
var libcudartPattern = regexp.MustCompile(`^libcudart(?:-[0-9a-f]+)?\.so(?:\.(\d{1,3})(?:\.(\d{1,2}))?(?:\.\d+)*)?$`)

func libcudartName(name string) bool { return libcudartPattern.MatchString(name) }

// libcudartVersion returns the version that a file name tells: 12040 for
// libcudart.so.12.4.127, 12000 for libcudart.so.12, 0 for libcudart.so. All of
// 11.x have the soname libcudart.so.11.0, so 11000 tells the major only.
func libcudartVersion(name string) Version {
	m := libcudartPattern.FindStringSubmatch(name)
	if m == nil {
		return 0
	}
	return versionOf(m[1], m[2])
}

// libcudartSoname returns the name under which the loader knows a libcudart
// that it has loaded, "" for versions whose soname is not known here.
func libcudartSoname(v Version) string {
	switch {
	case v.Major() >= 12:
		return "libcudart.so." + strconv.Itoa(v.Major())
	case v.Major() == 11:
		return "libcudart.so.11.0"
	}
	return ""
}

// fileVersion returns the version of a library as far as names tell it. Wheels
// call it libcudart.so.12 only, and have the full version in the name of the
// folder that describes the wheel: nvidia_cuda_runtime_cu12-12.4.127.dist-info.
func (f finder) fileVersion(file string) Version {
	version := libcudartVersion(path.Base(file))
	nvidia := path.Dir(path.Dir(path.Dir(file))) // SITE/nvidia/cu13/lib/FILE
	if version.Minor() != 0 || path.Base(nvidia) != "nvidia" {
		return version
	}
	names, _ := f.readDir(path.Dir(nvidia)) // unreadable: the library's own name must do
	for _, name := range names {
		m := wheelPattern.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		if v := versionOf(m[1], m[2]); v.Major() == version.Major() {
			return v
		}
	}
	return version
}

var wheelPattern = regexp.MustCompile(`^nvidia_cuda_runtime(?:_cu\d+)?-(\d{1,3})\.(\d{1,2})(?:\.[^/]*)?\.dist-info$`)

// versionOf takes digits, or "" for a part that is not known.
func versionOf(major, minor string) Version {
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(minor)
	return Version(1000*a + 10*b)
}

// driverPattern is the version in the first line of /proc/driver/nvidia/version.
var driverPattern = regexp.MustCompile(`\b\d{2,}\.\d+(?:\.\d+)*\b`)

// kernelModuleVersion returns 580.159.04 for the text of that file.
func kernelModuleVersion(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return driverPattern.FindString(line)
}
