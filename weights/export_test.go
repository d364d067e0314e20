package weights

import "github.com/gopinned/pinned/transfer"

// An Upload has what a load copies to the same devices.
type Upload struct {
	Devices  []int // of the plan
	Bytes    int
	Segments []Segment
	Pieces   []transfer.Piece
}

// A Segment is a range of a file in an Upload.
type Segment struct {
	File *File
	transfer.Range
	At int
}

// Uploads returns the uploads of a load of the plan.
func (p *Plan) Uploads(memory map[int]Memory) (list []Upload, err error) {
	placements, err := p.placements(memory)
	if err != nil {
		return nil, err
	}
	l := loading{owned: true}
	if err := l.plan(p.files, placements); err != nil {
		return nil, err
	}
	for _, q := range l.queues {
		u := Upload{Bytes: q.n, Pieces: q.pieces}
		for _, dev := range q.devices {
			for index, m := range memory {
				if m.Device == dev {
					u.Devices = append(u.Devices, index)
				}
			}
		}
		for _, s := range q.segments {
			u.Segments = append(u.Segments, Segment{s.file, s.Range, s.at})
		}
		list = append(list, u)
	}
	return list, nil
}
