//go:build linux && !android && (amd64 || arm64)

package arrowmem_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/arrowmem"
	"github.com/gopinned/pinned/hostmem/pool"
)

// An arrowAllocator is memory.Allocator of github.com/apache/arrow-go. Programs pass an
// Allocator to Arrow: array.NewFloat32Builder(a).
type arrowAllocator interface {
	Allocate(size int) []byte
	Reallocate(size int, b []byte) []byte
	Free(b []byte)
}

// A column is built in pinned memory, which grows with it, and is copied to the GPU.
func ExampleAllocator() {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{}) // instead of a GPU
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	a, err := arrowmem.New(p, arrowmem.Options{Streams: []*cudart.Stream{stream}})
	if err != nil {
		log.Fatal(err)
	}

	column := buildColumn(a, 1000)
	_, _, pinned := hostmem.Find(column)
	fmt.Println(len(column), "bytes, pinned:", pinned)

	mem, err := dev.Malloc(len(column))
	if err != nil {
		log.Fatal(err)
	}
	if err := stream.CopyToDevice(mem, unsafe.Pointer(&column[0]), len(column)); err != nil {
		log.Fatal(err)
	}
	a.Free(column) // the copy may still run: the pool reuses the memory after it
	fmt.Println(a.Stats().Allocations, "allocations, last error:", a.Err())

	if err := errors.Join(p.Close(), stream.Close(), dev.Free(mem), rt.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// 4000 bytes, pinned: true
	// 0 allocations, last error: <nil>
}

// buildColumn allocates as Arrow's builders do: a little, and twice as much when that is
// full.
func buildColumn(a arrowAllocator, n int) []byte {
	mem := a.Allocate(64)
	for i := range n {
		if 4*(i+1) > len(mem) {
			mem = a.Reallocate(2*len(mem), mem)
		}
		*(*float32)(unsafe.Pointer(&mem[4*i])) = float32(i)
	}
	return a.Reallocate(4*n, mem)
}

// Memory that was freed is not reused while a stream of Options.Streams may use it. If the pool
// has none, memory is of the Go heap: Err returns why.
func Example_memoryLifetime() {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{}) // instead of a GPU
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	a, err := arrowmem.New(p, arrowmem.Options{Streams: []*cudart.Stream{stream}})
	if err != nil {
		log.Fatal(err)
	}
	mem := a.Allocate(1000)
	gpu := make(chan struct{})
	if err := stream.LaunchHostFunc(func() { <-gpu }); err != nil { // instead of a kernel
		log.Fatal(err)
	}
	a.Free(mem)
	fmt.Println("in use by the GPU:", p.Stats().PendingBytes > 0)
	close(gpu)
	if err := p.Close(); err != nil { // waits for the GPU
		log.Fatal(err)
	}
	a.Free(a.Allocate(1000))
	fmt.Println("closed:", errors.Is(a.Err(), cudart.ErrClosed))
	if err := errors.Join(stream.Close(), rt.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// in use by the GPU: true
	// closed: true
}
