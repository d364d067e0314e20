//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"os"
	"path"
	"strings"
)

// ldsoDirs returns the folders that /etc/ld.so.conf names, in order, which
// ldconfig has put into the loader's cache.
func (f finder) ldsoDirs() []string {
	var dirs []string
	seen := map[string]bool{} // files may include each other
	var read func(file string)
	read = func(file string) {
		if seen[file] {
			return
		}
		seen[file] = true
		text, err := os.ReadFile(f.root + file)
		if err != nil {
			return // none here, as with musl and Nix; or not for us to read
		}
		for line := range strings.Lines(string(text)) {
			line, _, _ = strings.Cut(line, "#")
			words := strings.Fields(line)
			if len(words) > 1 && words[0] == "include" {
				for _, pattern := range words[1:] {
					if !path.IsAbs(pattern) {
						pattern = path.Join(path.Dir(file), pattern)
					}
					for _, included := range f.expand(path.Dir(pattern), path.Base(pattern)) {
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
