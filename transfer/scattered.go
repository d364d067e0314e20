package transfer

import (
	"context"
	"fmt"
	"math"
	"sort"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer/internal/queue"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A Part is one of many copies: the bytes of Host, and as many at Device.
type Part struct {
	Device cudart.DevPtr
	Host   []byte
}

// UploadAll copies the host's bytes of every part to the device. Many small
// copies cost much less so than one by one: they are gathered in pinned memory,
// parts that follow on each other on the device become one copy, and of the rest many
// small ones are copied between pinned memory and their places by a kernel on a few multiprocessors, which the
// first such call loads. Others are queued a thousand at a time (cudaMemcpyBatchAsync, where library and
// driver are of CUDA 12.8 or later). No two parts may overlap on the device.
// After an error some parts may have been copied.
func (c *Copier) UploadAll(ctx context.Context, parts []Part) error {
	return c.all(ctx, "upload", parts, false)
}

// DownloadAll copies the device's bytes of every part to the host, in the same
// way. No two parts may overlap on the host.
func (c *Copier) DownloadAll(ctx context.Context, parts []Part) error {
	return c.all(ctx, "download", parts, true)
}

func (c *Copier) all(ctx context.Context, what string, parts []Part, down bool) error {
	p := newPartList(parts, down)
	call := c.get()
	call.call.Inspect = nil // the parts are apart in the ring
	_, err := call.do(ctx, p.bytes(), func() (int, error) {
		if err := p.check(); err != nil {
			return 0, err
		}
		if err := call.call.waitForStream(ctx); err != nil {
			return 0, err
		}
		if p.small() {
			p.scatter = call.scatterer(ctx)
		}
		p.layOut()
		if progress := call.call.Progress; progress != nil {
			call.call.Progress = func(done, _ int) { progress(p.before(done), p.bytes()) }
		}
		whole := stage.Copy{N: p.n(), Down: down, Host: stage.Memory(p.copy), Queue: p.queue, MaxChunk: p.chunk()}
		done, err := call.run(ctx, whole, &call.stats.batchedBytes)
		if err != nil {
			err = fmt.Errorf("from part %d on: %w", min(p.find(done), len(parts)-1), err)
		}
		return done, err
	})
	if err != nil {
		return fmt.Errorf("transfer: %s %d bytes in %d parts: %w", what, p.bytes(), len(parts), err)
	}
	return nil
}

// A partList presents parts as one sequence of bytes, from which chunks are cut.
type partList struct {
	parts  []Part
	counts []int // bytes of the parts before each, and of all
	starts []int // of each in the sequence, and the end
	down   bool

	scatter *scatterer // nil unless a kernel copies the parts
	batch   cudart.CopyBatch
}

func newPartList(parts []Part, down bool) *partList {
	p := &partList{parts: parts, down: down, counts: make([]int, len(parts)+1)}
	for i, part := range parts {
		p.counts[i+1] = p.counts[i] + len(part.Host)
	}
	return p
}

// check returns an error if a part goes beyond the last address.
func (p *partList) check() error {
	for i, part := range p.parts {
		if uint64(part.Device) > math.MaxUint64-uint64(len(part.Host)) {
			return fmt.Errorf("part %d: %d bytes at %v: no memory has such addresses", i, len(part.Host), part.Device)
		}
	}
	return nil
}

// layOut sets where the parts are in the sequence: one after the other, and for a kernel as far from
// a multiple of 16 as on the device.
func (p *partList) layOut() {
	p.starts = p.counts
	if p.scatter == nil {
		return
	}
	p.starts = make([]int, len(p.parts)+1)
	end := 0
	for i, part := range p.parts {
		p.starts[i] = end
		if len(part.Host) > 0 { // else neighbours would no longer be
			p.starts[i] += (int(part.Device) - end) & 15
		}
		end = p.starts[i] + len(part.Host)
	}
	p.starts[len(p.parts)] = end
}

// chunk returns the size of a chunk with about queue.MaxBatch parts.
func (p *partList) chunk() int {
	return max(p.n()/len(p.parts)*queue.MaxBatch/(64*kib)*(64*kib), 512*kib)
}

// bytes returns the number of bytes of all parts, and n the length of the sequence.
func (p *partList) bytes() int { return p.counts[len(p.parts)] }
func (p *partList) n() int     { return p.starts[len(p.parts)] }

// find returns the index of the part with the byte at off, or of the next one.
func (p *partList) find(off int) int {
	return sort.Search(len(p.parts), func(i int) bool { return p.starts[i]+len(p.parts[i].Host) > off })
}

// before returns the number of the parts' bytes before off.
func (p *partList) before(off int) int {
	i := p.find(off)
	if i == len(p.parts) {
		return p.bytes()
	}
	return p.counts[i] + max(off-p.starts[i], 0)
}

// each calls f for the ranges of parts that are in the n bytes from off on, each with
// its offset in these bytes.
func (p *partList) each(off, n int, f func(piece Part, at int) error) error {
	for i := p.find(off); i < len(p.parts) && p.starts[i] < off+n; i++ {
		from, to := max(off-p.starts[i], 0), min(off+n-p.starts[i], len(p.parts[i].Host))
		if from >= to {
			continue
		}
		if err := f(Part{Device: p.parts[i].Device + cudart.DevPtr(from), Host: p.parts[i].Host[from:to]}, p.starts[i]+from-off); err != nil {
			return err
		}
	}
	return nil
}

// copy copies between parts and mem, where the parts are contiguous.
func (p *partList) copy(mem []byte, off int) error {
	return p.each(off, len(mem), func(piece Part, at int) error {
		if p.down {
			copyIn(piece.Host, mem[at:at+len(piece.Host)])
		} else {
			copy(mem[at:], piece.Host)
		}
		return nil
	})
}

// runs calls f for the copies of a chunk, with memory of it as Host. Parts that are contiguous on the
// device, in one allocation, are contiguous in the memory too, and are one copy.
func (p *partList) runs(mem []byte, off int, device *queue.Allocations, f func(run Part) error) error {
	var run Part
	end := func() error {
		if len(run.Host) == 0 {
			return nil
		}
		return f(run)
	}
	err := p.each(off, len(mem), func(piece Part, at int) error {
		if run.Device+cudart.DevPtr(len(run.Host)) == piece.Device && len(run.Host) > 0 && device.Joins(run.Device, len(run.Host)+len(piece.Host)) {
			run.Host = run.Host[:len(run.Host)+len(piece.Host)]
			return nil
		}
		err := end()
		run = Part{Device: piece.Device, Host: mem[at : at+len(piece.Host)]}
		return err
	})
	if err == nil {
		err = end()
	}
	return err
}

// queue queues the copies of a chunk between its memory and the device, by a kernel or by a batcher.
func (p *partList) queue(on *cudart.Stream, _ int, mem []byte, off int) error {
	if p.scatter != nil {
		if queued, err := p.scatter.queue(on, p, mem, off); queued || err != nil {
			return err
		}
	}
	copies := queue.NewBatcher(on, &p.batch, p.down)
	err := p.runs(mem, off, &copies.Memory, func(run Part) error { return copies.Add(unsafe.Pointer(&run.Host[0]), run.Device, len(run.Host)) })
	if err == nil {
		err = copies.Flush()
	}
	return err
}
