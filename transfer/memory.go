package transfer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/ntcopy"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// Upload copies src, which may be any memory, to the device.
func (v *View) Upload(ctx context.Context, dst cudart.DevPtr, src []byte) error {
	_, err := v.do(ctx, len(src), func() (int, error) { return v.upload(ctx, dst, src) })
	if err != nil {
		return fmt.Errorf("transfer: upload %d bytes: %w", len(src), err)
	}
	return nil
}

func (v *View) upload(ctx context.Context, dst cudart.DevPtr, src []byte) (int, error) {
	if queued, err := v.queue(ctx, dst, src); queued {
		if err != nil {
			return 0, err
		}
		return v.staged(len(src), nil)
	}
	if err := v.call.turn(ctx); err != nil {
		return 0, err
	}
	if done, ok, err := v.uploadPinned(ctx, dst, src); ok {
		return done, err
	}
	if done, ok, err := v.brief(ctx, dst, src, false); ok {
		return done, err
	}
	return v.stageUp(ctx, dst, fromMemory(src))
}

// Download copies from the device into dst, which may be any memory.
func (v *View) Download(ctx context.Context, dst []byte, src cudart.DevPtr) error {
	_, err := v.do(ctx, len(dst), func() (int, error) { return v.download(ctx, dst, src) })
	if err != nil {
		return fmt.Errorf("transfer: download %d bytes: %w", len(dst), err)
	}
	return nil
}

func (v *View) download(ctx context.Context, dst []byte, src cudart.DevPtr) (int, error) {
	if err := v.call.turn(ctx); err != nil {
		return 0, err
	}
	if done, ok, err := v.downloadPinned(ctx, dst, src); ok {
		return done, err
	}
	if done, ok, err := v.brief(ctx, src, dst, true); ok {
		return done, err
	}
	return v.stageDown(ctx, src, stage.Copy{N: len(dst), Sink: into(dst, copyIn)})
}

// brief copies what is small, on the caller's goroutine; ok is false if it cannot now.
func (v *View) brief(ctx context.Context, dev cudart.DevPtr, mem []byte, down bool) (done int, ok bool, err error) {
	if v.call.Progress != nil {
		return 0, false, nil
	}
	if ok, err = v.stage.Brief(ctx, dev, mem, down); !ok || err != nil {
		return 0, ok, err
	}
	done, err = v.staged(len(mem), nil)
	return done, true, err
}

// DownloadNew copies n bytes from the device into memory that it allocates:
// ordinary memory, but in huge pages, which takes less time than a new Go slice
// does. Close it. Most of that time the kernel clears pages, so that all cores
// are used. The memory of no bytes is empty.
func (v *View) DownloadNew(ctx context.Context, src cudart.DevPtr, n int) (*hostmem.Pageable, error) {
	mem := new(hostmem.Pageable)
	_, err := v.do(ctx, n, func() (int, error) {
		fresh, err := hostmem.AllocPageable(n)
		if err != nil {
			return 0, err
		}
		done, err := v.downloadFresh(ctx, fresh.Bytes(), src)
		if err != nil {
			return done, errors.Join(err, fresh.Close())
		}
		mem = fresh
		return done, nil
	})
	if err != nil {
		return nil, fmt.Errorf("transfer: download %d bytes: %w", n, err)
	}
	return mem, nil
}

// hugePage is what the kernel clears at a time, on amd64 and most of arm64.
const hugePage = 2 * mib

// downloadFresh copies into whole huge pages that are not resident: the worker
// that touches a page first has it cleared, in its caches, and should be the one
// that writes it.
func (v *View) downloadFresh(ctx context.Context, dst []byte, src cudart.DevPtr) (int, error) {
	if err := v.call.turn(ctx); err != nil {
		return 0, err
	}
	put := func(to, from []byte) { copy(to, from) }
	c := stage.Copy{N: len(dst), Sink: into(dst, put), Piece: hugePage, MaxChunk: 2 * hugePage}
	c.Workers = runtime.GOMAXPROCS(0)
	return v.stageDown(ctx, src, c)
}

// mostPast is the largest upload that is written past the caches. What a larger one has
// in them is overwritten there, again and again, and need not go to memory.
const mostPast = 32 * mib

// fromMemory is the upload of the caller's memory.
func fromMemory(src []byte) stage.Copy {
	m := &memoryFeed{from: src, past: len(src) <= mostPast}
	return stage.Copy{N: len(src), Feed: m, Past: m.past}
}

// memoryFeed is the caller's memory.
type memoryFeed struct {
	from []byte
	off  int // of what comes next
	past bool
}

func (*memoryFeed) Start(*stage.Job) {}

func (*memoryFeed) Stop() {}

func (m *memoryFeed) Ready() int { return len(m.from) - m.off }

func (m *memoryFeed) Take(most int) stage.Segment {
	s := stage.Segment{Off: m.off, N: most, Fill: m.fill}
	m.off += most
	return s
}

func (m *memoryFeed) fill(to []byte, off int) error {
	if from := m.from[off : off+len(to)]; m.past {
		stage.Put(to, from)
	} else {
		copy(to, from)
	}
	return nil
}

// A memorySink takes what comes at once: memory of the caller's, or a mapped file.
type memorySink func(from []byte, off int) error

func (memorySink) Start(*stage.Job) {}

func (memorySink) Stop() {}

func (memorySink) Room() int { return math.MaxInt }

func (m memorySink) Take(int, int) stage.Space { return stage.Space{Drain: m} }

// into is a sink that puts bytes into dst.
func into(dst []byte, put func(to, from []byte)) memorySink {
	return func(from []byte, off int) error {
		put(dst[off:off+len(from)], from)
		return nil
	}
}

// copyIn copies into the caller's memory, which may be resident or not. What is
// resident is written past the caches, where the ring should stay.
func copyIn(to, from []byte) {
	if resident(to) {
		ntcopy.Copy(to, from)
	} else {
		copyFresh(to, from)
	}
}

// copyFresh copies into memory that is not resident. It is populated a piece
// ahead: one call for many pages is faster than a fault each, and they are still
// in the cache when they are written.
func copyFresh(to, from []byte) {
	const piece = 256 * kib
	for n := 0; n < len(from); n += piece {
		part := to[n:min(n+piece, len(from))]
		populate(part)
		copy(part, from[n:])
	}
}
