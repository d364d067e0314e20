package doctor

import (
	"io/fs"
	"os"

	"github.com/gopinned/pinned/internal/procmem"
)

// Processes returns those below /proc that use the CUDA driver and that this user may
// read, without this one.
func Processes(root fs.FS) (all []Process) {
	for _, s := range procmem.Survey(root, os.Getpid()) {
		least, _ := s.Pinned()
		p := Process{PID: s.PID, Name: s.Name, Frameworks: s.Frameworks, Pinned: least, Mappings: s.Mappings}
		if bytes, blocks, likely := s.Rounded(); likely {
			p.Rounded, p.RoundedBlocks = bytes, blocks
		}
		for _, w := range s.Weights {
			p.Weights = append(p.Weights, WeightFile{Path: w.Path, Size: w.Size})
		}
		all = append(all, p)
	}
	return all
}
