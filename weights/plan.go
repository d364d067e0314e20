package weights

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// A Part is a tensor, or some of its bytes: Size bytes that start From bytes into it.
// [Tensor.Whole], [Tensor.Rows] and [Tensor.Slice] make Parts.
type Part struct {
	Tensor     *Tensor
	From, Size int // in bytes
	// Row and Stride are set for columns: Row bytes of every Stride bytes of the tensor are in
	// the part, from From on, and Size bytes in all. They are one behind the other in device
	// memory. Both are 0 if nothing is left out.
	Row, Stride int
}

// Whole returns all of a tensor.
func (t *Tensor) Whole() Part {
	if t == nil {
		return Part{}
	}
	return Part{Tensor: t, Size: t.Size}
}

// Rows returns the part of a tensor whose first index is in [from, to), which may be empty. It
// returns an error for a tensor without dimensions, for a range outside of the first dimension,
// and for rows that are not a whole number of bytes, or of a quantized type's blocks.
func (t *Tensor) Rows(from, to int) (Part, error) { return t.Slice(0, from, to) }

// Slice returns the part of a tensor whose index of dimension dim is in [from, to), which may be
// empty: rows for 0, columns of a matrix for 1. It returns an error for a dimension that the tensor
// does not have, for a range outside of it, and for a part that is not a whole number of bytes, or of a
// quantized type's blocks.
func (t *Tensor) Slice(dim, from, to int) (Part, error) {
	switch {
	case t == nil:
		return Part{}, errors.New("weights: slice of a nil tensor")
	case dim < 0 || dim >= len(t.Shape):
		return Part{}, fmt.Errorf("weights: slice of tensor %s: dimension %d of %d", quote(t.Name), dim, len(t.Shape))
	case from < 0 || from > to || to > t.Shape[dim]:
		return Part{}, fmt.Errorf("weights: slice of tensor %s: %d to %d of dimension %d, which is %d", quote(t.Name), from, to, dim, t.Shape[dim])
	}
	sizeOf := func(shape []int, n int) (int, error) {
		return t.DType.size(append([]int{n}, shape...))
	}
	inner := t.Shape[dim+1:]
	before, err := sizeOf(inner, from)
	row, err2 := sizeOf(inner, to-from)
	stride, err3 := sizeOf(inner, t.Shape[dim])
	_, err4 := t.DType.size(t.Shape)
	if err = cmp.Or(err, err2, err3, err4); err != nil {
		return Part{}, fmt.Errorf("weights: slice of tensor %s: %w", quote(t.Name), err)
	}
	p := Part{Tensor: t, From: before, Size: row}
	for _, n := range t.Shape[:dim] {
		p.Size *= n
	}
	if p.Size == 0 {
		p.From = min(p.From, t.Size)
	} else if row < stride && p.Size > row {
		p.Row, p.Stride = row, stride
	}
	return p, nil
}

// end returns the byte of the tensor behind the part.
func (p Part) end() int {
	if p.Row == 0 || p.Size == 0 {
		return p.From + p.Size
	}
	rows := (p.Size - 1) / p.Row
	return p.From + rows*p.Stride + p.Size - rows*p.Row
}

// at returns the byte of the tensor at which byte i of the part is.
func (p Part) at(i int) int {
	if p.Row == 0 {
		return p.From + i
	}
	return p.From + i/p.Row*p.Stride + i%p.Row
}

// check returns an error unless the part is within a tensor of a File.
func (p Part) check() error {
	t := p.Tensor
	switch {
	case t == nil:
		return errors.New("nil tensor")
	case t.File == nil || t.File.byName[t.Name] != t:
		return fmt.Errorf("tensor %s: not from a File's or Model's tensors", quote(t.Name))
	case p.From < 0 || p.Size < 0 || p.From > t.Size || p.Size > t.Size-p.From:
		return fmt.Errorf("tensor %s of %s: %d bytes from byte %d on, it has %d", quote(t.Name), t.File.name, p.Size, p.From, t.Size)
	case p.Row == 0 && p.Stride != 0:
		return fmt.Errorf("tensor %s of %s: a Stride of %d without a Row: want both, or neither", quote(t.Name), t.File.name, p.Stride)
	case !p.rowsFit():
		return fmt.Errorf("tensor %s of %s: %d bytes from byte %d on in rows of %d every %d bytes, it has %d", quote(t.Name), t.File.name, p.Size, p.From, p.Row, p.Stride, t.Size)
	}
	return nil
}

// rowsFit reports whether the rows do not overlap, and end within the tensor.
func (p Part) rowsFit() bool {
	if p.Row <= 0 {
		return p.Row == 0
	}
	room := p.Tensor.Size - p.From
	return p.Stride >= p.Row && (p.Size == 0 || (p.Size-1)/p.Row <= room/p.Stride) && p.end() <= p.Tensor.Size
}

// row returns the number of bytes from byte i of the part on, where a row begins, that are neighbours.
func (p Part) row(i int) int {
	if p.Row == 0 {
		return p.Size - i
	}
	return min(p.Row, p.Size-i)
}

// overlaps reports whether a part has a byte in common with another one of the tensor, q, which begins
// with p or behind it.
func (p Part) overlaps(q Part) bool {
	i, end := 0, q.Size
	if p.Row > 0 {
		i = (q.From - p.From) / p.Stride * p.Row // the last row that begins with q or before it
		if p.Stride == q.Stride {
			end = q.row(0) // the other rows are to those of p as the first one
		}
	}
	for j := 0; i < p.Size && j < end; {
		n, m := p.row(i), q.row(j)
		switch {
		case p.at(i)+n <= q.at(j):
			i += n
		case q.at(j)+m <= p.at(i):
			j += m
		default:
			return true
		}
	}
	return false
}

// compare orders parts of one file by offset.
func (p Part) compare(q Part) int {
	if p.Tensor != q.Tensor {
		return p.Tensor.compare(q.Tensor)
	}
	return cmp.Or(cmp.Compare(p.From, q.From), cmp.Compare(p.Size, q.Size), cmp.Compare(p.Row, q.Row), cmp.Compare(p.Stride, q.Stride))
}

// A Share assigns a part to a device, by the device's index.
type Share struct {
	Part
	Device int // index of the device in the plan, 0 or more
}

// Skip is returned by NewPlan's place function for a tensor that is not copied.
const Skip = -1

// PlanOptions shape a plan. The zero value suits cudaMalloc and large files.
type PlanOptions struct {
	// Align is the alignment of tensors in device memory, in bytes: a power of
	// two. 0 means 256, the alignment of cudaMalloc, which all of CUDA's libraries
	// accept.
	Align int
}

// A Plan places tensors: for each device, how many bytes to allocate, and where in them each
// tensor starts. It holds no addresses and uses neither files nor devices; [Plan.Load] does.
type Plan struct {
	// Devices has the plan of each device that gets a tensor, by ascending
	// index.
	Devices []DevicePlan

	files []*File // in the order in which they are read
}

// A DevicePlan is the part of a Plan for one device.
type DevicePlan struct {
	// Device is the index of the device.
	Device int
	// Bytes is the size of the memory for the tensors.
	Bytes int
	// Tensors are in the order of Placed.Offset, which is the order of their files and
	// of their offsets in these.
	Tensors []Placed
}

// A Placed is a part of a tensor with its place in the memory of a device: Size bytes from byte
// Offset on.
type Placed struct {
	Part
	Offset int // in bytes
	// Memory is the memory of a Loaded. It is nil in a Plan.
	Memory *cudart.DeviceMemory
}

// Ptr returns the address of a part of a Loaded. The error wraps [cudart.ErrClosed] after the memory was closed,
// and [cudart.ErrInvalidValue] for a part without memory. It does not block.
func (p Placed) Ptr() (cudart.DevPtr, error) {
	at, err := p.Memory.Range(p.Offset, p.Size)
	if err != nil {
		return 0, fmt.Errorf("weights: address: %w", err)
	}
	return at, nil
}

// NewPlan plans the copy of tensors to devices. tensors is File.Tensors, Model.Tensors or a
// slices.Values of some of them. device returns the index of a tensor's device, or Skip for none; if
// device is nil, all tensors go to device 0. The same arguments make the same plan. PlanShares
// is for tensors that several devices get. NewPlan does not block.
//
// Tensors are placed in the order of their files, and in each file in the order of their offsets. So
// neighbours in a file stay neighbours if the alignment allows it, and are one copy.
//
// It returns an error for a tensor that appears twice, for one that belongs to no File, for an index
// below Skip, for an alignment that is no power of two, and for a device with more than
// [math.MaxInt] bytes.
func NewPlan(tensors iter.Seq[*Tensor], device func(*Tensor) int, o PlanOptions) (*Plan, error) {
	if tensors == nil {
		return nil, errors.New("weights: plan: no tensors: the sequence is nil")
	}
	chosen := map[*Tensor]bool{}
	var shares []Share
	for t := range tensors {
		s := Share{Part: t.Whole()}
		if err := s.check(); err != nil {
			return nil, fmt.Errorf("weights: plan: %w", err)
		}
		if chosen[t] {
			return nil, fmt.Errorf("weights: plan: duplicate tensor %s of %s", quote(t.Name), t.File.name)
		}
		chosen[t] = true
		if device != nil {
			s.Device = device(t)
		}
		if s.Device != Skip {
			shares = append(shares, s)
		}
	}
	return PlanShares(shares, o)
}

// PlanShares plans like NewPlan. A tensor may be in several shares: for each device
// that gets a copy of it, and with [Tensor.Rows] and [Tensor.Slice] for each device that
// gets a part. Bytes for several devices are read once, and copied to all of them; of columns, if
// all of these devices get the same ones.
//
// It returns an error for a Part beyond its tensor, for Parts of a tensor that
// overlap on one device, and the errors of NewPlan. It does not block.
func PlanShares(shares []Share, o PlanOptions) (p *Plan, err error) {
	if p, err = planShares(shares, cmp.Or(o.Align, 256)); err != nil {
		return nil, fmt.Errorf("weights: plan: %w", err)
	}
	return p, nil
}

func planShares(shares []Share, align int) (*Plan, error) {
	if align < 1 || align&(align-1) != 0 {
		return nil, fmt.Errorf("PlanOptions.Align is %d, want a power of two", align)
	}
	files := fileOrder{}
	p := &Plan{}
	for _, s := range shares {
		if err := s.check(); err != nil {
			return nil, err
		}
		if s.Device < 0 {
			return nil, fmt.Errorf("tensor %s is placed on device %d, want 0 or more, or Skip", quote(s.Tensor.Name), s.Device)
		}
		if files.add(s.Tensor.File) {
			p.files = append(p.files, s.Tensor.File)
		}
	}
	shares = slices.Clone(shares)
	slices.SortFunc(shares, func(s, t Share) int { return cmp.Or(files.compare(s.Part, t.Part), cmp.Compare(s.Device, t.Device)) })

	devices, placed := map[int]*DevicePlan{}, map[int]*placedParts{}
	for _, s := range shares {
		d := devices[s.Device]
		if d == nil {
			d = &DevicePlan{Device: s.Device}
			devices[s.Device], placed[s.Device] = d, &placedParts{}
		}
		if !placed[s.Device].add(s.Part) {
			return nil, fmt.Errorf("parts of tensor %s of %s overlap on device %d, from byte %d on", quote(s.Tensor.Name), s.Tensor.File.name, s.Device, s.From)
		}
		padding := -d.Bytes & (align - 1)
		if s.Size > math.MaxInt-d.Bytes-padding {
			return nil, fmt.Errorf("device %d gets more than %d bytes", s.Device, math.MaxInt)
		}
		at := d.Bytes + padding
		d.Tensors = append(d.Tensors, Placed{Part: s.Part, Offset: at})
		d.Bytes = at + s.Size
	}
	for _, device := range slices.Sorted(maps.Keys(devices)) {
		p.Devices = append(p.Devices, *devices[device])
	}
	return p, nil
}

// placedParts are the parts of one tensor on a device, in the order of their first bytes.
type placedParts struct {
	parts    []Part
	anywhere bool // some part does not follow the one before
}

// add adds the next part, and reports whether it does not overlap an earlier part. Consecutive parts are
// not compared with all others: a tensor may have 100,000 rows or columns.
func (d *placedParts) add(p Part) bool {
	n := len(d.parts)
	if n > 0 && d.parts[0].Tensor != p.Tensor {
		*d, n = placedParts{}, 0
	}
	if p.Size == 0 {
		return true
	}
	d.anywhere = d.anywhere || n > 0 && !p.follows(d.parts[0], d.parts[n-1])
	apart := !d.anywhere || !slices.ContainsFunc(d.parts, func(q Part) bool { return q.overlaps(p) })
	d.parts = append(d.parts, p)
	return apart
}

// follows reports whether a part begins behind last, as bytes, or as columns of the group that
// starts with first. Parts of a tensor do not overlap if each of them follows the one before.
func (p Part) follows(first, last Part) bool {
	if p.From < last.From+last.row(0) || p.Row > 0 != (first.Row > 0) {
		return false
	}
	return p.Row == 0 || p.Stride == first.Stride && p.From+p.row(0) <= first.From+first.Stride
}

// A fileOrder numbers files in the order of their first use.
type fileOrder map[*File]int

// add reports whether the file is new.
func (o fileOrder) add(f *File) bool {
	if _, used := o[f]; used {
		return false
	}
	o[f] = len(o)
	return true
}

// compare orders parts by file and offset.
func (o fileOrder) compare(p, q Part) int {
	if f, g := p.Tensor.File, q.Tensor.File; f != g {
		return cmp.Compare(o[f], o[g])
	}
	return p.compare(q)
}
