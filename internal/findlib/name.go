package findlib

import (
	"path"
	"regexp"
	"strconv"
)

// A Version is what file names contain of a library's version. A part that the
// name does not contain is 0.
type Version struct{ Major, Minor int }

// search compiles the library's patterns. Its files are called
//
//	libcudart.so, libcudart.so.12, libcudart.so.12.4.127
//	libcudart-d0da41ae.so.11.0 by tools that bundle libraries
//
// and the wheel is described by nvidia_cuda_runtime_cu12-12.4.127.dist-info.
func (h Host) search(lib Library) search {
	return search{
		Host:  h,
		lib:   lib,
		file:  regexp.MustCompile(`^` + regexp.QuoteMeta(lib.Name) + `(?:-[0-9a-f]+)?\.so(?:\.(\d{1,3})(?:\.(\d{1,3}))?(?:\.\d+)*)?$`),
		wheel: regexp.MustCompile(`^` + regexp.QuoteMeta(lib.Wheel) + `(?:_cu\d+)?-(\d{1,3})\.(\d{1,3})(?:\.[^/]*)?\.dist-info$`),
	}
}

// Version returns the version of the library's file, or bare soname, at p as
// far as names contain it: 12.4 for libcudart.so.12.4.127 and for links to it.
func (h Host) Version(lib Library, p string) Version {
	return h.search(lib).version(h.resolve(p))
}

// version is Version of a file behind all links. A wheel has only the major
// version in the file's name, and the full one in the directory that describes
// the wheel.
func (s search) version(real string) Version {
	version := s.versionInName(real)
	nvidia := path.Dir(path.Dir(path.Dir(real))) // SITE/nvidia/cu13/lib/FILE
	if version.Minor != 0 || s.lib.Wheel == "" || path.Base(nvidia) != "nvidia" {
		return version
	}
	names, _ := s.readDir(path.Dir(nvidia)) // cannot be read: the file's name has to do
	for _, name := range names {
		if v := versionIn(s.wheel, name); v.Major != 0 && v.Major == version.Major {
			return v
		}
	}
	return version
}

// versionInName returns the version in the file's own name: 12.4 for
// libcudart.so.12.4.127, 12.0 for libcudart.so.12.
func (s search) versionInName(p string) Version { return versionIn(s.file, path.Base(p)) }

func versionIn(pattern *regexp.Regexp, name string) Version {
	m := pattern.FindStringSubmatch(name)
	if m == nil {
		return Version{}
	}
	// Nothing but digits, or nothing, which is 0.
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	return Version{major, minor}
}
