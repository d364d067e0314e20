package hostmem

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// registerFlags makes buffers pinned for every device of the process.
const registerFlags = cudart.HostRegisterPortable

// A pinning is the registrations of one piece of memory.
type pinning struct {
	dev   *cudart.Device
	base  unsafe.Pointer
	flags cudart.HostRegisterFlags // besides registerFlags
	limit int                      // the largest registration, 0 for the usual one
	mu    sync.Mutex               // chunks are pinned by several goroutines
	spans []Span
}

// register pins one span.
func (p *pinning) register(s Span) error {
	if err := p.dev.HostRegister(unsafe.Add(p.base, s.Off), s.Len, registerFlags|p.flags); err != nil {
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

// How much one registration can hold. One is what copies by other means need,
// so it is as much as goes:
//
//   - the GPU stands still while a call pins: 94 GB in one call stopped one for
//     11.6 s, the same in calls of 1 GB for 2.0 s in all;
//   - drivers from 580 on refuse 512 GiB and more, for want of one piece of
//     kernel memory;
//   - Linux 6.11 to 6.13 refuse more than 2 GB.
//
// Where a call is refused all the same, ever smaller ones are tried.
const (
	maxSpan       = 16 << 30
	maxSpanLinux6 = 1 << 30 // of Linux 6.11 to 6.13
	minSpan       = 64 << 20
)

// spanLimit is the largest registration on a kernel of this release.
func spanLimit(kernel linux.Release) int {
	if kernel.AtLeast(6, 11) && !kernel.AtLeast(6, 14) {
		return maxSpanLinux6
	}
	return maxSpan
}

// refused tells whether a smaller registration may succeed where one failed
// with this error.
func refused(err error) bool {
	return errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, cudart.ErrOperatingSystem) || errors.Is(err, cudart.ErrUnknown)
}

// registerAll pins the first n bytes in as few registrations as possible.
func (p *pinning) registerAll(ctx context.Context, n int) error {
	size := p.limit
	if size == 0 {
		size = maxSpan
	}
	var tried []string
	for off := 0; off < n; {
		if ctx.Err() != nil {
			return fmt.Errorf("pin %d bytes: %w", n, context.Cause(ctx))
		}
		s := Span{Off: off, Len: min(size, n-off)}
		err := p.register(s)
		if err == nil {
			off += s.Len
			continue
		}
		tried = append(tried, fmt.Sprintf("%d MiB", s.Len>>20))
		if !refused(err) || s.Len <= minSpan {
			if len(tried) > 1 {
				err = fmt.Errorf("registrations of %s were refused: %w", strings.Join(tried, ", "), err)
			}
			return err
		}
		size = max(minSpan, s.Len/2&^(chunkUnit-1))
	}
	return nil
}

// populateAndPin makes a region resident and registers it.
//
// Pages are there before they are registered: registering memory that is not
// makes the driver fault it in on one thread, at 4 to 7 GB/s.
func (p *pinning) populateAndPin(ctx context.Context, r *pages.Region, o Options) error {
	populate := pages.Populate{Threads: o.Workers}
	if o.Chunk > 0 {
		populate.Item = o.Chunk
		populate.Done = func(off, n int) error {
			// The bytes behind the last page's end are not the caller's.
			return p.register(Span{Off: off, Len: min(n, r.Len()-off)})
		}
		return r.Populate(ctx, 0, r.Mapped(), populate)
	}
	if err := r.Populate(ctx, 0, r.Mapped(), populate); err != nil {
		return err
	}
	return p.registerAll(ctx, r.Len())
}
