package findlib

import (
	"path"

	"github.com/gopinned/pinned/internal/linux"
)

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
