// Package device opens what the examples run on: the GPUs of this machine, or simulated ones.
package device

import (
	"context"
	"errors"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// Open opens the machine's CUDA library, or a simulated one.
func Open(ctx context.Context, sim bool, cfg cudasim.Config) (*cudart.Runtime, error) {
	if sim {
		return cudasim.Open(ctx, cfg)
	}
	return cudart.Open(ctx, cudart.Options{})
}

// First returns the first GPU of the machine, or a simulated one. Its Runtime is the caller's to close.
func First(ctx context.Context, sim bool) (*cudart.Device, error) {
	rt, err := Open(ctx, sim, cudasim.Config{})
	if err != nil {
		return nil, err
	}
	dev, err := rt.Device(0)
	if err != nil {
		return nil, errors.Join(err, rt.Close())
	}
	return dev, nil
}
