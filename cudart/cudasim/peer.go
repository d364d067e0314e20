package cudasim

import (
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// canAccess reports whether a device can be enabled to access the memory of
// another.
func (s *Sim) canAccess(d, peer *device) bool {
	a, b := d.ordinal, peer.ordinal
	return d != peer && !slices.Contains(s.cfg.NoPeerAccess, [2]int{a, b}) && !slices.Contains(s.cfg.NoPeerAccess, [2]int{b, a})
}

// peersWith reports whether copies between two devices go directly. One of them
// must have been enabled to access the other.
func (d *device) peersWith(o *device) bool {
	return slices.Contains(d.peers, o) || slices.Contains(o.peers, d)
}

// losesPeerCopies reports whether the bytes of direct copies do not arrive.
func (s *Sim) losesPeerCopies(from, to *device) bool {
	return slices.Contains(s.cfg.LostPeerCopies, [2]int{from.ordinal, to.ordinal})
}

// disablePeer is false if access was not enabled.
func (d *device) disablePeer(peer *device) bool {
	n := len(d.peers)
	d.peers = slices.DeleteFunc(d.peers, func(o *device) bool { return o == peer })
	return len(d.peers) < n
}

func (c *call) deviceCanAccessPeer() cudart.Code {
	d, peer := c.device(c.i32(1)), c.device(c.i32(2))
	if d == nil || peer == nil {
		return cudart.ErrInvalidDevice
	}
	var can int32
	if c.canAccess(d, peer) {
		can = 1
	}
	return put(c, 0, can)
}

func (c *call) deviceEnablePeerAccess() cudart.Code {
	peer := c.device(c.i32(0))
	switch {
	case peer == nil || peer == c.dev:
		return cudart.ErrInvalidDevice
	case c.u32(1) != 0:
		return cudart.ErrInvalidValue
	case !c.canAccess(c.dev, peer):
		return cudart.ErrPeerAccessUnsupported
	case slices.Contains(c.dev.peers, peer):
		return cudart.Code(704)
	}
	if code := peer.makeContext(); code != success {
		return code
	}
	c.dev.peers = append(c.dev.peers, peer)
	return success
}

func (c *call) deviceDisablePeerAccess() cudart.Code {
	peer := c.device(c.i32(0))
	switch {
	case peer == nil || peer == c.dev:
		return cudart.ErrInvalidDevice
	case !c.dev.disablePeer(peer):
		return cudart.ErrPeerAccessNotEnabled
	}
	return success
}

// onDevice checks that a range is memory of a device, or managed memory.
func (c *call) onDevice(at uintptr, n int, d *device) cudart.Code {
	s, code := c.span(at, n)
	switch {
	case code != success:
		return code
	case s.block == nil, s.block.kind != deviceBlock && s.block.kind != managedBlock,
		s.block.kind == deviceBlock && s.block.dev != d:
		return cudart.ErrInvalidValue
	}
	return success
}

// memcpyPeerAsync is cudaMemcpyAsync between devices that the caller names.
func (c *call) memcpyPeerAsync() cudart.Code {
	to, from, n := c.device(c.i32(1)), c.device(c.i32(3)), c.num(4)
	switch {
	case to == nil || from == nil:
		return cudart.ErrInvalidDevice
	case n == 0:
		return success
	}
	for _, d := range [...]*device{to, from} {
		if d.broken != success {
			return d.broken
		}
	}
	dst, src := c.ptr(0), c.ptr(2)
	if code := c.onDevice(dst, n, to); code != success {
		return code
	}
	if code := c.onDevice(src, n, from); code != success {
		return code
	}
	return c.copy(dst, src, n, deviceToDevice, c.ptr(5), true)
}
