package cudart

import (
	"fmt"
	"reflect"
	"sync"
)

// A peerAccess is the access of one device to another. Its lock is held during the
// calls that change it, so a call that blocks holds up only callers that need the same
// access.
type peerAccess struct {
	mu      sync.Mutex
	uses    int
	foreign bool // other code of the process has enabled it
	tried   bool // disabling has returned an error, and may have worked

	holders int // calls that use this; guarded by peers.mu
}

// peers has the accesses that are enabled. They belong to contexts that the Runtimes of a
// process share: what one of them enabled another must not disable meanwhile.
var peers = struct {
	mu  sync.Mutex
	all map[peerKey]*peerAccess
}{all: make(map[peerKey]*peerAccess)}

type peerKey struct {
	source   any    // nil for NVIDIA's libraries
	from, to string // UUIDs
}

// shares returns with what other Runtimes this one shares contexts: nil for NVIDIA's
// libraries, which all do.
func (rt *Runtime) shares() any {
	switch {
	case !rt.lib.Simulated:
		return nil
	case reflect.TypeOf(rt.source).Comparable():
		return rt.source
	}
	return rt
}

// holdPeer returns the access to another device, locked. Afterwards done is to be called.
func (d *Device) holdPeer(to *Device) (access *peerAccess, done func()) {
	key := peerKey{d.rt.shares(), d.uuid, to.uuid}
	peers.mu.Lock()
	access = peers.all[key]
	if access == nil {
		access = new(peerAccess)
		peers.all[key] = access
	}
	access.holders++
	peers.mu.Unlock()
	access.mu.Lock()
	return access, func() {
		access.mu.Unlock()
		peers.mu.Lock()
		defer peers.mu.Unlock()
		if access.holders--; access.holders == 0 && access.uses == 0 { // then no one changes uses
			delete(peers.all, key)
		}
	}
}

// CanAccessPeer reports whether the device can access the memory of another one
// directly, over NVLink or PCI Express (cudaDeviceCanAccessPeer). If it cannot, copies
// between the two go through the host. The error wraps [ErrInvalidValue] if peer is of
// another library; a nil peer is an error.
func (d *Device) CanAccessPeer(peer *Device) (bool, error) {
	if err := d.checkPeer(peer, fnDeviceCanAccessPeer); err != nil {
		return false, err
	}
	f := d.rt.begin()
	f.args[0], f.args[1], f.args[2] = f.outPtr(0), uintptr(d.ordinal), uintptr(peer.ordinal)
	out, err := d.rt.finish(fnDeviceCanAccessPeer, f, d.rt.callAnyDevice(fnDeviceCanAccessPeer, f), func() string { return fmt.Sprintf("%v to %v", d, peer) })
	return out.int(0) != 0, err
}

// EnablePeerAccess lets the device access the memory of another one directly
// (cudaDeviceEnablePeerAccess): kernels and copies of d may then use addresses of peer.
// Calls of all Runtimes of the process are counted together: access ends with the
// last [Device.DisablePeerAccess]. Access that other code of the process has enabled is
// used, and left enabled.
//
// The error wraps [ErrPeerAccessUnsupported] if the devices cannot access each other,
// [ErrInvalidDevice] if peer is d, and [ErrInvalidValue] if peer is of another library;
// a nil peer is an error.
func (d *Device) EnablePeerAccess(peer *Device) error {
	if err := d.checkPeer(peer, fnDeviceEnablePeerAccess); err != nil {
		return err
	}
	access, done := d.holdPeer(peer)
	defer done()
	if access.uses == 0 {
		f := d.rt.begin()
		f.args[0], f.args[1] = uintptr(peer.ordinal), 0
		code := d.guard(fnDeviceEnablePeerAccess, f)
		_, err := d.rt.finish(fnDeviceEnablePeerAccess, f, code, func() string { return fmt.Sprintf("%v to %v", d, peer) })
		access.foreign = code == errPeerAccessAlreadyEnabled
		if err != nil && !access.foreign {
			return err
		}
	}
	access.uses++
	return nil
}

// DisablePeerAccess undoes one [Device.EnablePeerAccess]
// (cudaDeviceDisablePeerAccess). Work that uses the access must be done. The error wraps
// [ErrPeerAccessNotEnabled] if there is none to undo. After any other error it may be
// called again.
func (d *Device) DisablePeerAccess(peer *Device) error {
	if err := d.checkPeer(peer, fnDeviceDisablePeerAccess); err != nil {
		return err
	}
	access, done := d.holdPeer(peer)
	defer done()
	switch {
	case access.uses == 0:
		return d.rt.errorf(fnDeviceDisablePeerAccess, ErrPeerAccessNotEnabled, "%v to %v", d, peer)
	case access.uses == 1 && !access.foreign:
		f := d.rt.begin()
		defer d.rt.end(f)
		f.args[0] = uintptr(peer.ordinal)
		// CUDA's calls may return an error of earlier asynchronous work although they
		// have done their own.
		code := d.guard(fnDeviceDisablePeerAccess, f)
		if code != success && (code != ErrPeerAccessNotEnabled || !access.tried) {
			access.tried = true
			return d.rt.errorf(fnDeviceDisablePeerAccess, code, "%v to %v", d, peer)
		}
		access.tried = false
	}
	access.uses--
	return nil
}

// CopyPeer queues a copy of n bytes from the memory of one device to that of another
// (cudaMemcpyPeerAsync). The stream may be of either device. The copy is direct if peer
// access is enabled between the two, and else goes through the host. A copy of 0 bytes
// is ignored. The error wraps [ErrInvalidValue] if n < 0, or if either range runs past
// its allocation; a nil device is an error.
func (s *Stream) CopyPeer(dst DevPtr, to *Device, src DevPtr, from *Device, n int) error {
	switch {
	case !to.made() || !from.made():
		return fmt.Errorf("cudaMemcpyPeerAsync: %v: %w", s, errNilDevice)
	case n < 0:
		return invalid(fnMemcpyPeerAsync, "size %d: must not be negative", n)
	case n == 0:
		return nil
	}
	f := s.Device().begin(s)
	f.args = [maxCallArgs]uintptr{uintptr(dst), uintptr(to.ordinal), uintptr(src), uintptr(from.ordinal), uintptr(n), s.arg()}
	_, err := s.Device().do(fnMemcpyPeerAsync, f, func() string {
		return fmt.Sprintf("%d bytes from %v on %v to %v on %v", n, src, from, dst, to)
	})
	return err
}

// checkPeer refuses a peer that is nil, or a device of another library.
func (d *Device) checkPeer(peer *Device, fn function) error {
	switch {
	case !d.made():
		return notMade(fn)
	case !peer.made():
		return fmt.Errorf("%s: %v: %w", fn.name(), d, errNilDevice)
	case peer.rt != d.rt:
		return invalid(fn, "%v and %v are of different libraries", d, peer)
	}
	return nil
}
