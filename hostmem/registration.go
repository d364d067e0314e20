package hostmem

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/linux"
)

// A Span is one registration of a buffer: CUDA takes a copy only if it lies
// within one.
type Span struct {
	Off, Len int // bytes
}

// Pieces calls do for each part of [off, off+n) that lies within one span, in
// order, until do returns an error: for copies by other means than a Buffer's
// own. Offsets and lengths are in bytes; the spans are sorted and do not overlap.
func Pieces(spans []Span, off, n int, do func(off, n int) error) error {
	// The first span that ends after off, by binary search.
	first, _ := slices.BinarySearchFunc(spans, off, func(s Span, off int) int {
		return cmp.Compare(s.Off+s.Len, off+1)
	})
	for _, s := range spans[first:] {
		from, to := max(off, s.Off), min(off+n, s.Off+s.Len)
		if from >= to {
			break
		}
		if err := do(from, to-from); err != nil {
			return err
		}
	}
	return nil
}

// registerFlags makes memory pinned for every device of the process.
const registerFlags = cudart.HostRegisterPortable

// registrations are those of one piece of memory.
type registrations struct {
	dev   *cudart.Device
	base  unsafe.Pointer
	flags cudart.HostRegisterFlags // besides registerFlags
	limit int                      // the largest registration

	mu    sync.Mutex // not held during calls into CUDA
	spans []Span
	tried []Span // of these, those whose unregistering has failed
}

// register registers one span (cudaHostRegister).
func (p *registrations) register(s Span) error {
	if err := p.dev.HostRegister(unsafe.Add(p.base, s.Off), s.Len, registerFlags|p.flags); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spans = append(p.spans, s)
	return nil
}

// sorted returns the spans in order.
func (p *registrations) sorted() []Span {
	p.mu.Lock()
	defer p.mu.Unlock()
	slices.SortFunc(p.spans, func(a, b Span) int { return a.Off - b.Off })
	return slices.Clone(p.spans)
}

// unregister unregisters everything, the last first (cudaHostUnregister). Spans that
// could not be unregistered stay, so that it can be called again and the memory is
// not unmapped. It is for one goroutine at a time.
//
// CUDA's calls may return an error of earlier asynchronous work although they have
// done their own. So "not registered" after an error means that the memory was
// unregistered by the call before.
func (p *registrations) unregister() error {
	p.mu.Lock()
	spans, tried := p.spans, p.tried
	p.mu.Unlock()
	var left []Span
	var errs []error
	for _, s := range slices.Backward(spans) {
		err := p.dev.HostUnregister(unsafe.Add(p.base, s.Off))
		if err == nil || errors.Is(err, cudart.ErrHostMemoryNotRegistered) && slices.Contains(tried, s) {
			continue
		}
		left = append(left, s)
		errs = append(errs, err)
	}
	slices.Reverse(left)
	p.mu.Lock()
	p.spans, p.tried = left, left
	p.mu.Unlock()
	return errors.Join(errs...)
}

// How much one registration can hold. Copies by other means need few of them, so it
// is as much as possible:
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

// spanLimit returns the largest registration on a kernel of this release.
func spanLimit(kernel linux.Release) int {
	if kernel.AtLeast(6, 11) && !kernel.AtLeast(6, 14) {
		return maxSpanLinux6
	}
	return maxSpan
}

// tooLarge reports whether a smaller registration may succeed where one failed with
// this error.
func tooLarge(err error) bool {
	return errors.Is(err, cudart.ErrMemoryAllocation) || errors.Is(err, cudart.ErrOperatingSystem) || errors.Is(err, cudart.ErrUnknown)
}

// registerAll registers the first n bytes in as few registrations as possible.
func (p *registrations) registerAll(ctx context.Context, n int) error {
	size := p.limit
	var tried []string
	for off := 0; off < n; {
		if ctx.Err() != nil {
			return fmt.Errorf("register %d bytes: %w", n, context.Cause(ctx))
		}
		s := Span{Off: off, Len: min(size, n-off)}
		err := p.register(s)
		if err == nil {
			off += s.Len
			continue
		}
		tried = append(tried, fmt.Sprintf("%d MiB", s.Len>>20))
		if !tooLarge(err) || s.Len <= minSpan {
			if len(tried) > 1 {
				err = fmt.Errorf("registrations of %s were refused: %w", strings.Join(tried, ", "), err)
			}
			return err
		}
		size = max(minSpan, s.Len/2&^(chunkUnit-1))
	}
	return nil
}

// populate makes a region resident and registers it.
//
// Pages are resident before they are registered: registering memory that is not
// makes the driver fault it in on one thread, at 4 to 7 GB/s.
func (p *registrations) populate(ctx context.Context, r *pages.Region, o Options) error {
	how := pages.Populate{Threads: o.Workers}
	if o.Chunk > 0 {
		how.Item = o.Chunk
		how.Done = func(off, n int) error {
			// The bytes past the end of the last page are not the caller's.
			return p.register(Span{Off: off, Len: min(n, r.Len()-off)})
		}
		return r.Populate(ctx, 0, r.Mapped(), how)
	}
	if err := r.Populate(ctx, 0, r.Mapped(), how); err != nil {
		return err
	}
	return p.registerAll(ctx, r.Len())
}
