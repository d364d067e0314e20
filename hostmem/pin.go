package hostmem

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// registerFlags makes buffers pinned for every device of the process.
const registerFlags = cudart.HostRegisterPortable

// A pinning is the registrations of one piece of memory.
type pinning struct {
	dev   *cudart.Device
	base  unsafe.Pointer
	mu    sync.Mutex // chunks are pinned by several goroutines
	spans []Span
}

// register pins one span.
func (p *pinning) register(s Span, flags cudart.HostRegisterFlags) error {
	if err := p.dev.HostRegister(unsafe.Add(p.base, s.Off), s.Len, flags); err != nil {
		return err
	}
	p.mu.Lock()
	p.spans = append(p.spans, s)
	p.mu.Unlock()
	return nil
}

// undo unregisters everything, the last first. What could not be unregistered
// stays in spans, so that undo can be tried again and the memory is not
// unmapped.
func (p *pinning) undo() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var failed []Span
	var errs []error
	for i := len(p.spans) - 1; i >= 0; i-- {
		s := p.spans[i]
		if err := p.dev.HostUnregister(unsafe.Add(p.base, s.Off)); err != nil {
			failed = append(failed, s)
			errs = append(errs, err)
		}
	}
	p.spans = failed
	return errors.Join(errs...)
}

// populateAndPin makes a region resident and registers it.
//
// Pages are there before they are registered: registering memory that is not
// makes the driver fault it in on one thread, at 4 to 7 GB/s.
func (p *pinning) populateAndPin(ctx context.Context, r *pages.Region, o Options) error {
	populate := pages.Populate{Threads: o.Threads}
	if o.Chunk > 0 {
		populate.Item = o.Chunk
		populate.Done = func(off, n int) error {
			// The bytes behind the last page's end are not the caller's.
			return p.register(Span{Off: off, Len: min(n, r.Len()-off)}, registerFlags)
		}
		return r.Populate(ctx, 0, r.Mapped(), populate)
	}
	if err := r.Populate(ctx, 0, r.Mapped(), populate); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("pin %d bytes: %w", r.Len(), context.Cause(ctx))
	}
	return p.register(Span{Len: r.Len()}, registerFlags)
}
