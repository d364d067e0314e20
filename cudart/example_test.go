//go:build linux && !android && (amd64 || arm64)

package cudart_test

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

// check ends an example that fails.
func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Open a library, and copy bytes to the GPU and back. The library here is a simulated
// one; without Options.Source it is the one of the host.
func Example() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	fmt.Println(rt.Library().Path, "with", len(rt.Devices()), "device")

	dev, err := rt.Device(0)
	check(err)
	mem, err := dev.Malloc(5)
	check(err)
	src, dst := []byte("hello"), make([]byte, 5)
	check(dev.CopyToDevice(mem, unsafe.Pointer(&src[0]), 5))
	check(dev.CopyToHost(unsafe.Pointer(&dst[0]), mem, 5))
	fmt.Printf("%s from %v\n", dst, dev)

	check(errors.Join(dev.Free(mem), rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// simulated libcudart 13.0 with 1 device
	// hello from device 0 (Simulated GPU)
}

// Open bounds the time that a broken GPU or driver may take.
func ExampleOpen_deadline() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	unblock := sim.Block("cudaGetDeviceCount", cudasim.Fault{}) // as a driver that hangs

	ctx, cancel := context.WithCancel(context.Background()) // or WithTimeout
	go func() {
		check(sim.AwaitBlocked(ctx, "cudaGetDeviceCount", 1))
		cancel()
	}()
	_, err = cudart.Open(ctx, cudart.Options{Source: sim})
	var open *cudart.OpenError
	if errors.As(err, &open) {
		fmt.Println(open.Err)
	}

	unblock()
	check(sim.Close())
	// Output:
	// cudaGetDeviceCount of simulated libcudart 13.0 has not returned: context canceled
}

// Two events around a copy measure its time on the GPU.
func ExampleEvent_Since() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	check(err)
	start, err := dev.NewEvent()
	check(err)
	end, err := dev.NewEvent()
	check(err)
	const n = 64 << 20
	host, err := dev.HostAlloc(n, 0)
	check(err)
	mem, err := dev.Malloc(n)
	check(err)

	check(s.Record(start))
	check(s.CopyToDevice(mem, host, n))
	check(s.Record(end))
	check(s.Synchronize(context.Background()))
	took, err := end.Since(start)
	check(err)
	fmt.Printf("%.0f GB/s\n", n/float64(took.Nanoseconds()))

	check(errors.Join(dev.Free(mem), dev.FreeHost(host), start.Close(), end.Close(), s.Close()))
	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// 55 GB/s
}

// A Point after the copies that use a piece of memory reports when it may be used
// again. What is queued later does not matter.
func ExampleStream_Point() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	check(err)
	host, err := dev.HostAlloc(4096, 0)
	check(err)
	mem, err := dev.Malloc(4096)
	check(err)
	ctx := context.Background()

	sim.Hold() // the GPU starts nothing
	check(s.CopyToDevice(mem, host, 4096))
	copied := s.Point()
	fmt.Println("host may be written:", copied.Done(ctx))
	sim.Release()

	later := make(chan struct{})
	check(s.LaunchHostFunc(func() { <-later })) // other work, which goes on
	check(copied.Wait(ctx))
	fmt.Println("host may be written:", copied.Done(ctx), "- error:", copied.Err())
	close(later)

	check(s.Synchronize(ctx))
	check(errors.Join(dev.Free(mem), dev.FreeHost(host), s.Close()))
	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// host may be written: false
	// host may be written: true - error: <nil>
}

// A copy in the order of another library's work: after what it has queued on its stream
// so far, and before what it queues later.
func ExampleDevice_StreamFromHandle() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)
	mem, err := dev.Malloc(5)
	check(err)
	host, err := dev.HostAlloc(5, 0)
	check(err)
	theirs, err := dev.NewStream(cudart.StreamOptions{}) // instead of another library
	check(err)
	handle := theirs.Handle() // a cudaStream_t: torch.cuda.Stream.cuda_stream, for one

	s, err := dev.StreamFromHandle(handle)
	check(err)
	check(theirs.Memset(mem, 'x', 5)) // the other library's kernel
	check(s.CopyToHost(host, mem, 5)) // our copy of its result
	check(s.Synchronize(context.Background()))
	fmt.Println(string(unsafe.Slice((*byte)(host), 5)))

	check(s.Close()) // first: it does not destroy the stream
	check(theirs.Close())
	check(errors.Join(dev.Free(mem), dev.FreeHost(host)))
	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// xxxxx
}

// Errors are inspected with errors.Is and a Code, also when other packages have wrapped
// them.
func ExampleCode() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)

	_, err = dev.Malloc(1 << 40)
	switch {
	case errors.Is(err, cudart.ErrMemoryAllocation):
		fmt.Println("too large:", err)
	default:
		check(err)
	}

	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// too large: cudaMalloc: 1099511627776 bytes on device 0 (Simulated GPU): cudaErrorMemoryAllocation (2): out of memory
}

// Stuck names calls that do not return, which no context can end.
func ExampleRuntime_Stuck() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)

	unblock := sim.Block("cudaMemGetInfo", cudasim.Fault{}) // as a driver that hangs
	returned := make(chan error)
	go func() {
		_, _, err := dev.MemInfo()
		returned <- err
	}()
	ctx := context.Background()
	check(sim.AwaitBlocked(ctx, "cudaMemGetInfo", 1))
	fmt.Println(rt.Stuck(ctx, 10*time.Millisecond))

	unblock()
	check(<-returned)
	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// [cudaMemGetInfo on device 0]
}
