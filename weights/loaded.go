package weights

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/transfer"
)

// A Loaded has the tensors of a plan in device memory that it owns. Close it: the garbage
// collector frees no device memory. Its methods may be called from any goroutine.
type Loaded struct {
	memory []*cudart.DeviceMemory // in the order of Plan.Devices
	parts  []Placed
	byName map[string][]Placed
	life   lifetime.Lifetime
}

// LoadModel opens the model at a path as [OpenModel] does, allocates device memory for all of its
// tensors (cudaMalloc), loads them as [Plan.Load] does, and closes the files.
//
//	l, err := weights.LoadModel(ctx, dev, "/models/llama", weights.LoadOptions{})
//	p, err := l.Ptr("model.embed_tokens.weight")
//	err = l.Close()
//
// The errors are those of OpenModel and [Plan.LoadNew], which may return a Loaded with its error.
func LoadModel(ctx context.Context, dev *cudart.Device, path string, o LoadOptions) (*Loaded, error) {
	m, err := OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer m.Close() // which was only read
	plan, err := NewPlan(m.Tensors(), nil, PlanOptions{})
	if err != nil {
		return nil, err
	}
	return plan.LoadNew(ctx, []*cudart.Device{dev}, o)
}

// allocations bound, for each device, the threads in calls of cudaMalloc.
var allocations bounded.Each[cudart.Device, bounded.Group]

// LoadNew allocates device memory for the plan's tensors (cudaMalloc) and loads them as
// [Plan.Load] does. Device i of the plan is devices[i]; devices without a tensor are not used.
//
// The errors are those of [cudart.Device.Alloc] and Plan.Load. After an error the memory is
// freed and the Loaded is nil, unless the error wraps [transfer.ErrUnderWay]: then a copy may still
// write to the memory, which stays allocated. The Loaded is returned with that error; close it when the
// calls of CUDA have returned.
func (p *Plan) LoadNew(ctx context.Context, devices []*cudart.Device, o LoadOptions) (*Loaded, error) {
	l := &Loaded{byName: map[string][]Placed{}}
	memory, err := l.allocate(ctx, p, devices)
	if err != nil {
		err = fmt.Errorf("weights: load: %w", err)
	} else {
		err = p.Load(ctx, memory, o)
	}
	switch {
	case err == nil:
		return l, nil
	case ctx == nil:
		return nil, err
	case errors.Is(err, transfer.ErrUnderWay):
		return l, err
	}
	return nil, errors.Join(err, l.CloseContext(ctx))
}

// allocate allocates the memory of a plan, and returns it as Plan.Load takes it.
func (l *Loaded) allocate(ctx context.Context, p *Plan, devices []*cudart.Device) (map[int]Memory, error) {
	switch {
	case p == nil:
		return nil, errors.New("nil plan")
	case ctx == nil:
		return nil, errors.New("the context is nil")
	}
	memory := map[int]Memory{}
	for _, d := range p.Devices {
		if d.Device < 0 || d.Device >= len(devices) {
			return nil, fmt.Errorf("the plan has device %d, of %d devices", d.Device, len(devices))
		}
		dev := devices[d.Device]
		if dev == nil || dev.Runtime() == nil {
			return nil, fmt.Errorf("device %d of the plan is nil or zero", d.Device)
		}
		m, err := allocate(ctx, dev, max(d.Bytes, 1))
		if err != nil {
			return nil, err
		}
		l.memory = append(l.memory, m)
		memory[d.Device] = Memory{Device: dev, Ptr: m.Ptr(), Bytes: m.Len()}
		for _, t := range d.Tensors {
			if err := t.check(); err != nil {
				return nil, err
			}
			t.Memory = m
			l.parts = append(l.parts, t)
			l.byName[t.Tensor.Name] = append(l.byName[t.Tensor.Name], t)
		}
	}
	return memory, nil
}

// allocate allocates device memory, or abandons the call when ctx ends.
func allocate(ctx context.Context, dev *cudart.Device, n int) (*cudart.DeviceMemory, error) {
	return bounded.Do(ctx, bounded.Call[*cudart.DeviceMemory]{Group: allocations.Of(dev), Run: func() (*cudart.DeviceMemory, error) {
		return dev.Alloc(n)
	}, Late: func(m *cudart.DeviceMemory, err error) {
		if err == nil {
			_ = m.Close()
		}
	}})
}

// Ptr returns the address of a tensor that is on one device as a whole. The error wraps
// [cudart.ErrInvalidValue] if no tensor has this name, or if several devices have the tensor or
// parts of it (see [Loaded.Parts]), and [cudart.ErrClosed] after Close. It does not block.
func (l *Loaded) Ptr(name string) (cudart.DevPtr, error) {
	parts := l.Parts(name)
	switch {
	case len(parts) == 0:
		return 0, fmt.Errorf("weights: address of tensor %s: nothing of this name was loaded: %w", quote(name), cudart.ErrInvalidValue)
	case len(parts) > 1 || parts[0].Size != parts[0].Tensor.Size:
		return 0, fmt.Errorf("weights: address of tensor %s: %d parts were loaded: %w", quote(name), len(parts), cudart.ErrInvalidValue)
	}
	return parts[0].Ptr()
}

// Parts returns the parts of the tensor of that name, in the order of the plan's devices. It does
// not block.
func (l *Loaded) Parts(name string) []Placed {
	if l == nil {
		return nil
	}
	return slices.Clone(l.byName[name])
}

// All iterates over all parts, in the order of the plan's devices, and of the places on each. It
// does not block.
func (l *Loaded) All() iter.Seq[Placed] {
	if l == nil {
		l = &Loaded{}
	}
	return slices.Values(l.parts)
}

// Close waits for the work of the devices and frees the memory (cudaFree). After an error it may
// be called again; once it has returned nil it does nothing.
func (l *Loaded) Close() error { return l.CloseContext(context.Background()) }

// CloseContext is Close that returns ctx's error if ctx ends first. A nil context is an error.
func (l *Loaded) CloseContext(ctx context.Context) error {
	switch {
	case l == nil:
		return errors.New("weights: close: nil Loaded")
	case ctx == nil:
		return errors.New("weights: close: the context is nil")
	}
	err := l.life.Close(ctx, func(context.Context) error {
		var errs []error
		for _, m := range l.memory {
			errs = append(errs, m.Close())
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("weights: close: %w", err)
	}
	return nil
}
