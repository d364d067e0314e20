package weights

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// A summer computes checksums of memory that a device can access, on the device. Several goroutines use it at once.
type summer struct {
	*gpukernels.Checksums
	streams deviceStreams
	list    *hostmem.Buffer // of summerSlots times summedSpans spans and their checksums
	view    cudart.DevPtr   // of list
	slots   chan int        // those that nobody uses
}

const (
	summerSlots = memoryWriters + 1
	// summedSpans is the number of spans that one launch sums: 1 GiB of blocks takes half a millisecond (H200,
	// 2026-11-29).
	summedSpans = 1024
	slotBytes   = summedSpans * (gpukernels.SpanBytes + 4)
)

// idleSummers has those of loads and saves that have ended: loading the kernel and pinning the list take milliseconds.
var idleSummers idle[*summer]

func takeSummer(ctx context.Context, dev *cudart.Device) (*summer, error) {
	return idleSummers.take(dev, func() (*summer, error) { return newSummer(ctx, dev) })
}

// keep keeps the summer for the next load or save, unless this one has failed, or a kernel may be running.
func (c *summer) keep(caller context.Context, failed bool) error {
	return idleSummers.keep(caller, failed || len(c.slots) < summerSlots, c.streams[0].Device(), c)
}

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
		return nil, errors.Join(err, release(ctx, true, dev.Runtime(), k))
	}
	if c.list, err = hostmem.Alloc(ctx, dev, summerSlots*slotBytes, hostmem.Options{Label: "weights checksums"}); err == nil {
		c.view, err = c.viewOf(ctx, c.list.Pointer())
	}
	if err != nil {
		return nil, errors.Join(err, release(ctx, true, dev.Runtime(), c))
	}
	return c, nil
}

// viewOf returns the address at which the device accesses pinned host memory.
func (c *summer) viewOf(ctx context.Context, mem unsafe.Pointer) (cudart.DevPtr, error) {
	dev := c.streams[0].Device()
	return onDevice(ctx, dev, func() (cudart.DevPtr, error) { return dev.HostDevicePointer(mem) }, nil)
}

// A summation is a launch that sums spans.
type summation struct {
	*summer
	slot, n int
}

// launch begins to sum at most summedSpans spans, which may be those of a lease.
func (c *summer) launch(ctx context.Context, spans []gpukernels.Span, lease *usedLease) (summation, error) {
	l := summation{summer: c}
	select {
	case l.slot = <-c.slots:
	case <-ctx.Done():
		return l, bounded.Ended(ctx)
	}
	l.n = copy(unsafe.Slice((*gpukernels.Span)(l.memory()), summedSpans), spans)
	view := c.view + cudart.DevPtr(l.slot*slotBytes)
	return l, lease.onDevice(ctx, l.stream().Device(), func() error {
		return c.CRC32C(l.stream(), view, l.n, view+summedSpans*gpukernels.SpanBytes)
	})
}

func (l summation) stream() *cudart.Stream { return l.streams[l.slot%len(l.streams)] }

func (l summation) memory() unsafe.Pointer { return unsafe.Add(l.list.Pointer(), l.slot*slotBytes) }

// sums waits for the checksums. After an error the slot stays taken: the kernel may use it.
func (l summation) sums(ctx context.Context) ([]uint32, error) {
	if err := await(ctx, l.stream()); err != nil {
		return nil, err
	}
	got := slices.Clone(unsafe.Slice((*uint32)(unsafe.Add(l.memory(), summedSpans*gpukernels.SpanBytes)), l.n))
	l.slots <- l.slot
	return got, nil
}

// CloseContext waits for kernels that use the summer's memory, also those whose launch was abandoned, and closes it.
func (c *summer) CloseContext(ctx context.Context) error {
	err := c.Checksums.CloseContext(ctx)
	if err == nil && c.list != nil {
		err = c.list.CloseContext(ctx)
	}
	if err == nil {
		err = c.streams.CloseContext(ctx)
	}
	return err
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
	for len(l.parts) > 0 {
		launched, err := c.launch(ctx, l.spans, &usedLease{})
		if err == nil {
			err = l.take(ctx, launched)
		}
		if err != nil {
			return l.parts[0], fmt.Errorf("checksums on %v: %w", c.streams[0].Device(), err)
		}
	}
	return failed, nil
}

// take adds the checksums of a launch, and removes its parts.
func (l *summing) take(ctx context.Context, launched summation) error {
	got, err := launched.sums(ctx)
	for i, sum := range got {
		p := l.parts[i]
		p.sum = sum
		p.put(p.block, p.summed)
	}
	l.spans, l.parts = l.spans[len(got):], l.parts[len(got):]
	return err
}

// A leaseSum is the sum of a lease, which a device reads over its link while the lease is written.
type leaseSum struct {
	summing
	launched summation
}

// sumLease begins to sum n bytes of leased memory, those from an offset of a file on. It returns nil if the CPU is to sum
// them, because no kernel is loaded, the device cannot access the memory, or there are many tensors.
func (c *summer) sumLease(ctx context.Context, s *sums, off int64, lease *usedLease, n int) (l *leaseSum, err error) {
	if c == nil || s == nil || ctx.Err() != nil {
		return nil, nil
	}
	view, err := c.viewOf(ctx, lease.Pointer())
	if err != nil {
		return nil, nil
	}
	l = &leaseSum{}
	if l.add(s, off, n, view); len(l.spans) > summedSpans {
		return nil, nil
	}
	l.launched, err = c.launch(ctx, l.spans, lease)
	return l, err
}

// end waits for the sum, and adds it.
func (l *leaseSum) end(ctx context.Context) error {
	n := 0
	for _, p := range l.parts {
		n += p.n
	}
	l.parts[0].added.Add(int64(n))
	return l.take(ctx, l.launched)
}
