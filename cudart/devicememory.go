package cudart

import (
	"context"
	"fmt"

	"github.com/gopinned/pinned/internal/lifetime"
)

// A DeviceMemory is memory of a device, with its owner and its size, which a [DevPtr] does
// not have. The garbage collector does not free it, because it cannot know whether the GPU
// still uses it: Close it. Methods may be called from any goroutine. Those of a nil
// DeviceMemory return zero values or errors.
type DeviceMemory struct {
	dev  *Device
	ptr  DevPtr
	n    int               // bytes
	life lifetime.Lifetime // no calls are counted
}

// Alloc allocates n bytes of device memory, aligned to 256 bytes at least (cudaMalloc). The
// bytes are not set. The errors are those of [Device.Malloc]; a nil device is an error.
func (d *Device) Alloc(n int) (*DeviceMemory, error) {
	p, err := d.Malloc(n)
	if err != nil {
		return nil, err
	}
	return &DeviceMemory{dev: d, ptr: p, n: n}, nil
}

// made reports whether Alloc has made the memory, and whether it is open.
func (m *DeviceMemory) made() bool { return m != nil && m.ptr != 0 }

func (m *DeviceMemory) open() bool { return m.made() && !m.life.Sealed() }

// Device returns the device whose memory it is, nil for a nil DeviceMemory.
func (m *DeviceMemory) Device() *Device {
	if m == nil {
		return nil
	}
	return m.dev
}

// Len returns the number of bytes, also after Close.
func (m *DeviceMemory) Len() int {
	if m == nil {
		return 0
	}
	return m.n
}

// Ptr returns the address of the first byte, 0 after Close.
func (m *DeviceMemory) Ptr() DevPtr {
	if !m.open() {
		return 0
	}
	return m.ptr
}

// String returns the size, the address and the device, for messages.
func (m *DeviceMemory) String() string {
	if !m.made() {
		return "no device memory"
	}
	return fmt.Sprintf("%d bytes at %v of %v", m.n, m.ptr, m.dev)
}

// Range returns the address of byte off, from which on n bytes are to be used. The error
// wraps [ErrInvalidValue] unless 0 <= off, 0 <= n and off+n <= Len, and [ErrClosed] after
// Close.
func (m *DeviceMemory) Range(off, n int) (DevPtr, error) {
	switch {
	case !m.made():
		return 0, fmt.Errorf("range of %v: %w", m, ErrInvalidValue)
	case !m.open():
		return 0, fmt.Errorf("range of %v: %w", m, ErrClosed)
	case off < 0 || n < 0 || off > m.n || n > m.n-off:
		return 0, fmt.Errorf("%d bytes from byte %d on are not within %v: %w", n, off, m, ErrInvalidValue)
	}
	return m.ptr + DevPtr(off), nil
}

// Close waits for the device's work and frees the memory (cudaFree). After an error the memory may
// still be in use: call Close again. Once it has returned nil, it does nothing. It works after
// [Runtime.Close], and returns nil for a nil DeviceMemory.
func (m *DeviceMemory) Close() error {
	if !m.made() {
		return nil
	}
	return m.life.Close(context.Background(), func(context.Context) error { return m.dev.Free(m.ptr) })
}
