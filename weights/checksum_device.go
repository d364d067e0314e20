package weights

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/lifetime"
)

// A summer computes checksums of memory that a device can access, on the device. Several goroutines use it at once.
type summer struct {
	*gpukernels.Checksums
	streams deviceStreams
	list    unsafe.Pointer // pinned: summerSlots times summedSpans spans and their checksums
	view    cudart.DevPtr  // of list
	slots   chan int       // those that nobody uses
	life    lifetime.Lifetime
}

const (
	summerSlots = 16
	// summedSpans is the number of spans that one launch sums: 1 GiB of blocks takes half a millisecond (H200,
	// 2026-11-29).
	summedSpans = 1024
	slotBytes   = summedSpans * (gpukernels.SpanBytes + 4)
)

// newSummer returns an error for a device that runs no kernels, among others.
func newSummer(ctx context.Context, dev *cudart.Device) (*summer, error) {
	k, err := gpukernels.NewChecksums(ctx, dev)
	if err != nil {
		return nil, err
	}
	c := &summer{Checksums: k, slots: make(chan int, summerSlots)}
	for i := range summerSlots {
		c.slots <- i
	}
	if c.streams, err = newStreams(ctx, dev); err != nil {
		return nil, errors.Join(err, release(ctx, dev.Runtime(), k))
	}
	c.list, err = onDevice(ctx, dev, func() (unsafe.Pointer, error) {
		return dev.HostAlloc(summerSlots*slotBytes, cudart.HostAllocMapped)
	}, func(list unsafe.Pointer, err error) {
		if err == nil {
			_ = dev.FreeHost(list)
		}
	})
	if err == nil {
		c.view, err = c.viewOf(ctx, c.list)
	}
	if err != nil {
		return nil, errors.Join(err, release(ctx, dev.Runtime(), c))
	}
	return c, nil
}

// viewOf returns the address at which the device accesses pinned host memory.
func (c *summer) viewOf(ctx context.Context, mem unsafe.Pointer) (cudart.DevPtr, error) {
	dev := c.streams[0].Device()
	return onDevice(ctx, dev, func() (cudart.DevPtr, error) { return dev.HostDevicePointer(mem) }, nil)
}

// sum returns the checksums of spans, which no work of the device writes meanwhile: of the first ones, after an error.
func (c *summer) sum(ctx context.Context, spans []gpukernels.Span) (sums []uint32, err error) {
	var slot int
	select {
	case slot = <-c.slots:
	case <-ctx.Done():
		return nil, bounded.Ended(ctx)
	}
	stream := c.streams[slot%len(c.streams)]
	mem := unsafe.Add(c.list, slot*slotBytes)
	list := unsafe.Slice((*gpukernels.Span)(mem), summedSpans)
	got := unsafe.Slice((*uint32)(unsafe.Add(mem, summedSpans*gpukernels.SpanBytes)), summedSpans)
	view := c.view + cudart.DevPtr(slot*slotBytes)
	for len(sums) < len(spans) {
		n := copy(list, spans[len(sums):])
		_, err := onDevice(ctx, stream.Device(), func() (none struct{}, err error) {
			return none, c.CRC32C(stream, view, n, view+summedSpans*gpukernels.SpanBytes)
		}, nil)
		if err == nil {
			err = await(ctx, stream)
		}
		if err != nil {
			return sums, err // and the slot stays taken: a kernel may use it
		}
		sums = append(sums, got[:n]...)
	}
	c.slots <- slot
	return sums, nil
}

// sumLease adds the checksums of leased memory with the bytes from an offset of a file on, which the device reads over
// its link.
func (c *summer) sumLease(ctx context.Context, s *sums, off int64, lease pool.Lease) error {
	view, err := c.viewOf(ctx, lease.Pointer())
	if err != nil {
		return err
	}
	var list summing
	list.add(s, off, lease.Len(), view)
	_, err = list.run(ctx, c)
	s.added.Add(int64(lease.Len()))
	return err
}

// CloseContext waits for kernels that use the summer's memory, and closes it.
func (c *summer) CloseContext(ctx context.Context) error {
	return c.life.Close(ctx, func(ctx context.Context) error {
		for _, s := range c.streams {
			if err := s.Synchronize(ctx); err != nil && ctx.Err() != nil {
				return err
			}
		}
		_, err := onDevice(ctx, c.streams[0].Device(), func() (none struct{}, err error) {
			return none, errors.Join(c.streams[0].Device().FreeHost(c.list), c.streams.close(), c.Checksums.CloseContext(ctx))
		}, nil)
		return err
	})
}

// A summing is parts of blocks of files that are in the memory of a device, and are to be summed there.
type summing struct {
	spans []gpukernels.Span
	parts []blockPart // as many
}

// A blockPart is a part of a block of one file.
type blockPart struct {
	*sums
	block int
	summed
}

// add adds n bytes at an offset of a file, whose copies are at an address of the device.
func (l *summing) add(s *sums, off int64, n int, at cudart.DevPtr) {
	for i, p := range s.parts(off, n) {
		skip := s.blocks[i].off + int64(p.from) - off
		l.spans = append(l.spans, gpukernels.Span{Address: at + cudart.DevPtr(skip), Size: uint64(p.n)})
		l.parts = append(l.parts, blockPart{s, i, p})
	}
}

// run computes the checksums and adds them to those of the files. It returns the part at which it has failed.
func (l *summing) run(ctx context.Context, c *summer) (failed blockPart, err error) {
	got, err := c.sum(ctx, l.spans)
	for i, sum := range got {
		p := &l.parts[i]
		p.sum = sum
		p.put(p.block, p.summed)
	}
	if err != nil {
		return l.parts[len(got)], fmt.Errorf("checksums on %v: %w", c.streams[0].Device(), err)
	}
	return failed, nil
}
