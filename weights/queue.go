package weights

import (
	"cmp"
	"os"
	"slices"
	"sort"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/transfer"
)

// A queue is the one upload that copies the bytes for one set of devices. The upload has the layout of device
// memory: the offset of each segment equals its address modulo transferAlign. So both ends of a copy have
// the same alignment, and segments that are separated only by alignment are one copy. Zero bytes are between
// segments. The effect of alignment alone is not measured.
type queue struct {
	set     []int // indices of the devices, ascending
	devices []*cudart.Device

	segments []segment
	n        int // bytes of the upload
	pieces   []transfer.Piece
	dropped  int // bytes of the upload that were removed from the page cache; only Progress uses it

	failed *failure // of the copies
	err    error    // of the release
}

// transferAlign is the alignment of cudaMalloc.
const transferAlign = 256

// A segment is a range of a file in the upload of a queue. It has one tensor, or several neighbours.
type segment struct {
	transfer.Range
	file   *File
	at     int // in the upload
	before int // bytes of the queue's segments before it
	number int // by the order of the files, among the segments of all queues
}

// addSegment adds a segment for devices, each with the address that it gets the bytes at. The segments of one
// queue are in the order of the files, and of their offsets.
func (l *loading) addSegment(p Part, devices, to []int) {
	at := slices.IndexFunc(l.queues, func(q *queue) bool { return slices.Equal(q.set, devices) })
	if at < 0 {
		q := &queue{set: slices.Clone(devices)}
		if len(devices) == 1 {
			q.segments = make([]segment, 0, len(l.placed)/len(l.devices)+1) // there are many sets, but few of one device
		}
		for _, d := range devices {
			q.devices = append(q.devices, l.devices[d])
		}
		at, l.queues = len(l.queues), append(l.queues, q)
	}
	q := l.queues[at]
	zeros := (to[0] - q.n) & (transferAlign - 1)
	s := segment{
		Range: transfer.Range{Reader: p.Tensor.File.r, Off: p.Tensor.Offset + int64(p.From), N: p.Size, Row: p.Row, Stride: p.Stride},
		file:  p.Tensor.File, at: q.n + zeros, number: l.made,
	}
	l.made++
	q.n = s.at + s.N
	if last := len(q.segments) - 1; last < 0 || zeros > 0 || !q.segments[last].extend(&s) {
		if last >= 0 {
			s.before = q.segments[last].before + q.segments[last].N
		}
		q.segments = append(q.segments, s)
	}
	if n := len(q.pieces); n > 0 {
		last, apart := &q.pieces[n-1], false
		for i, dst := range last.Dsts {
			end := int(dst) + last.N
			apart = apart || end+zeros != to[i] || !l.unused(q.set[i], end, to[i])
		}
		if !apart { // nothing but zero bytes, which the load may write, is between them
			last.N += zeros + s.N
			return
		}
	}
	piece := transfer.Piece{Off: s.at, N: s.N}
	for _, to := range to {
		piece.Dsts = append(piece.Dsts, cudart.DevPtr(to))
	}
	q.pieces = append(q.pieces, piece)
}

// extend appends the bytes of the next segment, unless others are between them in the file.
func (s *segment) extend(next *segment) bool {
	if s.file != next.file || s.Row > 0 || next.Row > 0 || s.Off+int64(s.N) != next.Off {
		return false
	}
	s.N += next.N
	return true
}

// part returns the segment as if its first byte were that of a tensor.
func (s *segment) part() Part { return Part{Size: s.N, Row: s.Row, Stride: s.Stride} }

// source returns the bytes of the upload.
func (q *queue) source() (*transfer.Ranges, error) {
	ranges, end := make([]transfer.Range, 0, 2*len(q.segments)), 0
	for i := range q.segments {
		s := &q.segments[i]
		if s.at > end {
			ranges = append(ranges, transfer.Range{N: s.at - end})
		}
		ranges, end = append(ranges, s.Range), s.at+s.N
	}
	return transfer.NewRanges(ranges)
}

// find returns the index of the segment that contains byte done of the upload, or else of the next one, and the
// number of its bytes before that byte. At the end of the upload, it returns the last segment.
func (q *queue) find(done int) (i, within int) {
	i = sort.Search(len(q.segments)-1, func(i int) bool { return q.segments[i].at+q.segments[i].N > done })
	return i, min(max(done-q.segments[i].at, 0), q.segments[i].N)
}

// read returns the number of bytes of files that are before a byte of the upload.
func (q *queue) read(done int) int {
	i, within := q.find(done)
	return q.segments[i].before + within
}

// drop removes whole pages of the first bytes of the upload from the page cache, but of columns: others
// may need the rest of their pages.
func (q *queue) drop(done int) {
	for q.dropped < done {
		i, within := q.find(q.dropped)
		s := &q.segments[i]
		end := min(s.at+s.N, done)
		if f, ok := s.Reader.(*os.File); ok && end > s.at && s.Row == 0 {
			dropCache(f, s.Off+int64(within), end-s.at-within, false)
		}
		q.dropped = max(end, q.dropped+1)
	}
}

// dropShared removes the pages of complete segments from the page cache, also those that they share with others.
func (q *queue) dropShared() {
	complete := q.segments
	if q.failed != nil {
		complete = complete[:q.failed.first]
	}
	for i := range complete {
		if f, ok := complete[i].Reader.(*os.File); ok {
			dropCache(f, complete[i].Off, complete[i].part().end(), true)
		}
	}
}

// enqueue makes the queues for targets, which it sorts by their files, and uses up.
func (l *loading) enqueue(order fileOrder, targets []target) {
	slices.SortFunc(targets, func(t, u target) int {
		if c := order.compare(t.Part, u.Part); c != 0 {
			return c
		}
		return t.compareAddress(u)
	})
	l.tensors = make([]*Tensor, 0, len(targets))
	for _, t := range targets {
		if n := len(l.tensors); n == 0 || l.tensors[n-1] != t.Tensor {
			l.tensors = append(l.tensors, t.Tensor)
		}
	}
	targets = slices.DeleteFunc(targets, func(t target) bool { return t.Size == 0 })
	for from, to := 0, 0; from < len(targets); from = to {
		for to = from + 1; to < len(targets) && targets[to].Tensor == targets[from].Tensor; {
			to++
		}
		if n, f := len(l.files), targets[from].Tensor.File; n == 0 || l.files[n-1] != f {
			l.files = append(l.files, f)
		}
		l.enqueueTensor(targets[from:to])
	}
}

// enqueueTensor adds the parts of one tensor. Columns are segments of their own. The others are cut into
// segments: the bytes between two neighbouring starts or ends of parts go to the same places.
func (l *loading) enqueueTensor(targets []target) {
	if t := targets[0]; len(targets) == 1 {
		l.addSegment(t.Part, []int{t.device}, []int{t.to}) // on the stack: a model may have tens of thousands of tensors
		return
	}
	var rows []target
	var cuts []int
	for from, to := 0, 0; from < len(targets); from = to {
		t := targets[from]
		for to = from; to < len(targets) && targets[to].Part == t.Part; {
			to++
		}
		if t.Row > 0 {
			l.addSegments(t.Part, targets[from:to])
		} else {
			rows = append(rows, targets[from:to]...)
			cuts = append(cuts, t.From, t.From+t.Size)
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var here []target // with the segment
	for i := 1; i < len(cuts); i++ {
		from := cuts[i-1]
		here = slices.DeleteFunc(here, func(t target) bool { return t.From+t.Size <= from })
		for ; len(rows) > 0 && rows[0].From == from; rows = rows[1:] {
			here = append(here, rows[0])
		}
		slices.SortStableFunc(here, func(t, u target) int { return cmp.Compare(t.device, u.device) })
		if len(here) > 0 {
			l.addSegments(Part{Tensor: here[0].Tensor, From: from, Size: cuts[i] - from}, slices.Clone(here))
		}
	}
}

// addSegments adds a segment for the devices of targets, once for each time that a device gets it. The
// targets are in the order of their devices, and addSegments uses up their slice.
func (l *loading) addSegments(p Part, targets []target) {
	for len(targets) > 0 {
		var devices, to []int
		targets = slices.DeleteFunc(targets, func(t target) bool {
			if n := len(devices); n > 0 && devices[n-1] == t.device {
				return false
			}
			devices, to = append(devices, t.device), append(to, t.to+p.From-t.From)
			return true
		})
		l.addSegment(p, devices, to)
	}
}
