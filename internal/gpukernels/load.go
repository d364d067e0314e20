// Package gpukernels has the module's own kernels: they fill, check, copy and time memory, and copy
// many blocks and parts. The sources are in src, in CUDA C; scripts/ptx.sh compiles them to the PTX
// that is embedded with gzip, for all devices of compute capability 7.5 or later and drivers of CUDA 11.8 or
// later, and records the hashes of both. Simulated devices run Go functions that do the same.
package gpukernels

import (
	"bytes"
	"compress/gzip"
	"context"
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
	errNilStream  = errors.New("the stream is nil or zero")
	errZero       = errors.New("the receiver is nil or zero (NewMemory, NewBlocks and NewParts return usable values)")
)

// groups bound, for each device, the threads in calls of CUDA that may not return.
var groups bounded.Each[cudart.Device, bounded.Group]

// unpack returns PTX, which is embedded with gzip in a fifth of its size.
func unpack(packed []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("gpukernels: the embedded PTX: %w", err)
	}
	return io.ReadAll(r)
}

// load loads code of this package, looks up its kernels, and calls more if it is not nil. When ctx
// ends during a call of CUDA, the code is unloaded once the call returns.
func load(ctx context.Context, dev *cudart.Device, code []byte, kernels map[string]**kernel.Kernel, more func() error) (*kernel.Module, error) {
	text, err := unpack(code)
	if err != nil {
		return nil, err
	}
	m, err := kernel.Load(ctx, dev, text)
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
