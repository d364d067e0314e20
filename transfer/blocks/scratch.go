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
// kernel that writes to the host beside it, it carries 72 GB/s both ways together, and 57 with two such kernels. A copy of
// an engine alone and that kernel carried 74 to 86 there (H200, 2026-11-29).
//
// The engine copies on a stream of its own, to one half of the scratch memory while the kernel reads the other half. The
// streams wait for each other:
//
//	work                           | stream       | waits for
//	copy to a half                 | the engine's | earlier work of the caller's stream, and the last kernel that reads the half
//	kernel that reads the half     | the caller's | the copy
//	later work, also after errors  | the caller's | all copies
const staged = ByEngine + 1

const (
	scratchBytes = 32 << 20 // an engine takes 0.3 ms for half of them
	scratches    = 2        // of a Copier
	// scratchProcessors is the number of multiprocessors of the kernel from scratch memory: 32 and 128 are no better
	// (H200, 2026-11-29).
	scratchProcessors = 16
)

// A scratch is device memory that blocks pass through. Copier.scratches has those that no call is queueing copies for.
type scratch struct {
	p      cudart.DevPtr  // 0 until it is first used
	stream *cudart.Stream // of the engine's copies; nil until the scratch is first used
	last   cudart.Point   // after the copies and kernels that use it
}

// canStage reports whether copies for which the kernel was chosen may pass through scratch memory.
func (b *Copier) canStage(c *Copy, down bool) bool {
	return !down && b.method == Quickest && b.processors == 0 && c.HostIndex == nil && c.HostIndexOnDevice == 0 && c.HostStride == c.Size &&
		c.Size <= b.scratchBytes/2 && c.Count >= b.scratchBytes/2/c.Size
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

// makeScratch allocates scratch memory and its stream if there are none yet, and reports whether the next copies of the
// caller's stream may use them. They do not wait for another stream: its work may be waiting for theirs.
func (c *call) makeScratch(s *scratch) bool {
	var err error
	if s.stream == nil {
		if s.stream, err = c.dev.NewStream(cudart.StreamOptions{}); err != nil {
			return false
		}
	}
	if s.p == 0 {
		s.p, err = c.dev.Malloc(c.scratchBytes)
		return err == nil
	}
	return c.s.Point().After(s.last) || s.last.Done(context.WithoutCancel(c.ctx))
}

// freeScratches frees those that are not in use: all of them, once no call is under way. What cannot be freed stays.
func (b *Copier) freeScratches() error {
	var err error
	for range len(b.scratches) {
		s := <-b.scratches
		e := s.stream.Close() // it does nothing the second time
		if e == nil {
			e = b.dev.Free(s.p) // it waits for the device's work
		}
		if e != nil {
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
	err := c.through(&s, l)
	if err != nil {
		err = errors.Join(err, c.follow(&s))
	}
	s.last = c.s.Point()
	c.scratches <- s
	return err
}

// through is throughScratch with scratch memory. After an error the caller's stream may not wait for all copies yet.
func (c *call) through(s *scratch, l *launch) error {
	_, dst := l.ends()
	half := c.scratchBytes / 2
	before := c.s.Point()
	read := [2]cudart.Point{before, before} // after the last use of each half
	for from, n, i := 0, 0, 0; from < l.Count; from, i = from+n, 1-i {
		if c.ctx.Err() != nil {
			return bounded.Ended(c.ctx)
		}
		n = min(half/l.Size, l.Count-from)
		begin, p := from*l.Size, s.p+cudart.DevPtr(i*half)
		if err := s.stream.WaitPoint(read[i]); err != nil {
			return err
		}
		for part := range l.owner.Spans(l.start+begin, n*l.Size) {
			at := part.Off - l.start
			if err := s.stream.CopyToDevice(p+cudart.DevPtr(at-begin), unsafe.Pointer(&l.Host[at]), part.Len); err != nil {
				return fmt.Errorf("blocks %d to %d: %w", from, from+n-1, err)
			}
		}
		if err := c.s.WaitPoint(s.stream.Point()); err != nil {
			return err
		}
		if err := c.kernel.Copy(c.s, dst.After(from), gpukernels.BlockList{Base: p, Stride: l.Size}, l.Size, n, scratchProcessors, false); err != nil {
			return err
		}
		read[i] = c.s.Point()
	}
	return nil
}

// follow makes the caller's stream wait for the engine's copies. If CUDA refuses that, follow waits for them, because the
// caller and the owner of the host memory wait for that stream alone.
func (c *call) follow(s *scratch) error {
	copied := s.stream.Point()
	if c.s.WaitPoint(copied) == nil {
		return nil
	}
	return copied.Wait(context.WithoutCancel(c.ctx))
}
