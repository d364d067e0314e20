package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/units"
)

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
