package cudasim

import (
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// Flags of cudaHostRegister.
const (
	registerIOMemory = 0x4
	registerReadOnly = 0x8
	registerFlags    = 0xf
)

// hostRegister registers memory of the process. Nothing is pinned.
func (c *call) hostRegister() cudart.Code {
	addr, n, flags := c.ptr(0), c.num(1), c.u32(2)
	readOnly := flags&registerReadOnly != 0
	attributes := c.dev.cfg.Attributes
	switch {
	case addr == 0 || n <= 0 || addr+uintptr(n) < addr:
		return cudart.ErrInvalidValue
	case flags&^registerFlags != 0 || flags&registerIOMemory != 0:
		return cudart.ErrInvalidValue
	case c.cfg.NoRegister, attributes[cudart.AttrHostRegisterSupported] == 0,
		readOnly && attributes[cudart.AttrHostRegisterReadOnlySupported] == 0:
		return cudart.ErrNotSupported
	case c.blocks.overlap(addr, n) != nil:
		return cudart.ErrHostMemoryAlreadyRegistered
	case c.cfg.MaxRegister > 0 && n > c.cfg.MaxRegister,
		c.cfg.MaxRegistrations > 0 && c.outstanding().Registrations >= c.cfg.MaxRegistrations,
		!c.canPin(n, c.cfg.MaxPinned):
		return cudart.ErrMemoryAllocation
	}
	if code := c.checkMapping(addr, n, readOnly); code != success {
		return code
	}
	if !c.canPin(n, c.cfg.HostMemory) || c.leak(n) {
		return cudart.ErrInvalidValue
	}
	c.blocks.insert(&block{addr: addr, size: n, kind: registeredBlock, dev: c.dev, flags: flags})
	return success
}

// checkMapping returns the code for memory that the process has mapped in a way that cannot be registered.
func (c *call) checkMapping(addr uintptr, n int, readOnly bool) cudart.Code {
	m, err := mappingsOf(addr, n)
	switch {
	case err != nil:
		c.fail("%s: cudaHostRegister: %w", c.Sim, err)
		return cudart.ErrUnknown
	case !m.readable, !m.writable && !readOnly:
		return cudart.ErrInvalidValue
	case !m.writable && m.privateFile:
		c.misuse(driverHang, -1, "%#x, %d bytes: a read-only private mapping of a file hangs in the driver", addr, n)
		return cudart.ErrInvalidValue
	}
	return success
}

// canPin reports whether n more bytes can be pinned within a limit, of which 0 is
// none. It needs mu.
func (s *Sim) canPin(n, limit int) bool {
	if limit == 0 {
		return true
	}
	o := s.outstanding()
	return n <= limit-o.HostBytes-o.RegisteredBytes-s.leaked
}

// leak reports whether pinning n bytes fails and leaves them pinned. It needs mu.
func (s *Sim) leak(n int) bool {
	if s.cfg.LeakAbove == 0 || n <= s.cfg.LeakAbove {
		return false
	}
	s.leaked += n
	return true
}

// LeakedBytes returns how many bytes of host memory stayed pinned when pinning them
// failed (see Config.LeakAbove). [Sim.Check] does not mention them.
func (s *Sim) LeakedBytes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaked
}

func (c *call) hostUnregister() cudart.Code {
	addr := c.ptr(0)
	b := c.blocks.find(addr)
	switch {
	case addr == 0:
		return cudart.ErrInvalidValue
	case b == nil:
		return cudart.ErrHostMemoryNotRegistered
	case b.kind != registeredBlock || b.addr != addr:
		return cudart.ErrInvalidValue
	}
	c.on(b.dev, "registered memory", addr)
	if b.uses > 0 {
		c.misuse(busyMemory, -1, "%#x, %d bytes: unregistered with %d copies pending", addr, b.size, b.uses)
	}
	if !mapped(addr) || !mapped(b.end()-1) {
		c.misuse(unmappedMemory, -1, "%#x, %d bytes: unmapped while registered", addr, b.size)
	}
	c.blocks.release(b)
	return success
}

// mappings summarises what the process has mapped in a range.
type mappings struct {
	readable    bool // all of it
	writable    bool // all of it
	privateFile bool // some of it is a file's private mapping
}

// mappingsOf sums up what the process has mapped in [addr, addr+n).
func mappingsOf(addr uintptr, n int) (mappings, error) {
	maps, err := linux.OpenMaps(os.DirFS("/"))
	if err != nil {
		return mappings{}, err
	}
	defer maps.Close()
	covered, err := maps.Within(addr, addr+uintptr(n))
	if err != nil {
		return mappings{}, err
	}
	sum := mappings{readable: true, writable: true}
	at := addr
	for _, m := range covered {
		if m.Start > at {
			break
		}
		sum.readable = sum.readable && m.Read
		sum.writable = sum.writable && m.Write
		sum.privateFile = sum.privateFile || m.File && !m.Shared
		at = m.End
	}
	if at < addr+uintptr(n) { // a hole
		sum.readable, sum.writable = false, false
	}
	return sum, nil
}
