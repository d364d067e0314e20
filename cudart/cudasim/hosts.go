package cudasim

import (
	"iter"

	"github.com/gopinned/pinned/cudart"
)

// ConfidentialComputing is a host with confidential computing (CC-On): every
// cudaHostRegister fails with cudaErrorNotSupported, cudaHostAlloc works.
func ConfidentialComputing() Config { return Config{NoRegister: true} }

// WSL is the Windows Subsystem for Linux, where 1 GiB can be pinned in all, however
// much memory the host has, and the device's address of registered memory is not the
// host's.
func WSL() Config {
	return withAttributes(Config{MaxPinned: 1 << 30}, map[cudart.Attr]int{
		cudart.AttrCanUseHostPointerForRegisteredMem: 0,
		cudart.AttrConcurrentManagedAccess:           0,
	})
}

// Driver580 is a host with a driver of release 580 or later, which refuses
// registrations of 512 GiB and more.
func Driver580() Config { return Config{MaxRegister: 512<<30 - 1} }

// MaxMapCount is a host on which the number of mappings limits that of registrations
// (vm.max_map_count).
func MaxMapCount() Config { return Config{MaxRegistrations: 65_536} }

// Linux611 is a host with Linux 6.11, 6.12 or 6.13, where pinning more than 2 GiB at
// once fails and leaks the memory until the next boot. The release that the kernel
// reports is not simulated.
func Linux611() Config { return Config{LeakAbove: 2 << 30} }

// SharedPageTables is a host such as GH200, whose GPU accesses all host memory by the
// host's page tables. Copies of memory that is not registered are as fast as others,
// and as asynchronous.
func SharedPageTables() Config {
	return withAttributes(Config{}, map[cudart.Attr]int{
		cudart.AttrPageableMemoryAccess:                   1,
		cudart.AttrPageableMemoryAccessUsesHostPageTables: 1,
	})
}

// NoHostRegister is a host with a GPU that cannot register memory, as some
// integrated ones cannot: the attribute HostRegisterSupported is 0.
func NoHostRegister() Config {
	return withAttributes(Config{}, map[cudart.Attr]int{cudart.AttrHostRegisterSupported: 0})
}

func withAttributes(c Config, attributes map[cudart.Attr]int) Config {
	c.Devices = []DeviceConfig{{Attributes: attributes}}
	return c
}

// Hosts returns all of these kinds by name, for tests that must pass on each of them.
func Hosts() iter.Seq2[string, Config] {
	return func(yield func(string, Config) bool) {
		_ = yield("confidential computing", ConfidentialComputing()) &&
			yield("WSL", WSL()) &&
			yield("driver 580", Driver580()) &&
			yield("vm.max_map_count", MaxMapCount()) &&
			yield("Linux 6.11", Linux611()) &&
			yield("shared page tables", SharedPageTables()) &&
			yield("no cudaHostRegister", NoHostRegister())
	}
}
