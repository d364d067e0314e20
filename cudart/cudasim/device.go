package cudasim

import (
	"encoding/binary"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// A device is one simulated GPU. Its Sim's mu guards it.
type device struct {
	sim      *Sim
	ordinal  int
	cfg      *DeviceConfig
	context  bool        // there is a primary context
	primary  uintptr     // its handle, for libcuda; 0 until it is retained first
	retained int         // times, by libcuda
	broken   cudart.Code // what every call returns once the device or its context is lost
	used     int         // bytes of device memory allocated
	managed  int         // bytes of it that have pages of managed memory
	peers    []*device   // whose memory it has been enabled to access

	streams   map[*stream]struct{} // with default streams, and destroyed ones that still work
	legacy    *stream
	perThread map[uint64]*stream

	engines
}

// The engines of a device do its copies and kernels.
type engines struct {
	toDevice, toHost, onDevice engine
	linkCopies                 int // for DeviceConfig.LinkShare
}

func newDevice(s *Sim, ordinal int, cfg *DeviceConfig) *device {
	return &device{sim: s, ordinal: ordinal, cfg: cfg,
		streams: make(map[*stream]struct{}), perThread: make(map[uint64]*stream)}
}

// makeContext makes the device's primary context.
func (d *device) makeContext() cudart.Code {
	if d.broken != success {
		return d.broken
	}
	d.context = true
	return success
}

// Contexts returns the ordinals of the devices that have a context, in order. Most
// calls make one on the current device of their thread.
func (s *Sim) Contexts() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var have []int
	for _, d := range s.devices {
		if d.context {
			have = append(have, d.ordinal)
		}
	}
	return have
}

// device returns the device with an ordinal, nil if there is none.
func (s *Sim) device(ordinal int) *device {
	if ordinal < 0 || ordinal >= len(s.devices) {
		return nil
	}
	return s.devices[ordinal]
}

func (c *call) runtimeGetVersion() cudart.Code {
	if c.driverTooOld() && c.cfg.Version.Major() < 12 {
		return cudart.ErrInsufficientDriver
	}
	return put(c, 0, int32(c.cfg.Version))
}

func (c *call) driverGetVersion() cudart.Code { return put(c, 0, int32(c.cfg.DriverVersion)) }

func (c *call) getDeviceCount() cudart.Code { return put(c, 0, int32(len(c.devices))) }

// setDevice makes a context from 12.0 on.
func (c *call) setDevice(d *device) cudart.Code {
	if c.cfg.Version.Major() >= 12 {
		if code := d.makeContext(); code != success {
			return code
		}
	}
	c.thread.device = d.ordinal
	return success
}

func (c *call) getDevice() cudart.Code { return put(c, 0, int32(c.thread.device)) }

// Offsets in cudaDeviceProp, the same in every version.
const (
	propertiesUUID   = 256
	propertiesMemory = 288
)

// structSize returns the size in bytes of the struct that cudaGetDeviceProperties, cudaGetDeviceProperties_v2 or
// cudaPointerGetAttributes fills in this version, and 0 for other functions. Exactly that much is written, as by
// the real library.
func (s *Sim) structSize(fn string) int {
	if _, ok := s.names[fn]; !ok {
		return 0
	}
	switch fn {
	case "cudaGetDeviceProperties":
		if s.cfg.Version.Major() >= 13 {
			return 784
		}
		return 728
	case "cudaGetDeviceProperties_v2":
		return 792
	case "cudaPointerGetAttributes":
		if s.cfg.Version.Major() >= 13 {
			return 88
		}
		return 24
	}
	return 0
}

// getDeviceProperties fills in name, UUID and memory, and zeros for the rest.
func (c *call) getDeviceProperties() cudart.Code {
	d := c.device(c.i32(1))
	switch {
	case c.ptr(0) == 0:
		return cudart.ErrInvalidValue
	case d == nil:
		return cudart.ErrInvalidDevice
	}
	b := make([]byte, c.structSize(c.name))
	copy(b[:propertiesUUID-1], d.cfg.Name)
	copy(b[propertiesUUID:], d.cfg.UUID[:])
	binary.NativeEndian.PutUint64(b[propertiesMemory:], uint64(d.cfg.Memory))
	copy(bytesAt(c.ptr(0), len(b)), b)
	return success
}

func (c *call) deviceGetAttribute(d *device) cudart.Code {
	attr := c.i32(1)
	if attr < 1 || attr > maxAttribute {
		return cudart.ErrInvalidValue
	}
	return put(c, 0, int32(d.cfg.Attributes[cudart.Attr(attr)]))
}

func (c *call) deviceGetPCIBusID(d *device) cudart.Code {
	if c.ptr(0) == 0 || c.i32(1) <= len(d.cfg.PCIBusID) {
		return cudart.ErrInvalidValue
	}
	copy(bytesAt(c.ptr(0), c.i32(1)), append([]byte(d.cfg.PCIBusID), 0))
	return success
}

// Priorities of streams: the lower number is the more urgent.
const (
	leastPriority    = 0
	greatestPriority = -5
)

func (c *call) deviceGetStreamPriorityRange() cudart.Code {
	if c.ptr(0) != 0 {
		put(c, 0, int32(leastPriority))
	}
	if c.ptr(1) != 0 {
		put(c, 1, int32(greatestPriority))
	}
	return success
}

func (c *call) deviceSynchronize() cudart.Code { return c.report(c.dev.marks()...) }

// deviceReset destroys the current device's context with all that is in it.
func (c *call) deviceReset() cudart.Code {
	c.reset(c.devices[c.thread.device])
	return success
}

func (c *call) reset(d *device) {
	for h, st := range c.streams {
		if st.dev == d {
			st.destroy()
			delete(c.streams, h)
		}
	}
	for h, e := range c.events {
		if e.dev == d {
			delete(c.events, h)
		}
	}
	for h, m := range c.modules {
		if m.dev == d {
			c.dropModule(h)
		}
	}
	for _, b := range slices.Clone(c.blocks.list) {
		if b.dev == d {
			c.blocks.release(b)
		}
	}
	for _, o := range c.devices {
		o.disablePeer(d)
	}
	d.context, d.broken, d.peers = false, success, nil
}

func (c *call) memGetInfo() cudart.Code {
	if c.ptr(0) == 0 || c.ptr(1) == 0 {
		return cudart.ErrInvalidValue
	}
	put(c, 0, uint64(max(c.dev.free(), 0)))
	return put(c, 1, uint64(c.dev.cfg.Memory))
}
