package procmem

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/internal/linux"
)

// A Surveyed is a process that uses the CUDA driver, as its mappings show it. Sizes are of
// mappings, not of what is resident: pinned memory is resident as a whole.
type Surveyed struct {
	*Process
	Mappings int // how many it has
	// Weights are mapped files of model weights, with the sizes of their mappings.
	Weights []MappedFile
}

// A MappedFile is a file that a process has mapped.
type MappedFile struct {
	Path string
	Size int // bytes
}

// weightSuffixes are the names of files of model weights.
var weightSuffixes = []string{".safetensors", ".gguf", ".ggml"}

// surveyTime bounds the time that [Survey] reads processes, on hosts with very many.
const surveyTime = 500 * time.Millisecond

// Survey lists the processes below /proc that use the CUDA driver and that this user may
// read, without the one that asks. It reads mappings only, which holds no process up, and
// stops after half a second.
func Survey(root fs.FS, self int) (found []Surveyed) {
	entries, err := fs.ReadDir(root, "proc")
	if err != nil {
		return nil
	}
	until := time.Now().Add(surveyTime)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid <= 0 || pid == self {
			continue
		}
		if time.Now().After(until) {
			break
		}
		if s, ok := survey(root, pid); ok {
			found = append(found, s)
		}
	}
	return found
}

func survey(root fs.FS, pid int) (Surveyed, bool) {
	all, err := linux.ReadProcessMaps(root, pid)
	if err != nil || !slices.ContainsFunc(all, usesDriver) {
		return Surveyed{}, false
	}
	s := Surveyed{Process: &Process{PID: pid, Frameworks: []Framework{}, Blocks: []Block{}}, Mappings: len(all)}
	if status, err := linux.ReadProcessStatus(root, pid); err == nil {
		s.Name = status["Name"]
	}
	s.readEnviron(root)
	maps := make([]mapped, 0, len(all))
	sizes := map[string]int{}
	for _, m := range all {
		one := mapped{m, linux.SMaps{}}
		one.account.Rss = one.size()
		maps = append(maps, one)
		if m.File && slices.Contains(weightSuffixes, path.Ext(m.Name)) {
			if _, known := sizes[m.Name]; !known {
				s.Weights = append(s.Weights, MappedFile{Path: m.Name})
			}
			sizes[m.Name] += one.size()
		}
	}
	for i := range s.Weights {
		s.Weights[i].Size = sizes[s.Weights[i].Path]
	}
	s.count(maps)
	return s, true
}

// usesDriver reports whether a mapping is of the CUDA driver.
func usesDriver(m linux.Mapping) bool {
	return m.File && (strings.HasPrefix(m.Name, "/dev/nvidia") || strings.HasPrefix(path.Base(m.Name), "libcuda.so"))
}
