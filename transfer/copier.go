package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync/atomic"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

var (
	errNilContext    = errors.New("the context is nil")
	errNilDevice     = errors.New("the device is nil")
	errNilReadWriter = errors.New("the reader or writer is nil")
	errNotMade       = errors.New("the Copier or Fanout is nil or zero: make it with NewCopier or NewFanout")
)

// ErrUnderWay is in the errors of copies that were abandoned while the GPU may still
// be copying. Until the GPU is done, the destination has unknown bytes, pinned memory must
// stay allocated, and uploaded memory outside of Go's heap must stay mapped.
var ErrUnderWay = stage.ErrUnderWay

// A Copier copies between one device and any host memory, file, reader or
// writer. Any goroutine may call its methods.
//
// For all methods that copy: ctx, a reader and a writer must not be nil, and sizes are bytes, 0 or
// more. A copy of no bytes returns nil. Errors are those of ctx (its error and its cause), of the
// reader or writer, of CUDA, and [cudart.ErrClosed].
type Copier struct{ view }

// NewCopier returns a copier for a device. Close it. The first copier of a device allocates the
// ring of pinned memory, 11 MiB on up to four cores and 39 MiB on more, and the streams that all
// copiers of the device share. On more than four cores the ring grows by 28 MiB while copies in
// both directions wait for memory. The error reports invalid Options or a nil or zero device, or is
// that of ctx (its error and its cause), [hostmem.Alloc] or cudaStreamCreateWithPriority. After an
// error nothing stays allocated, unless the error reports memory that could not be released, and
// NewCopier may be called again.
func NewCopier(ctx context.Context, dev *cudart.Device, o Options) (*Copier, error) {
	e, err := newEngine(ctx, fmt.Sprintf("copier on %v", dev), []*cudart.Device{dev}, o)
	if err != nil {
		return nil, err
	}
	return &Copier{view{engine: e}}, nil
}

// Close releases the copier; the last Close on a device waits for queued copies, and unregisters
// and unmaps the ring. After the call of Close, new copies return [cudart.ErrClosed].
//
// While methods run, Close returns an error instead of waiting, because one of their callbacks may
// have called it. CloseContext waits for them. After an error Close may be called again; once it
// has returned nil it does nothing.
func (c *Copier) Close() error { return c.get().close() }

// CloseContext is Close that also waits for running methods, until ctx ends: then it returns ctx's
// error. It waits one more second for a call into CUDA that does not return. If a reader, a writer
// or Progress calls it, it waits for its own copy until ctx ends.
func (c *Copier) CloseContext(ctx context.Context) error { return c.get().closeContext(ctx) }

// Stats count the copies of a Copier or Fanout and its views.
type Stats struct {
	Copies   int // calls of methods that copied at least one byte, or failed to
	Failures int // calls that returned an error after a copy was begun
	// StagedBytes went through the ring. DirectBytes were pinned, and did not.
	// BatchedBytes are those of UploadAll and DownloadAll, which went through the ring.
	StagedBytes, DirectBytes, BatchedBytes int
	// PeerBytes were copied from device to device: see [Fanout].
	PeerBytes int
	// RingBytes are pinned for all copiers of the device together, until the last
	// one is closed.
	RingBytes int
}

type counters struct {
	copies, failures, stagedBytes, directBytes, batchedBytes, peerBytes atomic.Int64
}

func (e *engine) readStats() Stats {
	if e == nil {
		return Stats{}
	}
	c := &e.stats
	s := Stats{
		Copies:       int(c.copies.Load()),
		Failures:     int(c.failures.Load()),
		StagedBytes:  int(c.stagedBytes.Load()),
		DirectBytes:  int(c.directBytes.Load()),
		BatchedBytes: int(c.batchedBytes.Load()),
		PeerBytes:    int(c.peerBytes.Load()),
	}
	for _, st := range e.stages {
		s.RingBytes += st.Bytes()
	}
	return s
}

// Options configure a Copier or a Fanout. The zero value fits most programs.
type Options struct {
	// Workers is the maximum number of goroutines that one copy keeps busy, from 1 to
	// 1024, the caller's included. With 0 copies on a device share as many goroutines as
	// fill its link: see "Cores" in the package's documentation. All copies of the
	// process together have no more than seven eighths of GOMAXPROCS, or all where that
	// is up to four.
	Workers int
	// NoPeers forbids a Fanout copies from device to device (cudaMemcpyPeerAsync): each device
	// gets all bytes over its own link, and no peer access is enabled. Without it a Fanout makes
	// such copies only where it has proved that they arrive: see [NewFanout]. A Copier has one
	// device, and ignores it.
	NoPeers bool
}

const (
	kib = 1 << 10
	mib = 1 << 20

	maxWorkers = 1024
)

// validate returns an error that names the option that is invalid, or nil.
func (o Options) validate() error {
	if o.Workers < 0 || o.Workers > maxWorkers {
		return fmt.Errorf("Options.Workers: %d: must be from 0 to %d", o.Workers, maxWorkers)
	}
	return nil
}

// A Call configures single copies: see [Copier.With]. The zero value changes nothing.
type Call struct {
	// Stream orders the copy with the work of this stream, which is of the copier's
	// device: see Ordering in the package's documentation.
	Stream *cudart.Stream
	// Progress is called now and then with the number of bytes that were copied, which
	// grows, and with that of all bytes: one call at a time, on a goroutine of its own.
	// If the copy succeeds, the last call has done == total, and returns before the copy
	// does. It may call methods of the
	// Copier, but see [Copier.CloseContext].
	Progress func(done, total int)
	// Inspect is called with all bytes of the copy while they are in pinned memory, for instance to compute
	// checksums: the bytes from off on, after they were read from their source or before they are written to their
	// destination. Several goroutines call it at once, with pieces in any order; bytes that have to be read again
	// come again. It must neither keep nor change the bytes, nor block, nor end its goroutine. After a panic the copy
	// fails. Memory that is pinned already is copied through the ring then. UploadAll and DownloadAll ignore it.
	Inspect func(off int, mem []byte)
	// DirectIO reads and writes files with O_DIRECT, without the page cache, where the
	// file system supports it. Files that are larger than memory then do not evict the
	// cached pages of others. It applies to regular files on disks; it is ignored for files
	// in memory (tmpfs), for files that are open for appending, and for other readers and
	// writers.
	DirectIO bool
}

// A view is an engine with the configuration of its copies.
type view struct {
	*engine // nil for a zero Copier or Fanout
	call    Call
}

func (c *Copier) get() view {
	if c == nil {
		return view{}
	}
	return c.view
}

// With returns the same copier, whose copies are configured by call: it shares the ring, the streams and the
// Stats, and a Close of either closes both. It does not block.
func (c *Copier) With(call Call) *Copier { return &Copier{view{c.get().engine, call}} }

// Device returns the device that is copied to and from, nil for a zero Copier.
func (c *Copier) Device() *cudart.Device {
	if e := c.get().engine; e != nil {
		return e.members[0].dev
	}
	return nil
}

// Stats returns the counts so far. It does not block.
func (c *Copier) Stats() Stats { return c.get().readStats() }

func (v view) dev() *cudart.Device { return v.members[0].dev }

// checkOffset checks the offset of n bytes.
func checkOffset(off int64, n int) error {
	if off < 0 || off > math.MaxInt64-int64(max(n, 0)) {
		return fmt.Errorf("offset %d: must not be negative, nor the end more than %d", off, int64(math.MaxInt64))
	}
	return nil
}

// isNil reports whether a reader or writer is nil or a nil pointer of a type whose methods
// need more. A nil pointer of another type may have methods that work.
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
