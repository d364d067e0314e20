package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/kernel"
)

// Code from a compiler, on a stream.
func Example() {
	scale := func(ctx context.Context, s *cudart.Stream, file string, x cudart.DevPtr, n int) (err error) {
		ptx, err := os.ReadFile(file) // nvcc --ptx
		if err != nil {
			return err
		}
		m, err := kernel.Load(s.Device(), ptx)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.Close()) }() // waits for the kernel
		k, err := m.Kernel("scale")
		if err != nil {
			return err
		}
		if err := k.Launch(s, kernel.Threads(n, 256), kernel.Ptr(x), kernel.Float32(2), kernel.Int(n)); err != nil {
			return err
		}
		return s.Synchronize(ctx)
	}
	_ = scale
}

// What the GPU has is compared there, at the speed of its memory.
func ExampleMemory_Compare() {
	check := func(ctx context.Context, m *kernel.Memory, s *cudart.Stream, p cudart.DevPtr, n int) error {
		content := kernel.Content{Seed: 42}
		if err := m.Fill(s, p, n, content, 0); err != nil {
			return err
		}
		found, err := m.Compare(ctx, s, p, n, content, 0)
		if err == nil && found.Wrong > 0 {
			err = fmt.Errorf("%d bytes are wrong, the first at offset %d", found.Wrong, found.First)
		}
		return err
	}
	_ = check
}
