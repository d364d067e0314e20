package transfer

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"

	"github.com/gopinned/pinned/cudart"
)

// A Piece is a part of the bytes that [FanoutView.UploadPieces] reads, and its place
// on each device.
type Piece struct {
	Off  int             // in the bytes that are read
	N    int             // bytes
	Dsts []cudart.DevPtr // one for each device, in the order of NewFanout
}

// UploadPieces reads n bytes from offset off of r, once, and copies pieces of them to
// all devices, each piece to places of its own. What is between pieces is read and
// dropped. Pieces are in the order of their Off and do not overlap, neither in what is
// read nor on a device. It returns how many of the n bytes, from the first on, are
// done with: pieces that end before are on all devices. r is read as
// [View.UploadFrom] does, and Call.Progress counts what is read.
func (f *FanoutView) UploadPieces(ctx context.Context, r io.ReaderAt, off int64, n int, pieces []Piece) (int, error) {
	check := func() error { return f.checkPieces(pieces, n) }
	err := checkRange(r, off, n)
	done := 0
	if err == nil {
		done, err = f.run(ctx, n, check, func() (int, error) { return uploadAt(ctx, onDevices{f, pieces}, r, off, n) })
	}
	if err != nil {
		return done, fmt.Errorf("transfer: upload %d pieces of %d bytes from offset %d of %s onto %d devices: %w", len(pieces), n, off, nameOf(r), len(f.devs), err)
	}
	return done, nil
}

func (f *FanoutView) checkPieces(pieces []Piece, n int) error {
	end := 0
	places := make([]devicePlace, 0, len(pieces)*len(f.devs))
	for i, p := range pieces {
		switch {
		case p.N < 0:
			return fmt.Errorf("piece %d: %d bytes: must not be negative", i, p.N)
		case p.Off < end:
			return fmt.Errorf("piece %d: at byte %d, before the end of the last one at %d: pieces must be in order", i, p.Off, end)
		case p.Off > n || p.N > n-p.Off:
			return fmt.Errorf("piece %d: %d bytes at %d, of %d that are read", i, p.N, p.Off, n)
		case len(p.Dsts) != len(f.devs):
			return fmt.Errorf("piece %d: %d destinations for %d devices: want one for each", i, len(p.Dsts), len(f.devs))
		}
		end = p.Off + p.N
		for d, dst := range p.Dsts {
			if uint64(dst) > math.MaxUint64-uint64(p.N) {
				return fmt.Errorf("piece %d: %d bytes at %#x of %v: no memory has such addresses", i, p.N, uintptr(dst), f.devs[d])
			}
			if p.N > 0 {
				places = append(places, devicePlace{d, dst, p.Off, p.N})
			}
		}
	}
	return f.checkApart(places)
}

// A devicePlace is that of a piece on one device of the Fanout.
type devicePlace struct {
	device int
	dst    cudart.DevPtr
	off, n int // of the piece
}

// checkApart returns an error if two places overlap. It sorts them.
func (f *FanoutView) checkApart(places []devicePlace) error {
	slices.SortFunc(places, func(a, b devicePlace) int {
		return cmp.Or(cmp.Compare(a.device, b.device), cmp.Compare(a.dst, b.dst))
	})
	for i := 1; i < len(places); i++ {
		a, b := places[i-1], places[i]
		if a.device == b.device && overlap(a.dst, a.n, b.dst, b.n) {
			return fmt.Errorf("the parts at offsets %d and %d overlap on %v, at %#x", a.off, b.off, f.devs[a.device], uintptr(b.dst))
		}
	}
	return nil
}

// each calls do for all that the n bytes at off have of pieces: n bytes of a piece
// after the first skip of it.
func (d onDevices) each(off, n int, do func(p *Piece, skip, n int) error) error {
	first := sort.Search(len(d.pieces), func(i int) bool { return d.pieces[i].Off+d.pieces[i].N > off })
	for i := first; i < len(d.pieces) && d.pieces[i].Off < off+n; i++ {
		p := &d.pieces[i]
		from, to := max(off, p.Off), min(off+n, p.Off+p.N)
		if from == to {
			continue
		}
		if err := do(p, from-p.Off, to-from); err != nil {
			return err
		}
	}
	return nil
}
