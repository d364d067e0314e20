package cudasim

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cudart"
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
		c.cfg.MaxRegistrations > 0 && c.outstanding().Registrations >= c.cfg.MaxRegistrations:
		return cudart.ErrMemoryAllocation
	}
	m, err := mappingsOf(addr, n)
	switch {
	case err != nil:
		c.fail("%s: cudaHostRegister: %w", c.Sim, err)
		return cudart.ErrUnknown
	case !m.readable, !m.writable && !readOnly:
		return cudart.ErrInvalidValue
	case !m.writable && m.privateFile:
		c.misuse(DriverHang, -1, "%#x, %d bytes: a read-only private mapping of a file hangs in the driver", addr, n)
		return cudart.ErrInvalidValue
	case !c.canPin(n):
		return cudart.ErrInvalidValue
	case c.cfg.LeakAbove > 0 && n > c.cfg.LeakAbove:
		c.leaked += n
		return cudart.ErrInvalidValue
	}
	c.blocks.insert(&block{addr: addr, size: n, kind: registeredBlock, dev: c.dev, flags: flags})
	return cudart.Success
}

// canPin reports whether the host has memory to pin n more bytes. It needs mu.
func (s *Sim) canPin(n int) bool {
	if s.cfg.HostMemory == 0 {
		return true
	}
	o := s.outstanding()
	return n <= s.cfg.HostMemory-o.HostBytes-o.RegisteredBytes-s.leaked
}

// LeakedBytes returns how many bytes of host memory failed registrations left
// pinned (see Config.LeakAbove). [Sim.Check] does not mention them.
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
		c.misuse(BusyMemory, -1, "%#x, %d bytes: unregistered with %d copies pending", addr, b.size, b.uses)
	}
	if !mapped(addr) || !mapped(b.end()-1) {
		c.misuse(UnmappedMemory, -1, "%#x, %d bytes: unmapped while registered", addr, b.size)
	}
	c.blocks.release(b)
	return cudart.Success
}

// mappings summarises what the process has mapped in a range.
type mappings struct {
	readable    bool // all of it
	writable    bool // all of it
	privateFile bool // some of it is a file's private mapping
}

// mapReads is how often /proc/self/maps is read until a range is found: where
// it is emulated (qemu-user), a read while other threads map memory misses some.
const mapReads = 5

// mappingsOf finds a range in /proc/self/maps.
func mappingsOf(addr uintptr, n int) (m mappings, err error) {
	for range mapReads {
		if m, err = readMappings(addr, n); err != nil || m.readable {
			break
		}
	}
	return m, err
}

func readMappings(addr uintptr, n int) (mappings, error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return mappings{}, err
	}
	defer f.Close()
	m := mappings{readable: true, writable: true}
	at, end := uint64(addr), uint64(addr)+uint64(n)
	lines := bufio.NewScanner(f)
	for at < end && lines.Scan() {
		first, last, perms, inode, err := parseMapping(lines.Text())
		if err != nil {
			return m, err
		}
		if last <= at {
			continue
		}
		if first > at {
			break
		}
		m.readable = m.readable && strings.Contains(perms, "r")
		m.writable = m.writable && strings.Contains(perms, "w")
		m.privateFile = m.privateFile || inode != "0" && strings.Contains(perms, "p")
		at = last
	}
	if at < end { // a hole
		m.readable, m.writable = false, false
	}
	return m, lines.Err()
}

// parseMapping splits a line of /proc/self/maps:
// "7f00-7f10 r--p 00000000 08:01 1234 /path".
func parseMapping(line string) (first, last uint64, perms, inode string, err error) {
	fields := strings.Fields(line)
	if len(fields) < 5 {
		return 0, 0, "", "", fmt.Errorf("/proc/self/maps: %q", line)
	}
	low, high, _ := strings.Cut(fields[0], "-")
	if first, err = strconv.ParseUint(low, 16, 64); err == nil {
		last, err = strconv.ParseUint(high, 16, 64)
	}
	if err != nil {
		err = fmt.Errorf("/proc/self/maps: %q: %w", line, err)
	}
	return first, last, fields[1], fields[4], err
}
