package transfer

import (
	"context"
	"fmt"
	"math"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
)

// A Call shapes single copies: see [View.With]. The zero value changes nothing.
type Call struct {
	// Stream orders the copy with the work of this stream, which is of the copier's
	// device: see Ordering in the package's documentation.
	Stream *cudart.Stream
	// Progress is called now and then with the bytes done of all, which grow: one
	// call at a time, on a goroutine of its own. If the copy succeeds the last call
	// has all of them, and returns before the copy does. It may call methods of the
	// Copier, but see [Copier.CloseContext].
	Progress func(done, total int)
	// DirectIO reads and writes files past the page cache (O_DIRECT), where
	// the file system can: what is read once, and is larger than memory, then
	// leaves the cache to others. It is for regular files, not in memory
	// (tmpfs); for other readers and writers it is ignored, and for files that
	// are open for appending.
	DirectIO bool
}

// A View has the methods of a [Copier] that copy. All views of a Copier share
// its ring, its streams and its Stats, and end with its Close.
//
// For all these methods: ctx must not be nil, nor a reader or writer, and sizes
// are bytes, 0 or more. Copies of nothing succeed at once. The other errors are
// those of ctx, of the reader or writer, of CUDA, and [ErrClosed].
type View struct {
	*engine
	call Call
}

// With returns a view whose copies are shaped by call.
func (v *View) With(call Call) *View { return &View{engine: v.engine, call: call} }

// Device returns the device that is copied to and from.
func (v *View) Device() *cudart.Device { return v.dev }

// do runs one copy of n bytes, while the copier is open.
func (v *View) do(ctx context.Context, n int, copies func() (int, error)) (done int, err error) {
	if ctx == nil {
		return 0, errNilContext
	}
	if !v.life.Begin() {
		return 0, ErrClosed
	}
	defer v.life.End()
	switch s := v.call.Stream; {
	case n < 0:
		return 0, fmt.Errorf("%d bytes: must not be negative", n)
	case s != nil && s.Device() != v.dev:
		return 0, fmt.Errorf("Call.Stream: %v is not of the copier's %v", s, v.dev)
	case ctx.Err() != nil:
		return 0, bounded.Ended(ctx)
	case n == 0:
		return 0, nil
	}
	v.stats.copies.Add(1)
	if done, err = copies(); err != nil {
		v.stats.failures.Add(1)
	}
	return done, err
}

// checkOffset checks the offset of n bytes.
func checkOffset(off int64, n int) error {
	if off < 0 || off > math.MaxInt64-int64(max(n, 0)) {
		return fmt.Errorf("offset %d: must not be negative, nor the end more than %d", off, int64(math.MaxInt64))
	}
	return nil
}

// checkRange checks n bytes at an offset of a reader or writer.
func checkRange(rw any, off int64, n int) error {
	if f, ok := rw.(*os.File); rw == nil || ok && f == nil {
		return errNilReadWriter
	}
	return checkOffset(off, n)
}

// doWith is do for n bytes at an offset of a reader or writer.
func (v *View) doWith(ctx context.Context, rw any, off int64, n int, copies func() (int, error)) (int, error) {
	if err := checkRange(rw, off, n); err != nil {
		return 0, err
	}
	return v.do(ctx, n, func() (int, error) {
		if err := v.call.turn(ctx); err != nil {
			return 0, err
		}
		return copies()
	})
}
