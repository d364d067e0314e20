package doctor

import (
	"io/fs"
	"os"

	"github.com/gopinned/pinned/cmd/pincheck/internal/procmem"
	"github.com/gopinned/pinned/internal/linux"
)

// Processes returns those below /proc that use the CUDA driver and that this user may
// read, without this one.
func Processes(root fs.FS) (all []Process) {
	memory, _ := linux.ReadMeminfo(root) // without it, every limit is one
	for _, s := range procmem.Survey(root, os.Getpid()) {
		smallest, _ := s.Pinned()
		p := Process{PID: s.PID, Name: s.Name, Frameworks: s.Frameworks, Pinned: smallest, Mappings: s.Mappings}
		if bytes, blocks, likely := s.Rounded(); likely {
			p.Rounded, p.RoundedBlocks = bytes, blocks
		}
		for _, w := range s.Weights {
			p.Weights = append(p.Weights, WeightFile{Path: w.Path, Size: w.Size})
		}
		p.Cgroup, p.MemoryLimit = limitOf(root, s.PID, memory["MemTotal"])
		all = append(all, p)
	}
	return all
}

// limitOf returns the outermost control group of a process with a limit of memory. What is
// not below the host's memory, total if that is known, limits nothing.
func limitOf(root fs.FS, pid, total int) (group string, limit int) {
	groups, err := linux.ReadProcessCgroupMemory(root, pid)
	if err != nil {
		return "", 0
	}
	for _, g := range groups { // from its own group outwards
		if g.Max != linux.NoLimit && (total == 0 || g.Max < total) {
			group, limit = "/"+g.Dir, g.Max
		}
	}
	return group, limit
}
