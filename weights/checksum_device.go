package weights

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// A summer computes checksums of device memory, on the device, for one goroutine at a time.
type summer struct {
	*gpukernels.Checksums
	streams deviceStreams   // one
	list    *hostmem.Buffer // of summedSpans spans and their checksums
	view    cudart.DevPtr   // of list
}

// summedSpans is the number of spans that one launch sums: 1 GiB of blocks takes half a millisecond (H200, 2026-11-29).
const summedSpans = 1024

// idleSummers has those of loads and saves that have ended: loading the kernel and pinning the list take milliseconds.
var idleSummers idle[*summer]

func takeSummer(ctx context.Context, dev *cudart.Device) (*summer, error) {
	return idleSummers.take(dev, func() (*summer, error) { return newSummer(ctx, dev) })
}

// keep keeps the summer for the next load or save, unless this one has failed: a kernel may be running then.
func (c *summer) keep(caller context.Context, failed bool) error {
	return idleSummers.keep(caller, failed, c.streams[0].Device(), c)
}

// newSummer returns an error for a device that runs no kernels, among others.
func newSummer(ctx context.Context, dev *cudart.Device) (*summer, error) {
	k, err := gpukernels.NewChecksums(ctx, dev)
	if err != nil {
		return nil, err
	}
	c := &summer{Checksums: k}
	if c.streams, err = newStreams(ctx, dev, 1); err != nil {
		return nil, errors.Join(err, release(ctx, true, dev.Runtime(), k))
	}
	const bytes = summedSpans * (gpukernels.SpanBytes + 4)
	if c.list, err = hostmem.Alloc(ctx, dev, bytes, hostmem.Options{Label: "weights checksums"}); err == nil {
		c.view, err = onDevice(ctx, dev, func() (cudart.DevPtr, error) { return dev.HostDevicePointer(c.list.Pointer()) }, nil)
	}
	if err != nil {
		return nil, errors.Join(err, release(ctx, true, dev.Runtime(), c))
	}
	return c, nil
}

// sum returns the checksums of the first spans, summedSpans at most.
func (c *summer) sum(ctx context.Context, spans []gpukernels.Span) ([]uint32, error) {
	on, list := c.streams[0], c.list.Bytes()
	n := copy(unsafe.Slice((*gpukernels.Span)(unsafe.Pointer(&list[0])), summedSpans), spans)
	_, err := onDevice(ctx, on.Device(), func() (none struct{}, err error) {
		return none, c.CRC32C(on, c.view, n, c.view+summedSpans*gpukernels.SpanBytes)
	}, nil)
	if err == nil {
		err = await(ctx, on)
	}
	if err != nil {
		return nil, fmt.Errorf("checksums on %v: %w", on.Device(), err)
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(&list[summedSpans*gpukernels.SpanBytes])), n), nil
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
		got, err := c.sum(ctx, l.spans)
		if err != nil {
			return l.parts[0], err
		}
		for i, sum := range got {
			p := l.parts[i]
			p.sum = sum
			p.put(p.block, p.summed)
		}
		l.spans, l.parts = l.spans[len(got):], l.parts[len(got):]
	}
	return failed, nil
}
