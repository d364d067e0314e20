package weights

import (
	"context"
	"errors"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/gpukernels"
	"github.com/gopinned/pinned/internal/lifetime"
)

// A summer computes checksums of memory of a device, on the device.
type summer struct {
	*gpukernels.Checksums
	stream *cudart.Stream
	list   unsafe.Pointer // pinned: summedSpans spans, and the checksums of them
	view   cudart.DevPtr  // of list
	life   lifetime.Lifetime
}

// summedSpans is the number of spans that one launch sums: 4 GiB of blocks.
const summedSpans = 4096

// newSummer returns an error for a device that runs no kernels, among others.
func newSummer(ctx context.Context, dev *cudart.Device) (*summer, error) {
	k, err := gpukernels.NewChecksums(ctx, dev)
	if err != nil {
		return nil, err
	}
	c, err := onDevice(ctx, dev, func() (*summer, error) {
		c := &summer{Checksums: k}
		var err error
		if c.stream, err = dev.NewStream(cudart.StreamOptions{}); err == nil {
			c.list, err = dev.HostAlloc(summedSpans*(gpukernels.SpanBytes+4), cudart.HostAllocMapped)
		}
		if err == nil {
			c.view, err = dev.HostDevicePointer(c.list)
		}
		if err != nil {
			return nil, errors.Join(err, c.close(context.WithoutCancel(ctx)))
		}
		return c, nil
	}, func(c *summer, err error) {
		if err == nil {
			_ = c.close(context.WithoutCancel(ctx))
		}
	})
	return c, err
}

// sum returns the checksums of spans, which no work of the device writes meanwhile: of the first ones, after an error.
func (c *summer) sum(ctx context.Context, spans []gpukernels.Span) ([]uint32, error) {
	list := unsafe.Slice((*gpukernels.Span)(c.list), summedSpans)
	got := unsafe.Slice((*uint32)(unsafe.Add(c.list, summedSpans*gpukernels.SpanBytes)), summedSpans)
	sums := make([]uint32, 0, len(spans))
	for len(sums) < len(spans) {
		n := copy(list, spans[len(sums):])
		_, err := onDevice(ctx, c.stream.Device(), func() (none struct{}, err error) {
			return none, c.CRC32C(c.stream, c.view, n, c.view+summedSpans*gpukernels.SpanBytes)
		}, nil)
		if err == nil {
			err = await(ctx, c.stream)
		}
		if err != nil {
			return sums, err
		}
		sums = append(sums, got[:n]...)
	}
	return sums, nil
}

// close closes what newSummer has made.
func (c *summer) close(ctx context.Context) error {
	var errs []error
	if c.list != nil {
		if err := c.stream.Device().FreeHost(c.list); err != nil {
			errs = append(errs, err)
		} else {
			c.list = nil
		}
	}
	if c.stream != nil {
		errs = append(errs, c.stream.Close())
	}
	return errors.Join(append(errs, c.Checksums.CloseContext(ctx))...)
}

// CloseContext waits for kernels that use the summer's memory, and closes it.
func (c *summer) CloseContext(ctx context.Context) error {
	return c.life.Close(ctx, func(ctx context.Context) error {
		if err := c.stream.Synchronize(ctx); err != nil && ctx.Err() != nil {
			return err
		}
		_, err := onDevice(ctx, c.stream.Device(), func() (none struct{}, err error) { return none, c.close(ctx) }, nil)
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
		failed = l.parts[len(got)]
	}
	return failed, err
}
