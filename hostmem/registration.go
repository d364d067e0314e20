package hostmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

// registerFlags makes memory pinned for every device of the process.
const registerFlags = cudart.HostRegisterPortable

// registrations are the registrations of one piece of memory, or its allocation. They belong
// to the goroutine that opens the memory, and then to the one that closes it.
type registrations struct {
	dev       *cudart.Device
	host      *host
	base      unsafe.Pointer
	flags     cudart.HostRegisterFlags // besides registerFlags
	limit     int                      // bytes of the largest registration
	allocated unsafe.Pointer           // address from cudaHostAlloc, nil for registrations
	notes     atomic.Pointer[[]string] // replaced by the goroutine to which the registrations belong
	spans     []registered
}

// A registered span.
type registered struct {
	Span
	failed bool // unregistering it has failed
}

// register registers one span (cudaHostRegister).
func (p *registrations) register(ctx context.Context, s Span) error {
	return p.host.pinning.Inside(ctx, func() error {
		return p.dev.HostRegister(unsafe.Add(p.base, s.Off), s.Len, registerFlags|p.flags)
	})
}

// release unregisters all spans (cudaHostUnregister), the last first, or frees memory of
// cudaHostAlloc (cudaFreeHost). After an error the memory must not be unmapped: spans that
// could not be unregistered stay, and release can be called again.
//
// CUDA's calls may return an error of earlier asynchronous work although they have
// done their own. So "not registered" after an error means that the memory was
// unregistered by the call before.
func (p *registrations) release(ctx context.Context) error {
	if p.allocated != nil {
		return p.free(ctx)
	}
	var errs []error
	for i := len(p.spans) - 1; i >= 0; i-- {
		s := &p.spans[i]
		err := p.host.unpinning.Inside(ctx, func() error {
			err := p.dev.HostUnregister(unsafe.Add(p.base, s.Off))
			if errors.Is(err, cudart.ErrHostMemoryNotRegistered) && s.failed {
				return nil
			}
			s.failed = err != nil
			return err
		})
		switch {
		case err == nil:
			p.spans = slices.Delete(p.spans, i, i+1)
			p.host.unregistered()
			continue
		case errors.Is(err, bounded.ErrStuck): // the other calls would be stuck, too
			i = 0
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// free frees memory of cudaHostAlloc. The call may return an error of earlier
// asynchronous work although it has done its own: then the memory is not CUDA's any
// more, and may be another owner's at the next try.
func (p *registrations) free(ctx context.Context) error {
	return p.host.unpinning.Inside(ctx, func() error {
		err := p.dev.FreeHost(p.allocated)
		if err != nil {
			if a, queryErr := p.dev.PointerAttributes(uintptr(p.allocated)); queryErr == nil && a.Type == cudart.MemoryUnregistered {
				return nil
			}
		}
		return err
	})
}

// registerAll registers [off, end) in as few registrations as possible. The error is a *refusal if
// smaller ones are refused too.
func (p *registrations) registerAll(ctx context.Context, off, end int) error {
	size, n := p.limit, end-off
	var tried []int // and refused
	var refused error
	for off < end {
		if ctx.Err() != nil {
			return fmt.Errorf("register %d bytes: %w", n, bounded.Ended(ctx))
		}
		s := Span{Off: off, Len: min(size, end-off)}
		err := p.register(ctx, s)
		if err == nil {
			p.spans = append(p.spans, registered{Span: s})
			off += s.Len
			continue
		}
		tried = append(tried, s.Len)
		if errors.Is(err, cudart.ErrNotSupported) {
			return &refusal{tried, err}
		}
		if !tooLarge(err) {
			return err
		}
		if low := lowMemory(s.Len, err); low != nil {
			return low
		}
		if s.Len <= minSpan {
			return &refusal{tried, err}
		}
		refused = err
		size = max(minSpan, s.Len/2&^(chunkUnit-1))
	}
	if refused != nil {
		p.host.learned.Store(&learned{span: size})
		p.note("%s refused (%v): there are registrations of at most %s", sizes(tried), refused, units.ExactBytes(size))
	} else if size < n {
		p.note("registrations are of at most %s here", units.ExactBytes(size))
	}
	return nil
}

func (p *registrations) note(format string, args ...any) {
	notes := append(slices.Clip(p.allNotes()), fmt.Sprintf(format, args...))
	p.notes.Store(&notes)
}

func (p *registrations) allNotes() []string {
	if notes := p.notes.Load(); notes != nil {
		return *notes
	}
	return nil
}

// populate makes a region resident and registers it, unless the device uses the
// host's page tables.
//
// Pages are resident before they are registered: otherwise the driver faults them in on one
// thread (see RATIONALE.md).
func (p *registrations) populate(ctx context.Context, r *pages.Region, o Options) error {
	shared := p.host.shared()
	if o.Chunk > 0 && !shared {
		err := p.registerChunks(ctx, r, o)
		switch {
		case errors.Is(err, cudart.ErrNotSupported):
			return &refusal{[]int{min(o.Chunk, p.limit)}, err}
		case !tooLarge(err):
			return err
		}
		// There may be too many registrations.
		if failed := p.release(ctx); failed != nil {
			return errors.Join(err, failed)
		}
		p.note("registering chunks of %s was refused: %v", units.ExactBytes(min(o.Chunk, p.limit)), err)
	}
	if err := r.Populate(ctx, pages.Populate{Threads: o.Workers}); err != nil {
		return err
	}
	if shared {
		p.note("%v uses the host's page tables (attribute %d): nothing was registered, the kernel may still move pages or swap them out",
			p.dev, cudart.AttrPageableMemoryAccessUsesHostPageTables)
		return nil
	}
	return p.registerAll(ctx, 0, r.Len())
}

// registerChunks registers chunks, each as soon as its pages are resident.
func (p *registrations) registerChunks(ctx context.Context, r *pages.Region, o Options) error {
	done := make([]Span, (r.Mapped()+chunkUnit-1)/chunkUnit) // by the unit in which each begins
	err := r.Populate(ctx, pages.Populate{
		Threads: o.Workers,
		Item:    min(o.Chunk, p.limit),
		Done: func(off, n int) error {
			// The bytes past the end of the last page are not the caller's.
			s := Span{Off: off, Len: min(n, r.Len()-off)}
			err := p.register(ctx, s)
			if err == nil {
				done[off/chunkUnit] = s
			}
			return err
		},
	})
	for _, s := range done {
		if s.Len > 0 {
			p.spans = append(p.spans, registered{Span: s})
		}
	}
	return err
}
