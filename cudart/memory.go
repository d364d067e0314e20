package cudart

import (
	"unsafe"
)

// A DevPtr is an address in a device's memory. The CPU cannot follow it.
type DevPtr uintptr

// Malloc allocates n bytes of device memory (cudaMalloc).
func (d *Device) Malloc(n int) (DevPtr, error) { return d.malloc(nil, n) }

// Free gives memory of [Device.Malloc] back after waiting for the device's
// work (cudaFree). Memory of [Device.MallocManaged] is freed so as well. Zero
// is ignored.
func (d *Device) Free(p DevPtr) error { return d.free(nil, p) }

// Malloc allocates n bytes of device memory in stream order: work that is
// queued on the stream later may use them at once (cudaMallocAsync).
func (s *Stream) Malloc(n int) (DevPtr, error) { return s.dev.malloc(s, n) }

// Free gives memory back once the work queued on the stream so far is done
// (cudaFreeAsync). Zero is ignored.
func (s *Stream) Free(p DevPtr) error { return s.dev.free(s, p) }

func (d *Device) malloc(s *Stream, n int) (DevPtr, error) {
	fn := fnMalloc
	if s != nil {
		fn = fnMallocAsync
	}
	if n <= 0 {
		return 0, invalid(fn, "size %d: must be positive", n)
	}
	f := d.begin(s)
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), s.arg()
	if code := d.guard(fn, f); code != Success {
		return 0, d.rt.errorf(fn, code, "%d bytes on %v", n, d)
	}
	return DevPtr(f.out[0]), nil
}

func (d *Device) free(s *Stream, p DevPtr) error {
	if p == 0 {
		return nil
	}
	fn := fnFree
	if s != nil {
		fn = fnFreeAsync
	}
	f := d.begin(s)
	defer d.rt.end(f)
	f.args[0], f.args[1] = uintptr(p), s.arg()
	if code := d.guard(fn, f); code != Success {
		return d.rt.errorf(fn, code, "%#x on %v", uintptr(p), d)
	}
	return nil
}

// A MemoryType tells what CUDA knows of an address.
type MemoryType int

// The values of cudaMemoryType.
const (
	MemoryUnregistered MemoryType = iota // ordinary host memory
	MemoryHost                           // pinned: registered or from cudaHostAlloc
	MemoryDevice
	MemoryManaged
)

// String names the type.
func (t MemoryType) String() string {
	switch t {
	case MemoryUnregistered:
		return "unregistered"
	case MemoryHost:
		return "host"
	case MemoryDevice:
		return "device"
	case MemoryManaged:
		return "managed"
	}
	return "unknown"
}

// PointerAttributes is what CUDA knows of an address.
type PointerAttributes struct {
	Type      MemoryType
	Device    int     // the device that it belongs to or was registered on
	DevicePtr DevPtr  // how the device reaches it, 0 if it cannot
	HostPtr   uintptr // how the host reaches it, 0 if it cannot
}

// cPointerAttributes is cudaPointerAttributes: 11.x and 12.x write the first
// 24 bytes, 13.x 88.
type cPointerAttributes struct {
	kind, device int32
	devicePtr    uint64
	hostPtr      uint64
	reserved     [8]uint64
}

// PointerAttributes tells what CUDA knows of an address of any kind
// (cudaPointerGetAttributes). Memory that CUDA does not know is
// MemoryUnregistered.
func (d *Device) PointerAttributes(address uintptr) (PointerAttributes, error) {
	var c cPointerAttributes
	f := d.rt.begin()
	defer d.rt.end(f)
	f.host = unsafe.Pointer(&c)
	f.args[0], f.args[1] = uintptr(f.host), address
	if code := d.guard(fnPointerGetAttributes, f); code != Success {
		return PointerAttributes{}, d.rt.errorf(fnPointerGetAttributes, code, "address %#x", address)
	}
	return PointerAttributes{
		Type: MemoryType(c.kind), Device: int(c.device),
		DevicePtr: DevPtr(c.devicePtr), HostPtr: uintptr(c.hostPtr),
	}, nil
}
