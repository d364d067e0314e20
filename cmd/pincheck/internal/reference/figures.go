package reference

import (
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A figure is what was reported of a GPU, or of any GPU on a link, in GB/s: the lowest
// and the highest. The lowest is what can be expected.
type figure struct {
	gpu      string        // words of its name; empty for any
	link     hostinfo.PCIe // zero for what is no PCI Express link
	coherent bool          // NVLink-C2C
	up, down [2]float64
	both     [2]float64 // the sum of both directions at once
	// size is that of the copies if the figure is for this size alone; 0 means 16 MiB
	// and more.
	size int
	from string
}

const (
	gen3 = 8
	gen4 = 16
	gen5 = 32
)

const (
	fromH200   = "nvbandwidth 0.8 and C on an H200, 2026-11-20"
	fromHealth = "NVIDIA/cuda-samples #357, Azure/azurehpc-health-checks"
	fromA100   = "NVIDIA/nvbandwidth README and #42"
)

// coherent are the GPUs that share an NVLink-C2C with their processor.
var coherent = []string{"GH200", "GB200", "GB300", "GB10"}

// figures are in the order in which they are looked up: of a GPU first, then of a link.
var figures = []figure{
	{gpu: "H200", link: hostinfo.PCIe{Speed: gen5, Width: 16}, up: [2]float64{55.4, 55.5}, down: [2]float64{55.4, 55.4}, both: [2]float64{98.8, 99.3}, from: fromH200},
	{gpu: "H200", link: hostinfo.PCIe{Speed: gen5, Width: 16}, size: 4 << 10, up: [2]float64{1.1, 1.1}, from: fromH200},
	{gpu: "H200", link: hostinfo.PCIe{Speed: gen5, Width: 16}, size: 64 << 10, up: [2]float64{13.4, 13.4}, from: fromH200},
	{gpu: "H200", link: hostinfo.PCIe{Speed: gen5, Width: 16}, size: 1 << 20, up: [2]float64{45.5, 45.5}, from: fromH200},
	{gpu: "H200", link: hostinfo.PCIe{Speed: gen5, Width: 16}, size: 4 << 20, up: [2]float64{52.6, 52.6}, from: fromH200},
	{gpu: "H100", link: hostinfo.PCIe{Speed: gen5, Width: 16}, up: [2]float64{55, 57}, down: [2]float64{55, 55}, from: fromHealth},
	{gpu: "RTX 5090", link: hostinfo.PCIe{Speed: gen5, Width: 16}, up: [2]float64{56.3, 56.3}, down: [2]float64{57.3, 57.3}, both: [2]float64{101.8, 101.8}, from: "tinygrad/open-gpu-kernel-modules #29"},
	{gpu: "A100", link: hostinfo.PCIe{Speed: gen4, Width: 16}, up: [2]float64{25, 26}, down: [2]float64{25, 26}, from: fromA100},
	{gpu: "RTX 4090", link: hostinfo.PCIe{Speed: gen4, Width: 16}, up: [2]float64{23.9, 27}, from: "NVIDIA/nvbandwidth #15"},
	{gpu: "P100", link: hostinfo.PCIe{Speed: gen3, Width: 16}, up: [2]float64{12.1, 12.1}, down: [2]float64{12.9, 12.9}, from: "mpicbg-scicomp/gearshifft #82"},
	{gpu: "GH200", coherent: true, up: [2]float64{346, 346}, from: "NVIDIA/nvbandwidth #23"},
	{gpu: "GB200", coherent: true, down: [2]float64{330, 330}, from: "pytorch/torchtitan #3519, on the GPU's own NUMA node"},

	{link: hostinfo.PCIe{Speed: gen5, Width: 16}, up: [2]float64{55, 57}, down: [2]float64{55, 57.3}, from: "H100, H200 and RTX 5090; " + fromHealth},
	{link: hostinfo.PCIe{Speed: gen4, Width: 16}, up: [2]float64{23.9, 27}, down: [2]float64{25, 26}, from: "A100 and RTX 4090; " + fromA100 + ", #15"},
	{link: hostinfo.PCIe{Speed: gen3, Width: 16}, up: [2]float64{12.1, 12.1}, down: [2]float64{12.9, 12.9}, from: "P100; mpicbg-scicomp/gearshifft #82"},
}

// applies reports whether a figure is of this GPU on this link, for copies of this size.
func (f figure) applies(gpu string, link hostinfo.PCIe, size int) bool {
	if !named([]string{f.gpu}, gpu) || !f.coherent && f.link != link {
		return false
	}
	if f.size > 0 {
		return size == f.size
	}
	return size >= largeCopy
}

// of returns the range of a direction, zeros if nothing was reported.
func (f figure) of(direction string) (low, high float64) {
	switch direction {
	case result.HostToDevice:
		return f.up[0], f.up[1]
	case result.DeviceToHost:
		return f.down[0], f.down[1]
	case result.Both:
		return f.both[0], f.both[1]
	}
	return 0, 0
}

func (f figure) source(low, high float64) string {
	link := "NVLink-C2C"
	if !f.coherent {
		link = f.link.String()
	}
	if f.gpu != "" {
		link = f.gpu + " on " + link
	}
	reported := fmt.Sprintf("%g", low)
	if high != low {
		reported = fmt.Sprintf("%g to %g", low, high)
	}
	return fmt.Sprintf("%s: %s GB/s reported (%s)", link, reported, f.from)
}

// named reports whether a product's name has all the words of one of these: NVIDIA
// A100-SXM4-80GB is an A100, NVIDIA RTX A1000 is not.
func named(any []string, product string) bool {
	words := strings.FieldsFunc(product, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	return slices.ContainsFunc(any, func(gpu string) bool {
		for _, w := range strings.Fields(gpu) {
			if !slices.Contains(words, w) {
				return false
			}
		}
		return gpu != ""
	})
}

// Coherent reports whether a GPU shares an NVLink-C2C with its processor: its copies do
// not go over the PCI Express link that the host shows.
func Coherent(gpu string) bool { return named(coherent, gpu) }
