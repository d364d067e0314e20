package cudart

import (
	"bytes"
	"fmt"
	"sync"
	"unsafe"
)

// A Device is one GPU as this process sees it. Its methods select it on the
// calling thread themselves and may be called from any goroutine.
type Device struct {
	rt       *Runtime
	ordinal  int
	name     string
	uuid     string
	pciBusID string
	events   eventPool
	drainer  drainer

	peersMu sync.Mutex
	peers   map[*Device]*peerAccess
}

// An Attr is a cudaDeviceAttr: a number that tells a property of a device.
type Attr int

// The attributes that decide how host memory and copies behave.
const (
	AttrMultiProcessorCount                    Attr = 16
	AttrIntegrated                             Attr = 18 // shares memory with the host
	AttrCanMapHostMemory                       Attr = 19
	AttrComputeMode                            Attr = 20
	AttrConcurrentKernels                      Attr = 31
	AttrECCEnabled                             Attr = 32
	AttrPCIBus                                 Attr = 33
	AttrPCIDevice                              Attr = 34
	AttrAsyncEngineCount                       Attr = 40 // copies that can run beside kernels and each other
	AttrUnifiedAddressing                      Attr = 41
	AttrPCIDomain                              Attr = 50
	AttrComputeCapabilityMajor                 Attr = 75
	AttrComputeCapabilityMinor                 Attr = 76
	AttrStreamPrioritiesSupported              Attr = 78
	AttrManagedMemory                          Attr = 83
	AttrMultiGPUBoard                          Attr = 84
	AttrPageableMemoryAccess                   Attr = 88
	AttrConcurrentManagedAccess                Attr = 89
	AttrCanUseHostPointerForRegisteredMem      Attr = 91
	AttrHostRegisterSupported                  Attr = 99
	AttrPageableMemoryAccessUsesHostPageTables Attr = 100
	AttrHostRegisterReadOnlySupported          Attr = 113
	AttrMemoryPoolsSupported                   Attr = 115
	AttrHostNumaID                             Attr = 134
)

// propertiesSize is more than cudaGetDeviceProperties wrote in any version
// seen (1032 bytes declared at most). Only the name and the UUID behind it are
// read from there: they lie at the same place in 11.x, 12.x and 13.x, and the
// rest does not.
const (
	propertiesSize = 4096
	nameSize       = 256
	uuidSize       = 16
)

// newDevice reads what identifies device i. None of it makes a context.
func (rt *Runtime) newDevice(i int) (*Device, error) {
	d := &Device{rt: rt, ordinal: i}
	d.drainer.dev = d
	f := rt.begin()
	defer rt.end(f)

	properties := make([]byte, propertiesSize)
	f.host = unsafe.Pointer(&properties[0])
	f.args[0], f.args[1] = uintptr(f.host), uintptr(i)
	if code := rt.ask(fnGetDeviceProperties, f); code != Success {
		return nil, rt.errorf(fnGetDeviceProperties, code, "device %d", i)
	}
	d.name = cString(properties[:nameSize])
	u := properties[nameSize : nameSize+uuidSize]
	d.uuid = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])

	id := make([]byte, 32)
	f.host = unsafe.Pointer(&id[0])
	f.args[0], f.args[1], f.args[2] = uintptr(f.host), uintptr(len(id)), uintptr(i)
	if code := rt.ask(fnDeviceGetPCIBusID, f); code != Success {
		return nil, rt.errorf(fnDeviceGetPCIBusID, code, "device %d", i)
	}
	d.pciBusID = cString(id)
	return d, nil
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// Runtime returns the library that the device belongs to.
func (d *Device) Runtime() *Runtime { return d.rt }

// Ordinal returns the device's number in this process.
func (d *Device) Ordinal() int { return d.ordinal }

// Name returns the product name, such as "NVIDIA H200".
func (d *Device) Name() string { return d.name }

// UUID returns the identity of the GPU, as nvidia-smi -L prints it.
func (d *Device) UUID() string { return d.uuid }

// PCIBusID returns the address as domain:bus:device.function, such as
// "0000:00:06.0": it names the GPU whatever CUDA_VISIBLE_DEVICES says.
func (d *Device) PCIBusID() string { return d.pciBusID }

// String names the device in messages.
func (d *Device) String() string { return fmt.Sprintf("device %d (%s)", d.ordinal, d.name) }

// Attribute returns a property of the device (cudaDeviceGetAttribute).
func (d *Device) Attribute(a Attr) (int, error) {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(a), uintptr(d.ordinal)
	if code := d.rt.ask(fnDeviceGetAttribute, f); code != Success {
		return 0, d.rt.errorf(fnDeviceGetAttribute, code, "attribute %d of %v", a, d)
	}
	return f.outInt(0), nil
}

// MemInfo returns the device's free and total memory in bytes
// (cudaMemGetInfo).
func (d *Device) MemInfo() (free, total int, err error) {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), f.outPtr(1)
	if code := d.guard(fnMemGetInfo, f); code != Success {
		return 0, 0, d.rt.errorf(fnMemGetInfo, code, "memory of %v", d)
	}
	return int(f.out[0]), int(f.out[1]), nil
}

// StreamPriorities returns the lowest and the highest priority that streams of
// the device can have; higher priorities are smaller numbers
// (cudaDeviceGetStreamPriorityRange).
func (d *Device) StreamPriorities() (lowest, highest int, err error) {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), f.outPtr(1)
	if code := d.guard(fnDeviceGetStreamPriorityRange, f); code != Success {
		return 0, 0, d.rt.errorf(fnDeviceGetStreamPriorityRange, code, "%v", d)
	}
	return f.outInt(0), f.outInt(1), nil
}
