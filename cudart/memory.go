package cudart

import (
	"fmt"
	"io"
	"unsafe"
)

// A DevPtr is an address that a device can access, mostly in its own memory. It is
// an integer to Go: it keeps nothing from being freed, and cannot be dereferenced.
// %v and %s print it in hexadecimal, 0x7f2a04000000; other verbs print a number.
type DevPtr uintptr

// String returns the address in hexadecimal.
func (p DevPtr) String() string { return fmt.Sprintf("%#x", uintptr(p)) }

// Format implements [fmt.Formatter], because %x of a value with String alone would print the
// text's bytes.
func (p DevPtr) Format(f fmt.State, verb rune) {
	if verb == 'v' || verb == 's' {
		_, _ = io.WriteString(f, p.String())
		return
	}
	fmt.Fprintf(f, fmt.FormatString(f, verb), uintptr(p))
}

// Malloc allocates n bytes of device memory, aligned to 256 bytes at least
// (cudaMalloc). Release it with [Device.Free]. The error wraps [ErrInvalidValue] if
// n <= 0, and [ErrMemoryAllocation] if the device has not enough memory.
func (d *Device) Malloc(n int) (DevPtr, error) { return d.malloc(nil, n) }

// Free waits for the device's work and frees memory of [Device.Malloc] or
// [Device.MallocManaged] (cudaFree). Zero is ignored. The error wraps
// [ErrInvalidValue] if p is not the start of such memory. Free takes no context: use
// [Device.Synchronize] first if the wait must be bounded.
func (d *Device) Free(p DevPtr) error { return d.free(nil, p) }

// Malloc allocates n bytes of device memory in the order of the stream: work that is
// queued there later can use them (cudaMallocAsync, of CUDA 11.2 or later). Release
// them with [Stream.Free] or [Device.Free]. The error wraps [ErrInvalidValue] if
// n <= 0, [ErrMemoryAllocation] if the device has not enough memory, and [ErrNotSupported] if
// [AttrMemoryPoolsSupported] is 0.
func (s *Stream) Malloc(n int) (DevPtr, error) { return s.Device().malloc(s, n) }

// Free frees memory when the work that is queued on the stream so far is done
// (cudaFreeAsync, of CUDA 11.2 or later). Zero is ignored. The error wraps
// [ErrInvalidValue] if p is not the start of memory from Malloc.
func (s *Stream) Free(p DevPtr) error { return s.Device().free(s, p) }

func (d *Device) malloc(s *Stream, n int) (DevPtr, error) {
	fn := s.either(fnMalloc, fnMallocAsync)
	if n <= 0 {
		return 0, invalid(fn, "size %d: must be positive", n)
	}
	f := d.begin(s)
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(n), s.arg()
	out, err := d.do(fn, f, func() string { return fmt.Sprintf("%d bytes on %v", n, d) })
	return DevPtr(out[0]), err
}

func (d *Device) free(s *Stream, p DevPtr) error {
	if p == 0 {
		return nil
	}
	fn := s.either(fnFree, fnFreeAsync)
	f := d.begin(s)
	f.args[0], f.args[1] = uintptr(p), s.arg()
	_, err := d.do(fn, f, func() string { return fmt.Sprintf("%v on %v", p, d) })
	return err
}

// A MemoryType is a cudaMemoryType: the kind of memory at an address.
type MemoryType int

// The kinds of memory.
const (
	MemoryUnregistered MemoryType = iota // not CUDA's: ordinary host memory
	MemoryHost                           // pinned: registered or from cudaHostAlloc
	MemoryDevice                         // device memory
	MemoryManaged                        // from cudaMallocManaged
)

// String returns "unregistered", "host", "device" or "managed", and "unknown" for
// other values.
func (t MemoryType) String() string {
	if names := [...]string{"unregistered", "host", "device", "managed"}; t >= 0 && int(t) < len(names) {
		return names[t]
	}
	return "unknown"
}

// PointerAttributes describe the memory at an address.
type PointerAttributes struct {
	Type      MemoryType
	Device    int     // ordinal of the device that it belongs to or was registered on
	DevicePtr DevPtr  // its address for the device, 0 if the device cannot access it
	HostPtr   uintptr // its address for the host, 0 if the host cannot access it
}

// cPointerAttributes is cudaPointerAttributes: 11.x and 12.x write the first 24
// bytes, 13.x writes 88.
type cPointerAttributes struct {
	kind, device int32
	devicePtr    uint64
	hostPtr      uint64
	reserved     [8]uint64
}

// PointerAttributes describes the memory at any address, of the host or of a device
// (cudaPointerGetAttributes). Memory that is not CUDA's is [MemoryUnregistered], and
// not an error.
func (d *Device) PointerAttributes(address uintptr) (PointerAttributes, error) {
	var c cPointerAttributes
	f := d.begin(nil)
	f.host = unsafe.Pointer(&c)
	f.args[0], f.args[1] = uintptr(f.host), address
	if _, err := d.do(fnPointerGetAttributes, f, func() string { return fmt.Sprintf("address %#x", address) }); err != nil {
		return PointerAttributes{}, err
	}
	return PointerAttributes{
		Type: MemoryType(c.kind), Device: int(c.device),
		DevicePtr: DevPtr(c.devicePtr), HostPtr: uintptr(c.hostPtr),
	}, nil
}

// A Number has the same bytes in Go, in C and on a GPU.
type Number interface {
	~int8 | ~uint8 | ~int16 | ~uint16 | ~int32 | ~uint32 | ~int | ~uint | ~int64 | ~uint64 | ~uintptr | ~float32 | ~float64 | ~complex64 | ~complex128
}
