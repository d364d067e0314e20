package hostmem

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/linux"
)

// A host records how memory can be pinned for one device, and bounds the threads in such
// calls. Its values are replaced as a whole.
type host struct {
	pinning    bounded.Group // calls that register or allocate, or query the device
	unpinning  bounded.Group // calls that unregister or free
	attributes atomic.Pointer[attributes]
	learned    atomic.Pointer[learned]
}

// attributes of the device, queried once.
type attributes struct {
	shared bool  // the device uses the host's page tables
	cannot error // why the device cannot register memory
}

// learned records what worked after another attempt was refused.
type learned struct {
	span    int   // bytes of the largest registration, 0 if none was too large
	refusal error // a *refusal if cudaHostAlloc worked instead of registering, else nil
}

var hosts bounded.Each[cudart.Device, host]

// attribute queries the device (cudaDeviceGetAttribute).
func (h *host) attribute(ctx context.Context, dev *cudart.Device, a cudart.Attr) (value int, err error) {
	err = h.pinning.Inside(ctx, func() error {
		value, err = dev.Attribute(a)
		return err
	})
	return value, err
}

// query queries the device's attributes, the first time.
func (h *host) query(ctx context.Context, dev *cudart.Device) error {
	if h.attributes.Load() != nil {
		return nil
	}
	tables, err := h.attribute(ctx, dev, cudart.AttrPageableMemoryAccessUsesHostPageTables)
	if err != nil {
		return err
	}
	supported, err := h.attribute(ctx, dev, cudart.AttrHostRegisterSupported)
	if err != nil {
		return err
	}
	a := &attributes{shared: tables == 1}
	if supported == 0 {
		a.cannot = cannotRegister(dev, cudart.AttrHostRegisterSupported, "host memory")
	}
	h.attributes.Store(a)
	return nil
}

// shared reports whether the device uses the host's page tables.
func (h *host) shared() bool { return h.attributes.Load().shared }

// refused returns why memory has to come from cudaHostAlloc, nil if it need not.
func (h *host) refused() error {
	switch a, l := h.attributes.Load(), h.learned.Load(); {
	case a.shared:
		return nil
	case a.cannot != nil:
		return a.cannot
	case l != nil:
		return l.refusal
	}
	return nil
}

// unregistered records that memory was unregistered, so that the driver may allow
// registrations again.
func (h *host) unregistered() {
	if l := h.learned.Load(); l != nil && !errors.Is(l.refusal, errors.ErrUnsupported) {
		h.learned.CompareAndSwap(l, &learned{span: l.span})
	}
}

// limit returns the size in bytes of the largest registration to try.
func (h *host) limit(kernel linux.Release) int {
	n := maxSpan
	if leaksRefused(kernel) {
		n = maxSpanLinux6
	}
	if l := h.learned.Load(); l != nil && l.span > 0 {
		n = min(n, l.span)
	}
	return n
}

// cannotRegister is the error of a device on which an attribute is 0.
func cannotRegister(dev *cudart.Device, a cudart.Attr, what string) error {
	return fmt.Errorf("%v cannot register %s (attribute %d is 0): %w", dev, what, a, errors.ErrUnsupported)
}

// Sizes of one registration in bytes. It is as large as possible, because copies by other
// means than a Buffer's need few spans, within these bounds:
//
//   - the GPU stands still while a call pins: see RATIONALE.md;
//   - drivers from 580 on refuse 512 GiB and more, for want of one piece of
//     kernel memory;
//   - Linux 6.11 refuses more than 2 GiB, and leaks what it refuses (repaired before 6.12
//     by 94efde1d1539). There cudaHostAlloc does, too.
const (
	maxSpan        = 16 << 30
	maxSpanLinux6  = 1 << 30 // of Linux 6.11
	maxAllocLinux6 = 2047 << 20
	minSpan        = 64 << 20
)

// leaksRefused reports whether a kernel of this release leaks the memory of a refused
// call of more than 2 GiB.
func leaksRefused(kernel linux.Release) bool {
	return kernel == linux.Release{Major: 6, Minor: 11}
}
