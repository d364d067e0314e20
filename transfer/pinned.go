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

// A sender queues a copy of n bytes at off of pinned memory.
type sender func(s *cudart.Stream, dst cudart.DevPtr, off, n int) error

// pinnedSource returns the sender for src, nil if that is not pinned. If hostmem does not
// know the memory, a copy may fail: see atSeam. The error is of a call that does not
// return.
func pinnedSource(ctx context.Context, dev *cudart.Device, src []byte) (send sender, known bool, err error) {
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

// pinnedTarget is pinnedSource for a download.
func pinnedTarget(ctx context.Context, dev *cudart.Device, dst []byte) (receive sender, known bool, err error) {
	if p, at, ok := hostmem.Find(dst); ok {
		return func(s *cudart.Stream, src cudart.DevPtr, off, n int) error {
			return p.CopyToHost(s, at+off, src, n)
		}, true, nil
	}
	if pinned, err := isPinned(ctx, dev, dst); !pinned {
		return nil, false, err
	}
	return func(s *cudart.Stream, src cudart.DevPtr, off, n int) error {
		return s.CopyToHost(unsafe.Pointer(&dst[off]), src, n)
	}, false, nil
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
	// The same for several devices, for each of them.
	fanPiece  = 16 * mib
	fanPieces = 4
)

// A direct copy is one of pinned memory.
type directCopy struct {
	n, piece, pieces int // of pieces, at most so many at a time
	// queue queues a piece, and returns the ends of what it has queued, also after an
	// error.
	queue func(off, n int) ([]cudart.Point, error)

	mu   sync.Mutex
	done int // bytes
	at   int // of err
	err  error
	open error         // why copies may be under way
	stop chan struct{} // closed when err is set
}

// runDirect runs a direct copy. It returns when the GPU is done with the memory, also
// after an error.
func (v view) runDirect(ctx context.Context, d *directCopy) (int, error) {
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
			if f.ends, err = d.queue(f.off, f.n); err != nil {
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
