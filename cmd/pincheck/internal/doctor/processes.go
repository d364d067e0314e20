package doctor

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/procmem"
	"github.com/gopinned/pinned/hostmem/shm"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/units"
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

// SharedMemory is memory of package hostmem/shm, which processes share and which may outlive them.
type SharedMemory struct {
	Path     string  `json:"path"`
	Size     int     `json:"size_bytes"`
	Age      float64 `json:"age_s"` // since it was made
	UID      int     `json:"uid"`   // of the user that it belongs to
	Kept     bool    `json:"kept"`  // it stays when no process has it open
	Complete bool    `json:"complete"`
	Users    []int   `json:"pids,omitempty"` // processes that have it open and that this one can see
}

// maxShared limits how many are listed.
const maxShared = 64

// SharedMemoryIn returns the shared memory in a directory that this user may read, the largest first.
func SharedMemoryIn(dir string, now time.Time) (all []SharedMemory) {
	found, _ := shm.List(dir) // no directory, no memory
	for _, m := range found {
		all = append(all, SharedMemory{
			Path: m.Path, Size: m.Len, Age: now.Sub(m.Created).Seconds(), UID: m.UID, Kept: m.Keep,
			Complete: m.Content.Complete, Users: m.Users,
		})
	}
	slices.SortStableFunc(all, func(a, b SharedMemory) int { return cmp.Compare(b.Size, a.Size) })
	return all[:min(len(all), maxShared)]
}

// sharedMemory returns how much of it there is, how much of that processes have open, and describes the largest pieces.
func (f *Facts) sharedMemory() (bytes, used int, texts []string) {
	for _, m := range f.Shared {
		bytes += max(0, m.Size)
		if len(m.Users) > 0 {
			used += max(0, m.Size)
		}
		if len(texts) < maxPinners {
			texts = append(texts, m.String())
		}
	}
	return bytes, used, texts
}

// String describes it in a sentence.
func (m SharedMemory) String() string {
	state := "no process is seen to have it open"
	if n := len(m.Users); n > 0 {
		state = fmt.Sprintf("%s open, such as process %d", units.Things(n, "process has it", "processes have it"), m.Users[0])
	}
	if m.Kept {
		state += ", and it stays until it is removed"
	}
	return fmt.Sprintf("%s is shared memory of %s, %s old, of user %d: %s", m.Path, units.Bytes(m.Size), units.Seconds(m.Age), m.UID, state)
}

// wasteChecks find memory that is pinned and not used.
var wasteChecks = []Check{
	{ID: "rounded_pins", Host: roundedPins},
}

// minRounded is from where on rounding is worth a change.
const minRounded = 1 << 30

func roundedPins(f *Facts) (out []Finding) {
	for _, p := range f.Processes {
		if p.Rounded < minRounded {
			continue
		}
		one := Finding{
			Summary:  fmt.Sprintf("process %d (%s) pins %s in blocks rounded to powers of two", p.PID, p.Name, units.Bytes(p.Rounded)),
			Evidence: []string{fmt.Sprintf("/proc/%d/smaps: %s, %s pinned in total", p.PID, units.Things(p.RoundedBlocks, "rounded block", "rounded blocks"), units.Bytes(p.Pinned))},
			values:   findings.Values{"size": units.Bytes(p.Rounded / 2)},
		}
		var names []string
		for _, fw := range p.Frameworks {
			names = append(names, fw.Name)
			if fw.Rounds && fw.Setting != "" && !fw.Set {
				one.because, one.values["the framework"] = "setting", fw.Name+": "+fw.Setting
			}
		}
		if len(names) > 0 {
			one.Evidence = append(one.Evidence, "It uses "+strings.Join(names, ", "))
		}
		out = append(out, one)
	}
	return out
}

// loadChecks judge where programs load model weights from, and how.
var loadChecks = []Check{
	{ID: "weights_on_network", Suppresses: []string{"weights_mapped"}, Host: mappedWeights(true)},
	{ID: "weights_mapped", Host: mappedWeights(false)},
	{ID: "small_read_ahead", Host: smallReadAhead},
}

// weights describes a mapped file of weights.
func (f *Facts) weights(p Process, w WeightFile) string {
	text := fmt.Sprintf("Process %d (%s): %s, %s", p.PID, p.Name, w.Path, units.Bytes(w.Size))
	if w.Resident > 0 {
		text += fmt.Sprintf(", %s of it in memory", units.Bytes(w.Resident))
	}
	if m, ok := f.Host.Mount(w.Path); ok {
		text += fmt.Sprintf(", %s at %s", m.Type, m.Point)
	}
	return text
}

// mappedWeights returns a check for files of weights of at least 1 GiB that processes have mapped.
func mappedWeights(network bool) func(*Facts) []Finding {
	return func(f *Facts) []Finding {
		var list []string
		for _, p := range f.Processes {
			for _, w := range p.Weights {
				if m, ok := f.Host.Mount(w.Path); w.Size >= 1<<30 && (ok && m.Network) == network {
					list = append(list, f.weights(p, w))
				}
			}
		}
		return seen(list[:min(len(list), 4)]...)
	}
}

// minReadAhead is what network file systems need: their own value is often 128 KiB.
const minReadAhead = 1 << 20

// smallReadAhead judges mounts of other machines, and those that hold weights in use.
func smallReadAhead(f *Facts) []Finding {
	var list []string
	for _, m := range f.Host.Mounts {
		ahead, ok := m.ReadAhead.Finite()
		used := slices.ContainsFunc(f.Processes, func(p Process) bool {
			return slices.ContainsFunc(p.Weights, func(w WeightFile) bool {
				at, found := f.Host.Mount(w.Path)
				return found && at.Point == m.Point
			})
		})
		if ok && ahead < minReadAhead && (m.Network && strings.HasPrefix(m.Type, "nfs") || used && m.Network) {
			list = append(list, fmt.Sprintf("%s (%s): %s", m.Point, m.Type, units.Bytes(ahead)))
		}
	}
	return seen(list[:min(len(list), 4)]...)
}
