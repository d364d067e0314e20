package hostmem

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// foreign is pinned memory whose pages are not hostmem's own: a registration's
// or a file's.
type foreign struct {
	pinnedMem
	region *pages.Region
	notes  []string
}

// Bytes returns the memory, nil after Close.
func (f *foreign) Bytes() []byte { return f.region.Bytes() }

// Notes tell in words what is not as one would expect: that this device does
// not lock registered pages, for instance.
func (f *foreign) Notes() []string { return slices.Concat(f.notes, f.region.Notes()) }

// ReadOnly tells whether the GPU may only read the memory.
func (f *foreign) ReadOnly() bool { return f.readOnly }

// Close waits for the copies that were queued by the methods here and undoes
// what [Register] or [MapFile] did: it unregisters the pages and, of a file,
// unmaps them. Memory that others mapped stays mapped. A second Close does
// nothing. If unregistering fails, the error says so, the memory must stay
// mapped, and Close may be called again.
func (f *foreign) Close() error { return f.CloseContext(context.Background()) }

// CloseContext is Close that gives up waiting when ctx ends: all is then as it
// was.
func (f *foreign) CloseContext(ctx context.Context) error {
	return f.close(ctx, f.region.Unmap)
}

// askDevice tells how a device registers memory that is not hostmem's, with
// notes, or why it cannot.
func askDevice(dev *cudart.Device, readOnly bool) (flags cudart.HostRegisterFlags, notes []string, err error) {
	if err := need(dev, cudart.AttrHostRegisterSupported, "host memory"); err != nil {
		return 0, nil, err
	}
	if readOnly {
		if err := need(dev, cudart.AttrHostRegisterReadOnlySupported, "memory that is mapped for reading only"); err != nil {
			return 0, nil, err
		}
		flags = cudart.HostRegisterReadOnly
	}
	tables, err := dev.Attribute(cudart.AttrPageableMemoryAccessUsesHostPageTables)
	if err != nil {
		return 0, nil, err
	}
	if tables == 1 {
		notes = []string{fmt.Sprintf("%v uses the host's page tables (attribute %d): registering does not lock pages there, the kernel may still move them or swap them out",
			dev, cudart.AttrPageableMemoryAccessUsesHostPageTables)}
	}
	return flags, notes, nil
}

func need(dev *cudart.Device, a cudart.Attr, what string) error {
	can, err := dev.Attribute(a)
	if err == nil && can == 0 {
		err = fmt.Errorf("%v cannot register %s (attribute %d is 0): %w", dev, what, a, errors.ErrUnsupported)
	}
	return err
}
