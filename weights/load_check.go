package weights

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"

	"github.com/gopinned/pinned/cudart"
)

// check returns an error unless the memory is valid and has at least n bytes.
func (m Memory) check(n int) error {
	switch {
	case m.Device == nil:
		return errors.New("nil device")
	case m.Device.Runtime() == nil:
		return errors.New("a device that is of no cudart.Runtime")
	case m.Bytes < 0:
		return fmt.Errorf("memory of %d bytes on %v", m.Bytes, m.Device)
	case n > m.Bytes:
		return fmt.Errorf("memory of %d bytes on %v, want %d", m.Bytes, m.Device, n)
	case n > 0 && m.Ptr == 0:
		return fmt.Errorf("memory at address 0 on %v", m.Device)
	case uint64(m.Ptr) > uint64(math.MaxInt-m.Bytes):
		return fmt.Errorf("memory of %d bytes at %v on %v: no memory has such addresses", m.Bytes, m.Ptr, m.Device)
	}
	return nil
}

// placements returns the plan's tensors with their memory.
func (p *Plan) placements(memory map[int]Memory) (list []Placement, err error) {
	if p == nil {
		return nil, errors.New("nil plan")
	}
	index := map[*cudart.Device]int{} // in the plan
	n := 0
	for _, d := range p.Devices {
		n += len(d.Tensors)
	}
	list = make([]Placement, 0, n)
	for _, d := range p.Devices {
		m, ok := memory[d.Device]
		if !ok {
			return nil, fmt.Errorf("no memory for device %d of the plan, which gets %d bytes", d.Device, d.Bytes)
		}
		if err := m.check(d.Bytes); err != nil {
			return nil, fmt.Errorf("device %d of the plan: %w", d.Device, err)
		}
		if other, twice := index[m.Device]; twice {
			return nil, fmt.Errorf("devices %d and %d of the plan are both %v", other, d.Device, m.Device)
		}
		index[m.Device] = d.Device
		for _, t := range d.Tensors {
			if t.Offset < 0 || t.Offset > m.Bytes {
				return nil, fmt.Errorf("a tensor at %d of device %d, which has %d bytes", t.Offset, d.Device, m.Bytes)
			}
			list = append(list, Placement{t.Part, Memory{m.Device, m.Ptr + cudart.DevPtr(t.Offset), m.Bytes - t.Offset}})
		}
	}
	return list, nil
}

// A target is a part and its address on a device.
type target struct {
	Part
	device, to int
}

// plan sets the tensors, the devices and the queues of placements. The files are in the given order, and after these
// in the order in which the placements use others.
func (l *loading) plan(files []*File, placements []Placement) error {
	targets, order := make([]target, 0, len(placements)), fileOrder{}
	for _, f := range files {
		order.add(f)
	}
	for i, p := range placements {
		if err := p.check(); err != nil {
			return fmt.Errorf("placement %d: %w", i, err)
		}
		if err := p.To.check(p.Size); err != nil {
			return fmt.Errorf("tensor %s of %s: %w", quote(p.Tensor.Name), p.Tensor.File.name, err)
		}
		device := slices.Index(l.devices, p.To.Device)
		if device < 0 {
			device = len(l.devices)
			l.devices = append(l.devices, p.To.Device)
		}
		if first := l.devices[0]; p.To.Device.Runtime() != first.Runtime() {
			return fmt.Errorf("%v and %v are of different CUDA libraries: open them with one cudart.Open", first, p.To.Device)
		}
		targets = append(targets, target{p.Part, device, int(p.To.Ptr)})
		order.add(p.Tensor.File)
	}
	l.placed = slices.DeleteFunc(slices.Clone(targets), func(t target) bool { return t.Size == 0 })
	slices.SortFunc(l.placed, target.compareAddress)
	if err := l.checkOverlap(); err != nil {
		return err
	}
	l.enqueue(order, targets)
	return nil
}

func (t target) compareAddress(u target) int {
	return cmp.Or(cmp.Compare(t.device, u.device), cmp.Compare(t.to, u.to))
}

// checkOverlap returns an error if two parts overlap on a device.
func (l *loading) checkOverlap() error {
	for i := 1; i < len(l.placed); i++ {
		t, u := l.placed[i-1], l.placed[i]
		if t.device == u.device && t.to+t.Size > u.to {
			return fmt.Errorf("tensors %s of %s, %d bytes at %#x, and %s of %s, %d bytes at %#x, overlap on %v",
				quote(t.Tensor.Name), t.Tensor.File.name, t.Size, t.to,
				quote(u.Tensor.Name), u.Tensor.File.name, u.Size, u.to, l.devices[t.device])
		}
	}
	return nil
}

// unused reports whether the load may write the bytes between two addresses of a device. If there
// are such bytes, the load must own the memory, and neither a part nor the rest of a part that
// other devices share may contain them.
func (l *loading) unused(device, from, to int) bool {
	if from == to || !l.owned {
		return from == to
	}
	next, _ := slices.BinarySearchFunc(l.placed, target{device: device, to: from}, target.compareAddress)
	for _, t := range l.placed[max(next-1, 0):min(next+1, len(l.placed))] {
		if t.device == device && t.to < to && t.to+t.Size > from {
			return false
		}
	}
	return true
}

// checkFiles returns an error for a file that is closed or has shrunk.
func (l *loading) checkFiles() error {
	for _, f := range l.files {
		opened, ok := f.r.(*os.File)
		if !ok {
			continue
		}
		info, err := opened.Stat()
		if err != nil {
			return err
		}
		if info.Size() < f.size {
			return fmt.Errorf("%s has %d bytes, it had %d when it was opened: %w", f.name, info.Size(), f.size, io.ErrUnexpectedEOF)
		}
	}
	return nil
}
