package stage

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/ntcopy"
)

// A smallSlot is a pinned buffer and a stream for one small copy at a time, in one
// direction. It synchronizes its stream, so it records no event. It serves a caller who
// copies alone: workers would wake too late. If the slot is taken, a small copy goes
// through the small ring, where it shares events with other copies: see link.
type smallSlot struct {
	stream     *cudart.Stream
	buf        *hostmem.Buffer
	taken      atomic.Bool
	unfinished cudart.Point // the end of a copy that failed or was not waited for; guarded by taken
	state      atomic.Int32 // of the copy
}

// The states of a copy through a slot. The caller may abandon it while it waits for CUDA.
//
//	slotCopies    begins, goes on           | uses the caller's memory
//	slotWaits     a piece was copied        | waits for CUDA
//	slotAbandoned the caller, if slotWaits  | waits for CUDA, and then frees the slot
const (
	slotCopies int32 = iota
	slotWaits
	slotAbandoned
)

// The sizes of the largest copies through a slot, in bytes. Workers copy larger ones faster,
// on several times the cores.
const (
	maxSlotUp   = 12 * MaxSmall
	maxSlotDown = 4 * MaxSmall
	// maxShort is the size of the largest copies that a polling goroutine makes. At 64 KiB that saves a fifth of the
	// time still, for half as much CPU time again (H200, 2026-11-29).
	maxShort = 16 << 10
	// slotPiece is the number of bytes in flight while the goroutine copies the next piece.
	slotPiece = 2 * MaxSmall
)

func (s *Stage) openSlot(ctx context.Context, d direction) (err error) {
	l, size := &s.slots[d], maxSlotUp
	if d == toHost {
		size = maxSlotDown
	}
	if l.buf, err = hostmem.Alloc(ctx, s.dev, size, hostmem.Options{Label: ringLabel}); err != nil {
		return err
	}
	s.pinned.Add(int64(l.buf.Info().Reserved))
	s.opened = append(s.opened, l.close)
	l.stream, err = s.openStream()
	return err
}

func (l *smallSlot) close(ctx context.Context) error {
	if l.taken.Load() {
		return fmt.Errorf("%v: %w", l.buf, ErrHeld)
	}
	if err := l.unfinished.Wait(ctx); err != nil {
		return fmt.Errorf("%v may be in use: %w", l.buf, err)
	}
	return l.buf.CloseContext(ctx)
}

// CopySmall copies mem through the slot of its direction. ok is false if mem is too large, or
// the slot is taken.
func (s *Stage) CopySmall(ctx context.Context, dev cudart.DevPtr, mem []byte, down bool) (ok bool, err error) {
	l := &s.slots[directionOf(down)]
	slot := l.buf.Bytes()
	if len(mem) > len(slot) || !l.take(ctx) {
		return false, nil
	}
	l.state.Store(slotCopies)
	if ctx.Done() == nil { // without the allocations of what follows
		err = l.copy(dev, mem, slot, down)
		l.taken.Store(false)
		return true, err
	}
	_, err = bounded.Do(ctx, bounded.Call[struct{}]{
		Run: func() (struct{}, error) {
			defer l.taken.Store(false)
			return struct{}{}, l.copy(dev, mem, slot, down)
		},
		Short:   len(mem) <= maxShort,
		Abandon: func() bool { return l.state.CompareAndSwap(slotWaits, slotAbandoned) },
		Grace:   grace,
	})
	return true, AddUnderWay(err)
}

// take takes the slot if neither a goroutine nor the GPU uses it. After an unfinished copy it
// queries the GPU.
func (l *smallSlot) take(ctx context.Context) bool {
	if !l.taken.CompareAndSwap(false, true) {
		return false
	}
	if l.unfinished == (cudart.Point{}) || l.unfinished.Done(ctx) {
		return true
	}
	l.taken.Store(false)
	return false
}

func (l *smallSlot) copy(dev cudart.DevPtr, mem, slot []byte, down bool) error {
	if l.unfinished != (cudart.Point{}) {
		_, _ = l.stream.Query() // takes the error of that copy, which its caller has
		l.unfinished = cudart.Point{}
	}
	if !down {
		return l.wait(l.upload(dev, mem, slot))
	}
	l.state.Store(slotWaits)
	err := l.stream.CopyToHost(unsafe.Pointer(&slot[0]), dev, len(mem))
	cold := err == nil && prefetch(mem)
	err = l.wait(err)
	if err != nil || !l.state.CompareAndSwap(slotWaits, slotCopies) {
		return err
	}
	return bounded.Guard(func() error {
		n := copy(mem[:min(len(mem), prefetched)], slot)
		if cold {
			ntcopy.Copy(mem[n:], slot[n:])
		} else {
			copy(mem[n:], slot[n:])
		}
		return nil
	})
}

const (
	// prefetched is the number of a download's first bytes that are brought into the caches, in the time
	// that the GPU needs for its copy.
	prefetched = MaxSmall
	// coldTime is the time from which prefetching them took so long that the memory is not in the caches. A
	// Xeon of 2023 took 4.6 µs, and less than 1 µs for memory that was there.
	coldTime = 2500 * time.Nanosecond
)

// prefetch brings the first bytes of mem into the caches, and reports whether they were not there: the
// rest is written with non-temporal stores then, as it would be read from memory first.
func prefetch(mem []byte) (cold bool) {
	began := time.Now()
	ntcopy.Prefetch(mem[:min(len(mem), prefetched)])
	return len(mem) > prefetched && time.Since(began) > coldTime
}

// upload queues the copy of mem in pieces. When it returns, mem is not used any more.
func (l *smallSlot) upload(dev cudart.DevPtr, mem, slot []byte) error {
	for at := 0; at < len(mem); at += slotPiece {
		if at > 0 && !l.state.CompareAndSwap(slotWaits, slotCopies) {
			return nil // abandoned
		}
		part := slot[at:min(at+slotPiece, len(mem))]
		err := bounded.Guard(func() error { Put(part, mem[at:at+len(part)]); return nil })
		l.state.Store(slotWaits)
		if err != nil {
			return err
		}
		if err := l.stream.CopyToDevice(dev+cudart.DevPtr(at), unsafe.Pointer(&part[0]), len(part)); err != nil {
			return err
		}
	}
	return nil
}

// wait waits until the stream is done, after a copy was queued or err has ended queueing.
// The work is short, and a thread inside CUDA notices its end first.
func (l *smallSlot) wait(err error) error {
	if err == nil {
		if err = l.stream.SynchronizeBlocking(); err == nil {
			return nil
		}
	}
	// Some of it may be queued.
	l.unfinished = l.stream.Point()
	if unknown := l.unfinished.Wait(background); unknown != nil {
		return errors.Join(err, errUnknown(l.unfinished, unknown))
	}
	failed := l.unfinished.Err()
	if _, again := l.stream.Query(); failed == nil { // else the next copy would find it
		failed = again
	}
	return errors.Join(err, failed)
}
