//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"os"
	"path"
	"slices"
	"strings"
)

// A place is where libcudart may lie.
type place struct {
	found  string   // how a library there was found
	looked string   // the place, for people
	dirs   []string // folders that may hold the library
	loader bool     // the loader's own search comes here, after the folders
}

// places returns all places but the process itself, first the ones that the
// user chose most deliberately.
func (f finder) places() []place {
	const wheels = "/{site,dist}-packages/{nvidia/cu*,torch}/lib"
	var list []place
	add := func(found, looked string, dirs []string) {
		list = append(list, place{found: found, looked: looked, dirs: dirs})
	}
	addEnv := func(found, name, below string, dirs func(prefix string) []string) {
		switch prefix := f.env(name); {
		case prefix == "":
			add(found, "$"+name+" (not set)", nil)
		case !path.IsAbs(prefix):
			add(found, "$"+name+" (not an absolute path: "+prefix+")", nil)
		default:
			prefix = path.Clean(prefix)
			add(found, "$"+name+" = "+prefix+below, dirs(prefix))
		}
	}

	addEnv("wheel in $VIRTUAL_ENV", "VIRTUAL_ENV", "/lib/python3*"+wheels, f.wheelDirs)
	addEnv("wheel in $CONDA_PREFIX", "CONDA_PREFIX", "/lib/python3*"+wheels, f.wheelDirs)
	python, prefixes := f.python()
	if python == "" {
		add("", "python3 (not on $PATH)", nil)
	} else {
		var dirs []string
		for _, prefix := range prefixes {
			dirs = append(dirs, f.wheelDirs(prefix)...)
		}
		add("wheel of "+python, "wheels of "+python+" ("+strings.Join(prefixes, ", ")+")", dirs)
	}
	if f.home != "" {
		user := f.home + "/.local"
		add("wheel in ~/.local", user+"/lib/python3*"+wheels, f.wheelDirs(user))
	}
	for _, prefix := range []string{"/usr/local", "/usr"} {
		add("wheel in "+prefix, prefix+"/lib/python3*"+wheels, f.wheelDirs(prefix))
	}

	addEnv("$CONDA_PREFIX", "CONDA_PREFIX", "/{lib,targets/*/lib}", f.toolkitDirs)

	if dirs := f.loaderDirs(); len(dirs) > 0 {
		add("$LD_LIBRARY_PATH", "$LD_LIBRARY_PATH = "+strings.Join(dirs, ":"), dirs)
	} else {
		add("", "$LD_LIBRARY_PATH (no absolute folder in it)", nil)
	}
	list = append(list, place{
		found:  "loader path",
		looked: "the loader's own path, for " + strings.Join(libcudartSonames[:], ", "),
		dirs:   f.ldsoDirs(),
		loader: true,
	})

	addEnv("$CUDA_PATH", "CUDA_PATH", "/{lib64,lib,targets/*/lib}", f.toolkitDirs)
	addEnv("$CUDA_HOME", "CUDA_HOME", "/{lib64,lib,targets/*/lib}", f.toolkitDirs)
	add("/usr/local/cuda", "/usr/local/cuda/{lib64,lib,targets/*/lib}", f.toolkitDirs("/usr/local/cuda"))
	siblings := f.expand("/usr/local", "cuda-*")
	if len(siblings) == 0 {
		add("", "/usr/local/cuda-* (none)", nil)
	}
	for _, toolkit := range siblings {
		add(toolkit, toolkit+"/{lib64,lib,targets/*/lib}", f.toolkitDirs(toolkit))
	}
	add("/opt/cuda", "/opt/cuda/{lib64,lib,targets/*/lib}", f.toolkitDirs("/opt/cuda"))
	for _, dir := range f.systemDirs() {
		add(dir, dir, []string{dir})
	}
	return list
}

// loaderDirs returns the folders of $LD_LIBRARY_PATH, without empty and relative
// entries: these mean the working folder, which chance sets.
func (f finder) loaderDirs() []string {
	var dirs []string
	for _, dir := range strings.FieldsFunc(f.env("LD_LIBRARY_PATH"), func(r rune) bool { return r == ':' || r == ';' }) {
		if path.IsAbs(dir) {
			dirs = append(dirs, path.Clean(dir))
		}
	}
	return dirs
}

// toolkitDirs returns the library folders of a CUDA toolkit. Below targets are
// those for other machines too, for cross builds: they are left alone.
func (f finder) toolkitDirs(prefix string) []string {
	dirs := []string{prefix + "/lib64", prefix + "/lib"}
	targets := []string{"x86_64-linux"}
	if f.arch == "arm64" {
		targets = []string{"sbsa-linux", "aarch64-linux"}
	}
	for _, target := range targets {
		dirs = append(dirs, prefix+"/targets/"+target+"/lib")
	}
	return dirs
}

// systemDirs returns the folders of the system's own packages.
func (f finder) systemDirs() []string {
	triple := "x86_64-linux-gnu"
	if f.arch == "arm64" {
		triple = "aarch64-linux-gnu"
	}
	return []string{"/usr/lib/" + triple, "/usr/lib/wsl/lib", "/usr/lib64", "/usr/lib"}
}

// wheelDirs returns the folders that hold libcudart in the Python packages
// installed below prefix: NVIDIA's own wheels, and PyTorch's before it used them.
func (f finder) wheelDirs(prefix string) []string {
	var dirs []string
	for _, lib := range []string{"lib", "lib64"} {
		for _, packages := range []string{"site-packages", "dist-packages"} {
			for _, site := range f.expand(prefix, lib, "python3*", packages) {
				dirs = append(dirs, f.expand(site, "nvidia", "cu*", "lib")...)
				dirs = append(dirs, site+"/torch/lib")
			}
		}
	}
	return dirs
}

// python returns the python3 that a shell would run, "" when there is none,
// and the folders below which its packages lie. Nothing is executed.
func (f finder) python() (file string, prefixes []string) {
	for _, dir := range strings.Split(f.env("PATH"), ":") {
		if !path.IsAbs(dir) {
			continue
		}
		file = path.Join(dir, "python3")
		info, err := os.Stat(f.root + file)
		if err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return file, f.pythonPrefixes(file)
		}
	}
	return "", nil
}

func (f finder) pythonPrefixes(file string) []string {
	own := path.Dir(path.Dir(file))
	prefixes := []string{own}
	if base := path.Dir(path.Dir(f.resolve(file))); base != own {
		prefixes = append(prefixes, base)
	}
	// A virtualenv made with copies tells its base only here: home = /usr/bin
	config, err := os.ReadFile(f.root + own + "/pyvenv.cfg")
	if err != nil {
		return prefixes // no virtualenv
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
