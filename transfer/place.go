package transfer

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer/internal/stage"
)

// A place is where an upload goes: pieces of its bytes, each to an address on every
// device of the engine.
type place struct {
	view
	pieces   []Piece
	numbered bool // errors name the number of a piece
}

// at is the place of n bytes, with an address for each device.
func (v view) at(n int, dsts ...cudart.DevPtr) place {
	return place{view: v, pieces: []Piece{{N: n, Dsts: dsts}}}
}

// what names n bytes in errors, and onto where they go.
func (p place) what(n int) string {
	if p.numbered {
		return fmt.Sprintf("%d pieces of %d bytes", len(p.pieces), n)
	}
	return fmt.Sprintf("%d bytes", n)
}

func (p place) onto() string {
	if p.engine == nil || len(p.members) == 1 {
		return ""
	}
	return fmt.Sprintf(" onto %d devices", len(p.members))
}

// memory uploads memory, which may be pinned.
func (p place) memory(ctx context.Context, src []byte) (int, error) {
	if len(p.members) == 1 && len(p.pieces) == 1 && p.pieces[0].Off == 0 && p.pieces[0].N >= len(src) {
		return p.copyMemory(ctx, p.pieces[0].Dsts[0], src, false)
	}
	if err := p.call.turn(ctx); err != nil {
		return 0, err
	}
	send, known, err := pinned(ctx, p.dev(), src, false)
	if err != nil {
		return 0, err
	}
	if send != nil {
		done, err := p.copyPinned(ctx, len(src), send, false)
		if known || !atSeam(err) {
			return done, err
		}
	}
	return p.stage(ctx, fromMemory(src))
}

// stage copies between the host and the place, through the ring.
func (p place) stage(ctx context.Context, c stage.Copy) (int, error) {
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
	c.Stages, c.Groups, c.Progress = v.stages, v.groups, v.call.Progress
	c.Workers = cmp.Or(v.o.Workers, c.Workers)
	done, err := v.stages[0].Run(ctx, c)
	counter.Add(int64(done))
	return done, err
}

// forward queues the copies of n bytes at off from one member of a group to the
// others, when the device has passed a Point. It returns their ends, also after an
// error.
func (p place) forward(from, off, n int, after cudart.Point) (ends []cudart.Point, err error) {
	if !p.forwarding.Begin() {
		return nil, ErrClosed // the copy was abandoned before
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
// several devices each of a group gets every so many pieces.
func (p place) copyPinned(ctx context.Context, n int, send sender, down bool) (int, error) {
	turn, stream := 0, 0
	if down {
		stream = 1
	}
	queue := func(off, n int) (ends []cudart.Point, err error) {
		defer func() { turn++ }()
		for _, group := range p.groups {
			to := group[turn%len(group)]
			on := p.members[to].direct[stream]
			err := p.each(off, n, func(piece *Piece, skip, n int) error {
				return send(on, piece.Dsts[to]+cudart.DevPtr(skip), piece.Off+skip, n)
			})
			end := on.Point()
			ends = append(ends, end)
			if err != nil {
				return ends, err
			}
			if len(p.peers) > 0 {
				more, err := p.forward(to, off, n, end)
				if ends = append(ends, more...); err != nil {
					return ends, err
				}
			}
		}
		return ends, nil
	}
	c := stage.Direct{N: n, Piece: directPiece, Pieces: directPieces, Down: down, Queue: queue}
	if len(p.members) > 1 {
		c.Piece, c.Pieces = fanPiece, fanPieces*len(p.members)
	}
	c.Progress = p.call.Progress
	done, err := c.Run(ctx)
	p.stats.directBytes.Add(int64(done))
	return done, err
}
