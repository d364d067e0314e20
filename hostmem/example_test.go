//go:build linux && !android && (amd64 || arm64)

package hostmem_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
)

// openGPU opens a simulated GPU, so that the examples run anywhere. Programs call
// cudart.Open(context.Background(), cudart.Options{}).
func openGPU() (dev *cudart.Device, s *cudart.Stream, done func()) {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if dev, err = rt.Device(0); err != nil {
		log.Fatal(err)
	}
	if s, err = dev.NewStream(cudart.StreamOptions{}); err != nil {
		log.Fatal(err)
	}
	return dev, s, func() {
		if err := errors.Join(s.Close(), rt.Close()); err != nil {
			log.Fatal(err)
		}
	}
}

// A million numbers go to the GPU and come back into the same memory.
func Example() {
	dev, s, done := openGPU()
	defer done()
	ctx := context.Background()

	buf, err := hostmem.Alloc(ctx, dev, 4_000_000, hostmem.Options{Label: "numbers"})
	if err != nil {
		log.Fatal(err)
	}
	defer buf.Close()
	numbers := hostmem.Slice[float32](buf.Bytes())
	for i := range numbers {
		numbers[i] = float32(i)
	}

	place, err := dev.Malloc(buf.Len())
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(place)
	if err := buf.CopyToDevice(s, place, 0, buf.Len()); err != nil {
		log.Fatal(err)
	}
	if err := s.Synchronize(ctx); err != nil { // the copy has run only now
		log.Fatal(err)
	}
	clear(numbers)
	if err := buf.CopyFromDevice(s, place, 0, buf.Len()); err != nil {
		log.Fatal(err)
	}
	if err := s.Synchronize(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(buf, "reserves", buf.Info().Reserved)
	fmt.Println(len(numbers), numbers[999_999])
	// Output:
	// buffer "numbers" of 4000000 bytes reserves 4001792
	// 1000000 999999
}

// Chunks pin faster. Buffer's own copies are split where spans end; copies by other means must
// not cross from one span to the next.
func ExampleBuffer_Spans() {
	dev, _, done := openGPU()
	defer done()
	buf, err := hostmem.Alloc(context.Background(), dev, 5<<20, hostmem.Options{Chunk: 2 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer buf.Close()
	for _, span := range slices.Collect(buf.Spans(0, buf.Len())) {
		fmt.Println(span.Len, "bytes at", span.Off)
	}
	// Output:
	// 2097152 bytes at 0
	// 2097152 bytes at 2097152
	// 1048576 bytes at 4194304
}

// Memory lifetime: Close waits for the buffer's copies. A context bounds the wait.
func ExampleBuffer_CloseContext() {
	dev, s, done := openGPU()
	defer done()
	buf, err := hostmem.Alloc(context.Background(), dev, 4096, hostmem.Options{})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := buf.CloseContext(ctx); err != nil {
		log.Fatal(err) // the buffer is as it was, and can be closed later
	}
	err = buf.CopyToDevice(s, 0, 0, 4096)
	fmt.Println(err)
	fmt.Println(errors.Is(err, cudart.ErrClosed), buf.Bytes() == nil)
	// Output:
	// hostmem: copy to device: buffer of 4096 bytes: already closed
	// true true
}

// The GPU reads a file where the kernel keeps it.
func ExampleMapFile() {
	dev, s, done := openGPU()
	defer done()
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "weights.bin")
	if err := os.WriteFile(path, make([]byte, 1000), 0o600); err != nil {
		log.Fatal(err)
	}

	file, err := hostmem.MapFile(ctx, dev, path, hostmem.FileOptions{Label: "weights"})
	if err != nil {
		log.Fatal(err)
	}
	place, err := dev.Malloc(file.Len())
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(place)
	if err := file.CopyToDevice(s, place, 0, file.Len()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(file.CopyFromDevice(s, place, 0, 1))
	if err := file.Close(); err != nil { // waits for the copy
		log.Fatal(err)
	}
	// Output:
	// hostmem: copy from device: file "weights" of 1000 bytes: registered read-only
}

// Any goroutine may allocate, copy and close. A context that ends ends every wait.
func Example_threads() {
	dev, s, done := openGPU()
	defer done()
	mem, err := dev.Malloc(4 << 20)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(mem)
	errs := make(chan error)
	for i := range 4 {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			buf, err := hostmem.Alloc(ctx, dev, 1<<20, hostmem.Options{})
			if err == nil {
				err = errors.Join(buf.CopyToDevice(s, mem+cudart.DevPtr(i<<20), 0, 1<<20), buf.CloseContext(ctx))
			}
			errs <- err
		}()
	}
	fmt.Println(errors.Join(<-errs, <-errs, <-errs, <-errs))
	// Output: <nil>
}

// Reserved huge pages are taken where the administrator has reserved enough. Otherwise a
// note says so, and the buffer is made of other pages.
func Example_hugePages() {
	dev, _, done := openGPU()
	defer done()
	for _, pages := range []hostmem.HugePages{hostmem.HugePagesNever, hostmem.HugeTLB} {
		buf, err := hostmem.Alloc(context.Background(), dev, 3<<20, hostmem.Options{HugePages: pages})
		if err != nil {
			log.Fatal(err)
		}
		took := buf.Info().Reserved == 4<<20
		fmt.Println(buf.Len(), took == (pages == hostmem.HugeTLB) || len(buf.Info().Notes) > 0)
		if err := buf.Close(); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// 3145728 true
	// 3145728 true
}

// A limit of the process refuses what can never be pinned, and has other requests wait.
func Example_limits() {
	dev, _, done := openGPU()
	defer done()
	limit := hostmem.ReadStats().PinnedBytes + 1<<20
	if err := hostmem.SetLimits(hostmem.Limits{MaxBytes: limit}); err != nil {
		log.Fatal(err)
	}
	defer hostmem.SetLimits(hostmem.Limits{})
	_, err := hostmem.Alloc(context.Background(), dev, limit+1, hostmem.Options{})
	fmt.Println(errors.Is(err, hostmem.ErrLimit), errors.Is(err, hostmem.ErrTooLarge))

	buf, err := hostmem.Alloc(context.Background(), dev, 1<<20, hostmem.Options{})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err = hostmem.Alloc(ctx, dev, 1, hostmem.Options{}) // waits for the buffer
	fmt.Println(errors.Is(err, hostmem.ErrLimit), errors.Is(err, context.DeadlineExceeded))
	fmt.Println(buf.Close())
	// Output:
	// true true
	// true true
	// <nil>
}

// Memory that other code has mapped is pinned where it is, and found by its address.
func ExampleRegister() {
	dev, _, done := openGPU()
	defer done()
	mapped, err := syscall.Mmap(-1, 0, 100_000, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON) // as a C library does
	if err != nil {
		log.Fatal(err)
	}
	r, err := hostmem.Register(context.Background(), dev, mapped, hostmem.RegisterOptions{})
	if err != nil {
		log.Fatal(err)
	}
	_, off, ok := hostmem.Find(mapped[4096:])
	fmt.Println(r, off, ok)
	fmt.Println(errors.Join(r.Close(), syscall.Munmap(mapped))) // in this order
	// Output:
	// registration of 100000 bytes 4096 true
	// <nil>
}

// In debug mode what a program has pinned is listed with the stack of the call that did it.
func Example_debugging() {
	sim, err := cudasim.New(cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim, Debug: true}) // or PINNED_DEBUG=1
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	buf, err := hostmem.Alloc(context.Background(), dev, 10_000, hostmem.Options{Label: "forgotten"})
	if err != nil {
		log.Fatal(err)
	}
	for _, h := range hostmem.Outstanding() {
		if h.Label == "forgotten" {
			fmt.Println(h.Kind, h.Bytes, strings.Contains(h.Stack, "Example_debugging"))
		}
	}
	if err := errors.Join(buf.Close(), rt.Close()); err != nil {
		log.Fatal(err)
	}
	// Output: buffer 12288 true
}

// What a program has pinned.
func ExampleOutstanding() {
	dev, _, done := openGPU()
	defer done()
	buf, err := hostmem.Alloc(context.Background(), dev, 10_000, hostmem.Options{Label: "batch"})
	if err != nil {
		log.Fatal(err)
	}
	for _, h := range hostmem.Outstanding() {
		if h.Label == "batch" {
			fmt.Println(h.Kind, h.Label, h.Bytes)
		}
	}
	if err := buf.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// buffer batch 12288
}
