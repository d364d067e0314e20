package kernel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/fence"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/sentinel"
)

// ErrClosed is returned for a [Module], and what was made from it, that is closed. errors.Is
// reports that it is [os.ErrClosed].
var ErrClosed = sentinel.New("already closed", os.ErrClosed)

var (
	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil or zero")
	errNilStream  = errors.New("the stream is nil or zero")
	errNotMade    = errors.New("what the method is called on is nil or zero: Load, Module.Kernel and the functions that begin with New make it")
)

// noStream reports whether a stream is nil or zero.
func noStream(s *cudart.Stream) bool { return s == nil || s.Device() == nil }

// A Module is code that is loaded on a device. Close it: the garbage collector unloads none.
type Module struct {
	dev     *cudart.Device
	module  *cudart.Module
	kernels map[string]parameters // nil if unknown
	life    lifetime.Lifetime
	fence   fence.Fence // of the kernels' runs
}

// Load loads PTX, a cubin or a fat binary on a device (cuModuleLoadDataEx). The driver compiles PTX, which takes a fraction of a
// second unless its cache has it. code may be changed afterwards. A nil device and empty code
// are errors. The error wraps [cudart.ErrInvalidKernelImage] if the code is nothing of that
// kind, or not whole; see [cudart.Device.LoadModule] for the others.
func Load(dev *cudart.Device, code []byte) (*Module, error) {
	if dev == nil || dev.Runtime() == nil {
		return nil, fmt.Errorf("kernel: load: %w", errNilDevice)
	}
	kernels, err := checkCode(code)
	var loaded *cudart.Module
	if err == nil {
		loaded, err = dev.LoadModule(code)
	}
	if err != nil {
		return nil, fmt.Errorf("kernel: load: %w", err)
	}
	return &Module{dev: dev, module: loaded, kernels: kernels}, nil
}

// made reports whether Load has made the Module.
func (m *Module) made() bool { return m != nil && m.module != nil }

// Kernel looks up a kernel by its name, which is that of a function with extern "C"
// (cuModuleGetFunction). The error wraps [cudart.ErrSymbolNotFound] if
// the code has none of that name, and [ErrClosed].
func (m *Module) Kernel(name string) (*Kernel, error) {
	switch {
	case !m.made():
		return nil, fmt.Errorf("kernel: look up %s: %w", name, errNotMade)
	case !m.life.Begin():
		return nil, fmt.Errorf("kernel: look up %s: the module is %w", name, ErrClosed)
	}
	defer m.life.End()
	params, known := m.kernels[name]
	if m.kernels != nil && !known {
		names := strings.Join(slices.Sorted(maps.Keys(m.kernels)), ", ")
		return nil, fmt.Errorf("kernel: look up %q: the code has the kernels %s: %w", name, names, cudart.ErrSymbolNotFound)
	}
	f, err := m.module.Function(name)
	if err != nil {
		return nil, fmt.Errorf("kernel: look up %q: %w", name, err)
	}
	return &Kernel{module: m, function: f, known: known, params: params}, nil
}

// Close waits for the kernels that were launched, and unloads the code
// (cuModuleUnload). From its start on, launches return [ErrClosed]. After an error the code
// stays loaded, and Close may be called again; once it has returned nil it does nothing.
func (m *Module) Close() error { return m.CloseContext(context.Background()) }

// CloseContext is Close that ends with ctx, with its error. A nil ctx is an error.
func (m *Module) CloseContext(ctx context.Context) error {
	switch {
	case !m.made():
		return fmt.Errorf("kernel: close the module: %w", errNotMade)
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
