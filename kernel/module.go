package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/ptx"
	"github.com/gopinned/pinned/internal/raw"
)

var (
	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil or zero")
	errNilStream  = errors.New("the stream is nil or zero")
	errZero       = errors.New("the receiver is nil or zero (Load and Module.Kernel return usable values)")
)

// isZero reports whether a stream is nil or zero.
func isZero(s *cudart.Stream) bool { return s == nil || s.Device() == nil }

// A Module is code that is loaded on a device. Close it: the garbage collector does not unload it.
type Module struct {
	dev     *cudart.Device
	module  raw.Module
	kernels map[string]ptx.Entry // nil if the code is not PTX
	inside  *bounded.Group
	life    lifetime.Lifetime
	fence   fence.Fence // of the kernels that were launched
}

// groups bound, for each device, the threads in calls of CUDA that may not return.
var groups bounded.Each[cudart.Device, bounded.Group]

// Load loads PTX, a cubin or a fat binary on a device (cuModuleLoadDataEx). The driver compiles
// PTX, which takes a fraction of a second unless the driver's cache on disk has the result. code
// may be changed afterwards.
//
// The error wraps [cudart.ErrInvalidKernelImage] if the code has none of these formats or is not
// whole. If CUDA cannot use the code, the error is a [*JITError]: it wraps
// [cudart.ErrUnsupportedPtxVersion] if the PTX is of a newer CUDA than the driver, and
// [cudart.ErrNoKernelImageForDevice] if the code is for other devices, or if the device is a
// simulated one that has no Go functions instead of its kernels. If ctx ends first, the error is
// ctx's, and the code is unloaded once CUDA returns. A nil context, a nil device and empty code are
// errors.
func Load(ctx context.Context, dev *cudart.Device, code []byte) (*Module, error) {
	m, err := load(ctx, dev, bytes.Clone(code))
	if err != nil {
		return nil, fmt.Errorf("kernel: load: %w", err)
	}
	return m, nil
}

func load(ctx context.Context, dev *cudart.Device, code []byte) (*Module, error) {
	switch {
	case ctx == nil:
		return nil, errNilContext
	case dev == nil || dev.Runtime() == nil:
		return nil, errNilDevice
	}
	kernels, err := checkCode(code)
	if err != nil {
		return nil, err
	}
	inside := groups.Of(dev)
	module, err := bounded.Do(ctx, bounded.Call[raw.Module]{Group: inside, Run: func() (raw.Module, error) {
		if ctx.Err() != nil {
			return nil, bounded.Ended(ctx)
		}
		return raw.Load(dev, code)
	}, Late: func(m raw.Module, err error) {
		if err == nil {
			_ = lifetime.Undo(ctx, func(context.Context) error { return m.Unload() })
		}
	}})
	if err != nil {
		return nil, compiled(err)
	}
	return &Module{dev: dev, module: module, kernels: kernels, inside: inside}, nil
}

// A JITError is code that CUDA could not load. Unwrap returns the [*cudart.Error] of the call.
type JITError struct {
	Log string // of the compiler (ptxas), with line numbers of the PTX; may be empty
	Err error  // the failed call
}

// Error returns the call's error and the log.
func (e *JITError) Error() string { return (*raw.CompileError)(e).Error() }

// Unwrap returns the call's error.
func (e *JITError) Unwrap() error { return e.Err }

// compiled returns the error of a call that may have compiled.
func compiled(err error) error {
	if e, ok := err.(*raw.CompileError); ok {
		return (*JITError)(e)
	}
	return err
}

// made reports whether Load has made the Module.
func (m *Module) made() bool { return m != nil && m.module != nil }

// Device returns the device on which the code is loaded. It does not block.
func (m *Module) Device() *cudart.Device {
	if !m.made() {
		return nil
	}
	return m.dev
}

// Kernel looks up a kernel by its name, which is that of a function with extern "C"
// (cuModuleGetFunction). CUDA may compile the code only now.
//
// The error wraps [cudart.ErrSymbolNotFound] if the code has no kernel of that name,
// [cudart.ErrClosed], or ctx's error if ctx ends first. A nil context is an error.
func (m *Module) Kernel(ctx context.Context, name string) (*Kernel, error) {
	k, err := m.kernel(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("kernel: look up %q: %w", name, err)
	}
	return k, nil
}

func (m *Module) kernel(ctx context.Context, name string) (*Kernel, error) {
	switch {
	case !m.made():
		return nil, errZero
	case ctx == nil:
		return nil, errNilContext
	}
	entry, parsed := m.kernels[name]
	if m.kernels != nil && !parsed {
		names := strings.Join(slices.Sorted(maps.Keys(m.kernels)), ", ")
		return nil, fmt.Errorf("the code has the kernels %s: %w", names, cudart.ErrSymbolNotFound)
	}
	f, err := bounded.Do(ctx, bounded.Call[raw.Function]{Group: m.inside, Run: func() (raw.Function, error) {
		if !m.life.Begin() {
			return nil, fmt.Errorf("the module is %w", cudart.ErrClosed)
		}
		defer m.life.End()
		return m.module.Function(name)
	}})
	if err != nil {
		return nil, compiled(err)
	}
	return &Kernel{limits: f.Limits(), module: m, function: f, parsed: parsed, params: entry.Params}, nil
}

// Close waits for the kernels that were launched, and unloads the code (cuModuleUnload). After the
// call of Close, launches return [cudart.ErrClosed]. After an error the code stays loaded, and
// Close may be called again; once it has returned nil it does nothing.
func (m *Module) Close() error { return m.CloseContext(context.Background()) }

// CloseContext is Close that returns ctx's error if ctx ends first. A nil context is an error.
func (m *Module) CloseContext(ctx context.Context) error {
	switch {
	case !m.made():
		return fmt.Errorf("kernel: close the module: %w", errZero)
	case ctx == nil:
		return fmt.Errorf("kernel: close the module: %w", errNilContext)
	}
	err := m.life.Close(ctx, func(ctx context.Context) error {
		if err := m.fence.Wait(ctx); err != nil {
			return fmt.Errorf("its kernels may be running: %w", err)
		}
		return m.module.Unload()
	})
	if err != nil {
		return fmt.Errorf("kernel: close the module on %v: %w", m.dev, err)
	}
	return nil
}
