// Package gpukernels has the module's own kernels: they fill, check, copy and time memory, copy
// many blocks and parts, and compute checksums. The sources are in src, in CUDA C. scripts/ptx.sh compiles them to PTX, for all devices of
// compute capability 7.5 or later and drivers of CUDA 11.8 or later, and the PTX to cubins for the architectures that
// users have. Cubins load in 0.2 ms, and compiling PTX takes the driver 0.1 s or more the first time on a machine
// (H100, 2026-11-27). All are embedded with gzip. Simulated devices run Go functions that do the same.
package gpukernels

import (
	"bytes"
	"compress/gzip"
	"context"
	"embed"
	"errors"
	"fmt"
	"io"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/kernel"
)

var (
	errNilContext = errors.New("the context is nil")
	errNilDevice  = errors.New("the device is nil or zero")
	errNilStream  = errors.New("the stream is nil or zero")
	errZero       = errors.New("the receiver is nil or zero (NewMemory, NewBlocks, NewParts and NewChecksums return usable values)")
)

// groups bound, for each device, the threads in calls of CUDA that may not return.
var groups bounded.Each[cudart.Device, bounded.Group]

//go:embed src/*.gz
var embedded embed.FS

// unpack returns the code of a file in src: "blocks.ptx".
func unpack(name string) ([]byte, error) {
	packed, err := embedded.ReadFile("src/" + name + ".gz")
	if err != nil {
		return nil, err
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("gpukernels: %s: %w", name, err)
	}
	return io.ReadAll(r)
}

// architectures are those with cubins: ten times the major plus the minor number of a compute capability.
var architectures = [...]int{75, 80, 86, 89, 90, 100, 120}

// codes returns the files for a device in the order in which to try them: PTX is the last. A device runs the
// cubins of its major number whose minor number is no larger, and of these the largest is for it.
func codes(dev *cudart.Device, name string) ([]string, error) {
	ptx := name + ".ptx"
	if dev.Runtime().Library().Simulated { // these read the names of kernels from PTX
		return []string{ptx}, nil
	}
	major, err := dev.Attribute(cudart.AttrComputeCapabilityMajor)
	if err != nil {
		return nil, err
	}
	minor, err := dev.Attribute(cudart.AttrComputeCapabilityMinor)
	if err != nil {
		return nil, err
	}
	if arch := architecture(10*major + minor); arch != 0 {
		return []string{fmt.Sprintf("%s.sm_%d.cubin", name, arch), ptx}, nil
	}
	return []string{ptx}, nil
}

// architecture returns the one whose cubins a device of a compute capability runs, or 0 if it runs none.
func architecture(capability int) (arch int) {
	for _, a := range architectures {
		if a/10 == capability/10 && a <= capability {
			arch = a
		}
	}
	return arch
}

// loadFirst loads the first of some files that CUDA takes. Drivers refuse cubins of a newer CUDA than their own, and
// integrated GPUs those of others.
func loadFirst(ctx context.Context, dev *cudart.Device, names ...string) (m *kernel.Module, err error) {
	for _, name := range names {
		code, unpackErr := unpack(name)
		if unpackErr != nil {
			return nil, unpackErr
		}
		m, err = kernel.Load(ctx, dev, code)
		if !errors.Is(err, cudart.ErrNoKernelImageForDevice) && !errors.Is(err, cudart.ErrInvalidKernelImage) && !errors.Is(err, cudart.ErrUnsupportedPtxVersion) {
			break
		}
	}
	return m, err
}

// load loads the code of a source in src for the device, looks up its kernels, and calls more if it is not nil. When ctx
// ends during a call of CUDA, the code is unloaded once the call returns.
func load(ctx context.Context, dev *cudart.Device, name string, kernels map[string]**kernel.Kernel, more func() error) (*kernel.Module, error) {
	if dev == nil || dev.Runtime() == nil {
		return nil, fmt.Errorf("gpukernels: load %s: %w", name, errNilDevice)
	}
	names, err := codes(dev, name)
	if err != nil {
		return nil, err
	}
	m, err := loadFirst(ctx, dev, names...)
	if err != nil {
		return nil, err
	}
	return bounded.Do(ctx, bounded.Call[*kernel.Module]{
		Run: func() (*kernel.Module, error) {
			var err error
			for name, k := range kernels {
				if err == nil {
					*k, err = m.Kernel(context.WithoutCancel(ctx), name)
				}
			}
			if err == nil && more != nil {
				err = more()
			}
			if err != nil {
				return nil, errors.Join(err, lifetime.Undo(ctx, m.CloseContext))
			}
			return m, nil
		},
		Late: func(m *kernel.Module, err error) {
			if err == nil {
				_ = lifetime.Undo(ctx, m.CloseContext)
			}
		},
	})
}
