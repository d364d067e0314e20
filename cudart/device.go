package cudart

import (
	"bytes"
	"fmt"
	"sync"
	"unsafe"
)

// A Device is a GPU that this process sees. Its methods may be called from any
// goroutine: each selects the device on its thread.
type Device struct {
	rt       *Runtime
	ordinal  int
	name     string
	uuid     string
	pciBusID string
	waits    waits

	mu      sync.Mutex // of what follows; not held during calls into the library
	events  eventPool
	drainer drainer
}

// An Attr is a cudaDeviceAttr: the number of a property of a device, for
// [Device.Attribute]. Any value of CUDA's enumeration may be used, not only the
// constants here.
type Attr int

// The attributes that decide how host memory and copies behave. Their names are
// those of CUDA without cudaDevAttr. Attributes without a comment are 1 for yes and
// 0 for no.
const (
	AttrMultiProcessorCount                    Attr = 16 // number of multiprocessors
	AttrIntegrated                             Attr = 18 // the device shares memory with the host
	AttrCanMapHostMemory                       Attr = 19 // kernels can access pinned host memory
	AttrComputeMode                            Attr = 20 // 0 default, 2 prohibited, 3 one process only
	AttrConcurrentKernels                      Attr = 31
	AttrECCEnabled                             Attr = 32 // memory has error correction, switched on
	AttrPCIBus                                 Attr = 33 // PCI bus number
	AttrPCIDevice                              Attr = 34 // PCI device number
	AttrAsyncEngineCount                       Attr = 40 // copy engines: copies that can run at once
	AttrUnifiedAddressing                      Attr = 41 // one address space for host and devices
	AttrPCIDomain                              Attr = 50 // PCI domain number
	AttrComputeCapabilityMajor                 Attr = 75 // 9 of 9.0
	AttrComputeCapabilityMinor                 Attr = 76 // 0 of 9.0
	AttrStreamPrioritiesSupported              Attr = 78
	AttrManagedMemory                          Attr = 83 // Device.MallocManaged works
	AttrPageableMemoryAccess                   Attr = 88 // the device can access memory that is not pinned
	AttrConcurrentManagedAccess                Attr = 89 // host and device can access managed memory at once
	AttrCanUseHostPointerForRegisteredMem      Attr = 91 // the device's address of registered memory is the host's
	AttrHostRegisterSupported                  Attr = 99
	AttrPageableMemoryAccessUsesHostPageTables Attr = 100 // Device.HostRegister does not page-lock then
	AttrHostRegisterReadOnlySupported          Attr = 113 // HostRegisterReadOnly works
	AttrMemoryPoolsSupported                   Attr = 115 // Stream.Malloc works
	AttrHostNumaID                             Attr = 134 // nearest NUMA node of the host, -1 if unknown
)

// propertiesSize is more than cudaGetDeviceProperties writes in any version seen
// (the struct has 1032 bytes at most). Only the name and the UUID after it are read:
// they are at the same place in 11.x, 12.x and 13.x, and the rest is not.
const (
	propertiesSize = 4096
	nameSize       = 256
	uuidSize       = 16
)

// newDevice reads name, UUID and PCI address of device i (cudaGetDeviceProperties,
// cudaDeviceGetPCIBusId). Neither call makes a context.
func (rt *Runtime) newDevice(i int) (*Device, error) {
	d := &Device{rt: rt, ordinal: i}
	d.waits.init(rt)
	f := rt.begin()
	defer rt.end(f)

	properties := make([]byte, propertiesSize)
	f.host = unsafe.Pointer(&properties[0])
	f.args[0], f.args[1] = uintptr(f.host), uintptr(i)
	if code := rt.callAnyDevice(fnGetDeviceProperties, f); code != success {
		return nil, rt.errorf(fnGetDeviceProperties, code, "device %d", i)
	}
	d.name = cString(properties[:nameSize])
	u := properties[nameSize : nameSize+uuidSize]
	d.uuid = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])

	id := make([]byte, 32)
	f.host = unsafe.Pointer(&id[0])
	f.args[0], f.args[1], f.args[2] = uintptr(f.host), uintptr(len(id)), uintptr(i)
	if code := rt.callAnyDevice(fnDeviceGetPCIBusID, f); code != success {
		return nil, rt.errorf(fnDeviceGetPCIBusID, code, "device %d", i)
	}
	d.pciBusID = cString(id)
	return d, nil
}

func cString(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}

// zeroDevice stands for nil.
var zeroDevice = &Device{ordinal: -1}

func (d *Device) made() bool { return d != nil && d.rt != nil }

// orNone returns d, or zeroDevice for nil and for a zero value.
func (d *Device) orNone() *Device {
	if d.made() {
		return d
	}
	return zeroDevice
}

// Runtime returns the Runtime of the device, nil for a nil device.
func (d *Device) Runtime() *Runtime { return d.orNone().rt }

// Ordinal returns the device's number in this process, from 0, and -1 for a nil device.
func (d *Device) Ordinal() int { return d.orNone().ordinal }

// Name returns the product name, such as "NVIDIA H200".
func (d *Device) Name() string { return d.orNone().name }

// UUID returns the UUID of the GPU, as nvidia-smi -L prints it:
// "GPU-5d4c8b1e-…".
func (d *Device) UUID() string { return d.orNone().uuid }

// PCIBusID returns the PCI address as domain:bus:device.function, such as
// "0000:00:06.0". Unlike the ordinal it does not depend on CUDA_VISIBLE_DEVICES.
func (d *Device) PCIBusID() string { return d.orNone().pciBusID }

// String returns the ordinal and the name, for messages: "device 0 (NVIDIA H200)".
func (d *Device) String() string {
	if !d.made() {
		return "no device"
	}
	return fmt.Sprintf("device %d (%s)", d.ordinal, d.name)
}

// Attribute returns a property of the device (cudaDeviceGetAttribute). The error
// wraps [ErrInvalidValue] if the library does not have the attribute. The call makes
// no context.
func (d *Device) Attribute(a Attr) (int, error) {
	if !d.made() {
		return 0, notMade(fnDeviceGetAttribute)
	}
	f := d.rt.begin()
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(a), uintptr(d.ordinal)
	out, err := d.rt.finish(fnDeviceGetAttribute, f, d.rt.callAnyDevice(fnDeviceGetAttribute, f), func() string { return fmt.Sprintf("attribute %d of %v", a, d) })
	return out.int(0), err
}

// MemInfo returns the bytes of device memory that are free for all processes, and
// all that the device has (cudaMemGetInfo). The call makes a context, which itself
// takes some hundred MiB.
func (d *Device) MemInfo() (free, total int, err error) {
	f := d.begin(nil)
	f.args[0], f.args[1] = f.outPtr(0), f.outPtr(1)
	out, err := d.do(fnMemGetInfo, f, func() string { return fmt.Sprintf("memory of %v", d) })
	if err == nil && out[0] > out[1] {
		return 0, 0, fmt.Errorf("cudaMemGetInfo: memory of %v: %d bytes are free of %d", d, out[0], out[1])
	}
	return int(out[0]), int(out[1]), err
}
