package hostmem

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/internal/pages"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/raw"
)

// backgroundPiece is the number of bytes that are registered at once: the GPU stands still meanwhile.
const backgroundPiece = 1 << 30

// A background registers the memory of a Buffer while it is in use. A nil one has nothing to do.
//
//	state        entered by                      | Buffer.pieces | Buffer.registrations belong to
//	in progress  start, when the Buffer is open  | grow          | its goroutine
//	over         the last piece, an error, stop  | stay          | Close
type background struct {
	m       *Buffer
	memory  pages.Memory
	piece   int // bytes of a registration, at most
	workers int
	ctx     context.Context // ended by stop
	stopped context.CancelCauseFunc
	over    chan struct{}
	err     error // once over is closed

	mu   sync.Mutex
	more chan struct{} // closed when the next piece is registered
}

func newBackground(ctx context.Context, m *Buffer, memory pages.Memory, o Options) *background {
	b := &background{m: m, memory: memory, piece: cmp.Or(o.Chunk, backgroundPiece), workers: o.Workers, over: make(chan struct{}), more: make(chan struct{})}
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
		part := b.memory
		part.Bytes = part.Bytes[off:end]
		region, err := pages.Borrow(pages.SystemOf(b.ctx), part)
		if err == nil {
			err = region.Populate(b.ctx, pages.Populate{Threads: b.workers})
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

func init() { raw.PinnedPrefix = pinnedPrefix }

// pinnedPrefix returns how many bytes of mem to copy at once, because they are all registered or all are not: everything,
// unless mem is of a Buffer that is registered in the background.
func pinnedPrefix(mem []byte) int {
	m, off := process.at(mem)
	if m == nil || m.background.covered(off, len(mem)) {
		return len(mem)
	}
	for s := range m.Spans(off, len(mem)) {
		if s.Off == off {
			return s.Len
		}
		return min(s.Off-off, m.background.piece)
	}
	return min(len(mem), m.background.piece)
}
