package weights

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
)

// A target is a part and its place on a device: an offset in bytes, or an address.
type target struct {
	Part
	device, to int
}

// withBytes returns the targets that have bytes, in memory of their own.
func withBytes(targets []target) []target {
	return slices.DeleteFunc(slices.Clone(targets), func(t target) bool { return t.Size == 0 })
}

// planReads sorts targets, and returns the reads for them. The reads are in the order of files, and
// after these in the order in which the targets use other files.
func planReads(files []*File, targets []target) []Read {
	order := fileOrder{}
	for _, f := range files {
		order.add(f)
	}
	for _, t := range targets {
		order.add(t.Tensor.File)
	}
	slices.SortFunc(targets, func(t, u target) int {
		return cmp.Or(order.compare(t.Part, u.Part), cmp.Compare(t.device, u.device), cmp.Compare(t.to, u.to))
	})
	if slices.ContainsFunc(targets, func(t target) bool { return t.Size == 0 }) {
		targets = withBytes(targets)
	}
	p := readPlanner{last: map[string]int{}}
	for from := 0; from < len(targets); {
		to := from + 1
		for to < len(targets) && targets[to].Tensor == targets[from].Tensor {
			to++
		}
		p.tensor(targets[from:to])
		from = to
	}
	return p.reads
}

// A readPlanner merges segments, which are added in the order of the files, into reads.
type readPlanner struct {
	reads []Read
	last  map[string]int // read for each set of devices
	key   []byte         // of last
	ints  []int          // unused memory for numbers that reads keep
}

// keep returns a copy of a few numbers. A model has tens of thousands of tensors: an allocation for each
// takes longer than all the rest.
func (p *readPlanner) keep(list []int) []int {
	if len(p.ints) < len(list) {
		p.ints = make([]int, max(len(list), 1024))
	}
	kept := p.ints[:len(list):len(list)]
	p.ints = p.ints[len(list):]
	copy(kept, list)
	return kept
}

// tensor adds the parts of one tensor. Columns are reads of their own. The others are cut into
// segments: the bytes between two neighbouring starts or ends of parts go to the same places.
func (p *readPlanner) tensor(targets []target) {
	columns := slices.ContainsFunc(targets, func(t target) bool { return t.Row > 0 })
	if t := targets[0]; len(targets) == 1 && !columns {
		p.add(t.Part, []int{t.device}, []int{t.to}) // on the stack
		return
	}
	if columns {
		var same []target // one behind the other, as targets are in order
		targets = slices.DeleteFunc(slices.Clone(targets), func(t target) bool {
			if t.Row == 0 {
				return false
			}
			if len(same) > 0 && same[0].Part != t.Part {
				p.places(same[0].Part, same)
				same = same[:0]
			}
			same = append(same, t)
			return true
		})
		p.places(same[0].Part, same)
	}
	var cuts []int
	for _, t := range targets {
		cuts = append(cuts, t.From, t.From+t.Size)
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var here []target // with the segment
	for i := 1; i < len(cuts); i++ {
		from := cuts[i-1]
		here = slices.DeleteFunc(here, func(t target) bool { return t.From+t.Size <= from })
		for ; len(targets) > 0 && targets[0].From == from; targets = targets[1:] {
			here = append(here, targets[0])
		}
		slices.SortStableFunc(here, func(t, u target) int { return cmp.Compare(t.device, u.device) })
		if len(here) > 0 {
			p.places(Part{Tensor: here[0].Tensor, From: from, Size: cuts[i] - from}, slices.Clone(here))
		}
	}
}

// places adds a segment for the devices of targets, once for each time that a device gets it. The
// targets are in the order of their devices, and places uses up their slice.
func (p *readPlanner) places(s Part, targets []target) {
	for len(targets) > 0 {
		var devices, to []int
		targets = slices.DeleteFunc(targets, func(t target) bool {
			if n := len(devices); n > 0 && devices[n-1] == t.device {
				return false
			}
			devices, to = append(devices, t.device), append(to, t.to+s.From-t.From)
			return true
		})
		p.add(s, devices, to)
	}
}

// add adds a segment. For one device or for several, each segment is at a higher offset than the
// segments before it.
func (p *readPlanner) add(s Part, devices, places []int) {
	to := p.keep(places)
	p.key = p.key[:0]
	for _, d := range devices {
		p.key = binary.AppendUvarint(p.key, uint64(d))
	}
	f, offset := s.Tensor.File, s.Tensor.Offset+int64(s.From)
	if s.Row > 0 {
		delete(p.last, string(p.key))
	} else {
		if last, ok := p.last[string(p.key)]; ok && p.reads[last].File == f && p.reads[last].extend(offset, s.Size, to) {
			return
		}
		p.last[string(p.key)] = len(p.reads)
	}
	p.reads = append(p.reads, Read{
		File: f, Offset: offset, Size: s.Size, Row: s.Row, Stride: s.Stride,
		Devices: p.keep(devices), Pieces: []Piece{{Size: s.Size, To: to}},
	})
}

// extend appends size bytes at an offset of the file to r, and reports whether only padding, which is
// read too, is between them.
func (r *Read) extend(offset int64, size int, to []int) bool {
	from := offset - r.Offset
	if from < int64(r.Size) || from-int64(r.Size) >= r.File.padding || from > int64(math.MaxInt-size) {
		return false
	}
	r.Size = int(from) + size
	last := &r.Pieces[len(r.Pieces)-1]
	if int(from) == last.From+last.Size && last.endsAt(to) {
		last.Size += size
	} else {
		r.Pieces = append(r.Pieces, Piece{From: int(from), Size: size, To: to})
	}
	return true
}

// position returns the offset in the file of byte i of the read.
func (r *Read) position(i int) int64 { return r.Offset + int64(r.part().at(i)) }

// part returns the read as if its first byte were that of a tensor.
func (r *Read) part() Part { return Part{Size: r.Size, Row: r.Row, Stride: r.Stride} }

// endsAt reports whether a piece ends at the place to[i] of each device i.
func (p *Piece) endsAt(to []int) bool {
	return slices.EqualFunc(p.To, to, func(at, to int) bool { return at+p.Size == to })
}
