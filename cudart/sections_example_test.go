//go:build linux && !android && (amd64 || arm64)

package cudart_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
)

// Library reports what was loaded. What was tried before it is in Attempts.
func Example_loading() {
	sim, err := cudasim.New(cudasim.Config{Version: 12040})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim}) // or Library: "/path/to/libcudart.so.12"
	check(err)
	lib := rt.Library()
	fmt.Printf("%s: runtime %v, driver for up to %v, tried: %d\n", lib.Path, lib.Runtime, lib.Driver, len(lib.Attempts))
	check(errors.Join(rt.Close(), sim.Close()))

	without, err := cudasim.New(cudasim.Config{NoDriver: true})
	check(err)
	_, err = cudart.Open(context.Background(), cudart.Options{Source: without})
	var open *cudart.OpenError
	if errors.As(err, &open) {
		fmt.Println(open.Remedy())
	}
	check(without.Close())
	// Output:
	// simulated libcudart 12.4: runtime 12.4, driver for up to 12.4, tried: 1
	// install an NVIDIA driver or, in a container, start it with the GPU (--gpus all, or the nvidia runtime class)
}

// Goroutines may use any device: each call selects its own.
func Example_threads() {
	sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	var users sync.WaitGroup
	for _, dev := range rt.Devices() {
		users.Go(func() {
			mem, err := dev.Alloc(1 << 20)
			check(err)
			check(dev.Memset(mem.Ptr(), 0, mem.Len()))
			check(mem.Close())
		})
	}
	users.Wait()
	fmt.Println("misuses:", len(sim.Misuses()))
	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// misuses: 0
}

// Device memory with a size has checked ranges, and typed views.
func ExampleDevice_Alloc() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)

	mem, err := dev.Alloc(4096)
	check(err)
	header, err := mem.Range(0, 64)
	check(err)
	_, err = mem.Range(4000, 100)
	fmt.Println(header == mem.Ptr(), errors.Is(err, cudart.ErrInvalidValue))

	check(errors.Join(mem.Close(), rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// true true
}

// Pinned memory stays as it is until the stream has passed the copy that reads it.
func Example_memoryLifetime() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	check(err)
	mem, err := dev.Alloc(4096)
	check(err)
	host, err := dev.HostAlloc(4096, 0)
	check(err)

	check(s.CopyToDevice(mem.Ptr(), host, mem.Len()))
	copied := s.Point()
	check(copied.Wait(context.Background())) // only now may host be written, or freed
	check(dev.FreeHost(host))
	fmt.Println("freed")

	check(errors.Join(mem.Close(), s.Close(), rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// freed
}

// Allocations take 1 byte or more, copies 0 or more.
func Example_sizes() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)

	_, err = dev.Malloc(0)
	fmt.Println(err)
	fmt.Println(dev.CopyToDevice(0, nil, 0))

	check(errors.Join(rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// cudaMalloc: size 0: must be positive: cudaErrorInvalidValue (1): invalid argument
	// <nil>
}

// In debug mode an asynchronous copy of memory that is not pinned is an error.
func Example_debugging() {
	sim, err := cudasim.New(cudasim.Config{})
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim, Debug: true}) // as PINNED_DEBUG=1
	check(err)
	dev, err := rt.Device(0)
	check(err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	check(err)
	mem, err := dev.Alloc(64)
	check(err)

	pageable := make([]byte, 64)
	err = s.CopyToDevice(mem.Ptr(), unsafe.Pointer(&pageable[0]), len(pageable))
	fmt.Println(errors.Is(err, cudart.ErrInvalidValue))

	check(errors.Join(mem.Close(), s.Close(), rt.Close(), sim.Check(), sim.Close()))
	// Output:
	// true
}
