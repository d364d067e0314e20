package findlib

import (
	"os"
	"path"
	"slices"
	"strings"
)

// loaderDirs returns the directories in which the dynamic loader looks for a
// bare name, in its order.
func (h Host) loaderDirs() []string {
	return slices.Concat(h.loaderEnvDirs(), h.loaderConfigDirs(), h.systemDirs())
}

// loaderEnvDirs returns the directories in $LD_LIBRARY_PATH, without empty and
// relative entries: these depend on the working directory.
func (h Host) loaderEnvDirs() []string {
	var dirs []string
	for _, dir := range strings.FieldsFunc(h.env("LD_LIBRARY_PATH"), func(r rune) bool { return r == ':' || r == ';' }) {
		if path.IsAbs(dir) {
			dirs = append(dirs, path.Clean(dir))
		}
	}
	return dirs
}

// loaderConfigDirs returns the directories in /etc/ld.so.conf, in order.
// ldconfig puts their libraries into the loader's cache.
func (h Host) loaderConfigDirs() []string {
	var dirs []string
	seen := map[string]bool{} // files may include each other
	var read func(file string)
	read = func(file string) {
		if seen[file] {
			return
		}
		seen[file] = true
		text, err := os.ReadFile(h.root + file)
		if err != nil {
			return // absent, as with musl and Nix, or unreadable
		}
		for line := range strings.Lines(string(text)) {
			line, _, _ = strings.Cut(line, "#")
			words := strings.Fields(line)
			if len(words) > 1 && words[0] == "include" {
				for _, pattern := range words[1:] {
					if !path.IsAbs(pattern) {
						pattern = path.Join(path.Dir(file), pattern)
					}
					for _, included := range h.expand(path.Dir(pattern), path.Base(pattern)) {
						read(included)
					}
				}
			} else if dir := strings.TrimSpace(line); path.IsAbs(dir) {
				dirs = append(dirs, path.Clean(dir))
			}
		}
	}
	read("/etc/ld.so.conf")
	return dirs
}

// systemDirs returns the directories of the system's packages.
func (h Host) systemDirs() []string {
	triple := "x86_64-linux-gnu"
	if h.arch == "arm64" {
		triple = "aarch64-linux-gnu"
	}
	return []string{"/usr/lib/" + triple, "/usr/lib/wsl/lib", "/usr/lib64", "/usr/lib"}
}
