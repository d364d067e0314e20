package cudart

import "unsafe"

// HostAllocFlags are the flags of cudaHostAlloc.
type HostAllocFlags uint32

// The values of cudaHostAlloc's flags.
const (
	HostAllocDefault       HostAllocFlags = 0
	HostAllocPortable      HostAllocFlags = 1 // pinned for all devices
	HostAllocMapped        HostAllocFlags = 2 // reachable from the device
	HostAllocWriteCombined HostAllocFlags = 4 // very slow to read for the CPU
)

// HostRegisterFlags are the flags of cudaHostRegister.
type HostRegisterFlags uint32

// The values of cudaHostRegister's flags.
const (
	HostRegisterDefault  HostRegisterFlags = 0
	HostRegisterPortable HostRegisterFlags = 1
	HostRegisterMapped   HostRegisterFlags = 2
	HostRegisterIOMemory HostRegisterFlags = 4
	HostRegisterReadOnly HostRegisterFlags = 8
)

// HostAlloc allocates n bytes of pinned host memory (cudaHostAlloc). It is
// here for comparison: package hostmem pins several times as fast and keeps
// exactly what is asked.
func (d *Device) HostAlloc(n int, flags HostAllocFlags) (unsafe.Pointer, error) {
	if n <= 0 {
		return nil, invalid(fnHostAlloc, "size %d: must be positive", n)
	}
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), uintptr(flags)
	if code := d.guard(fnHostAlloc, f); code != Success {
		return nil, d.rt.errorf(fnHostAlloc, code, "%d bytes, flags %#x, for %v", n, uint32(flags), d)
	}
	return *(*unsafe.Pointer)(unsafe.Pointer(&f.out[0])), nil
}

// FreeHost gives memory of [Device.HostAlloc] back (cudaFreeHost). Nil is
// ignored.
func (d *Device) FreeHost(p unsafe.Pointer) error {
	if p == nil {
		return nil
	}
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0] = uintptr(p)
	if code := d.guard(fnFreeHost, f); code != Success {
		return d.rt.errorf(fnFreeHost, code, "%p", p)
	}
	return nil
}

// HostRegister pins n bytes of mapped memory at p, which need not be aligned
// (cudaHostRegister). The memory must not be unmapped before
// [Device.HostUnregister], and must not be Go heap memory: the garbage
// collector would give it back while the GPU still writes there.
func (d *Device) HostRegister(p unsafe.Pointer, n int, flags HostRegisterFlags) error {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = uintptr(p), uintptr(n), uintptr(flags)
	if code := d.guard(fnHostRegister, f); code != Success {
		return d.rt.errorf(fnHostRegister, code, "%d bytes at %p, flags %#x, for %v", n, p, uint32(flags), d)
	}
	return nil
}

// HostUnregister undoes [Device.HostRegister]; p is the exact address that was
// registered (cudaHostUnregister).
func (d *Device) HostUnregister(p unsafe.Pointer) error {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0] = uintptr(p)
	if code := d.guard(fnHostUnregister, f); code != Success {
		return d.rt.errorf(fnHostUnregister, code, "%p", p)
	}
	return nil
}

// HostFlags returns the flags with which pinned memory was made
// (cudaHostGetFlags).
func (d *Device) HostFlags(p unsafe.Pointer) (uint32, error) {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1] = f.outPtr(0), uintptr(p)
	if code := d.guard(fnHostGetFlags, f); code != Success {
		return 0, d.rt.errorf(fnHostGetFlags, code, "%p", p)
	}
	return uint32(f.outInt(0)), nil
}

// HostDevicePointer returns the address by which the device reaches pinned
// memory (cudaHostGetDevicePointer).
func (d *Device) HostDevicePointer(p unsafe.Pointer) (DevPtr, error) {
	f := d.rt.begin()
	defer d.rt.end(f)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(p), 0
	if code := d.guard(fnHostGetDevicePointer, f); code != Success {
		return 0, d.rt.errorf(fnHostGetDevicePointer, code, "%p", p)
	}
	return DevPtr(f.out[0]), nil
}
