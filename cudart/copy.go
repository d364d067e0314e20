package cudart

import (
	"fmt"
	"unsafe"
)

// A copyKind is a cudaMemcpyKind.
type copyKind uintptr

const (
	hostToDevice copyKind = iota + 1
	deviceToHost
	deviceToDevice
	byAddress // cudaMemcpyDefault: the addresses say which
)

func (k copyKind) String() string {
	return [...]string{"host to device", "device to host", "device to device", "of a batch"}[k-1]
}

// CopyToDevice copies n bytes from any host memory to device memory (cudaMemcpy).
// When it returns, src may be changed. From memory that is not pinned it reaches
// about a sixth of the link's speed, and it returns before all bytes are on the
// device: a [Stream] that is not blocking does not wait for them, so call
// [Device.Synchronize] there. The error wraps
// [ErrInvalidValue] if n < 0, or if dst to dst+n is not one allocation.
func (d *Device) CopyToDevice(dst DevPtr, src unsafe.Pointer, n int) error {
	return d.copy(nil, uintptr(dst), uintptr(src), src, n, hostToDevice)
}

// CopyToHost copies n bytes from device memory to any host memory (cudaMemcpy).
// When it returns, dst holds them. The errors are those of [Device.CopyToDevice].
func (d *Device) CopyToHost(dst unsafe.Pointer, src DevPtr, n int) error {
	return d.copy(nil, uintptr(dst), uintptr(src), dst, n, deviceToHost)
}

// CopyToDevice queues a copy of n bytes from pinned host memory to device memory
// (cudaMemcpyAsync). It returns before the copy has run. Until the stream has passed
// the copy, src must stay pinned, mapped and unchanged. src must not be Go heap
// memory: CUDA copies memory that is not pinned through a staging buffer of its own,
// which blocks the caller. [Options.Debug] checks that src is pinned.
//
// The error wraps [ErrInvalidValue] if n < 0, or if either range runs past its
// allocation or registration, even into the next one.
func (s *Stream) CopyToDevice(dst DevPtr, src unsafe.Pointer, n int) error {
	if err := s.Device().checkPinned(fnMemcpyAsync, uintptr(src), n); err != nil {
		return err
	}
	return s.Device().copy(s, uintptr(dst), uintptr(src), src, n, hostToDevice)
}

// CopyToHost queues a copy of n bytes from device memory to pinned host memory
// (cudaMemcpyAsync). It returns before the copy has run: until the stream has passed
// the copy, dst holds old bytes, or some old and some new ones. The requirements of
// [Stream.CopyToDevice] on src apply to dst, and its errors.
func (s *Stream) CopyToHost(dst unsafe.Pointer, src DevPtr, n int) error {
	if err := s.Device().checkPinned(fnMemcpyAsync, uintptr(dst), n); err != nil {
		return err
	}
	return s.Device().copy(s, uintptr(dst), uintptr(src), dst, n, deviceToHost)
}

// CopyOnDevice queues a copy of n bytes between two addresses that the device can
// access (cudaMemcpyAsync). They must not overlap. The error wraps [ErrInvalidValue]
// if n < 0, or if either range runs past its allocation.
func (s *Stream) CopyOnDevice(dst, src DevPtr, n int) error {
	return s.Device().copy(s, uintptr(dst), uintptr(src), nil, n, deviceToDevice)
}

// copy queues a copy on s, or copies synchronously if s is nil.
func (d *Device) copy(s *Stream, dst, src uintptr, host unsafe.Pointer, n int, kind copyKind) error {
	fn := s.either(fnMemcpy, fnMemcpyAsync)
	if n < 0 {
		return invalid(fn, "size %d: must not be negative", n)
	}
	f := d.begin(s)
	f.host = host
	f.args[0], f.args[1], f.args[2], f.args[3], f.args[4] = dst, src, uintptr(n), uintptr(kind), s.arg()
	_, err := d.do(fn, f, func() string { return fmt.Sprintf("%d bytes %v, from %#x to %#x on %v", n, kind, src, dst, d) })
	return err
}

// checkPinned refuses, in debug mode, host memory for an asynchronous copy that is
// not pinned at its first or at its last byte (cudaPointerGetAttributes).
func (d *Device) checkPinned(fn function, host uintptr, n int) error {
	if !d.made() || !d.rt.debug || host == 0 || n <= 0 {
		return nil
	}
	for _, at := range [2]uintptr{0, uintptr(n - 1)} {
		a, err := d.PointerAttributes(host + at)
		if err != nil {
			return err
		}
		if a.Type == MemoryUnregistered {
			return invalid(fn, "debug: %d bytes of host memory at %#x are not pinned (byte %d is not), so the copy would not be asynchronous: use a hostmem.Buffer, or Device.CopyToDevice and CopyToHost for any memory", n, host, at)
		}
	}
	return nil
}

// Memset sets n bytes to v. It may return before the device has done so
// (cudaMemset). The error wraps [ErrInvalidValue] if n < 0, or if p to p+n is not
// one allocation.
func (d *Device) Memset(p DevPtr, v byte, n int) error { return d.memset(nil, p, v, n) }

// Memset queues setting n bytes to v (cudaMemsetAsync). The errors are those of
// [Device.Memset].
func (s *Stream) Memset(p DevPtr, v byte, n int) error { return s.Device().memset(s, p, v, n) }

func (d *Device) memset(s *Stream, p DevPtr, v byte, n int) error {
	fn := s.either(fnMemset, fnMemsetAsync)
	if n < 0 {
		return invalid(fn, "size %d: must not be negative", n)
	}
	f := d.begin(s)
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(p), uintptr(v), uintptr(n), s.arg()
	_, err := d.do(fn, f, func() string { return fmt.Sprintf("%d bytes at %v on %v", n, p, d) })
	return err
}
