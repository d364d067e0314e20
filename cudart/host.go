package cudart

import (
	"fmt"
	"unsafe"
)

// HostAllocFlags are flags of cudaHostAlloc, to be combined with |.
type HostAllocFlags uint32

// Flags for [Device.HostAlloc].
const (
	HostAllocMapped HostAllocFlags = 2 // kernels can access it: see [Device.HostDevicePointer]
)

// HostRegisterFlags are flags of cudaHostRegister, to be combined with |.
type HostRegisterFlags uint32

// Flags for [Device.HostRegister].
const (
	HostRegisterPortable HostRegisterFlags = 1 // pinned for all devices
	HostRegisterReadOnly HostRegisterFlags = 8 // devices only read: for memory that cannot be written
)

// HostAlloc allocates n bytes of pinned host memory (cudaHostAlloc), which CUDA does not
// promise to be zero. Release it with [Device.FreeHost]. Package hostmem pins several times
// as fast, and allocates no more than n rounded up to a page. The error wraps
// [ErrInvalidValue] if n <= 0, and [ErrMemoryAllocation] if the host has not enough memory.
func (d *Device) HostAlloc(n int, flags HostAllocFlags) (unsafe.Pointer, error) {
	if n <= 0 {
		return nil, invalid(fnHostAlloc, "size %d: must be positive", n)
	}
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), uintptr(flags)
	out, err := d.do(fnHostAlloc, f, func() string { return fmt.Sprintf("%d bytes, flags %#x, for %v", n, uint32(flags), d) })
	return *(*unsafe.Pointer)(unsafe.Pointer(&out[0])), err
}

// FreeHost frees memory of [Device.HostAlloc] (cudaFreeHost). No copy may use it
// any more. Nil is ignored. The error wraps [ErrInvalidValue] if p is not the start
// of such memory.
func (d *Device) FreeHost(p unsafe.Pointer) error {
	if p == nil {
		return nil
	}
	f := d.begin(nil)
	f.args[0] = uintptr(p)
	_, err := d.do(fnFreeHost, f, func() string { return fmt.Sprintf("%p", p) })
	return err
}

// HostRegister pins n bytes of mapped memory at p (cudaHostRegister). Neither p nor
// n need be aligned. The memory must stay mapped until [Device.HostUnregister], and
// must not be Go heap memory, which the garbage collector would reuse while the GPU
// still writes there. HostRegister does not check either; hostmem.Register does.
//
// The error wraps [ErrInvalidValue] if n <= 0, if p is nil or if CUDA cannot pin
// such memory, [ErrHostMemoryAlreadyRegistered] if part of it is registered already,
// and [ErrNotSupported] on hosts that refuse to pin (confidential computing). A
// private mapping that cannot be written makes cudaHostRegister hang if flags contain
// HostRegisterReadOnly.
func (d *Device) HostRegister(p unsafe.Pointer, n int, flags HostRegisterFlags) error {
	if n <= 0 {
		return invalid(fnHostRegister, "size %d: must be positive", n)
	}
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2] = uintptr(p), uintptr(n), uintptr(flags)
	_, err := d.do(fnHostRegister, f, func() string { return fmt.Sprintf("%d bytes at %p, flags %#x, for %v", n, p, uint32(flags), d) })
	return err
}

// HostUnregister unpins memory of [Device.HostRegister] (cudaHostUnregister). p is
// the address that was registered. No copy may use the memory any more. The error
// wraps [ErrHostMemoryNotRegistered] if p is not registered, and [ErrInvalidValue] if
// it is inside a registration. After an error the memory may still be pinned: do
// not unmap it.
func (d *Device) HostUnregister(p unsafe.Pointer) error {
	f := d.begin(nil)
	f.args[0] = uintptr(p)
	_, err := d.do(fnHostUnregister, f, func() string { return fmt.Sprintf("%p", p) })
	return err
}

// HostDevicePointer returns the address at which the device accesses pinned host
// memory (cudaHostGetDevicePointer). The error wraps [ErrInvalidValue] if p is not
// pinned.
func (d *Device) HostDevicePointer(p unsafe.Pointer) (DevPtr, error) {
	f := d.begin(nil)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(p), 0
	out, err := d.do(fnHostGetDevicePointer, f, func() string { return fmt.Sprintf("%p", p) })
	return DevPtr(out[0]), err
}
