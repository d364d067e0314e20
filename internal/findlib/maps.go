package findlib

import (
	"path"
	"strings"
)

type mappedFile struct {
	path    string
	deleted bool // removed, or replaced, since it was mapped
}

// mapped returns the files mapped into the process whose base name matches, or
// a note why they cannot be listed.
func (h Host) mapped(match func(base string) bool) (files []mappedFile, note string) {
	text, err := h.maps()
	if err != nil {
		return nil, " (" + cause(err).Error() + ")"
	}
	return mappedFiles(string(text), match), ""
}

// mappedFiles reads the text of /proc/PID/maps, whose lines are
// "start-end perms offset major:minor inode   /path", often without a path.
// It returns each path once, in order.
func mappedFiles(text string, match func(base string) bool) []mappedFile {
	var files []mappedFile
	seen := map[mappedFile]bool{}
	for line := range strings.Lines(text) {
		before, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "/")
		if !ok || !strings.HasSuffix(before, " ") {
			continue
		}
		name, deleted := strings.CutSuffix("/"+name, " (deleted)")
		file := mappedFile{name, deleted}
		if match(path.Base(name)) && !seen[file] {
			seen[file] = true
			files = append(files, file)
		}
	}
	return files
}
