package weights

import (
	"os"
	"slices"
	"sort"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// A queue contains the reads for one set of devices, and the one upload that copies them. The upload has the
// layout of device memory: the offset of each piece equals its address modulo transferAlign. So both ends of
// a copy have the same alignment, and pieces that are separated only by alignment are one copy. Zero bytes
// are between pieces. The effect of alignment alone is not measured.
type queue struct {
	set     []int // indices of the devices
	devices []*cudart.Device
	reads   []int // indices in loading.reads, ascending

	segments []segment
	n        int // bytes of the upload
	ranges   []transfer.Range
	pieces   []transfer.Piece
	dropped  int // bytes of the upload that were removed from the page cache; only Progress uses it

	err error // of the release
}

// transferAlign is the alignment of cudaMalloc.
const transferAlign = 256

// A segment is a piece of a read in the upload of a queue.
type segment struct {
	off    int            // in the upload
	source transfer.Range // in the file
	read   int            // index in loading.reads
	from   int            // in the read
	before int            // bytes of the queue's reads before it
}

// queues returns the reads by their sets of devices.
func (l *loading) queues() (list []*queue) {
	of, pieces := make([]int, len(l.reads)), []int(nil) // by read; by queue
	for i := range l.reads {
		r := &l.reads[i]
		at := slices.IndexFunc(list, func(q *queue) bool { return slices.Equal(q.set, r.Devices) })
		if at < 0 {
			q := &queue{set: r.Devices}
			for _, d := range r.Devices {
				q.devices = append(q.devices, l.devices[d])
			}
			at, list, pieces = len(list), append(list, q), append(pieces, 0)
		}
		of[i] = at
		pieces[at] += len(r.Pieces)
	}
	for i, q := range list {
		q.segments, q.ranges = make([]segment, 0, pieces[i]), make([]transfer.Range, 0, 2*pieces[i])
	}
	totals := make([]int, len(list))
	for i, at := range of {
		r, q := &l.reads[i], list[at]
		q.reads = append(q.reads, i)
		for _, p := range r.Pieces {
			source := transfer.Range{Reader: r.File.r, Off: r.Offset + int64(p.From), N: p.Size, Row: r.Row, Stride: r.Stride}
			q.segments = append(q.segments, segment{source: source, read: i, from: p.From, before: totals[at] + p.From})
			q.add(p.To, l)
		}
		totals[at] += r.Size
	}
	return list
}

// add adds the last segment, whose places are to, to the upload. Pieces are one copy if nothing but zero
// bytes, which the load may write, is between them.
func (q *queue) add(to []int, l *loading) {
	s := &q.segments[len(q.segments)-1]
	zeros := (to[0] - q.n) & (transferAlign - 1)
	if zeros > 0 {
		q.ranges = append(q.ranges, transfer.Range{N: zeros})
	}
	s.off = q.n + zeros
	q.n = s.off + s.source.N
	q.ranges = append(q.ranges, s.source)
	if n := len(q.pieces); n > 0 {
		last, apart := &q.pieces[n-1], false
		for i, dst := range last.Dsts {
			end := int(dst) + last.N
			apart = apart || end+zeros != to[i] || !l.unused(q.set[i], end, to[i])
		}
		if !apart {
			last.N += zeros + s.source.N
			return
		}
	}
	piece := transfer.Piece{Off: s.off, N: s.source.N}
	for _, to := range to {
		piece.Dsts = append(piece.Dsts, cudart.DevPtr(to))
	}
	q.pieces = append(q.pieces, piece)
}

// at returns the segment that contains byte done of the upload, or else the next one, and the
// number of its bytes before that byte. At the end of the upload, it returns the last segment.
func (q *queue) at(done int) (s *segment, within int) {
	i := sort.Search(len(q.segments), func(i int) bool { return q.segments[i].off+q.segments[i].source.N > done })
	s = &q.segments[min(i, len(q.segments)-1)]
	return s, min(max(done-s.off, 0), s.source.N)
}

// read returns the number of bytes of the queue's reads that are before a byte of the upload.
func (q *queue) read(done int) int {
	s, within := q.at(done)
	return s.before + within
}

// drop removes whole pages of the first bytes of the upload from the page cache, but of columns: others
// may need the rest of their pages.
func (q *queue) drop(done int) {
	for q.dropped < done {
		s, within := q.at(q.dropped)
		end := min(s.off+s.source.N, done)
		if f, ok := s.source.Reader.(*os.File); ok && end > s.off && s.source.Row == 0 {
			dropCache(f, s.source.Off+int64(within), end-s.off-within, false)
		}
		q.dropped = max(end, q.dropped+1)
	}
}

// drop removes the pages of a read from the page cache, also those that it shares with others.
func (r *Read) drop() {
	if f, ok := r.File.r.(*os.File); ok {
		dropCache(f, r.Offset, r.part().end(), true)
	}
}
