package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/transfer/internal/queue"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A target has the device addresses of a copy: pieces of its bytes, each with an address on
// every device of the engine.
type target struct {
	view
	pieces   []Piece
	numbered bool // errors name the number of a piece
}

// at returns the target of n bytes, with an address for each device.
func (v view) at(n int, dsts ...cudart.DevPtr) target {
	return target{view: v, pieces: []Piece{{N: n, Dsts: dsts}}}
}

// what names n bytes in errors; onto names the devices of a Fanout.
func (p target) what(n int) string {
	if p.numbered {
		return fmt.Sprintf("%d pieces of %d bytes", len(p.pieces), n)
	}
	return fmt.Sprintf("%d bytes", n)
}

func (p target) onto() string {
	if p.engine == nil || len(p.members) == 1 {
		return ""
	}
	return fmt.Sprintf(" onto %d devices", len(p.members))
}

// memory uploads memory, which may be pinned.
func (p target) memory(ctx context.Context, src []byte) (int, error) {
	if len(p.members) == 1 && len(p.pieces) == 1 && p.pieces[0].Off == 0 && p.pieces[0].N >= len(src) {
		return p.copyMemory(ctx, p.pieces[0].Dsts[0], src, false)
	}
	if err := p.call.waitForStream(ctx); err != nil {
		return 0, err
	}
	send, registered, err := p.pinned(ctx, src, false)
	if err != nil {
		return 0, err
	}
	if send != nil {
		done, err := p.copyPinned(ctx, len(src), send, false)
		if registered || !atSeam(err) {
			return done, err
		}
	}
	return p.stage(ctx, stage.Upload(src))
}

// stage copies between the host and the target, through the ring.
func (p target) stage(ctx context.Context, c stage.Copy) (int, error) {
	down := c.Down
	c.Queue = func(on *cudart.Stream, device int, mem []byte, off int) error {
		return p.each(off, len(mem), func(piece *Piece, skip, n int) error {
			host, at := unsafe.Pointer(&mem[piece.Off+skip-off]), piece.Dsts[device]+cudart.DevPtr(skip)
			if down {
				return on.CopyToHost(host, at, n)
			}
			return on.CopyToDevice(at, host, n)
		})
	}
	if len(p.peers) > 0 {
		c.Forward = p.forward
	}
	return p.run(ctx, c, &p.stats.stagedBytes)
}

// run copies through the rings of the devices.
func (v view) run(ctx context.Context, c stage.Copy, counter *atomic.Int64) (int, error) {
	c.Stages, c.Groups, c.Progress, c.Inspect = v.stages, v.groups, v.call.Progress, v.call.Inspect
	c.Workers = cmp.Or(v.o.Workers, c.Workers)
	done, err := v.stages[0].Run(ctx, c)
	counter.Add(int64(done))
	return done, err
}

// forward queues the copies of n bytes at off from one member of a group to the
// others, when the device has passed a Point. It returns their ends, also after an
// error.
func (p target) forward(from, off, n int, after cudart.Point) (ends []cudart.Point, err error) {
	if !p.forwarding.Begin() {
		return nil, cudart.ErrClosed // the copy was abandoned before
	}
	defer p.forwarding.End()
	for _, peer := range p.peers {
		if peer.from != from {
			continue
		}
		of, to := p.members[from].dev, p.members[peer.to].dev
		err := peer.stream.WaitPoint(after)
		if err == nil {
			err = p.each(off, n, func(piece *Piece, skip, n int) error {
				at := cudart.DevPtr(skip)
				err := peer.stream.CopyPeer(piece.Dsts[peer.to]+at, to, piece.Dsts[from]+at, of, n)
				if err == nil {
					p.stats.peerBytes.Add(int64(n))
				}
				return err
			})
		}
		ends = append(ends, peer.stream.Point()) // also of what was queued before an error
		if err != nil {
			return ends, fmt.Errorf("from %v to %v: %w", of, to, err)
		}
	}
	return ends, nil
}

// copyPinned copies n bytes of pinned memory, which send queues, without the ring. With
// several devices the members of a group get the pieces round robin.
func (p target) copyPinned(ctx context.Context, n int, send sender, down bool) (int, error) {
	round, stream := 0, 0
	if down {
		stream = 1
	}
	// queueTo queues a piece for the devices of one group, which a full stream blocks.
	queueTo := func(to, off, n int) (ends []cudart.Point, err error) {
		on := p.members[to].direct[stream]
		calls := queue.Calls.Of(on)
		if err := calls.Begin(ctx); err != nil {
			return nil, err
		}
		defer calls.End()
		err = p.each(off, n, func(piece *Piece, skip, n int) error {
			return send(on, piece.Dsts[to]+cudart.DevPtr(skip), piece.Off+skip, n)
		})
		end := on.Point()
		if err != nil || len(p.peers) == 0 {
			return []cudart.Point{end}, err
		}
		more, err := p.forward(to, off, n, end)
		return append([]cudart.Point{end}, more...), err
	}
	queue := func(off, n int) (ends []cudart.Point, err error) {
		defer func() { round++ }()
		for _, group := range p.groups {
			more, err := queueTo(group[round%len(group)], off, n)
			if ends = append(ends, more...); err != nil {
				return ends, err
			}
		}
		return ends, nil
	}
	c := &stage.Direct{N: n, Piece: directPiece, Pieces: directPieces, Down: down, Queue: queue}
	if len(p.members) > 1 {
		c.Piece, c.Pieces = fanPiece, fanPieces*len(p.members)
	}
	c.Progress = p.call.Progress
	done, err := c.Run(ctx)
	p.stats.directBytes.Add(int64(done))
	return done, err
}

// A Piece is a part of the bytes that [Fanout.UploadPieces] reads, and its place
// on each device.
type Piece struct {
	Off  int             // in the bytes that are read
	N    int             // bytes
	Dsts []cudart.DevPtr // one for each device, in the order of NewFanout
}

// UploadPieces reads n bytes from offset off of r, once, and copies pieces of them to
// all devices, each piece to addresses of its own. Bytes between pieces are read and
// dropped. Pieces are in the order of their Off and overlap neither in the bytes that are
// read nor on a device. It returns the number of bytes, from the first on, that were
// processed: pieces that end before have arrived on all devices. r is read as
// [Copier.UploadFrom] does, and Call.Progress counts the bytes that are read.
func (f *Fanout) UploadPieces(ctx context.Context, r io.ReaderAt, off int64, n int, pieces []Piece) (int, error) {
	return target{f.get(), pieces, true}.uploadFrom(ctx, r, off, n)
}

// check returns an error unless the pieces are in order within n bytes, and have places
// on every device that do not overlap: no two devices have memory at one address.
func (p target) check(n int) error {
	end := 0
	ranges := make([]deviceRange, 0, len(p.pieces)*len(p.members))
	for i, piece := range p.pieces {
		if err := p.checkPiece(piece, end, n); err != nil {
			if p.numbered {
				err = fmt.Errorf("piece %d: %w", i, err)
			}
			return err
		}
		end = piece.Off + piece.N
		for d, dst := range piece.Dsts {
			if piece.N > 0 {
				ranges = append(ranges, deviceRange{d, dst, piece.Off, piece.N})
			}
		}
	}
	slices.SortFunc(ranges, func(a, b deviceRange) int { return cmp.Compare(a.dst, b.dst) })
	for i := 1; i < len(ranges); i++ {
		if a, b := ranges[i-1], ranges[i]; b.dst < a.dst+cudart.DevPtr(a.n) {
			return fmt.Errorf("the destinations of byte %d on %v (%v) and of byte %d on %v (%v) overlap",
				a.off, p.members[a.device].dev, a.dst, b.off, p.members[b.device].dev, b.dst)
		}
	}
	return nil
}

// checkPiece checks a piece behind one that ends at a byte.
func (p target) checkPiece(piece Piece, end, n int) error {
	switch {
	case piece.N < 0:
		return fmt.Errorf("%d bytes: must not be negative", piece.N)
	case piece.Off < end:
		return fmt.Errorf("at byte %d, before the end of the last one at %d: pieces must be in order", piece.Off, end)
	case piece.Off > n || piece.N > n-piece.Off:
		return fmt.Errorf("%d bytes at %d, of %d that are read", piece.N, piece.Off, n)
	case len(piece.Dsts) != len(p.members):
		return fmt.Errorf("%d destinations for %d devices: want one for each", len(piece.Dsts), len(p.members))
	}
	for d, dst := range piece.Dsts {
		if uint64(dst) > math.MaxUint64-uint64(piece.N) {
			return fmt.Errorf("%d bytes at %v of %v: no memory has such addresses", piece.N, dst, p.members[d].dev)
		}
	}
	return nil
}

// A deviceRange is the address range of a piece on one device.
type deviceRange struct {
	device int
	dst    cudart.DevPtr
	off, n int // of the piece
}

// each calls do for each piece that has some of the n bytes at off, with the range of the
// piece that they have: n bytes after the first skip bytes.
func (p target) each(off, n int, do func(p *Piece, skip, n int) error) error {
	first := sort.Search(len(p.pieces), func(i int) bool { return p.pieces[i].Off+p.pieces[i].N > off })
	for i := first; i < len(p.pieces) && p.pieces[i].Off < off+n; i++ {
		piece := &p.pieces[i]
		from, to := max(off, piece.Off), min(off+n, piece.Off+piece.N)
		if from == to {
			continue
		}
		if err := do(piece, from-piece.Off, to-from); err != nil {
			return err
		}
	}
	return nil
}

// A sender queues a copy of n bytes at off of pinned memory, to or from the device.
type sender func(s *cudart.Stream, at cudart.DevPtr, off, n int) error

// pinned returns a sender for mem, nil if mem is not pinned, or is to be inspected. registered reports whether mem is
// hostmem's; else a copy may fail: see atSeam. An error is that of a call that does not
// return.
func (v view) pinned(ctx context.Context, mem []byte, down bool) (send sender, registered bool, err error) {
	if v.call.Inspect != nil {
		return nil, false, nil
	}
	if p, start, ok := hostmem.Find(mem); ok {
		return sendRegistered(p, start, down), true, nil
	}
	if ok, err := isPinned(ctx, v.dev(), mem); !ok {
		return nil, false, err
	}
	return sendOther(mem, down), false, nil
}

// Both are functions of their own because closures allocate what they use where it is declared.
func sendRegistered(p hostmem.Pinned, start int, down bool) sender {
	return func(s *cudart.Stream, at cudart.DevPtr, off, n int) error {
		if down {
			return p.CopyFromDevice(s, at, start+off, n)
		}
		return p.CopyToDevice(s, at, start+off, n)
	}
}

func sendOther(mem []byte, down bool) sender {
	return func(s *cudart.Stream, at cudart.DevPtr, off, n int) error {
		if down {
			return s.CopyToHost(unsafe.Pointer(&mem[off]), at, n)
		}
		return s.CopyToDevice(at, unsafe.Pointer(&mem[off]), n)
	}
}

// querying bounds the threads in queries of memory.
var querying bounded.Each[cudart.Device, bounded.Group]

// isPinned queries CUDA for both ends of memory that is not hostmem's
// (cudaPointerGetAttributes). An error is that of a call that does not return.
func isPinned(ctx context.Context, dev *cudart.Device, mem []byte) (bool, error) {
	if len(mem) <= stage.MaxSmall {
		return false, nil // a query takes longer than staging
	}
	first, last := uintptr(unsafe.Pointer(&mem[0])), uintptr(unsafe.Pointer(&mem[len(mem)-1]))
	return bounded.Do(ctx, bounded.Call[bool]{
		Group: querying.Of(dev),
		Run: func() (bool, error) {
			for _, at := range [...]uintptr{first, last} {
				if a, err := dev.PointerAttributes(at); err != nil || a.Type == cudart.MemoryUnregistered {
					return false, nil
				}
			}
			return true, nil
		},
		Grace: bounded.CallbackGrace,
	})
}

// atSeam reports whether a direct copy may have failed because it crosses from one registration to
// the next. Copying the bytes before again does no harm.
func atSeam(err error) bool { return errors.Is(err, cudart.ErrInvalidValue) }

const (
	// directPiece is the size of the pieces in which pinned memory is queued. A few pieces
	// keep the link full, and a canceled copy ends after them.
	directPiece  = 64 * mib
	directPieces = 4
	// The same for several devices, for each of them.
	fanPiece  = 16 * mib
	fanPieces = 4
)
