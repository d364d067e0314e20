package transfer

import (
	"context"
	"fmt"
	"sort"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

// A Part is one of many copies: Host's bytes, and as many on the device.
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
	return v.all(ctx, "upload", parts, func(p *partList) (int, error) {
		j := p.newJob(v, up)
		return j.upload(ctx, p.gather, func(s *slot, off, _, n int) error {
			return p.send(j, s, off, n)
		})
	})
}

// DownloadAll copies the device's bytes of every part to the host, in the same
// way. No two parts may overlap on the host.
func (v *View) DownloadAll(ctx context.Context, parts []Part) error {
	return v.all(ctx, "download", parts, func(p *partList) (int, error) {
		j := p.newJob(v, down)
		return j.download(ctx, func(s *slot, off, n int) error {
			return p.receive(j, s, off, n)
		}, p.spread)
	})
}

func (v *View) all(ctx context.Context, what string, parts []Part, copies func(*partList) (int, error)) error {
	p := newPartList(parts)
	_, err := v.do(ctx, p.n(), func() (int, error) {
		done, err := copies(p)
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

// A partList is parts as one run of bytes, of which chunks can be cut.
type partList struct {
	parts  []Part
	starts []int // of each, and the end
}

func newPartList(parts []Part) *partList {
	p := &partList{parts: parts, starts: make([]int, len(parts)+1)}
	for i, part := range parts {
		p.starts[i+1] = p.starts[i] + len(part.Host)
	}
	return p
}

// newJob plans chunks of as many copies as a batch should have.
func (p *partList) newJob(v *View, w way) *job {
	j := v.newJob(p.n(), w)
	j.moved = &v.stats.batchedBytes
	even := p.n() / len(p.parts) * mostInBatch / chunkUnit * chunkUnit
	j.chunk = min(max(even, j.least), j.chunk)
	j.least = j.chunk
	return j
}

func (p *partList) n() int { return p.starts[len(p.parts)] }

// find is the part that the byte at off is in.
func (p *partList) find(off int) int {
	return sort.Search(len(p.parts), func(i int) bool { return p.starts[i+1] > off })
}

// each calls f for the pieces of parts that the n bytes from off on are made of,
// with where in these bytes they start.
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

// gather is a source.
func (p *partList) gather(_ context.Context, to []byte, off, n int) (skip, got int, err error) {
	err = p.each(off, n, func(piece Part, at int) error {
		copy(to[at:], piece.Host)
		return nil
	})
	return 0, n, err
}

// spread is a sink.
func (p *partList) spread(from []byte, off int) (int, error) {
	return len(from), p.each(off, len(from), func(piece Part, at int) error {
		copyIn(piece.Host, from[at:at+len(piece.Host)])
		return nil
	})
}

func (p *partList) send(j *job, s *slot, off, n int) error {
	return p.queue(j, s, off, n, func(run Part) error {
		return j.stream.CopyToDevice(run.Device, unsafe.Pointer(&run.Host[0]), len(run.Host))
	}, func(run Part) {
		s.batch.ToDevice(run.Device, unsafe.Pointer(&run.Host[0]), len(run.Host))
	})
}

func (p *partList) receive(j *job, s *slot, off, n int) error {
	return p.queue(j, s, off, n, func(run Part) error {
		return j.stream.CopyToHost(unsafe.Pointer(&run.Host[0]), run.Device, len(run.Host))
	}, func(run Part) {
		s.batch.ToHost(unsafe.Pointer(&run.Host[0]), run.Device, len(run.Host))
	})
}

// mostInBatch is how many copies one call queues: the call takes 0.4 µs a copy
// then, and twice that with ten times as many.
const mostInBatch = 1000

// queue queues the copies of a chunk between its slot and the device, as
// batches where there are any. What follows on each other on the device does so
// in the slot too, and is one run.
func (p *partList) queue(j *job, s *slot, off, n int, one func(run Part) error, add func(run Part)) error {
	batches := j.engine.dev.Runtime().CanCopyBatch()
	flush := func(run Part, last bool) error {
		if len(run.Host) > 0 {
			if !batches {
				return one(run)
			}
			add(run)
		}
		if s.batch.Len() < mostInBatch && !last {
			return nil
		}
		defer s.batch.Reset()
		return j.stream.CopyBatch(&s.batch)
	}
	var run Part
	err := p.each(off, n, func(piece Part, at int) error {
		if run.Device+cudart.DevPtr(len(run.Host)) == piece.Device && len(run.Host) > 0 {
			run.Host = run.Host[:len(run.Host)+len(piece.Host)]
			return nil
		}
		err := flush(run, false)
		run = Part{Device: piece.Device, Host: s.mem[at : at+len(piece.Host)]}
		return err
	})
	if err == nil {
		err = flush(run, true)
	}
	return err
}
