// Package device runs the examples, and opens what they run on: the GPUs of this machine, or simulated ones.
package device

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// Main calls run with a context that an interrupt ends. An error of run is printed, and ends the process with status 1.
func Main(run func(ctx context.Context) error) {
	log.SetFlags(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

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
