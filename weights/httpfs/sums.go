package httpfs

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gopinned/pinned/internal/bounded"
)

// ErrChecksum is the error of bytes that do not have the checksum that the server told.
var ErrChecksum = errors.New("wrong checksum")

// maxEarly is the size of the bytes of a file that are kept because they came before those in front of them.
const maxEarly = 128 << 20

// sums compute a checksum of a file as its bytes come. A nil one computes none.
type sums struct {
	kind      *kind
	want      []byte // of the file, or of the digests of its parts
	composite bool
	parts     []*part
	early     atomic.Int64          // the memory for bytes that parts keep
	limit     int64                 // of early
	complete  atomic.Int64          // parts
	compared  atomic.Pointer[error] // the outcome; nil before all parts are complete
}

// A part is a part of a file with a digest, or all of it.
//
//	at             bytes before it are in the digest
//	pieces         came early: in order, behind at
//	busy           one goroutine adds bytes at at, without the lock
//	lost           early bytes were dropped: no more are kept
type part struct {
	off, end int64

	mu     sync.Mutex
	at     int64
	hash   hash.Hash // or, of a CRC:
	crc    uint64
	pieces []piece
	busy   bool
	lost   bool
	digest []byte // once at is end
}

// A piece is bytes, or their CRC.
type piece struct {
	off, end int64
	mem      []byte
	crc      uint64
}

// pieceBytes is the memory that a piece takes besides its bytes. It counts, because a server may send one byte at a time.
const pieceBytes = 64

// memory returns the memory for a piece that came early.
func (c piece) memory() int64 { return c.end - c.off + pieceBytes }

func newSums(k *kind, want []byte, composite bool, size, partSize int64) *sums {
	s := &sums{kind: k, want: want, composite: composite, limit: maxEarly}
	for off := int64(0); off < size; off += partSize {
		p := &part{off: off, end: min(off+partSize, size), at: off}
		if k.hash != nil {
			p.hash = k.hash()
		}
		s.parts = append(s.parts, p)
	}
	return s
}

// add adds bytes of the file. The error is that of the checksum which they complete.
func (s *sums) add(off int64, mem []byte) error {
	if s == nil {
		return nil
	}
	end := off + int64(len(mem))
	i, _ := slices.BinarySearchFunc(s.parts, off, func(p *part, off int64) int {
		if p.end <= off {
			return -1
		}
		return 1
	})
	var err error
	for ; i < len(s.parts) && s.parts[i].off < end; i++ {
		p := s.parts[i]
		from, to := max(off, p.off), min(end, p.end)
		if s.kind.hash != nil {
			p.addInOrder(s, from, mem[from-off:to-off])
		} else {
			p.addCRC(s.kind, from, mem[from-off:to-off])
		}
		err = errors.Join(err, s.finish(p))
	}
	return err
}

// addCRC adds bytes to a part whose checksum is a CRC.
func (p *part) addCRC(k *kind, off int64, mem []byte) {
	c := piece{off, off + int64(len(mem)), nil, k.sum(mem)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.off < p.at && c.end > p.at { // some of them were read before
		c.off, c.crc = p.at, k.sum(mem[p.at-off:])
	}
	p.insertCRC(k, c)
	for len(p.pieces) > 0 && p.pieces[0].off <= p.at {
		if next := p.pieces[0]; next.off == p.at {
			p.crc, p.at = k.combine(p.crc, next.crc, next.end-next.off), next.end
		}
		p.pieces = p.pieces[1:]
	}
}

// insert inserts a piece that is behind at, and returns its index, or -1 for another piece.
func (p *part) insert(c piece) int {
	if c.off < p.at || c.off == c.end {
		return -1
	}
	i, _ := slices.BinarySearchFunc(p.pieces, c.off, func(q piece, off int64) int { return cmp.Compare(q.off, off) })
	p.pieces = slices.Insert(p.pieces, i, c)
	return i
}

// insertCRC inserts a piece, and joins it with the piece before it: a server may send a byte at a time.
func (p *part) insertCRC(k *kind, c piece) {
	i := p.insert(c)
	if i < 1 || p.pieces[i-1].end != c.off {
		return
	}
	before := &p.pieces[i-1]
	before.crc, before.end = k.combine(before.crc, c.crc, c.end-c.off), c.end
	p.pieces = slices.Delete(p.pieces, i, i+1)
}

// addInOrder adds bytes to a part whose checksum needs them in order: those that come early are copied.
func (p *part) addInOrder(s *sums, off int64, mem []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	end := off + int64(len(mem))
	if off > p.at || p.busy {
		p.keep(s, off, mem)
		return
	}
	if end <= p.at {
		return
	}
	p.busy = true
	p.write(mem[p.at-off:])
	for len(p.pieces) > 0 && p.pieces[0].off <= p.at {
		next := p.pieces[0]
		p.pieces = p.pieces[1:]
		if next.end > p.at {
			p.write(next.mem[p.at-next.off:])
		}
		s.early.Add(-next.memory())
	}
	p.busy = false
}

// write hashes bytes at at, without the lock.
func (p *part) write(mem []byte) {
	p.mu.Unlock()
	_, _ = p.hash.Write(mem)
	p.mu.Lock()
	p.at += int64(len(mem))
}

// keep copies bytes that came early, unless there are too many of them.
func (p *part) keep(s *sums, off int64, mem []byte) {
	if skip := p.at - off; skip > 0 {
		mem, off = mem[min(skip, int64(len(mem))):], p.at
	}
	c := piece{off: off, end: off + int64(len(mem))}
	switch {
	case p.lost || len(mem) == 0:
	case s.early.Add(c.memory()) > s.limit:
		p.lost = true
		for _, dropped := range append(p.pieces, c) {
			s.early.Add(-dropped.memory())
		}
		p.pieces = nil
	default:
		c.mem = bytes.Clone(mem)
		p.insert(c)
	}
}

// rest returns the first byte that the digest of a part lacks.
func (p *part) rest() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at
}

// finish takes the digest of a part that is complete. With the last one it compares.
func (s *sums) finish(p *part) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.at < p.end || p.busy || p.digest != nil {
		return nil
	}
	p.pieces = nil
	if p.hash != nil {
		p.digest = p.hash.Sum(nil)
	} else {
		p.digest = s.kind.bytes(p.crc)
	}
	if s.complete.Add(1) < int64(len(s.parts)) {
		return nil
	}
	got, of := p.digest, "of the file"
	if s.composite {
		var all []byte
		for _, q := range s.parts { // which are complete
			all = append(all, q.digest...)
		}
		got, of = s.kind.of(all), fmt.Sprintf("of %d parts, each of %d bytes", len(s.parts), s.parts[0].end)
	}
	var err error
	if !bytes.Equal(got, s.want) {
		err = fmt.Errorf("%w: the %s %s is %x, the server has %x", ErrChecksum, s.kind.name, of, got, s.want)
	}
	s.compared.Store(&err)
	return err
}

// outcome reports whether all parts are complete, and their error.
func (s *sums) outcome() (complete bool, err error) {
	if err := s.compared.Load(); err != nil {
		return true, *err
	}
	return len(s.parts) == 0, nil
}

// verify reads what the checksum lacks.
func (f *file) verify(ctx context.Context) error {
	switch {
	case !f.fs.o.Checksums:
		return errors.New("Options.Checksums is not set")
	case f.sums == nil:
		return fmt.Errorf("the server has no checksum of %s: %w", shown(f.url), errors.ErrUnsupported)
	}
	failed := bounded.ForEach(ctx, len(f.sums.parts), 1, f.fs.o.Connections, func(ctx context.Context, i, _ int) error {
		p := f.sums.parts[i]
		if err := f.readRest(ctx, p); err != nil {
			return err
		}
		return f.sums.finish(p) // another goroutine may have read the last bytes, and not have come that far
	})
	complete, err := f.sums.outcome()
	if err == nil && !complete {
		err = failed
	}
	return err
}

// readRest reads what a part lacks. Others may read it at the same time.
func (f *file) readRest(ctx context.Context, p *part) error {
	for at := p.rest(); at < p.end; at = p.rest() {
		r, err := f.OpenRange(ctx, at, p.end-at)
		if err != nil {
			return err
		}
		_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, r, make([]byte, 1<<20))
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
	}
	return nil
}
