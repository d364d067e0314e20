package hostmem

import (
	"context"
	"errors"
	"fmt"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// Alloc maps n bytes, makes them resident and registers them for all devices (cudaHostRegister, on
// dev). If the host refuses that, Alloc makes smaller registrations, or calls cudaHostAlloc
// instead. If the GPU uses the host's page tables, it registers nothing: see [Method].
// [Buffer.Info] reports the method and the reason. The memory is zero. Its size is n bytes rounded
// up to a page; n must be positive.
//
// The error names an invalid argument or option, wraps [ErrLimit] if the host lacks the memory or
// [SetLimits] forbids it, wraps [cudart.ErrClosed] if the Runtime was closed, or is the system's or
// CUDA's. An error of CUDA lists every attempt, and if the host is low on memory, the available
// bytes. After an error nothing is mapped or registered, unless unregistering failed too: then the
// error reports it, and the memory stays (Stats.LeakedBytes).
//
// When ctx ends while Alloc waits for a limit or makes pages resident, it undoes its
// work and returns ctx's error. When ctx ends while a call into CUDA does not return,
// Alloc returns within a second, and its work is undone when the call returns.
func Alloc(ctx context.Context, dev *cudart.Device, n int, o Options) (*Buffer, error) {
	b := &Buffer{}
	if err := b.open(ctx, dev, "buffer", o, func() error { return b.alloc(ctx, n, o) }); err != nil {
		return nil, fmt.Errorf("hostmem: allocate %d bytes: %w", n, err)
	}
	return b, nil
}

// alloc maps and registers n bytes, or has cudaHostAlloc allocate them.
func (b *Buffer) alloc(ctx context.Context, n int, o Options) error {
	refused := b.host.refused()
	if refused == nil {
		err := b.mapAndRegister(ctx, n, o)
		var final *refusal
		if !errors.As(err, &final) {
			return explain(err)
		}
		if err := b.undo(ctx); err != nil {
			return errors.Join(final, err)
		}
		refused = final
	}
	return b.hostAlloc(ctx, n, o, refused)
}

func (b *Buffer) mapAndRegister(ctx context.Context, n int, o Options) error {
	how, note := o.pages(ctx, b.dev)
	// The error of a limit explains more than the kernel's ENOMEM.
	how.Admit = func(bytes int) error { return b.acquire(ctx, budget.Request{Bytes: bytes}) }
	r, err := pages.Map(ctx, n, how)
	if err != nil {
		return err
	}
	if note != "" {
		b.note("%s", note)
	}
	return b.pin(ctx, r, 0, o)
}
