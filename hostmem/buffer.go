package hostmem

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// host is what mapping needs to know of this machine, read once.
var host = sync.OnceValue(func() *pages.System { return pages.NewSystem(os.DirFS("/")) })

// A Buffer is pinned host memory of exactly the size asked for. Its methods
// may be called from any goroutine; what they do to its bytes is the callers'
// to order.
type Buffer struct {
	pinnedMem
	region *pages.Region
	notes  []string
}

// Alloc maps n bytes, makes them resident and registers them for all devices
// (cudaHostRegister, on dev). The memory is zero. The buffer keeps n bytes
// rounded up to a page. After an error nothing is mapped or registered; only
// if unregistering fails on the way back the memory has to stay, and the error
// says so. What the host cannot spare, or [SetLimits] forbids, is [ErrLimit].
//
// When ctx ends while Alloc waits for a limit or makes pages resident, it
// undoes its work and returns ctx's error.
func Alloc(ctx context.Context, dev *cudart.Device, n int, o Options) (*Buffer, error) {
	b, err := alloc(ctx, dev, n, o)
	if err != nil {
		account.failures.Add(1)
		return nil, fmt.Errorf("hostmem: allocate %d bytes: %w", n, err)
	}
	return b, nil
}

func alloc(ctx context.Context, dev *cudart.Device, n int, o Options) (*Buffer, error) {
	start := time.Now()
	if err := checkArguments(ctx, dev); err != nil {
		return nil, err
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	node, onNode, note := o.Node.pick(dev, o.host())
	want := o.pages()
	want.Node, want.NodeSet = node, onNode
	r, err := pages.Map(ctx, n, want)
	if err != nil {
		return nil, err
	}
	b := &Buffer{region: r}
	if err := b.pin(ctx, dev, r, "buffer", 0, o); err != nil {
		return nil, err
	}
	if note != "" {
		b.notes = []string{note}
	}
	account.asked.add(1, n)
	b.enter(&account.kept, r.Mapped(), start)
	return b, nil
}

// Bytes returns the memory, exactly as long as asked for, and nil after Close.
// The slice must not be used after Close: the memory is unmapped then.
func (b *Buffer) Bytes() []byte { return b.region.Bytes() }

// Slice returns memory as a slice of T, as many as fit whole: a buffer's, a
// lease's, a registration's or a file's. T must not hold Go pointers: the
// garbage collector does not look here.
func Slice[T any](m interface{ Bytes() []byte }) []T {
	size := int(unsafe.Sizeof(*(*T)(nil)))
	mem := m.Bytes()
	if size == 0 || len(mem) < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/size)
}

// Kept returns the bytes that the buffer keeps resident: Len rounded up to a
// page.
func (b *Buffer) Kept() int { return b.region.Mapped() }

// Notes tell what the host refused, in words: huge pages that could not be
// had, for instance.
func (b *Buffer) Notes() []string { return slices.Concat(b.notes, b.region.Notes()) }

// Close waits for the copies that were queued by the buffer's methods,
// unregisters the memory and unmaps it. A second Close does nothing. If
// unregistering fails, the memory stays mapped, the error says so, and Close
// may be called again.
func (b *Buffer) Close() error { return b.CloseContext(context.Background()) }

// CloseContext is Close that gives up waiting when ctx ends: the buffer is
// then as it was.
func (b *Buffer) CloseContext(ctx context.Context) error {
	return b.close(ctx, func() error {
		if err := b.region.Unmap(); err != nil {
			return err
		}
		account.asked.add(-1, -b.n)
		return nil
	})
}
