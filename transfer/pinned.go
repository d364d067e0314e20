package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// uploadPinned is for memory that is pinned already, and needs no ring; ok is
// false for other memory.
func (v *View) uploadPinned(ctx context.Context, dst cudart.DevPtr, src []byte) (done int, ok bool, err error) {
	send, known, err := pinnedSource(ctx, v.dev, src)
	if send == nil {
		return 0, err != nil, err
	}
	done, err = v.copyDirect(ctx, len(src), 0, func(s *cudart.Stream, off, n int) error {
		return send(s, dst+cudart.DevPtr(off), off, n)
	})
	return done, known || !atSeam(err), err
}

// pinnedSource returns what queues a copy of n bytes at off of src, nil if that is
// not pinned. Of memory that is not known to hostmem it may fail: see atSeam. The
// error is of a call that does not return.
func pinnedSource(ctx context.Context, dev *cudart.Device, src []byte) (send func(s *cudart.Stream, dst cudart.DevPtr, off, n int) error, known bool, err error) {
	if p, at, ok := hostmem.Find(src); ok {
		return func(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
			return p.CopyToDevice(s, dst, at+off, n)
		}, true, nil
	}
	if pinned, err := isPinned(ctx, dev, src); !pinned {
		return nil, false, err
	}
	return func(s *cudart.Stream, dst cudart.DevPtr, off, n int) error {
		return s.CopyToDevice(dst, unsafe.Pointer(&src[off]), n)
	}, false, nil
}

// downloadPinned is the same the other way.
func (v *View) downloadPinned(ctx context.Context, dst []byte, src cudart.DevPtr) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(dst); ok {
		done, err = v.copyDirect(ctx, len(dst), 1, func(s *cudart.Stream, off, n int) error {
			return p.CopyToHost(s, at+off, src+cudart.DevPtr(off), n)
		})
		return done, true, err
	}
	if pinned, err := isPinned(ctx, v.dev, dst); !pinned {
		return 0, err != nil, err
	}
	done, err = v.copyDirect(ctx, len(dst), 1, func(s *cudart.Stream, off, n int) error {
		return s.CopyToHost(unsafe.Pointer(&dst[off]), src+cudart.DevPtr(off), n)
	})
	return done, !atSeam(err), err
}

// isPinned asks CUDA about memory that is not hostmem's, at its ends
// (cudaPointerGetAttributes). The error is of a call that does not return.
func isPinned(ctx context.Context, dev *cudart.Device, mem []byte) (bool, error) {
	if len(mem) <= stage.Alone {
		return false, nil // asking takes longer than staging
	}
	first, last := uintptr(unsafe.Pointer(&mem[0])), uintptr(unsafe.Pointer(&mem[len(mem)-1]))
	return bounded.Do(ctx, bounded.Call[bool]{
		Run:   func() (bool, error) { return isRegistered(dev, first) && isRegistered(dev, last), nil },
		Grace: bounded.CallbackGrace,
	})
}

func isRegistered(dev *cudart.Device, at uintptr) bool {
	a, err := dev.PointerAttributes(at)
	return err == nil && a.Type != cudart.MemoryUnregistered
}

// atSeam reports whether a direct copy may have failed because the memory is of
// several registrations, which no copy may cross. What was copied before does
// no harm when it is copied again.
func atSeam(err error) bool { return errors.Is(err, cudart.ErrInvalidValue) }

const (
	// directPiece is how much of a copy of pinned memory is queued at a time: a
	// few pieces keep the link full, and a copy that is canceled ends after them.
	directPiece  = 64 * mib
	directPieces = 4
)

// A direct copy is one of pinned memory.
type directCopy struct {
	n, piece, pieces int // of pieces, at most so many at a time
	// queue queues a piece, and appends the ends of what it has queued, also after
	// an error.
	queue func(ends []cudart.Point, off, n int) ([]cudart.Point, error)

	mu   sync.Mutex
	done int // bytes
	at   int // of err
	err  error
	open error         // why copies may be under way
	stop chan struct{} // closed when err is set
}

// copyDirect copies n bytes of the caller's pinned memory, a piece of which queue
// queues. It returns when the GPU is done with the memory, also after an error.
func (v *View) copyDirect(ctx context.Context, n, way int, queue func(s *cudart.Stream, off, n int) error) (int, error) {
	on := v.engine.direct[way]
	d := &directCopy{n: n, piece: directPiece, pieces: directPieces, queue: func(ends []cudart.Point, off, n int) ([]cudart.Point, error) {
		err := queue(on, off, n)
		return append(ends, on.Point()), err
	}}
	done, err := d.do(ctx, v.call.Progress)
	v.stats.directBytes.Add(int64(done))
	return done, err
}

// do copies, and returns how many bytes, from the first on, were copied.
func (d *directCopy) do(ctx context.Context, progress func(done, total int)) (int, error) {
	d.stop = make(chan struct{})
	var reporter *bounded.Reporter
	if progress != nil {
		reporter = bounded.NewReporter(d.n, progress, d.fail, d.stop)
	}
	ended, err := bounded.Do(ctx, bounded.Call[bool]{
		Run: func() (bool, error) {
			d.run(reporter)
			return true, nil
		},
		Stop:  func(error) { d.fail(d.n, bounded.Ended(ctx)) },
		Grace: stage.Grace,
	})
	if !ended {
		d.giveUp(fmt.Errorf("%w: %w", stage.ErrUnderWay, err))
	}
	return d.result()
}

func (d *directCopy) run(reporter *bounded.Reporter) {
	type flight struct {
		off, n int
		ends   []cudart.Point
	}
	var room [directPieces]flight
	flights := room[:0]
	off := 0
	for len(flights) > 0 || off < d.n && !d.failed() {
		for len(flights) < d.pieces && off < d.n && !d.failed() {
			f := flight{off: off, n: min(d.piece, d.n-off)}
			var err error
			if f.ends, err = d.queue(nil, f.off, f.n); err != nil {
				d.fail(f.off, err)
			}
			flights = append(flights, f)
			off += f.n
		}
		f := flights[0]
		flights = append(flights[:0], flights[1:]...)
		for _, end := range f.ends {
			if err := end.Wait(context.Background()); err != nil {
				d.giveUp(stage.UnderWay(end, err))
			} else if err := end.Err(); err != nil {
				d.fail(f.off, fmt.Errorf("%v: %w", end.Line(), err))
			}
		}
		if !d.failed() {
			d.pass(f.off + f.n)
			if reporter != nil {
				reporter.Set(f.off + f.n)
			}
		}
	}
	if reporter != nil {
		reporter.Finish()
	}
}

func (d *directCopy) failed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err != nil
}

func (d *directCopy) pass(done int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.done = done
}

// fail keeps the error with the least offset, and of several the first.
func (d *directCopy) fail(at int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		close(d.stop)
	}
	if d.err == nil || at < d.at {
		d.at, d.err = at, err
	}
}

// giveUp ends the copy while the GPU may still copy, and why: that is reported
// beside any other error.
func (d *directCopy) giveUp(why error) {
	d.fail(d.n, why)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = 0
	if d.err != why {
		d.open = errors.Join(d.open, why)
	}
}

func (d *directCopy) result() (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		return d.n, nil
	}
	done := min(d.done, d.at)
	err := fmt.Errorf("at byte %d of %d: %w", done, d.n, d.err)
	if d.open != nil {
		err = fmt.Errorf("%w; %w", err, d.open)
	}
	return done, err
}
