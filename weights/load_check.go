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

// check returns an error for what is no memory, and for less than n bytes of it.
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
		return fmt.Errorf("memory of %d bytes at %#x on %v: no memory has such addresses", m.Bytes, uintptr(m.Ptr), m.Device)
	}
	return nil
}

// checkPlan checks the arguments of Load.
func (l *loading) checkPlan(p *Plan) error {
	if p == nil {
		return errors.New("nil plan")
	}
	var devices []*cudart.Device
	bytes := make(map[int]int, len(p.Devices)) // by device
	for _, d := range p.Devices {
		m, ok := l.memory[d.Device]
		if !ok {
			return fmt.Errorf("no memory for device %d of the plan, which gets %d bytes", d.Device, d.Bytes)
		}
		if err := m.check(d.Bytes); err != nil {
			return fmt.Errorf("device %d of the plan: %w", d.Device, err)
		}
		if i := slices.Index(devices, m.Device); i >= 0 {
			return fmt.Errorf("devices %d and %d of the plan are both %v", p.Devices[i].Device, d.Device, m.Device)
		}
		devices = append(devices, m.Device)
		bytes[d.Device] = m.Bytes
		for _, t := range d.Tensors {
			if err := t.check(); err != nil {
				return err
			}
			l.parts = append(l.parts, t.Part)
		}
	}
	for i := range p.Reads {
		if err := p.Reads[i].check(bytes); err != nil {
			return fmt.Errorf("read %d of the plan: %w", i, err)
		}
	}
	l.reads = p.Reads
	return checkDevices(devices)
}

// check returns an error for a read that is not within its file, or goes to other
// places than those of the plan's devices, which have so many bytes each.
func (r *Read) check(bytes map[int]int) error {
	switch {
	case r.File == nil:
		return errors.New("nil file")
	case r.Size < 1 || r.Offset < 0 || int64(r.Size) > r.File.size-r.Offset:
		return fmt.Errorf("%d bytes from offset %d of %s, which has %d", r.Size, r.Offset, r.File.name, r.File.size)
	case len(r.Devices) == 0:
		return errors.New("no devices")
	}
	for i, d := range r.Devices {
		room, ok := bytes[d]
		if !ok {
			return fmt.Errorf("device %d is not in the plan", d)
		}
		for _, p := range r.Pieces {
			if len(p.To) != len(r.Devices) {
				return fmt.Errorf("a piece has %d places for %d devices", len(p.To), len(r.Devices))
			}
			if to := p.To[i]; to < 0 || p.Size < 0 || p.Size > room-to {
				return fmt.Errorf("a piece of %d bytes at %d of device %d, which has %d", p.Size, to, d, room)
			}
		}
	}
	return nil
}

// checkDevices returns an error for devices that cannot work together.
func checkDevices(devices []*cudart.Device) error {
	for _, d := range devices {
		if d.Runtime() != devices[0].Runtime() {
			return fmt.Errorf("%v and %v are of different CUDA libraries: open them with one cudart.Open", devices[0], d)
		}
	}
	return nil
}

// plan makes reads for placements. Addresses are counted from 0 on each device.
func (l *loading) plan(placements []Placement) error {
	files := fileOrder{}
	var devices []*cudart.Device
	targets := make([]target, 0, len(placements))
	for i, p := range placements {
		if err := p.check(); err != nil {
			return fmt.Errorf("placement %d: %w", i, err)
		}
		if err := p.To.check(p.Size); err != nil {
			return fmt.Errorf("tensor %s of %s: %w", quote(p.Tensor.Name), p.Tensor.File.name, err)
		}
		device := slices.Index(devices, p.To.Device)
		if device < 0 {
			device = len(devices)
			devices = append(devices, p.To.Device)
			l.memory[device] = Memory{Device: p.To.Device}
		}
		files.add(p.Tensor.File)
		targets = append(targets, target{p.Part, device, int(p.To.Ptr)})
	}
	if err := checkDevices(devices); err != nil {
		return err
	}
	if err := checkApart(targets, devices); err != nil {
		return err
	}
	slices.SortFunc(targets, func(t, u target) int {
		return cmp.Or(files.compare(t.Part, u.Part), cmp.Compare(t.device, u.device), cmp.Compare(t.to, u.to))
	})
	for _, t := range targets {
		l.parts = append(l.parts, t.Part)
	}
	l.reads = planReads(targets, 0)
	return nil
}

// checkApart returns an error if two parts overlap on a device.
func checkApart(targets []target, devices []*cudart.Device) error {
	sorted := slices.DeleteFunc(slices.Clone(targets), func(t target) bool { return t.Size == 0 })
	slices.SortFunc(sorted, func(t, u target) int { return cmp.Or(cmp.Compare(t.device, u.device), cmp.Compare(t.to, u.to)) })
	for i := 1; i < len(sorted); i++ {
		t, u := sorted[i-1], sorted[i]
		if t.device == u.device && t.to+t.Size > u.to {
			return fmt.Errorf("tensors %s of %s, %d bytes at %#x, and %s of %s, %d bytes at %#x, overlap on %v",
				quote(t.Tensor.Name), t.Tensor.File.name, t.Size, t.to,
				quote(u.Tensor.Name), u.Tensor.File.name, u.Size, u.to, devices[t.device])
		}
	}
	return nil
}

// checkFiles returns an error for a file that is closed or has shrunk.
func (l *loading) checkFiles() error {
	var last *File
	for _, r := range l.reads {
		opened, ok := r.File.r.(*os.File)
		if !ok || r.File == last {
			continue
		}
		last = r.File
		info, err := opened.Stat()
		if err != nil {
			return err
		}
		if info.Size() < r.File.size {
			return fmt.Errorf("%s has %d bytes, it had %d when it was opened: %w", r.File.name, info.Size(), r.File.size, io.ErrUnexpectedEOF)
		}
	}
	return nil
}
