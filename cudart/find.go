//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// A candidate is a file that may be a CUDA runtime library.
type candidate struct {
	path    string  // absolute, or a bare soname for the loader's own search
	found   string  // how: "loaded already", "wheel in $VIRTUAL_ENV", "$CUDA_PATH", ...
	version Version // as the name tells: x.0 when it tells only x, 0 when nothing
}

// A finder looks for libraries on this host, or on a copy of one below root.
// All paths that it takes and returns are those of that host, without root.
type finder struct {
	root string                 // put before every path; "" on a live host
	arch string                 // as GOARCH
	env  func(string) string    // environment variables
	home string                 // of the user; "" when unknown
	maps func() ([]byte, error) // /proc/self/maps
}

// newFinder returns the finder for the running process.
func newFinder() finder {
	home, _ := os.UserHomeDir() // without one the user's packages are not looked at
	if runsElevated() {
		home = ""
	}
	return finder{
		arch: runtime.GOARCH,
		env:  getenv,
		home: home,
		maps: func() ([]byte, error) { return os.ReadFile("/proc/self/maps") },
	}
}

// candidates returns the libraries found, each file once under the first way
// that led to it, and every place looked at, with what was wrong with it. The
// bare sonames for the loader are always among them. Nothing is loaded or run.
func (f finder) candidates() (list []candidate, looked []string) {
	seen := map[string]bool{}
	add := func(c candidate, real string) {
		if !seen[real] {
			seen[real] = true
			list = append(list, c)
		}
	}

	mapped, note := f.mapped(libcudartName)
	looked = append(looked, "libraries loaded already (/proc/self/maps)"+note)
	for _, m := range mapped {
		if !m.deleted {
			real := f.resolve(m.path)
			add(candidate{m.path, "loaded already", f.fileVersion(real)}, real)
			continue
		}
		// The path is gone or another file by now, the loader still has the soname.
		version := libcudartVersion(path.Base(m.path))
		if soname := libcudartSoname(version); soname != "" {
			add(candidate{soname, "loaded already, its file deleted since", version}, soname)
		}
	}

	for _, p := range f.places() {
		var notes []string
		for _, dir := range p.dirs {
			libs, note := f.librariesIn(dir)
			for _, lib := range libs {
				add(candidate{lib.path, p.found, lib.version}, lib.real)
			}
			if note != "" {
				notes = append(notes, note)
			}
		}
		if p.loader {
			for _, soname := range libcudartSonames {
				add(candidate{soname, p.found, libcudartVersion(soname)}, soname)
			}
		}
		if len(notes) > 0 {
			p.looked += " (" + strings.Join(notes, "; ") + ")"
		}
		looked = append(looked, p.looked)
	}
	return list, looked
}

type library struct {
	path, real string
	version    Version
}

// librariesIn returns the libcudarts of one folder, those with the fullest
// name first, and what keeps entries or the whole folder from being used.
func (f finder) librariesIn(dir string) (libs []library, note string) {
	names, err := f.readDir(dir)
	if err != nil {
		return nil, dir + ": " + why(err)
	}
	var notes []string
	for _, name := range slices.Backward(names) {
		if !libcudartName(name) {
			continue
		}
		file := path.Join(dir, name)
		info, err := os.Stat(f.root + file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			notes = append(notes, file+": broken link")
		case err != nil:
			notes = append(notes, file+": "+why(err))
		case !info.Mode().IsRegular():
			notes = append(notes, file+": not a file")
		default:
			real := f.resolve(file)
			libs = append(libs, library{file, real, f.fileVersion(real)})
		}
	}
	return libs, strings.Join(notes, "; ")
}

// resolve returns the file behind all links, or p itself where that fails.
func (f finder) resolve(p string) string {
	real, err := filepath.EvalSymlinks(f.root + p)
	if err != nil {
		return p
	}
	if f.root == "" {
		return real
	}
	root, err := filepath.EvalSymlinks(f.root)
	if err != nil {
		return p
	}
	if inside, ok := strings.CutPrefix(real, root+"/"); ok {
		return "/" + inside
	}
	return p
}

// readDir returns the sorted names in a folder; none, and no error, when there
// is no such folder.
func (f finder) readDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(f.root + dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !notFolder(err) {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// expand returns the paths below dir that the segments lead to. A segment with
// a * stands for every matching name there is; others need not exist. Unlike
// filepath.Glob it takes dir as it is, whatever characters that has.
func (f finder) expand(dir string, segments ...string) []string {
	dirs := []string{dir}
	for _, segment := range segments {
		var next []string
		for _, d := range dirs {
			if !strings.Contains(segment, "*") {
				next = append(next, path.Join(d, segment))
				continue
			}
			names, _ := f.readDir(d) // a folder that cannot be read has no matches
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
