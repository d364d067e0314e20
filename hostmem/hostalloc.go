package hostmem

import (
	"context"
	"fmt"
	"strings"
	"unsafe"

	"github.com/gopinned/pinned/hostmem/internal/budget"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// hostAlloc allocates the memory by cudaHostAlloc, after registering was refused, and clears
// it. The reservation may be for memory that was unmapped.
func (b *Buffer) hostAlloc(ctx context.Context, n int, o Options, refused error) error {
	system := pages.SystemOf(ctx)
	size, align, err := system.Sizes(n, o.Align)
	if err != nil {
		return err
	}
	if err := b.allocateAligned(ctx, system, n, size, align, refused); err != nil {
		return err
	}
	if err := b.region.Clear(ctx, o.Workers); err != nil { // CUDA does not
		return err
	}
	b.host.learned.Store(&learned{refusal: refused})
	notes := []string{fmt.Sprintf("%v: the memory comes from cudaHostAlloc, which pins more slowly", refused)}
	var ignored []string
	for i, set := range []bool{o.HugePages != 0, o.Chunk != 0, o.Node != 0, o.Fork, o.Dump} {
		if set {
			ignored = append(ignored, "Options."+[...]string{"HugePages", "Chunk", "Node", "Fork", "Dump"}[i])
		}
	}
	if len(ignored) > 0 {
		notes = append(notes, strings.Join(ignored, ", ")+": ignored, because cudaHostAlloc chooses the pages")
	}
	b.notes.Store(&notes)
	return nil
}

// allocateAligned allocates size bytes, and, if CUDA's address is not aligned, align bytes
// more.
func (b *Buffer) allocateAligned(ctx context.Context, system *pages.System, n, size, align int, refused error) error {
	for _, extra := range []int{0, align} {
		if n := size + extra; n > maxAllocLinux6 && leaksRefused(system.Kernel) {
			return fmt.Errorf("%w; cudaHostAlloc of %d bytes was not tried: Linux %d.%d leaks the memory of a refused call of more than 2 GiB until the next boot (update the kernel, or allocate less at once)",
				refused, n, system.Kernel.Major, system.Kernel.Minor)
		}
		if err := b.acquire(ctx, budget.Request{Bytes: size + extra}); err != nil {
			return err
		}
		var p unsafe.Pointer
		err := b.host.pinning.Inside(ctx, func() (err error) {
			p, err = b.dev.HostAlloc(size+extra, 0)
			return err
		})
		if err != nil {
			b.host.learned.Store(nil) // the next Alloc tries everything
			return fmt.Errorf("%w; in its place %w (%s)", refused, err, headroom())
		}
		skip := int(-uintptr(p) & uintptr(align-1))
		b.base = unsafe.Add(p, skip)
		b.region = pages.Allocated(system, b.base, n, size+extra)
		b.allocated = p
		if skip <= extra {
			break
		}
		if err := b.undo(ctx); err != nil {
			return err
		}
	}
	return nil
}
