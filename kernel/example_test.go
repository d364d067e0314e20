//go:build linux && !android && (amd64 || arm64)

package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/kernel"
)

// Code from a compiler is loaded, launched on a stream, and unloaded.
func Example() {
	scale := func(ctx context.Context, s *cudart.Stream, file string, x cudart.DevPtr, n int) (err error) {
		ptx, err := os.ReadFile(file) // nvcc --ptx
		if err != nil {
			return err
		}
		m, err := kernel.Load(ctx, s.Device(), ptx)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.Close()) }() // waits for the kernel
		k, err := m.Kernel(ctx, "scale")
		if err != nil {
			return err
		}
		if err := k.Launch(s, kernel.Threads(n, 256), kernel.Arg(x), kernel.Arg(float32(2)), kernel.Arg(n)); err != nil {
			return err
		}
		return s.Synchronize(ctx)
	}
	_ = scale
}

// On a simulated device a Go function stands for each kernel.
func ExampleLoad() {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{Kernels: map[string]cudasim.KernelFunc{"scale": func(l *cudasim.Launch) {
		x := cudasim.Elements[float32](l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 4*cudasim.Arg[int](l, 2)))
		for i := range x {
			x[i] *= cudasim.Arg[float32](l, 1)
		}
	}}})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()

	ctx, dev := context.Background(), rt.Devices()[0]
	_, err = kernel.Load(ctx, dev, []byte("no code"))
	fmt.Println(err)
	m, err := kernel.Load(ctx, dev, []byte(".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry scale(.param .u64 x, .param .f32 factor, .param .u64 n) { ret; }\n"))
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	k, err := m.Kernel(ctx, "scale")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(k.Limits().BlockThreads, "threads of a block")
	// Output:
	// kernel: load: 7 bytes that begin with "no code" are neither PTX, nor a cubin, nor a fat binary: cudaErrorInvalidKernelImage (200): device kernel image is invalid
	// 1024 threads of a block
}

// The shape of a launch: a million threads in blocks of 256.
func ExampleThreads() {
	c := kernel.Threads(1_000_000, 256)
	fmt.Println(c.Grid.X, "blocks of", c.Block.X)
	// Output: 3907 blocks of 256
}

// Memory that a kernel uses is freed when the stream has passed the launch.
func ExampleKernel_Launch() {
	once := func(ctx context.Context, k *kernel.Kernel, s *cudart.Stream, n int) (err error) {
		p, err := s.Device().Malloc(4 * n)
		if err != nil {
			return err
		}
		err = k.Launch(s, kernel.Threads(n, 256), kernel.Arg(p), kernel.Arg(n))
		if end := s.Point().Wait(ctx); end != nil {
			return errors.Join(err, end) // the kernel may still use the memory
		}
		return errors.Join(err, s.Device().Free(p))
	}
	_ = once
}
