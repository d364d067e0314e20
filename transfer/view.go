package transfer

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/gopinned/pinned/cudart"
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
type View struct{ view }

// A view is an engine with the shape of its copies.
type view struct {
	*engine // nil for a zero View
	call    Call
}

func (v *View) get() view {
	if v == nil {
		return view{}
	}
	return v.view
}

// With returns a view whose copies are shaped by call.
func (v *View) With(call Call) *View { return &View{view{v.get().engine, call}} }

// Device returns the device that is copied to and from.
func (v *View) Device() *cudart.Device {
	if e := v.get().engine; e != nil {
		return e.members[0].dev
	}
	return nil
}

// Stats returns what was done so far by the Copier and all its views.
func (v *View) Stats() Stats { return v.get().readStats() }

func (v view) dev() *cudart.Device { return v.members[0].dev }

// checkOffset checks the offset of n bytes.
func checkOffset(off int64, n int) error {
	if off < 0 || off > math.MaxInt64-int64(max(n, 0)) {
		return fmt.Errorf("offset %d: must not be negative, nor the end more than %d", off, int64(math.MaxInt64))
	}
	return nil
}

// isNil reports whether a reader or writer is nil, of a type that is known to need more. A
// nil pointer of another type may have methods that work.
func isNil(rw any) bool {
	switch rw := rw.(type) {
	case nil:
		return true
	case *os.File:
		return rw == nil || *rw == os.File{}
	case *io.SectionReader:
		return rw == nil
	case *bytes.Reader:
		return rw == nil
	case *strings.Reader:
		return rw == nil
	case *bytes.Buffer:
		return rw == nil
	}
	return false
}
