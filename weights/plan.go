package weights

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
)

// Skip is what a placement returns for a tensor that is not to be copied.
const Skip = -1

// PlanOptions shape a plan. The zero value suits cudaMalloc and large files.
type PlanOptions struct {
	// Align is what every tensor's place on its device is a multiple of: a
	// power of two in bytes. 0 means 256, the alignment of cudaMalloc's memory,
	// which all of CUDA's libraries accept.
	Align int
	// MaxGap is how many bytes between two tensors of a device are read along
	// and dropped, so that one read gets both. 0 means none but the padding of
	// a GGUF file, which belongs to no tensor.
	MaxGap int
}

// A Plan says where tensors go and how to read them: for each device what to
// allocate, where in it each tensor starts, and the reads that fetch all of
// them. It holds no addresses and touches neither files nor devices.
type Plan struct {
	// Devices has the plan of each device that gets a tensor, by ascending
	// index.
	Devices []DevicePlan
}

// A DevicePlan is what a Plan has for one device.
type DevicePlan struct {
	// Device is the index that the placement returned.
	Device int
	// Bytes is the size of the memory that the tensors are placed in.
	Bytes int
	// Tensors are in the order of their places, which is that of their files
	// and their offsets in them.
	Tensors []Placed
	// Reads are in the order of the files and of their offsets. They do not
	// overlap.
	Reads []Read
}

// A Placed is a tensor with its place: it starts Offset bytes into the device's
// memory, and has Tensor.Size bytes there.
type Placed struct {
	Tensor *Tensor
	Offset int
}

// A Read is a range of a file, and what to copy of it: Size bytes from Offset
// on, of which Pieces, by ascending From, go to the device.
type Read struct {
	File   *File
	Offset int64
	Size   int
	Pieces []Piece
}

// A Piece is a copy: Size bytes that are From bytes into a read, to the place
// To bytes into the device's memory. It is one or several whole tensors.
type Piece struct {
	From, To, Size int
}

// NewPlan plans the copy of tensors to devices: File.Tensors, Model.Tensors or
// slices.Values of chosen ones. Each goes to the device whose index place
// returns, or to none where that is Skip; where place is nil, all go to device
// 0. The same arguments make the same plan.
//
// Tensors get their places in the order in which their files hold them, those
// of a file used first before those of the next, so that neighbours in a file
// stay neighbours where the alignment allows it, and are one Piece.
//
// It returns an error for a tensor that appears twice or that no open File has,
// for an index below Skip, for options out of range, and for a device that
// would get more bytes than an int can count.
func NewPlan(tensors iter.Seq[*Tensor], place func(*Tensor) int, o PlanOptions) (*Plan, error) {
	align := cmp.Or(o.Align, 256)
	switch {
	case tensors == nil:
		return nil, errors.New("weights: plan: no tensors: the sequence is nil")
	case align < 1 || align&(align-1) != 0:
		return nil, fmt.Errorf("weights: plan: PlanOptions.Align is %d, want a power of two", o.Align)
	case o.MaxGap < 0:
		return nil, fmt.Errorf("weights: plan: PlanOptions.MaxGap is %d, want 0 or more", o.MaxGap)
	}
	files := map[*File]int{} // in the order of their first use
	chosen := map[*Tensor]bool{}
	byDevice := map[int][]*Tensor{}
	for t := range tensors {
		switch {
		case t == nil:
			return nil, errors.New("weights: plan: nil tensor")
		case t.File == nil || t.File.byName[t.Name] != t:
			return nil, fmt.Errorf("weights: plan: tensor %s: not from a File's or Model's tensors", quote(t.Name))
		case chosen[t]:
			return nil, fmt.Errorf("weights: plan: tensor %s of %s is there twice", quote(t.Name), t.File.name)
		}
		chosen[t] = true
		device := 0
		if place != nil {
			device = place(t)
		}
		if device == Skip {
			continue
		}
		if device < 0 {
			return nil, fmt.Errorf("weights: plan: tensor %s is placed on device %d, want 0 or more, or Skip", quote(t.Name), device)
		}
		if _, used := files[t.File]; !used {
			files[t.File] = len(files)
		}
		byDevice[device] = append(byDevice[device], t)
	}

	p := &Plan{}
	for _, device := range slices.Sorted(maps.Keys(byDevice)) {
		group := byDevice[device]
		slices.SortFunc(group, func(t, u *Tensor) int {
			return cmp.Or(cmp.Compare(files[t.File], files[u.File]), t.compare(u))
		})
		d := DevicePlan{Device: device}
		for _, t := range group {
			padding := -d.Bytes & (align - 1)
			if t.Size > math.MaxInt-d.Bytes-padding {
				return nil, fmt.Errorf("weights: plan: device %d gets more than %d bytes", device, math.MaxInt)
			}
			place := d.Bytes + padding
			d.Tensors = append(d.Tensors, Placed{t, place})
			d.Bytes = place + t.Size
			d.read(t, place, o.MaxGap)
		}
		p.Devices = append(p.Devices, d)
	}
	return p, nil
}

// read adds the bytes of t, which is behind all tensors added before, to the
// reads.
func (d *DevicePlan) read(t *Tensor, to, maxGap int) {
	if t.Size == 0 {
		return
	}
	if len(d.Reads) > 0 {
		last := &d.Reads[len(d.Reads)-1]
		if last.File == t.File && last.extend(t, to, max(int64(maxGap), t.File.padding-1)) {
			return
		}
	}
	d.Reads = append(d.Reads, Read{File: t.File, Offset: t.Offset, Size: t.Size, Pieces: []Piece{{To: to, Size: t.Size}}})
}

// extend makes r reach to the end of t, and reports whether t is near enough.
func (r *Read) extend(t *Tensor, to int, maxGap int64) bool {
	from := t.Offset - r.Offset
	if from-int64(r.Size) > maxGap || from > int64(math.MaxInt-t.Size) {
		return false
	}
	r.Size = int(from) + t.Size
	piece := Piece{From: int(from), To: to, Size: t.Size}
	last := &r.Pieces[len(r.Pieces)-1]
	if piece.From == last.From+last.Size && piece.To == last.To+last.Size {
		last.Size += piece.Size
	} else {
		r.Pieces = append(r.Pieces, piece)
	}
	return true
}
