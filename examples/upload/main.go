// Command upload copies a slice to a GPU and back, and compares.
//
//	go run ./examples/upload        # on this machine's first GPU
//	go run ./examples/upload -sim   # on a simulated one
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"

	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/transfer"
)

func main() {
	sim := flag.Bool("sim", false, "use a simulated GPU")
	flag.Parse()
	device.Main(func(ctx context.Context) error { return run(ctx, *sim) })
}

func run(ctx context.Context, sim bool) (err error) {
	dev, err := device.First(ctx, sim)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Runtime().Close()) }()
	copier, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, copier.Close()) }()

	data := make([]byte, 64<<20)
	for i := range data {
		data[i] = byte(i * 7)
	}
	mem, err := dev.Alloc(len(data))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	if err := copier.Upload(ctx, mem.Ptr(), data); err != nil {
		return err
	}
	back := make([]byte, len(data))
	if err := copier.Download(ctx, back, mem.Ptr()); err != nil {
		return err
	}
	if !slices.Equal(data, back) {
		return errors.New("the bytes that came back differ")
	}
	fmt.Printf("%v: %d bytes there and back, equal\n", dev, len(back))
	return nil
}
