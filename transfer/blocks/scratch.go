package blocks

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/gpukernels"
)

// staged is the method of many blocks to the device that lie one after the other in host memory: an engine copies them to
// device memory, as one, and the kernel from there to their places. The link then carries large reads alone: with a
// kernel that writes to the host beside it, it carries 93 to 96 GB/s both ways together, and 62 with two such
// kernels (C, H200, 2026-11-23).
const staged = ByEngine + 1

const (
	scratchBytes      = 32 << 20 // an engine takes 0.6 ms for them, and waits for the kernel that follows
	scratches         = 2        // of a Copier
	scratchProcessors = 32       // of the kernel from scratch memory; not measured yet
)

// A scratch is device memory that blocks pass through. Copier.scratches has those that no call is queueing copies for.
type scratch struct {
	p    cudart.DevPtr // 0 until it is first used
	last cudart.Point  // after the copies that use it
}

// canStage reports whether copies for which the kernel was chosen may pass through scratch memory.
func (b *Copier) canStage(c *Copy, down bool) bool {
	return !down && b.method == Quickest && b.processors == 0 && c.HostIndex == nil && c.HostIndexOnDevice == 0 && c.HostStride == c.Size &&
		c.Size <= b.scratchBytes && c.Count >= b.scratchBytes/2/c.Size
}

// scratch returns scratch memory that no other stream's copies use. It returns false if all of it is in use.
func (c *call) scratch() (scratch, bool) {
	for range scratches {
		select {
		case s := <-c.scratches:
			if c.makeScratch(&s) {
				return s, true
			}
			c.scratches <- s
		default:
			return scratch{}, false
		}
	}
	return scratch{}, false
}

// makeScratch allocates scratch memory that has none yet, and reports whether the stream's next copies may use it. They do
// not wait for another stream: its work may be waiting for theirs.
func (c *call) makeScratch(s *scratch) bool {
	if s.p == 0 {
		p, err := c.dev.Malloc(c.scratchBytes)
		s.p = p
		return err == nil
	}
	return c.s.Point().After(s.last) || s.last.Done(context.WithoutCancel(c.ctx))
}

// freeScratches frees those that are not in use: all of them, once no call is under way. What cannot be freed stays.
func (b *Copier) freeScratches() error {
	var err error
	for range len(b.scratches) {
		s := <-b.scratches
		if e := b.dev.Free(s.p); e != nil {
			err = errors.Join(err, e)
		} else {
			s = scratch{}
		}
		b.scratches <- s
	}
	return err
}

// throughScratch queues copies to the device of blocks that lie one after the other in host memory.
func (c *call) throughScratch(l *launch) error {
	s, ok := c.scratch()
	if !ok {
		return c.byKernel(l)
	}
	defer func() {
		s.last = c.s.Point()
		c.scratches <- s
	}()
	_, dst := l.ends()
	for from, n := 0, 0; from < l.Count; from += n {
		if c.ctx.Err() != nil {
			return bounded.Ended(c.ctx)
		}
		n = min(c.scratchBytes/l.Size, l.Count-from)
		begin := from * l.Size
		for part := range l.owner.Spans(l.start+begin, n*l.Size) {
			at := part.Off - l.start
			if err := c.s.CopyToDevice(s.p+cudart.DevPtr(at-begin), unsafe.Pointer(&l.Host[at]), part.Len); err != nil {
				return fmt.Errorf("blocks %d to %d: %w", from, from+n-1, err)
			}
		}
		if err := c.kernel.Copy(c.s, dst.After(from), gpukernels.BlockList{Base: s.p, Stride: l.Size}, l.Size, n, scratchProcessors, false); err != nil {
			return err
		}
	}
	return nil
}
