package cudasim

import (
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// What libcuda does that libcudart does not, or by other arguments. No thread has a context
// from the start; a device's primary context exists while it is retained, and until it is reset.

// unattached is the result of a call on a thread without the context that it needs. No fault
// applies to such a call, and none counts it: callers make it again.
func (s *Sim) unattached(e *export, thread uint64) cudart.Code {
	if s.cfg.API != cudart.DriverAPI || e.traits&(withoutDriver|withoutContext) != 0 {
		return success
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.thread(thread).context != nil:
		return success
	case e.traits&blamesArgument != 0:
		return cudart.ErrInvalidValue
	}
	return cudart.Code(201)
}

// readyDriver is ready for libcuda.
func (c *call) readyDriver(e *export) cudart.Code {
	switch {
	case !c.initialized:
		return cudart.ErrInitializationError
	case e.traits&withoutContext != 0:
		return success
	}
	c.dev = c.thread.context
	switch {
	case c.dev.broken != success:
		return c.dev.broken
	case !c.dev.context:
		return cudart.ErrContextIsDestroyed
	}
	return success
}

func (c *call) initDriver() cudart.Code {
	switch {
	case c.u32(0) != 0:
		return cudart.ErrInvalidValue
	case len(c.devices) == 0:
		return cudart.ErrNoDevice
	}
	c.initialized = true
	return success
}

// Results of cuGetProcAddress_v2, besides 0.
const (
	symbolNotFound      = 1
	versionInsufficient = 2
)

// getProcAddress finds the newest function of a name that is no newer than a version.
func (c *call) getProcAddress() cudart.Code {
	name, version, status := text(c.ptr(0)), cudart.Version(c.i32(2)), int32(symbolNotFound)
	var found uintptr
	for i := range exports {
		e := &exports[i]
		if e.driver != name && e.driver != name+"_v2" || e.nameIn(cudart.DriverAPI, c.cfg.DriverVersion) == "" {
			continue
		}
		if e.since <= version {
			found, status = c.slot.entries[i], 0
		} else if found == 0 {
			status = versionInsufficient
		}
	}
	if c.name == "cuGetProcAddress_v2" && c.ptr(4) != 0 {
		put(c, 4, status)
	}
	if put(c, 1, found); found == 0 {
		return cudart.ErrSymbolNotFound
	}
	return success
}

// ofDevice returns a function for a device, whose ordinal is an argument.
func ofDevice(argument int, do func(*call, *device) cudart.Code) func(*call) cudart.Code {
	return func(c *call) cudart.Code {
		d := c.device(c.i32(argument))
		if d == nil {
			return cudart.ErrInvalidDevice
		}
		return do(c, d)
	}
}

func (c *call) deviceGet(d *device) cudart.Code { return put(c, 0, int32(d.ordinal)) }

func (c *call) deviceGetName(d *device) cudart.Code {
	if c.ptr(0) == 0 || c.i32(1) < 1 {
		return cudart.ErrInvalidValue
	}
	to := bytesAt(c.ptr(0), c.i32(1))
	to[copy(to[:len(to)-1], d.cfg.Name)] = 0
	return success
}

func (c *call) deviceGetUUID(d *device) cudart.Code { return put(c, 0, d.cfg.UUID) }

// primaryContextRetain makes the context unless there is one.
func (c *call) primaryContextRetain(d *device) cudart.Code {
	if code := d.makeContext(); code != success {
		return code
	}
	if d.primary == 0 {
		d.primary = c.handle()
	}
	d.retained++
	return put(c, 0, d.primary)
}

func (c *call) primaryContextRelease(d *device) cudart.Code {
	if d.retained == 0 {
		return cudart.Code(201)
	}
	if d.retained--; d.retained == 0 {
		c.reset(d)
	}
	return success
}

func (c *call) primaryContextReset(d *device) cudart.Code {
	c.reset(d)
	return success
}

func (c *call) primaryContextGetState(d *device) cudart.Code {
	active := int32(0)
	if d.context {
		active = 1
	}
	put(c, 1, uint32(0))
	return put(c, 2, active)
}

// ofContext returns the device of a primary context, nil for anything else.
func (c *call) ofContext(context uintptr) *device {
	for _, d := range c.devices {
		if context != 0 && d.primary == context {
			return d
		}
	}
	return nil
}

func (c *call) contextSetCurrent() cudart.Code {
	d := c.ofContext(c.ptr(0))
	if d == nil && c.ptr(0) != 0 {
		return cudart.Code(201)
	}
	if c.thread.context = d; d != nil {
		c.thread.device = d.ordinal
	}
	return success
}

func (c *call) contextGetDevice() cudart.Code {
	d := c.thread.context
	switch {
	case d == nil:
		return cudart.Code(201)
	case !d.context:
		return cudart.ErrContextIsDestroyed
	}
	return put(c, 0, int32(d.ordinal))
}

// peerOf replaces a context among the arguments by the ordinal of its device, which is how
// libcudart takes it.
func (c *call) peerOf(i int) cudart.Code {
	d := c.ofContext(c.ptr(i))
	if d == nil {
		return cudart.Code(201)
	}
	c.a[i] = uintptr(d.ordinal)
	return success
}

// withPeer returns a function of libcuda that takes the context of another device, for one that takes its ordinal.
func withPeer(do func(*call) cudart.Code) func(*call) cudart.Code {
	return func(c *call) cudart.Code {
		if c.ptr(0) == c.dev.primary {
			return cudart.Code(201)
		}
		if code := c.peerOf(0); code != success {
			return code
		}
		return do(c)
	}
}

func (c *call) memcpyContextsAsync() cudart.Code {
	for _, i := range [...]int{1, 3} {
		if code := c.peerOf(i); code != success {
			return code
		}
	}
	return c.memcpyPeerAsync()
}

// Values of CUpointer_attribute.
const (
	pointerMemoryType    = 2
	pointerDevicePointer = 3
	pointerHostPointer   = 4
	pointerIsManaged     = 8
	pointerDeviceOrdinal = 9
)

var pointerAttributeSizes = map[int32]int{
	pointerMemoryType:    4,
	pointerDevicePointer: 8,
	pointerHostPointer:   8,
	pointerIsManaged:     1, // a bool
	pointerDeviceOrdinal: 4,
}

// pointerAttributesOfDriver leaves 0 for memory that is not CUDA's.
func (c *call) pointerAttributesOfDriver() cudart.Code {
	n := int(c.u32(0))
	if n < 1 || c.ptr(1) == 0 || c.ptr(2) == 0 {
		return cudart.ErrInvalidValue
	}
	b := c.blocks.find(c.ptr(3))
	to := array[uintptr](c.ptr(2), n)
	for i, attribute := range array[int32](c.ptr(1), n) {
		size, ok := pointerAttributeSizes[attribute]
		if !ok {
			return cudart.ErrInvalidValue
		}
		v := b.pointerAttribute(attribute, c.ptr(3))
		copy(bytesAt(to[i], size), unsafe.Slice((*byte)(unsafe.Pointer(&v)), size)) // little-endian
	}
	return success
}

// pointerAttribute returns an attribute of an address in the block, which is nil for memory that is not CUDA's.
func (b *block) pointerAttribute(attribute int32, at uintptr) uint64 {
	if b == nil {
		return 0
	}
	switch attribute {
	case pointerMemoryType:
		if b.kind == deviceBlock || b.kind == managedBlock {
			return 2
		}
		return 1 // of the host
	case pointerIsManaged:
		if b.kind == managedBlock {
			return 1
		}
		return 0
	case pointerDeviceOrdinal:
		return uint64(b.dev.ordinal)
	case pointerHostPointer:
		if b.kind == deviceBlock {
			return 0
		}
	}
	return uint64(at)
}
