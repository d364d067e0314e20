// Command gocudrv copies pinned memory of this module to memory of gocudrv, in a stream of gocudrv's context.
//
//	go mod tidy && go run .   # on this machine's first GPU
//
// Both use the primary context of the device, so that addresses and streams of one are valid for the other.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"

	"github.com/eitamring/gocudrv/cuda"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem/pool"
)

func main() {
	log.SetFlags(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) (err error) {
	// gocudrv's part: the context, a stream and memory.
	if err := cuda.Init(); err != nil {
		return err
	}
	theirDevice, err := cuda.GetDevice(0)
	if err != nil {
		return err
	}
	primary, err := theirDevice.Primary()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, primary.Close()) }()
	theirStream, err := primary.NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirStream.Close()) }()
	const n = 64 << 20
	theirs, err := cuda.Alloc[uint8](primary, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.Close()) }()

	// This module's part: pinned memory, and the copy.
	rt, err := cudart.Open(ctx, cudart.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rt.Close()) }()
	dev, err := rt.Device(0)
	if err != nil {
		return err
	}
	stream, err := dev.StreamFromHandle(cudart.StreamHandle(theirStream.Raw()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }() // before the owner destroys its stream
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	lease, err := p.Get(ctx, n)
	if err != nil {
		return err
	}
	for i := range lease.Bytes() {
		lease.Bytes()[i] = byte(i * 7)
	}
	err = lease.CopyToDevice(stream, cudart.DevPtr(theirs.DevicePtr()), 0, n)
	if err = errors.Join(err, lease.Release()); err != nil { // reused when their stream has passed the copy
		return err
	}

	// gocudrv's kernels would follow in its stream. Here the bytes come back.
	if err := theirStream.Synchronize(ctx); err != nil {
		return err
	}
	back := make([]uint8, n)
	if err := theirs.CopyTo(ctx, back); err != nil {
		return err
	}
	for i, b := range back {
		if b != byte(i*7) {
			return fmt.Errorf("byte %d is %d on the GPU, want %d", i, b, byte(i*7))
		}
	}
	fmt.Printf("%v: %d bytes in a stream of gocudrv, equal\n", dev, n)
	return nil
}
