package findlib

import (
	"os"
	"path"
	"slices"
	"strings"
)

// A location is a set of directories that may hold a library.
type location struct {
	found    string   // Candidate.Found of the libraries there
	searched string   // describes the location
	dirs     []string // directories that may hold the library
	sonames  []string // names for the dynamic loader, whose turn comes after the directories
}

const toolkitBelow = "/{lib64,lib,targets/*/lib}"

// A locationList collects the locations of a search.
type locationList struct {
	search
	list []location
}

func (l *locationList) add(found, searched string, dirs []string) {
	if dirs == nil && slices.ContainsFunc(l.list, func(p location) bool { return p.searched == searched }) {
		return // such as a variable that is not set
	}
	l.list = append(l.list, location{found: found, searched: searched, dirs: dirs})
}

// addEnv adds the directories below the one that a variable names.
func (l *locationList) addEnv(found, name, below string, dirs func(prefix string) []string) {
	switch prefix := l.env(name); {
	case prefix == "":
		l.add(found, "$"+name+" (not set)", nil)
	case !path.IsAbs(prefix):
		l.add(found, "$"+name+" (not an absolute path: "+prefix+")", nil)
	default:
		prefix = path.Clean(prefix)
		l.add(found, "$"+name+" = "+prefix+below, dirs(prefix))
	}
}

// addWheels adds the directories of Python packages that have the library.
func (l *locationList) addWheels() {
	below := "/lib/python3*/{site,dist}-packages/{" + strings.Join(l.lib.WheelDirs, ",") + "}/lib"
	l.addEnv("wheel in $VIRTUAL_ENV", "VIRTUAL_ENV", below, l.wheelDirs)
	l.addEnv("wheel in $CONDA_PREFIX", "CONDA_PREFIX", below, l.wheelDirs)
	if python, prefixes := l.python(); python == "" {
		l.add("", "python3 (not on $PATH)", nil)
	} else {
		var dirs []string
		for _, prefix := range prefixes {
			dirs = append(dirs, l.wheelDirs(prefix)...)
		}
		l.add("wheel of "+python, "wheels of "+python+" ("+strings.Join(prefixes, ", ")+")", dirs)
	}
	if l.home != "" {
		user := l.home + "/.local"
		l.add("wheel in ~/.local", user+below, l.wheelDirs(user))
	}
	for _, prefix := range []string{"/usr/local", "/usr"} {
		l.add("wheel in "+prefix, prefix+below, l.wheelDirs(prefix))
	}
}

// locations returns all locations except the process itself. The ones that a user
// chose most deliberately come first.
func (s search) locations() []location {
	l := &locationList{search: s}
	if len(s.lib.WheelDirs) > 0 {
		l.addWheels()
	}
	if s.lib.Toolkit {
		l.addEnv("$CONDA_PREFIX", "CONDA_PREFIX", "/{lib,targets/*/lib}", s.toolkitDirs)
	}

	if dirs := s.loaderEnvDirs(); len(dirs) > 0 {
		l.add("$LD_LIBRARY_PATH", "$LD_LIBRARY_PATH = "+strings.Join(dirs, ":"), dirs)
	} else {
		l.add("", "$LD_LIBRARY_PATH (no absolute directory in it)", nil)
	}
	l.list = append(l.list, location{
		found:    "loader path",
		searched: "the loader's own path, for " + strings.Join(s.lib.Sonames, ", "),
		dirs:     s.loaderConfigDirs(),
		sonames:  s.lib.Sonames,
	})

	if s.lib.Toolkit {
		l.addEnv("$CUDA_PATH", "CUDA_PATH", toolkitBelow, s.toolkitDirs)
		l.addEnv("$CUDA_HOME", "CUDA_HOME", toolkitBelow, s.toolkitDirs)
		l.add("/usr/local/cuda", "/usr/local/cuda"+toolkitBelow, s.toolkitDirs("/usr/local/cuda"))
		siblings := s.expand("/usr/local", "cuda-*")
		if len(siblings) == 0 {
			l.add("", "/usr/local/cuda-* (none)", nil)
		}
		for _, toolkit := range siblings {
			l.add(toolkit, toolkit+toolkitBelow, s.toolkitDirs(toolkit))
		}
		l.add("/opt/cuda", "/opt/cuda"+toolkitBelow, s.toolkitDirs("/opt/cuda"))
	}
	dirs := s.systemDirs()
	if s.lib.Driver {
		dirs = append(dirs, driverDirs...)
	}
	for _, dir := range dirs {
		l.add(dir, dir, []string{dir})
	}
	return l.list
}

// toolkitDirs returns the library directories of a CUDA toolkit. Those for
// other architectures, which serve cross builds, are left out.
func (h Host) toolkitDirs(prefix string) []string {
	dirs := []string{prefix + "/lib64", prefix + "/lib"}
	targets := []string{"x86_64-linux"}
	if h.arch == "arm64" {
		targets = []string{"sbsa-linux", "aarch64-linux"}
	}
	for _, target := range targets {
		dirs = append(dirs, prefix+"/targets/"+target+"/lib")
	}
	return dirs
}

// wheelDirs returns the directories of the library in the Python packages
// installed below prefix.
func (s search) wheelDirs(prefix string) []string {
	var dirs []string
	for _, lib := range []string{"lib", "lib64"} {
		for _, packages := range []string{"site-packages", "dist-packages"} {
			for _, site := range s.expand(prefix, lib, "python3*", packages) {
				for _, pattern := range s.lib.WheelDirs {
					dirs = append(dirs, s.expand(site, append(strings.Split(pattern, "/"), "lib")...)...)
				}
			}
		}
	}
	return dirs
}

// python returns the python3 that a shell would run, "" if there is none, and
// the directories below which its packages are installed. It runs nothing.
func (h Host) python() (file string, prefixes []string) {
	for _, dir := range strings.Split(h.env("PATH"), ":") {
		if !path.IsAbs(dir) {
			continue
		}
		file = path.Join(dir, "python3")
		info, err := os.Stat(h.root + file)
		if err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return file, h.pythonPrefixes(file)
		}
	}
	return "", nil
}

func (h Host) pythonPrefixes(file string) []string {
	own := path.Dir(path.Dir(file))
	prefixes := []string{own}
	if base := path.Dir(path.Dir(h.resolve(file))); base != own {
		prefixes = append(prefixes, base)
	}
	// A virtualenv made with copies names its base only here: home = /usr/bin
	config, err := os.ReadFile(h.root + own + "/pyvenv.cfg")
	if err != nil {
		return prefixes // not a virtualenv
	}
	for line := range strings.Lines(string(config)) {
		key, value, _ := strings.Cut(line, "=")
		if home := strings.TrimSpace(value); strings.TrimSpace(key) == "home" && path.IsAbs(home) {
			if base := path.Dir(path.Clean(home)); !slices.Contains(prefixes, base) {
				prefixes = append(prefixes, base)
			}
		}
	}
	return prefixes
}
