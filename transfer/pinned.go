package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// uploadPinned is for memory that is pinned already, and needs no ring; ok is
// false for other memory.
func (v *View) uploadPinned(ctx context.Context, dst cudart.DevPtr, src []byte) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(src); ok {
		done, err = v.copyDirect(ctx, len(src), 0, func(s *cudart.Stream, off, n int) error {
			return p.CopyToDevice(s, dst+cudart.DevPtr(off), at+off, n)
		})
		return done, true, err
	}
	if !v.isPinned(src) {
		return 0, false, nil
	}
	done, err = v.copyDirect(ctx, len(src), 0, func(s *cudart.Stream, off, n int) error {
		return s.CopyToDevice(dst+cudart.DevPtr(off), unsafe.Pointer(&src[off]), n)
	})
	return done, !atSeam(err), err
}

// downloadPinned is the same the other way.
func (v *View) downloadPinned(ctx context.Context, dst []byte, src cudart.DevPtr) (done int, ok bool, err error) {
	if p, at, ok := hostmem.Find(dst); ok {
		done, err = v.copyDirect(ctx, len(dst), 1, func(s *cudart.Stream, off, n int) error {
			return p.CopyToHost(s, at+off, src+cudart.DevPtr(off), n)
		})
		return done, true, err
	}
	if !v.isPinned(dst) {
		return 0, false, nil
	}
	done, err = v.copyDirect(ctx, len(dst), 1, func(s *cudart.Stream, off, n int) error {
		return s.CopyToHost(unsafe.Pointer(&dst[off]), src+cudart.DevPtr(off), n)
	})
	return done, !atSeam(err), err
}

// isPinned asks CUDA about memory that is not hostmem's, at its ends
// (cudaPointerGetAttributes).
func (v *View) isPinned(mem []byte) bool {
	if len(mem) <= stage.Alone {
		return false // asking takes longer than staging
	}
	for _, at := range []*byte{&mem[0], &mem[len(mem)-1]} {
		a, err := v.dev.PointerAttributes(uintptr(unsafe.Pointer(at)))
		if err != nil || a.Type == cudart.MemoryUnregistered {
			return false
		}
	}
	return true
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
	n     int
	on    *cudart.Stream
	queue func(s *cudart.Stream, off, n int) error

	mu   sync.Mutex
	done int // bytes
	at   int // of err
	err  error
	stop chan struct{} // closed when err is set
}

// copyDirect copies n bytes of the caller's pinned memory, a piece of which queue
// queues. It returns when the GPU is done with the memory, also after an error.
func (v *View) copyDirect(ctx context.Context, n, way int, queue func(s *cudart.Stream, off, n int) error) (int, error) {
	d := &directCopy{n: n, on: v.engine.direct[way], queue: queue, stop: make(chan struct{})}
	var tell *stage.Teller
	if v.call.Progress != nil {
		tell = stage.NewTeller(n, v.call.Progress, d.fail, d.stop)
	}
	left := stage.Apart(ctx, func() { d.run(tell) }, func(cause error) { d.fail(n, cause) }, func() bool { return true })
	if left {
		d.fail(0, stage.ErrUnderWay)
	}
	done, err := d.result()
	v.stats.directBytes.Add(int64(done))
	return done, err
}

func (d *directCopy) run(tell *stage.Teller) {
	type flight struct {
		off, n int
		end    cudart.Point
	}
	var room [directPieces]flight
	flights := room[:0]
	off := 0
	for len(flights) > 0 || off < d.n && !d.failed() {
		for len(flights) < directPieces && off < d.n && !d.failed() {
			f := flight{off: off, n: min(directPiece, d.n-off)}
			err := d.queue(d.on, f.off, f.n)
			f.end = d.on.Point()
			if err != nil {
				d.fail(f.off, err)
			}
			flights = append(flights, f)
			off += f.n
		}
		f := flights[0]
		flights = append(flights[:0], flights[1:]...)
		if err := f.end.Wait(context.Background()); err != nil {
			d.fail(f.off, fmt.Errorf("the GPU may still be copying: %w", err))
		} else if err := f.end.Err(); err != nil {
			d.fail(f.off, err)
		}
		if !d.failed() {
			d.pass(f.off + f.n)
			if tell != nil {
				tell.Set(f.off + f.n)
			}
		}
	}
	if tell != nil {
		tell.Finish()
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

func (d *directCopy) result() (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err == nil {
		return d.n, nil
	}
	done := min(d.done, d.at)
	return done, fmt.Errorf("at byte %d of %d: %w", done, d.n, d.err)
}
