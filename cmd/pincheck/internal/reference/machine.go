package reference

import (
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

// Values of Machine.Host.
const (
	bareMetal      = "bare metal"
	virtualMachine = "virtual machine"
)

// kernelVersion is the part of a release that Linux has given it: what follows may name who built it.
var kernelVersion = regexp.MustCompile(`^[0-9]+(\.[0-9]+)+`)

// MachineOf returns the type of machine of a GPU with its link, which is the zero value if it is unknown. Host is nil
// if nothing is known of it.
func MachineOf(host *hostinfo.Host, gpu string, link hostinfo.PCIe) Machine {
	m := Machine{GPU: gpu}
	switch {
	case Coherent(gpu):
		m.Link = nvlinkC2C
	case link.Rate() > 0:
		m.Link = link.String()
	}
	if host == nil {
		return m
	}
	m.CPU, m.Sockets, m.Host = host.CPU.Model, host.CPU.Sockets, bareMetal
	if host.Virt.VM {
		m.Host = virtualMachine
	}
	m.Driver, m.Kernel = host.NVIDIA.DriverVersion, kernelVersion.FindString(host.Kernel.Release)
	return m
}

// coherent are the GPUs that share an NVLink-C2C with their processor.
var coherent = [][]string{{"GH200"}, {"GB200"}, {"GB300"}, {"GB10"}}

// Coherent reports whether a GPU shares an NVLink-C2C with its processor: its copies do
// not go over the PCI Express link that the host shows.
func Coherent(gpu string) bool {
	has := wordsOf(gpu)
	return slices.ContainsFunc(coherent, func(words []string) bool { return named(words, has) })
}

// wordsOf returns the words of a product's name.
func wordsOf(name string) []string {
	return strings.FieldsFunc(name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
}

// named reports whether a product's name has all of these words: NVIDIA A100-SXM4-80GB is an A100,
// NVIDIA RTX A1000 is not.
func named(words, has []string) bool {
	return len(words) > 0 && !slices.ContainsFunc(words, func(w string) bool { return !slices.Contains(has, w) })
}
