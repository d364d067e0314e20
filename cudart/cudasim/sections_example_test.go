//go:build linux && !android && (amd64 || arm64)

package cudasim_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/kernel"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// start opens a simulated library with a stream on device 0.
func start(cfg cudasim.Config) (*cudasim.Sim, *cudart.Runtime, *cudart.Stream) {
	sim, err := cudasim.New(cfg)
	check(err)
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	check(err)
	dev, err := rt.Device(0)
	check(err)
	s, err := dev.NewStream(cudart.StreamOptions{})
	check(err)
	return sim, rt, s
}

// shut closes it, and fails if something was misused or not released.
func shut(sim *cudasim.Sim, rt *cudart.Runtime, s *cudart.Stream) {
	check(errors.Join(s.Close(), rt.Close(), sim.Check(), sim.Close()))
}

// CUDA 11.8 has no batches of copies.
func Example_versions() {
	for _, v := range []cudart.Version{11080, 13000} {
		sim, rt, s := start(cudasim.Config{Version: v})
		fmt.Println(rt.Library().Runtime, rt.Library().CopyBatch)
		shut(sim, rt, s)
	}
	// Output:
	// 11.8 false
	// 13.0 true
}

// A held simulator runs nothing, so that a test sees what is true before the work is done.
func Example_streamsAndTime() {
	sim, rt, s := start(cudasim.Config{})
	mem, err := s.Device().Alloc(4096)
	check(err)
	sim.Hold()
	check(s.Memset(mem.Ptr(), 1, mem.Len()))
	done, err := s.Query()
	check(err)
	fmt.Println("held:", done)
	sim.Release()
	check(s.Synchronize(context.Background()))
	done, err = s.Query()
	check(err)
	fmt.Println("released:", done)
	check(mem.Close())
	shut(sim, rt, s)
	// Output:
	// held: false
	// released: true
}

// The third operation blocks on a stream that holds two.
func Example_fullQueues() {
	sim, rt, s := start(cudasim.Config{QueueDepth: 2})
	mem, err := s.Device().Alloc(64)
	check(err)
	sim.Hold()
	queued := make(chan error, 3)
	go func() {
		for range 3 {
			queued <- s.Memset(mem.Ptr(), 1, mem.Len())
		}
	}()
	check(sim.AwaitBlocked(context.Background(), "cudaMemsetAsync", 1))
	fmt.Println("queued:", len(queued))
	sim.Release()
	check(errors.Join(<-queued, <-queued, <-queued, s.Synchronize(context.Background())))
	check(mem.Close())
	shut(sim, rt, s)
	// Output:
	// queued: 2
}

// A copy past the end of an allocation fails, as on a GPU.
func Example_memory() {
	sim, rt, s := start(cudasim.Config{})
	mem, err := s.Device().Alloc(100)
	check(err)
	bytes := make([]byte, 200)
	err = s.Device().CopyToDevice(mem.Ptr(), unsafe.Pointer(&bytes[0]), len(bytes))
	fmt.Println(errors.Is(err, cudart.ErrInvalidValue), sim.Outstanding())
	check(mem.Close())
	shut(sim, rt, s)
	// Output:
	// true 1 device allocation (100 bytes), 1 stream
}

// With confidential computing cudaHostRegister fails, and cudaHostAlloc works.
func Example_hostsThatRefuseToPin() {
	sim, rt, s := start(cudasim.Config{NoRegister: true})
	page := make([]byte, 4096)
	err := s.Device().HostRegister(unsafe.Pointer(&page[0]), len(page), 0)
	fmt.Println(errors.Is(err, cudart.ErrNotSupported))
	host, err := s.Device().HostAlloc(4096, 0)
	check(err)
	check(s.Device().FreeHost(host))
	shut(sim, rt, s)
	// Output:
	// true
}

// Of three devices, the first and the last cannot access each other's memory.
func Example_peers() {
	sim, rt, s := start(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3), NoPeerAccess: [][2]int{{0, 2}}})
	for _, peer := range rt.Devices()[1:] {
		ok, err := s.Device().CanAccessPeer(peer)
		check(err)
		fmt.Println(peer.Ordinal(), ok)
	}
	shut(sim, rt, s)
	// Output:
	// 1 true
	// 2 false
}

// A call makes a context on the device that it is for, and on no other.
func Example_kernels() {
	sim, rt, s := start(cudasim.Config{Kernels: map[string]cudasim.KernelFunc{
		"double": func(l *cudasim.Launch) {
			numbers := cudasim.Elements[uint32](l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 4*cudasim.Arg[int](l, 1)))
			for i := range numbers {
				numbers[i] *= 2
			}
		},
	}})
	defer shut(sim, rt, s)
	dev := s.Device()
	ctx := context.Background()
	code, err := kernel.Load(ctx, dev, []byte(".version 7.0\n.target sm_75\n.visible .entry double(.param .u64 numbers, .param .u64 n) { ret; }\n"))
	check(err)
	double, err := code.Kernel(ctx, "double")
	check(err)

	numbers := []uint32{1, 2, 3}
	p, err := dev.Malloc(12)
	check(err)
	check(dev.CopyToDevice(p, unsafe.Pointer(&numbers[0]), 12))
	check(double.Launch(s, kernel.Threads(3, 3), kernel.Arg(p), kernel.Arg(3)))
	check(s.Synchronize(context.Background()))
	check(dev.CopyToHost(unsafe.Pointer(&numbers[0]), p, 12))
	fmt.Println(numbers)
	check(dev.Free(p))
	check(code.Close())
	// Output: [2 4 6]
}

func Example_threads() {
	sim, rt, s := start(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	fmt.Println(sim.Contexts(), len(sim.Misuses()))
	shut(sim, rt, s)
	// Output:
	// [0] 0
}

// Check reports what a program has left.
func Example_misuse() {
	sim, rt, s := start(cudasim.Config{})
	mem, err := s.Device().Alloc(64)
	check(err)
	check(s.Close())
	fmt.Println(sim.Check() != nil, sim.Outstanding())
	check(mem.Close())
	shut(sim, rt, s)
	// Output:
	// true 1 device allocation (64 bytes)
}
