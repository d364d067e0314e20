package hostmem

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/raw"
)

// backgroundPiece is the number of bytes that are registered at once.
const backgroundPiece = 1 << 30

// idleTime is the time without copies of memory that is not registered after which registering goes on.
const idleTime = 20 * time.Millisecond

// patience is how many times the memory is copied before registering goes on although it is being copied: only then does
// it cost less than it saves.
const patience = 16

// A background registers the memory of a Buffer while it is in use. A nil one has nothing to do.
//
// The GPU stands still while a call registers: a copy of 30 GB takes 2.0 s while they are registered, 0.65 s through the
// ring alone, and 0.54 s from registered memory (H200, 2026-11-29). So copies of what is not registered yet go first.
//
//	state        entered by                      | Buffer.pieces | Buffer.registrations belong to
//	in progress  start, when the Buffer is open  | grows         | its goroutine
//	over         the last piece, an error, stop  | stays         | Close
type background struct {
	m       *Buffer
	memory  pages.Memory
	piece   int // bytes of a registration, at most
	workers int
	file    *os.File        // that the memory maps, nil if unknown
	off     int64           // of the memory in the file
	ctx     context.Context // ended by stop
	stopped context.CancelCauseFunc
	over    chan struct{}
	err     error // once over is closed

	mu      sync.Mutex
	more    chan struct{} // closed when the next piece is registered
	copies  int           // copies of memory that is not all registered, in progress
	copied  int           // bytes of such copies that have ended
	settled int           // copied when registering went on, or began to wait for idleTime
	idle    chan struct{} // closed when copies becomes 0; nil if nobody waits
}

func newBackground(ctx context.Context, m *Buffer, memory pages.Memory, o RegisterOptions) *background {
	b := &background{
		m: m, memory: memory, piece: cmp.Or(o.Chunk, backgroundPiece), workers: o.Workers, file: o.File, off: o.Offset,
		over: make(chan struct{}), more: make(chan struct{}), settled: -1,
	}
	b.ctx, b.stopped = context.WithCancelCause(context.WithoutCancel(ctx))
	return b
}

// start begins to register.
func (b *background) start() {
	if b == nil {
		return
	}
	go func() {
		defer close(b.over)
		began := time.Now()
		b.err = b.register()
		process.change(func(s *Stats) {
			s.PinTime += time.Since(began)
			if b.err != nil && b.ctx.Err() == nil {
				s.Failures++
			}
		})
		b.m.reservation.MarkResident()
	}()
}

// register registers the pieces. It begins with the last one: copies mostly begin with the first byte, and take what is
// registered when they arrive there.
func (b *background) register() error {
	m := b.m
	m.limit = min(m.limit, b.piece)
	for end := m.n; end > 0; {
		off := (end - 1) / m.limit * m.limit
		err := b.waitForCopies()
		if err == nil {
			err = b.populate(off, end)
		}
		if err == nil {
			err = b.waitForCopies()
		}
		if err == nil {
			err = explain(m.registerAll(b.ctx, off, end))
		}
		if err != nil {
			return copyInstead(err)
		}
		m.publish()
		b.mu.Lock()
		close(b.more)
		b.more = make(chan struct{})
		b.mu.Unlock()
		end = off
	}
	return nil
}

// populate makes a piece resident.
func (b *background) populate(off, end int) error {
	part := b.memory
	part.Bytes = part.Bytes[off:end]
	region, err := pages.Borrow(pages.SystemOf(b.ctx), part)
	if err != nil {
		return err
	}
	return region.Populate(b.ctx, pages.Populate{Threads: b.workers})
}

// waitForCopies waits until no copy of memory that is not registered was in progress for idleTime, or there were too many
// of them.
func (b *background) waitForCopies() error {
	for b.ctx.Err() == nil {
		b.mu.Lock()
		passed := b.overdue() || b.copies == 0 && b.copied == b.settled
		if b.copies == 0 {
			b.settled = b.copied
		} else if b.idle == nil {
			b.idle = make(chan struct{})
		}
		idle := b.idle
		b.mu.Unlock()
		if passed {
			return nil
		}
		if idle != nil {
			select {
			case <-b.ctx.Done():
			case <-idle:
			}
			continue
		}
		timer := time.NewTimer(idleTime)
		select {
		case <-b.ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
	return bounded.Ended(b.ctx)
}

// overdue reports whether registering goes on although memory is being copied. It needs b.mu.
func (b *background) overdue() bool { return b.copied/patience >= b.m.n }

// stop has it end soon.
func (b *background) stop() {
	if b != nil {
		b.stopped(cudart.ErrClosed)
	}
}

// wait waits until it is over.
func (b *background) wait(ctx context.Context) error {
	if b == nil {
		return nil
	}
	select {
	case <-b.over:
		return nil
	case <-ctx.Done():
		return bounded.Ended(ctx)
	}
}

// covered reports whether n bytes at off are registered.
func (b *background) covered(off, n int) bool {
	if b == nil {
		return true
	}
	yieldPieces(b.m.registered(), off, n, func(s Span) bool {
		n -= s.Len
		return true
	})
	return n <= 0
}

// await waits until n bytes at off are registered.
func (b *background) await(ctx context.Context, off, n int) error {
	for !b.covered(off, n) {
		b.mu.Lock()
		more := b.more
		b.mu.Unlock()
		if b.covered(off, n) {
			break
		}
		select {
		case <-more:
		case <-b.over:
			if b.covered(off, n) {
				return nil
			}
			return fmt.Errorf("registering it in the background ended: %w", b.err)
		case <-ctx.Done():
			return bounded.Ended(ctx)
		}
	}
	return nil
}

// Registered waits until all of the memory is registered, which it is from the start unless
// RegisterOptions.Background is set. The error is that of registering, wraps [cudart.ErrClosed] if Close ended it, or is
// ctx's. After an error of registering, the pieces that were registered stay so.
func (m *Buffer) Registered(ctx context.Context) error {
	var err error
	switch {
	case ctx == nil:
		err = errNilContext
	case m.region == nil:
		return fmt.Errorf("hostmem: wait for the registration: %w", errZero)
	default:
		err = m.background.await(ctx, 0, m.n)
	}
	if err != nil {
		return fmt.Errorf("hostmem: wait for the registration of %v: %w", m, err)
	}
	return nil
}

// A partly is a copy of memory that is registered in the background.
type partly struct {
	b      *background
	off, n int // of the copy in the Buffer
}

func init() { raw.BeginPartly = beginPartly }

// beginPartly begins a copy of memory that is not all registered, but will be; nil of other memory.
func beginPartly(mem []byte) raw.Partly {
	m, off := process.at(mem)
	if m == nil || m.background.covered(off, len(mem)) || !m.life.Begin() {
		return nil
	}
	b := m.background
	b.mu.Lock()
	defer b.mu.Unlock()
	b.copies++
	return partly{b, off, len(mem)}
}

// End ends the copy.
func (p partly) End() {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	b.copied += p.n
	if b.copies--; b.copies == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
	b.m.life.End()
}

// ReadOnly reports whether the memory can only be read.
func (p partly) ReadOnly() bool { return p.b.m.readOnly }

// Prefix returns how many of n bytes at an offset of the copy are all registered, or all not.
func (p partly) Prefix(off, n int) (bytes int, registered bool) {
	at := p.off + off
	for s := range p.b.m.Spans(at, n) {
		if s.Off > at {
			return s.Off - at, false
		}
		return s.Len, true
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if p.b.overdue() { // pieces become registered meanwhile
		n = min(n, p.b.piece)
	}
	return n, false
}

// File returns the file with the bytes at an offset of the copy, and where they are in it; nil if it is unknown.
func (p partly) File(off int) (f *os.File, at int64) {
	return p.b.file, p.b.off + int64(p.off) + int64(off)
}
