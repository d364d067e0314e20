package transfer

import (
	"context"
	"fmt"
	"sort"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A Part is one of many copies: the bytes of Host, and as many at Device.
type Part struct {
	Device cudart.DevPtr
	Host   []byte
}

// UploadAll copies the host's bytes of every part to the device. Many small
// copies cost much less so than one by one: they are gathered in pinned memory,
// parts that follow on each other on the device become one copy, and the rest
// is queued a thousand at a time (cudaMemcpyBatchAsync, where library and
// driver are of CUDA 12.8 or later). No two parts may overlap on the device.
// After an error some parts may have been copied.
func (v *View) UploadAll(ctx context.Context, parts []Part) error {
	return v.all(ctx, "upload", parts, false)
}

// DownloadAll copies the device's bytes of every part to the host, in the same
// way. No two parts may overlap on the host.
func (v *View) DownloadAll(ctx context.Context, parts []Part) error {
	return v.all(ctx, "download", parts, true)
}

func (v *View) all(ctx context.Context, what string, parts []Part, down bool) error {
	p := newPartList(parts, down)
	_, err := v.get().do(ctx, p.n(), func() (int, error) {
		if err := v.call.waitForStream(ctx); err != nil {
			return 0, err
		}
		c := stage.Copy{N: p.n(), Down: down, Host: stage.Memory(p.copy), Queue: p.queue, MaxChunk: p.chunk()}
		done, err := v.run(ctx, c, &v.stats.batchedBytes)
		if err != nil {
			err = fmt.Errorf("part %d: %w", min(p.find(done), len(parts)-1), err)
		}
		return done, err
	})
	if err != nil {
		return fmt.Errorf("transfer: %s %d bytes in %d parts: %w", what, p.n(), len(parts), err)
	}
	return nil
}

// A partList presents parts as one sequence of bytes, from which chunks are cut.
type partList struct {
	parts  []Part
	starts []int // of each, and the end
	down   bool

	batch cudart.CopyBatch
}

func newPartList(parts []Part, down bool) *partList {
	p := &partList{parts: parts, down: down, starts: make([]int, len(parts)+1)}
	for i, part := range parts {
		p.starts[i+1] = p.starts[i] + len(part.Host)
	}
	return p
}

// chunk returns the size of a chunk with about maxBatch parts.
func (p *partList) chunk() int {
	return max(p.n()/len(p.parts)*maxBatch/(64*kib)*(64*kib), 512*kib)
}

func (p *partList) n() int { return p.starts[len(p.parts)] }

// find returns the index of the part with the byte at off.
func (p *partList) find(off int) int {
	return sort.Search(len(p.parts), func(i int) bool { return p.starts[i+1] > off })
}

// each calls f for the ranges of parts that the n bytes from off on consist of, each with
// its offset in these bytes.
func (p *partList) each(off, n int, f func(piece Part, at int) error) error {
	for i, at := p.find(off), 0; at < n; i++ {
		skip := off + at - p.starts[i]
		host := p.parts[i].Host[skip:]
		host = host[:min(len(host), n-at)]
		if len(host) == 0 {
			continue
		}
		if err := f(Part{Device: p.parts[i].Device + cudart.DevPtr(skip), Host: host}, at); err != nil {
			return err
		}
		at += len(host)
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

// queue queues the copies of a chunk between its memory and the device, in batches if CUDA
// has them. Parts that are contiguous on the device are contiguous in the memory too, and
// are one copy.
func (p *partList) queue(on *cudart.Stream, _ int, mem []byte, off int) error {
	copies := newBatcher(on, &p.batch, p.down)
	var run Part
	add := func() error {
		if len(run.Host) == 0 {
			return nil
		}
		return copies.add(unsafe.Pointer(&run.Host[0]), run.Device, len(run.Host))
	}
	err := p.each(off, len(mem), func(piece Part, at int) error {
		if run.Device+cudart.DevPtr(len(run.Host)) == piece.Device && len(run.Host) > 0 {
			run.Host = run.Host[:len(run.Host)+len(piece.Host)]
			return nil
		}
		err := add()
		run = Part{Device: piece.Device, Host: mem[at : at+len(piece.Host)]}
		return err
	})
	if err == nil {
		err = add()
	}
	if err == nil {
		err = copies.flush()
	}
	return err
}
