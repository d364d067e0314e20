// Command arrow builds an Apache Arrow column in pinned memory and copies it to a GPU, without another buffer.
//
//	go run ./arrow        # on this machine's first GPU
//	go run ./arrow -sim   # on a simulated one
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/arrowmem"
	"github.com/gopinned/pinned/hostmem/pool"
	"github.com/gopinned/pinned/transfer"
)

var _ memory.Allocator = (*arrowmem.Allocator)(nil)

func main() {
	log.SetFlags(0)
	sim := flag.Bool("sim", false, "use a simulated GPU")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *sim); err != nil {
		log.Fatal(err)
	}
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
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	allocator, err := arrowmem.New(p, arrowmem.Options{})
	if err != nil {
		return err
	}

	column := squares(allocator, 1_000_000)
	defer column.Release()
	values := column.Data().Buffers()[1].Bytes() // buffer 0 has the nulls
	if _, _, pinned := hostmem.Find(values); !pinned {
		return fmt.Errorf("the column is not pinned: %w", allocator.Err())
	}
	mem, err := dev.Alloc(len(values))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	if err := copier.Upload(ctx, mem.Ptr(), values); err != nil {
		return err
	}
	back := make([]float32, column.Len())
	if err := copier.Download(ctx, hostmem.Bytes(back), mem.Ptr()); err != nil {
		return err
	}
	for i, v := range back {
		if v != column.Value(i) {
			return fmt.Errorf("row %d is %v on the GPU, and %v in the column", i, v, column.Value(i))
		}
	}
	fmt.Printf("%d rows, %d bytes of pinned memory, on %v\n", column.Len(), len(values), dev)
	return nil
}

// squares returns a column of n rows.
func squares(allocator memory.Allocator, n int) *array.Float32 {
	b := array.NewFloat32Builder(allocator)
	defer b.Release()
	for i := range n {
		b.Append(float32(i) * float32(i))
	}
	return b.NewFloat32Array()
}
