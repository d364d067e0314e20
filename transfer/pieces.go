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
	return place{f.get(), pieces, true}.uploadFrom(ctx, r, off, n)
}

// check returns an error unless the pieces are in order within n bytes, and have places
// on every device that do not overlap: no two devices have memory at one address.
func (p place) check(n int) error {
	end := 0
	places := make([]devicePlace, 0, len(p.pieces)*len(p.members))
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
				places = append(places, devicePlace{d, dst, piece.Off, piece.N})
			}
		}
	}
	slices.SortFunc(places, func(a, b devicePlace) int { return cmp.Compare(a.dst, b.dst) })
	for i := 1; i < len(places); i++ {
		if a, b := places[i-1], places[i]; b.dst < a.dst+cudart.DevPtr(a.n) {
			return fmt.Errorf("the destinations of byte %d on %v (%#x) and of byte %d on %v (%#x) overlap",
				a.off, p.members[a.device].dev, uintptr(a.dst), b.off, p.members[b.device].dev, uintptr(b.dst))
		}
	}
	return nil
}

// checkPiece checks a piece behind one that ends at a byte.
func (p place) checkPiece(piece Piece, end, n int) error {
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
			return fmt.Errorf("%d bytes at %#x of %v: no memory has such addresses", piece.N, uintptr(dst), p.members[d].dev)
		}
	}
	return nil
}

// A devicePlace is that of a piece on one device.
type devicePlace struct {
	device int
	dst    cudart.DevPtr
	off, n int // of the piece
}

// each calls do for all that the n bytes at off have of pieces: n bytes of a piece
// after the first skip of it.
func (p place) each(off, n int, do func(p *Piece, skip, n int) error) error {
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
