package linux

import (
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// A PCIAddress is the location of a device on the PCI buses. Addresses compare with ==,
// however they were written.
type PCIAddress struct {
	// Domain has up to 32 bits: those of Intel VMD and of some arm64 and cloud
	// hosts start at 10000 hexadecimal.
	Domain   uint32
	Bus      uint8
	Device   uint8 // 5 bits
	Function uint8 // 3 bits
}

// ParsePCIAddress parses domain:bus:device.function in hexadecimal, upper or lower
// case, with a domain of four to eight digits: the kernel writes 0000:c3:00.0 and
// 10000:e1:00.0, CUDA and nvidia-smi also 00000000:C3:00.0.
func ParsePCIAddress(text string) (PCIAddress, error) {
	bad := func() (PCIAddress, error) {
		return PCIAddress{}, &SyntaxError{Text: text, Want: "a PCI address, such as 0000:c3:00.0"}
	}
	domain, rest, _ := strings.Cut(text, ":")
	bus, rest, _ := strings.Cut(rest, ":")
	device, function, _ := strings.Cut(rest, ".")
	if len(domain) < 4 || len(domain) > 8 || len(bus) != 2 || len(device) != 2 || len(function) != 1 {
		return bad()
	}
	var n [4]uint64
	for i, field := range []struct {
		text string
		bits int
	}{{domain, 32}, {bus, 8}, {device, 5}, {function, 3}} {
		var err error
		if n[i], err = strconv.ParseUint(field.text, 16, field.bits); err != nil {
			return bad()
		}
	}
	return PCIAddress{uint32(n[0]), uint8(n[1]), uint8(n[2]), uint8(n[3])}, nil
}

// String returns the address as /sys/bus/pci/devices names it: the domain has four
// digits, or more where it needs them.
func (a PCIAddress) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.Domain, a.Bus, a.Device, a.Function)
}

// PCIDevices is the directory of all PCI devices, each named by its address.
const PCIDevices = "sys/bus/pci/devices"

// Dir returns the device's directory in /sys, as a path below the root.
func (a PCIAddress) Dir() string { return path.Join(PCIDevices, a.String()) }

// NUMANode reads the node that the device is attached to, [NoNode] where the
// firmware names none.
func (a PCIAddress) NUMANode(fsys fs.FS) (NUMANode, error) {
	n, err := ReadInt(fsys, path.Join(a.Dir(), "numa_node"))
	return NUMANode(n), err
}

// LocalCPUs reads the CPUs of the device's NUMA node.
func (a PCIAddress) LocalCPUs(fsys fs.FS) (CPUList, error) {
	return ReadCPUList(fsys, path.Join(a.Dir(), "local_cpulist"))
}
