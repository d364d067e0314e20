//go:build linux && !android && (amd64 || arm64)

package dlpack_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/dlpack"
	"github.com/gopinned/pinned/hostmem/pool"
)

// Memory of a pool goes to another library, which has a stream of its own. The pool
// reuses the memory when the library is done with it, and its stream as well.
func ExampleExport() {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{}) // instead of a GPU
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	theirs, err := dev.NewStream(cudart.StreamOptions{}) // the other library's
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.StreamFromHandle(theirs.Handle())
	if err != nil {
		log.Fatal(err)
	}
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}

	lease, err := p.Get(context.Background(), 4*6)
	if err != nil {
		log.Fatal(err)
	}
	for i, values := 0, hostmem.Slice[float32](lease.Bytes()); i < len(values); i++ {
		values[i] = float32(i) / 2
	}
	released := make(chan error)
	tensor, err := dlpack.Export(lease.Bytes(), dlpack.Tensor{
		Type:  dlpack.DataType{Code: dlpack.Float, Bits: 32},
		Shape: []int{2, 3},
	}, func() { released <- lease.Release(stream) })
	if err != nil {
		log.Fatal(err)
	}

	consume(tensor)
	if err := <-released; err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.Stats().Leases, "leases")

	if err := errors.Join(p.Close(), stream.Close(), theirs.Close(), rt.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// [2 3] of float32: [0 0.5 1 1.5 2 2.5]
	// 0 leases
}

// consume is the other library: it takes the address of a DLManagedTensorVersioned, and
// calls the deleter at the end.
func consume(tensor dlpack.Versioned) {
	t, err := dlpack.Import(tensor)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(t.Shape, "of", t.Type.String()+":", hostmem.Slice[float32](t.Bytes()))
	if err := t.Close(); err != nil {
		log.Fatal(err)
	}
}

// A tensor that no consumer takes is deleted. Its memory is released on a goroutine, which may
// wait for the GPU.
func Example_memoryLifetime() {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{}) // instead of a GPU
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	buf, err := hostmem.Alloc(ctx, dev, 1000, hostmem.Options{})
	if err != nil {
		log.Fatal(err)
	}
	released := make(chan error)
	tensor, err := dlpack.Export(buf.Bytes(), dlpack.Tensor{
		Type:     dlpack.DataType{Code: dlpack.Uint, Bits: 8},
		Shape:    []int{1000},
		ReadOnly: true,
	}, func() { released <- errors.Join(dev.Synchronize(ctx), buf.Close()) })
	if err != nil {
		log.Fatal(err)
	}
	tensor.Delete()
	fmt.Println(<-released, buf.Bytes() == nil)
	if err := rt.Close(); err != nil {
		log.Fatal(err)
	}
	// Output: <nil> true
}
