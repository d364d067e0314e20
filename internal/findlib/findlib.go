// Package findlib finds NVIDIA's libraries on a host: the files that may be a library, the
// version of each, and whether the file is whole. It loads
// and runs nothing.
package findlib

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gopinned/pinned/internal/linux"
)

// A Library describes a shared library: how its files are named and which
// directories may hold it.
type Library struct {
	Name      string   // its file name before ".so": "libcudart"
	Sonames   []string // the names that the dynamic loader looks for, the newest version first
	Wheel     string   // the Python package that holds it: "nvidia_cuda_runtime"
	WheelDirs []string // patterns of its directories, less "/lib", in site-packages: "nvidia/cu*"
	Toolkit   bool     // the CUDA toolkit has it: look in $CUDA_PATH, /usr/local/cuda, conda
	Driver    bool     // the driver has it: look where container runtimes put the driver
}

// A Candidate is a file that may be the library.
type Candidate struct {
	Path    string // absolute, or a bare soname that the dynamic loader is to look for
	Found   string // how it was found: "loaded already", "wheel in $VIRTUAL_ENV", "$CUDA_PATH", …
	Version Version
}

// A Host is a machine on which libraries are searched for, as this process sees
// it, or a copy of one in a directory. Paths are of that machine.
type Host struct {
	root string              // put before every path; "" for this machine
	arch string              // as GOARCH
	env  func(string) string // environment variables
	home string              // the user's home directory, "" if unknown
	maps func() ([]linux.Mapping, error)
}

// This returns the machine that the process runs on.
func This() Host {
	home, _ := os.UserHomeDir() // without one, the user's packages are not searched
	if elevated() {
		home = ""
	}
	return Host{
		arch: runtime.GOARCH,
		env:  Getenv,
		home: home,
		maps: func() ([]linux.Mapping, error) { return linux.ReadMaps(os.DirFS("/")) },
	}
}

// Getenv is os.Getenv, and like secure_getenv(3) returns "" in a process that
// has more rights than its caller (setuid, file capabilities): the caller must
// not choose what such a process loads.
func Getenv(name string) string {
	if elevated() {
		return ""
	}
	return os.Getenv(name)
}

// Find returns the files that may be the library, in the order of the search,
// each file once, under the place that was searched first. The library's
// sonames, for the dynamic loader, are always among them. searched lists every
// place that was searched and what was wrong with it.
func (h Host) Find(lib Library) (found []Candidate, searched []string) {
	s := h.search(lib)
	seen := map[string]bool{}
	add := func(c Candidate, real string) {
		if !seen[real] {
			seen[real] = true
			found = append(found, c)
		}
	}

	mapped, note := h.mapped(s.file.MatchString)
	searched = append(searched, "libraries loaded already (/proc/self/maps)"+note)
	for _, m := range mapped {
		if !m.Deleted {
			real := h.resolve(m.Path)
			add(Candidate{m.Path, "loaded already", s.version(real)}, real)
			continue
		}
		// The path names no file, or another one by now. The dynamic loader
		// still has the library under its soname.
		version := s.versionInName(m.Path)
		for _, soname := range lib.Sonames {
			if s.versionInName(soname).Major == version.Major {
				add(Candidate{soname, "loaded already, its file deleted since", version}, soname)
			}
		}
	}

	for _, p := range s.locations() {
		var notes []string
		for _, dir := range p.dirs {
			files, note := s.filesIn(dir)
			for _, f := range files {
				add(Candidate{f.path, p.found, f.version}, f.real)
			}
			if note != "" {
				notes = append(notes, note)
			}
		}
		for _, soname := range p.sonames {
			add(Candidate{soname, p.found, s.versionInName(soname)}, soname)
		}
		if len(notes) > 0 {
			p.searched += " (" + strings.Join(notes, "; ") + ")"
		}
		searched = append(searched, p.searched)
	}
	return found, searched
}

// A search is for one library on one host.
type search struct {
	Host
	lib   Library
	file  *regexp.Regexp // the library's file names, with major and minor version
	wheel *regexp.Regexp // names of the directory that describes its wheel, likewise
}

// A Version is a library's version as far as file names contain it. A part that the
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

type file struct {
	path, real string // real is the file behind all links
	version    Version
}

// filesIn returns the library's files in a directory, the fullest name first,
// and why files, or the directory, cannot be used.
func (s search) filesIn(dir string) (files []file, note string) {
	names, err := s.readDir(dir)
	if err != nil {
		return nil, dir + ": " + cause(err).Error()
	}
	var notes []string
	for _, name := range slices.Backward(names) {
		if !s.file.MatchString(name) {
			continue
		}
		p := path.Join(dir, name)
		info, err := os.Stat(s.root + p)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			notes = append(notes, p+": broken link")
		case err != nil:
			notes = append(notes, p+": "+cause(err).Error())
		case !info.Mode().IsRegular():
			notes = append(notes, p+": not a file")
		default:
			real := s.resolve(p)
			files = append(files, file{p, real, s.version(real)})
		}
	}
	return files, strings.Join(notes, "; ")
}

// mapped returns the files mapped into the process whose base name matches, or
// a note why they cannot be listed.
func (h Host) mapped(match func(base string) bool) (files []linux.MappedFile, note string) {
	maps, err := h.maps()
	if err != nil {
		return nil, " (" + cause(err).Error() + ")"
	}
	for _, f := range linux.MappedFiles(maps) {
		if match(path.Base(f.Path)) {
			files = append(files, f)
		}
	}
	return files, ""
}

// resolve returns the file behind all links, or p itself where that fails.
func (h Host) resolve(p string) string {
	real, err := filepath.EvalSymlinks(h.root + p)
	if err != nil {
		return p
	}
	if h.root == "" {
		return real
	}
	root, err := filepath.EvalSymlinks(h.root)
	if err != nil {
		return p
	}
	if inside, ok := strings.CutPrefix(real, root+"/"); ok {
		return "/" + inside
	}
	return p
}

// readDir returns the sorted names in a directory. If there is no such
// directory it returns none, and no error.
func (h Host) readDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(h.root + dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// expand returns the paths below dir that the segments lead to. A segment with
// a * stands for every matching name that exists; others need not exist.
// Unlike filepath.Glob it gives the characters of dir no meaning.
func (h Host) expand(dir string, segments ...string) []string {
	dirs := []string{dir}
	for _, segment := range segments {
		var next []string
		for _, d := range dirs {
			if !strings.Contains(segment, "*") {
				next = append(next, path.Join(d, segment))
				continue
			}
			names, _ := h.readDir(d) // a directory that cannot be read has no matches
			for _, name := range names {
				if ok, _ := path.Match(segment, name); ok {
					next = append(next, path.Join(d, name))
				}
			}
		}
		dirs = next
	}
	return dirs
}

// cause returns what failed without the operation and the path, which the
// caller reports.
func cause(err error) error {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		return pathErr.Err
	}
	return err
}
