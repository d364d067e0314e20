package hostmem

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"weak"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/linux"
)

// A host is what is known of how memory can be pinned for one device.
type host struct {
	shared bool  // the device uses the host's page tables
	cannot error // why the device cannot register memory

	mu      sync.Mutex
	span    int   // the largest registration that worked, after a larger one was refused
	refusal error // a *refusal, since cudaHostAlloc worked in place of registering
}

var hosts struct {
	mu sync.Mutex
	of map[weak.Pointer[cudart.Device]]*host
}

// hostOf returns what is known for a device; the first time, it queries the device's
// attributes (cudaDeviceGetAttribute).
func hostOf(dev *cudart.Device) (*host, error) {
	key := weak.Make(dev)
	hosts.mu.Lock()
	h := hosts.of[key]
	hosts.mu.Unlock()
	if h != nil {
		return h, nil
	}
	h = &host{}
	tables, err := dev.Attribute(cudart.AttrPageableMemoryAccessUsesHostPageTables)
	if err != nil {
		return nil, err
	}
	supported, err := dev.Attribute(cudart.AttrHostRegisterSupported)
	if err != nil {
		return nil, err
	}
	h.shared = tables == 1
	if supported == 0 {
		h.cannot = cannotRegister(dev, cudart.AttrHostRegisterSupported, "host memory")
	}
	hosts.mu.Lock()
	defer hosts.mu.Unlock()
	if other := hosts.of[key]; other != nil {
		return other, nil
	}
	if hosts.of == nil {
		hosts.of = make(map[weak.Pointer[cudart.Device]]*host)
	}
	hosts.of[key] = h
	runtime.AddCleanup(dev, func(key weak.Pointer[cudart.Device]) {
		hosts.mu.Lock()
		defer hosts.mu.Unlock()
		delete(hosts.of, key)
	}, key)
	return h, nil
}

// refused returns why memory has to come from cudaHostAlloc, nil if it need not.
func (h *host) refused() error {
	if h.shared {
		return nil
	}
	if h.cannot != nil {
		return h.cannot
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.refusal
}

// never returns why no memory at all can be registered, nil if it is not known.
func (h *host) never() error {
	if err := h.refused(); errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}

// remember records that cudaHostAlloc works where registering was refused.
func (h *host) remember(refusal error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.span, h.refusal = 0, refusal
}

// forget makes the next Alloc try everything.
func (h *host) forget() { h.remember(nil) }

// unregistered records that memory was unregistered: there may be room for
// registrations again.
func (h *host) unregistered() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !errors.Is(h.refusal, errors.ErrUnsupported) {
		h.refusal = nil
	}
}

// accepted records the largest registration that works.
func (h *host) accepted(span int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.span = span
}

// limit returns the size in bytes of the largest registration to try.
func (h *host) limit(kernel linux.Release) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.span > 0 {
		return min(h.span, spanLimit(kernel))
	}
	return spanLimit(kernel)
}

// cannotRegister is the error of a device on which an attribute is 0.
func cannotRegister(dev *cudart.Device, a cudart.Attr, what string) error {
	return fmt.Errorf("%v cannot register %s (attribute %d is 0): %w", dev, what, a, errors.ErrUnsupported)
}

// How much one registration can hold. Copies by other means need few of them, so it
// is as much as possible:
//
//   - the GPU stands still while a call pins: 94 GB in one call stopped one for
//     11.6 s, the same in calls of 1 GB for 2.0 s in all;
//   - drivers from 580 on refuse 512 GiB and more, for want of one piece of
//     kernel memory;
//   - Linux 6.11 to 6.13 refuse more than 2 GiB, and leak what they refuse. There
//     cudaHostAlloc does, too.
const (
	maxSpan        = 16 << 30
	maxSpanLinux6  = 1 << 30 // of Linux 6.11 to 6.13
	maxAllocLinux6 = 2047 << 20
	minSpan        = 64 << 20
)

// leaksRefused reports whether a kernel of this release leaks the memory of a refused
// call of more than 2 GiB.
func leaksRefused(kernel linux.Release) bool {
	return kernel.AtLeast(6, 11) && !kernel.AtLeast(6, 14)
}

// spanLimit returns the largest registration on a kernel of this release.
func spanLimit(kernel linux.Release) int {
	if leaksRefused(kernel) {
		return maxSpanLinux6
	}
	return maxSpan
}
