package cudart

import (
	"fmt"
	"math"
	"unsafe"
)

// A copyKind is a cudaMemcpyKind.
type copyKind uintptr

const (
	hostToDevice   copyKind = 1
	deviceToHost   copyKind = 2
	deviceToDevice copyKind = 3
)

func (k copyKind) String() string {
	switch k {
	case hostToDevice:
		return "host to device"
	case deviceToHost:
		return "device to host"
	}
	return "device to device"
}

// CopyToDevice copies n bytes from any host memory to the device and returns
// when src may be changed again (cudaMemcpy). From memory that is not pinned
// it reaches about a sixth of the link's speed.
func (d *Device) CopyToDevice(dst DevPtr, src unsafe.Pointer, n int) error {
	return d.copy(nil, uintptr(dst), uintptr(src), src, n, hostToDevice)
}

// CopyToHost copies n bytes from the device to any host memory and returns
// when they are there (cudaMemcpy).
func (d *Device) CopyToHost(dst unsafe.Pointer, src DevPtr, n int) error {
	return d.copy(nil, uintptr(dst), uintptr(src), dst, n, deviceToHost)
}

// CopyOnDevice copies n bytes between places that the device reaches
// (cudaMemcpy).
func (d *Device) CopyOnDevice(dst, src DevPtr, n int) error {
	return d.copy(nil, uintptr(dst), uintptr(src), nil, n, deviceToDevice)
}

// CopyToDevice queues a copy of n bytes from pinned host memory
// (cudaMemcpyAsync). It returns before the copy ran: src must stay unchanged,
// pinned and mapped until the stream has passed it, and must never be Go heap
// memory, which CUDA would copy through a staging buffer of its own, blocking
// the caller. [Options.Debug] checks that.
func (s *Stream) CopyToDevice(dst DevPtr, src unsafe.Pointer, n int) error {
	return s.dev.copy(s, uintptr(dst), uintptr(src), src, n, hostToDevice)
}

// CopyToHost queues a copy of n bytes into pinned host memory
// (cudaMemcpyAsync). It returns before the copy ran: until the stream has
// passed it, dst holds old bytes, or some of each. What is said of src at
// [Stream.CopyToDevice] goes for dst.
func (s *Stream) CopyToHost(dst unsafe.Pointer, src DevPtr, n int) error {
	return s.dev.copy(s, uintptr(dst), uintptr(src), dst, n, deviceToHost)
}

// CopyOnDevice queues a copy of n bytes between places that the device reaches
// (cudaMemcpyAsync).
func (s *Stream) CopyOnDevice(dst, src DevPtr, n int) error {
	return s.dev.copy(s, uintptr(dst), uintptr(src), nil, n, deviceToDevice)
}

// copy is every one-dimensional copy: queued on s, or synchronous if s is nil.
func (d *Device) copy(s *Stream, dst, src uintptr, host unsafe.Pointer, n int, kind copyKind) error {
	fn := fnMemcpy
	if s != nil {
		fn = fnMemcpyAsync
	}
	if n < 0 {
		return invalid(fn, "size %d: must not be negative", n)
	}
	if s != nil && d.rt.debug {
		if err := d.checkPinned(fn, uintptr(host), n); err != nil {
			return err
		}
	}
	f := d.begin(s)
	f.host = host
	f.args[0], f.args[1], f.args[2], f.args[3], f.args[4] = dst, src, uintptr(n), uintptr(kind), s.arg()
	code := d.guard(fn, f)
	d.rt.end(f)
	if code != Success {
		return d.rt.errorf(fn, code, "%d bytes %v, from %#x to %#x on %v", n, kind, src, dst, d)
	}
	return nil
}

// Pitched tells the shape of a two-dimensional copy: Height rows of Width
// bytes, each row starting DstPitch (SrcPitch) bytes behind the one before.
type Pitched struct {
	Width, Height      int
	DstPitch, SrcPitch int
}

func (p Pitched) String() string {
	return fmt.Sprintf("%d rows of %d bytes (pitch %d from %d)", p.Height, p.Width, p.DstPitch, p.SrcPitch)
}

// Copy2DToDevice is [Device.CopyToDevice] for rows (cudaMemcpy2D).
func (d *Device) Copy2DToDevice(dst DevPtr, src unsafe.Pointer, shape Pitched) error {
	return d.copy2D(nil, uintptr(dst), uintptr(src), src, shape, hostToDevice)
}

// Copy2DToHost is [Device.CopyToHost] for rows (cudaMemcpy2D).
func (d *Device) Copy2DToHost(dst unsafe.Pointer, src DevPtr, shape Pitched) error {
	return d.copy2D(nil, uintptr(dst), uintptr(src), dst, shape, deviceToHost)
}

// Copy2DOnDevice is [Device.CopyOnDevice] for rows (cudaMemcpy2D).
func (d *Device) Copy2DOnDevice(dst, src DevPtr, shape Pitched) error {
	return d.copy2D(nil, uintptr(dst), uintptr(src), nil, shape, deviceToDevice)
}

// Copy2DToDevice is [Stream.CopyToDevice] for rows (cudaMemcpy2DAsync).
func (s *Stream) Copy2DToDevice(dst DevPtr, src unsafe.Pointer, shape Pitched) error {
	return s.dev.copy2D(s, uintptr(dst), uintptr(src), src, shape, hostToDevice)
}

// Copy2DToHost is [Stream.CopyToHost] for rows (cudaMemcpy2DAsync).
func (s *Stream) Copy2DToHost(dst unsafe.Pointer, src DevPtr, shape Pitched) error {
	return s.dev.copy2D(s, uintptr(dst), uintptr(src), dst, shape, deviceToHost)
}

// Copy2DOnDevice is [Stream.CopyOnDevice] for rows (cudaMemcpy2DAsync).
func (s *Stream) Copy2DOnDevice(dst, src DevPtr, shape Pitched) error {
	return s.dev.copy2D(s, uintptr(dst), uintptr(src), nil, shape, deviceToDevice)
}

func (d *Device) copy2D(s *Stream, dst, src uintptr, host unsafe.Pointer, p Pitched, kind copyKind) error {
	fn := fnMemcpy2D
	if s != nil {
		fn = fnMemcpy2DAsync
	}
	if p.Width < 0 || p.Height < 0 || p.DstPitch < p.Width || p.SrcPitch < p.Width {
		return invalid(fn, "%v: sizes must not be negative, a pitch not less than the width", p)
	}
	if p.Height > 0 && max(p.DstPitch, p.SrcPitch) > math.MaxInt/p.Height {
		return invalid(fn, "%v: more than an address space", p)
	}
	if s != nil && d.rt.debug && host != nil && p.Height > 0 {
		pitch := p.SrcPitch
		if kind == deviceToHost {
			pitch = p.DstPitch
		}
		if err := d.checkPinned(fn, uintptr(host), (p.Height-1)*pitch+p.Width); err != nil {
			return err
		}
	}
	f := d.begin(s)
	f.host = host
	f.args = [9]uintptr{dst, uintptr(p.DstPitch), src, uintptr(p.SrcPitch), uintptr(p.Width), uintptr(p.Height), uintptr(kind), s.arg()}
	code := d.guard(fn, f)
	d.rt.end(f)
	if code != Success {
		return d.rt.errorf(fn, code, "%v %v, from %#x to %#x on %v", p, kind, src, dst, d)
	}
	return nil
}

// checkPinned refuses host memory that CUDA does not know as pinned, at its
// first and at its last byte. It serves the debug mode.
func (d *Device) checkPinned(fn function, host uintptr, n int) error {
	if host == 0 || n == 0 {
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

// Memset sets n bytes to v; it may return before the device has done so
// (cudaMemset).
func (d *Device) Memset(p DevPtr, v byte, n int) error { return d.memset(nil, p, v, n) }

// Memset queues the setting of n bytes to v (cudaMemsetAsync).
func (s *Stream) Memset(p DevPtr, v byte, n int) error { return s.dev.memset(s, p, v, n) }

func (d *Device) memset(s *Stream, p DevPtr, v byte, n int) error {
	fn := fnMemset
	if s != nil {
		fn = fnMemsetAsync
	}
	if n < 0 {
		return invalid(fn, "size %d: must not be negative", n)
	}
	f := d.begin(s)
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(p), uintptr(v), uintptr(n), s.arg()
	code := d.guard(fn, f)
	d.rt.end(f)
	if code != Success {
		return d.rt.errorf(fn, code, "%d bytes at %#x on %v", n, uintptr(p), d)
	}
	return nil
}

// Memset2D sets height rows of width bytes, pitch bytes apart, to v
// (cudaMemset2D).
func (d *Device) Memset2D(p DevPtr, pitch int, v byte, width, height int) error {
	return d.memset2D(nil, p, pitch, v, width, height)
}

// Memset2D queues the setting of height rows of width bytes, pitch bytes
// apart, to v (cudaMemset2DAsync).
func (s *Stream) Memset2D(p DevPtr, pitch int, v byte, width, height int) error {
	return s.dev.memset2D(s, p, pitch, v, width, height)
}

func (d *Device) memset2D(s *Stream, p DevPtr, pitch int, v byte, width, height int) error {
	fn := fnMemset2D
	if s != nil {
		fn = fnMemset2DAsync
	}
	if width < 0 || height < 0 || pitch < width {
		return invalid(fn, "%d rows of %d bytes, pitch %d: sizes must not be negative, the pitch not less than the width", height, width, pitch)
	}
	f := d.begin(s)
	f.args[0], f.args[1], f.args[2], f.args[3], f.args[4], f.args[5] = uintptr(p), uintptr(pitch), uintptr(v), uintptr(width), uintptr(height), s.arg()
	code := d.guard(fn, f)
	d.rt.end(f)
	if code != Success {
		return d.rt.errorf(fn, code, "%d rows of %d bytes at %#x on %v", height, width, uintptr(p), d)
	}
	return nil
}
