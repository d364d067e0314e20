//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// A copy lands when the stream has run it, not when the call returns.
func Example() {
	sim, err := cudasim.New(cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	const n = 1 << 20
	host, err := dev.HostAlloc(n, 0)
	if err != nil {
		log.Fatal(err)
	}
	mem, err := dev.Malloc(n)
	if err != nil {
		log.Fatal(err)
	}
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}

	first := unsafe.Slice((*byte)(host), n)
	clear(first) // CUDA does not
	sim.Hold()
	if err := errors.Join(s.Memset(mem, 7, n), s.CopyToHost(host, mem, n)); err != nil {
		log.Fatal(err)
	}
	fmt.Println("before:", first[0])
	sim.Release()
	if err := s.Synchronize(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Println("after:", first[0])

	if err := errors.Join(s.Close(), dev.Free(mem)); err != nil {
		log.Fatal(err)
	}
	fmt.Println("still allocated:", sim.Outstanding().HostBytes, "bytes of host memory")
	if err := errors.Join(dev.FreeHost(host), rt.Close(), sim.Check(), sim.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// before: 0
	// after: 7
	// still allocated: 1048576 bytes of host memory
}

// The second allocation fails.
func ExampleSim_Fail() {
	sim, err := cudasim.New(cudasim.Config{Version: 12040})
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	sim.Fail("cudaMalloc", cudasim.Fault{Nth: 2, Code: cudart.ErrMemoryAllocation})
	a, err := dev.Malloc(100)
	fmt.Println(err)
	_, err = dev.Malloc(100)
	fmt.Println(errors.Is(err, cudart.ErrMemoryAllocation))
	if err := errors.Join(dev.Free(a), rt.Close(), sim.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// <nil>
	// true
}

// A call that blocks holds up no other. The stream's work goes on.
func ExampleSim_Block() {
	sim, err := cudasim.New(cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	unblock := sim.Block("cudaStreamQuery", cudasim.Fault{Stream: s.Handle()})
	answer := make(chan bool)
	go func() {
		done, err := s.Query()
		if err != nil {
			log.Fatal(err)
		}
		answer <- done
	}()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := sim.AwaitBlocked(ctx, "cudaStreamQuery", 1); err != nil {
		log.Fatal(err)
	}
	fmt.Println("blocked:", sim.Blocked())
	fmt.Println("device:", dev.Synchronize(ctx))
	unblock()
	fmt.Println("stream:", <-answer)
	if err := errors.Join(s.Close(), rt.Close(), sim.Check(), sim.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// blocked: map[cudaStreamQuery:1]
	// device: <nil>
	// stream: true
}
