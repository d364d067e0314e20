package transfer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/ntcopy"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// Upload copies src, which may be any memory, to the device.
func (v *View) Upload(ctx context.Context, dst cudart.DevPtr, src []byte) error {
	_, err := v.get().do(ctx, len(src), nil, func() (int, error) { return v.upload(ctx, dst, src) })
	if err != nil {
		return fmt.Errorf("transfer: upload %d bytes: %w", len(src), err)
	}
	return nil
}

func (v view) upload(ctx context.Context, dst cudart.DevPtr, src []byte) (int, error) {
	if queued, err := v.queue(ctx, dst, src); queued {
		return v.counted(len(src), err)
	}
	if err := v.call.turn(ctx); err != nil {
		return 0, err
	}
	send, known, err := pinnedSource(ctx, v.dev(), src)
	if err != nil {
		return 0, err
	}
	if send == nil {
		if ok, err := v.small(ctx, dst, src, false); ok {
			return v.counted(len(src), err)
		}
	}
	return v.at(len(src), dst).copyFrom(ctx, src, send, known)
}

// counted counts a small copy of n bytes.
func (v view) counted(n int, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	v.stats.stagedBytes.Add(int64(n))
	return n, nil
}

// turn waits until the caller's stream is done with what was queued there: a copy
// uses the ring, which all share, only when nothing of the caller's can delay it.
func (c Call) turn(ctx context.Context) error {
	if c.Stream == nil {
		return nil
	}
	err := c.Stream.Timeline().End().Wait(ctx) // which calls CUDA elsewhere if ctx can end
	if err != nil && ctx.Err() != nil {
		return bounded.Ended(ctx)
	}
	return err
}

const (
	// Uploads of up to maxQueued bytes are queued on the caller's stream, from leased
	// memory.
	maxQueued = mib
	// queuedBytes is how much memory such uploads have together.
	queuedBytes = 16 * mib
)

// queue queues a small upload on the caller's stream, and does not wait for it.
// queued is false if there is no stream, or no memory for it just now.
func (v view) queue(ctx context.Context, dst cudart.DevPtr, src []byte) (queued bool, err error) {
	if v.call.Stream == nil || len(src) > maxQueued || v.call.Progress != nil {
		return false, nil
	}
	lease, err := v.queued.TryGet(ctx, len(src))
	if err != nil {
		return false, nil
	}
	if err := bounded.Guard(func() error { stage.Put(lease.Bytes(), src); return nil }); err != nil {
		return true, errors.Join(err, lease.Release())
	}
	// A stream with a full queue blocks the call.
	_, err = bounded.Do(ctx, bounded.Call[struct{}]{
		Run: func() (none struct{}, err error) {
			return none, errors.Join(lease.CopyToDevice(v.call.Stream, dst, 0, len(src)), lease.Release())
		},
		Grace: bounded.CallbackGrace,
	})
	return true, stage.Abandoned(err)
}

// Download copies from the device into dst, which may be any memory.
func (v *View) Download(ctx context.Context, dst []byte, src cudart.DevPtr) error {
	_, err := v.get().do(ctx, len(dst), nil, func() (int, error) { return v.download(ctx, dst, src) })
	if err != nil {
		return fmt.Errorf("transfer: download %d bytes: %w", len(dst), err)
	}
	return nil
}

func (v view) download(ctx context.Context, dst []byte, src cudart.DevPtr) (int, error) {
	if err := v.call.turn(ctx); err != nil {
		return 0, err
	}
	receive, known, err := pinnedTarget(ctx, v.dev(), dst)
	switch {
	case err != nil:
		return 0, err
	case receive != nil:
		done, err := v.downloadPinned(ctx, len(dst), src, receive)
		if known || !atSeam(err) {
			return done, err
		}
	default:
		if ok, err := v.small(ctx, src, dst, true); ok {
			return v.counted(len(dst), err)
		}
	}
	return v.stageDown(ctx, src, stage.Copy{N: len(dst), Sink: into(dst, copyIn)})
}

// downloadPinned copies into pinned memory without the ring.
func (v view) downloadPinned(ctx context.Context, n int, src cudart.DevPtr, receive sender) (int, error) {
	on := v.members[0].direct[1]
	return v.runDirect(ctx, &directCopy{n: n, piece: directPiece, pieces: directPieces, queue: func(off, n int) ([]cudart.Point, error) {
		err := receive(on, src+cudart.DevPtr(off), off, n)
		return []cudart.Point{on.Point()}, err
	}})
}

// stageDown copies from one place on the device to a sink, through the ring.
func (v view) stageDown(ctx context.Context, src cudart.DevPtr, c stage.Copy) (int, error) {
	c.Down = true
	c.Queue = func(on *cudart.Stream, _ int, mem []byte, off int) error {
		return on.CopyToHost(unsafe.Pointer(&mem[0]), src+cudart.DevPtr(off), len(mem))
	}
	return v.run(ctx, c, &v.stats.stagedBytes)
}

// small copies what is small, on the caller's goroutine; ok is false if it cannot now.
func (v view) small(ctx context.Context, dev cudart.DevPtr, mem []byte, down bool) (ok bool, err error) {
	if v.call.Progress != nil {
		return false, nil
	}
	return v.stages[0].Brief(ctx, dev, mem, down)
}

// DownloadNew copies n bytes from the device into memory that it allocates:
// ordinary memory, but in huge pages, which takes less time than a new Go slice
// does. Close it. Most of that time the kernel clears pages, so that all cores
// are used. The memory of no bytes is empty.
func (v *View) DownloadNew(ctx context.Context, src cudart.DevPtr, n int) (*hostmem.Pageable, error) {
	mem := new(hostmem.Pageable)
	_, err := v.get().do(ctx, n, nil, func() (int, error) {
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
func (v view) downloadFresh(ctx context.Context, dst []byte, src cudart.DevPtr) (int, error) {
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
