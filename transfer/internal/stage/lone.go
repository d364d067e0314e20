package stage

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// A lone is what one small copy at a time passes through, in one direction: a
// slot and a stream of its own, whose end it asks for without an event. It is for
// the caller who copies alone. Those who find it taken share an event, see link.
type lone struct {
	stream *cudart.Stream
	buf    *hostmem.Buffer
	taken  atomic.Bool
	left   cudart.Point // of a copy that was not waited for; guarded by taken
}

func (l *lone) open(ctx context.Context, dev *cudart.Device) (err error) {
	if l.stream, err = dev.NewStream(cudart.StreamOptions{}); err != nil {
		return err
	}
	l.buf, err = hostmem.Alloc(ctx, dev, alone, hostmem.Options{Label: "transfer ring"})
	return err
}

func (l *lone) close(ctx context.Context) error {
	if l.buf != nil {
		if err := l.left.Wait(ctx); err != nil {
			return err
		}
		if err := l.buf.CloseContext(ctx); err != nil {
			return err
		}
		l.buf = nil
	}
	if l.stream != nil {
		return l.stream.Close()
	}
	return nil
}

// take takes the slot, if no other goroutine and no work of the GPU uses it.
func (l *lone) take() bool {
	if !l.taken.CompareAndSwap(false, true) {
		return false
	}
	if l.left.Known() {
		return true
	}
	l.left.Record()
	l.taken.Store(false)
	return false
}

// upload copies up to alone bytes.
func (l *lone) upload(ctx context.Context, dst cudart.DevPtr, from []byte) error {
	defer l.taken.Store(false)
	mem := l.buf.Bytes()
	if err := Guard(func() error { copy(mem, from); return nil }); err != nil {
		return err
	}
	return l.wait(ctx, l.stream.CopyToDevice(dst, unsafe.Pointer(&mem[0]), len(from)))
}

// download copies up to alone bytes.
func (l *lone) download(ctx context.Context, to []byte, src cudart.DevPtr) error {
	defer l.taken.Store(false)
	mem := l.buf.Bytes()
	if err := l.wait(ctx, l.stream.CopyToHost(unsafe.Pointer(&mem[0]), src, len(to))); err != nil {
		return err
	}
	return Guard(func() error { copy(to, mem); return nil })
}

// wait waits until the stream is done, for a copy that was queued or has failed.
func (l *lone) wait(ctx context.Context, err error) error {
	const questions = 8
	for begin := time.Now(); err == nil && time.Since(begin) < spinFor; {
		for range questions {
			var done bool
			if done, err = l.stream.Query(); done {
				return nil
			} else if err != nil {
				break
			}
		}
	}
	// Also after an error: some of it may be queued.
	l.left = l.stream.Point()
	return errors.Join(err, l.left.Wait(ctx), l.left.Err())
}
