//go:build linux && !android && (amd64 || arm64)

package pool_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/hostmem/pool"
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

// A hundred batches share a few blocks of pinned memory. A block that a copy still reads is not
// reused before the copy is done.
func Example() {
	dev, s, done := openGPU()
	defer done()
	ctx := context.Background()
	p, err := pool.New(dev, pool.Options{MaxBytes: 64 << 20})
	if err != nil {
		log.Fatal(err)
	}
	place, err := dev.Malloc(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(place)

	for i := range 100 {
		lease, err := p.Get(ctx, 10_000)
		if err != nil {
			log.Fatal(err)
		}
		for j := range lease.Bytes() {
			lease.Bytes()[j] = byte(i)
		}
		if err := lease.CopyToDevice(s, place+cudart.DevPtr(i*10_000), 0, lease.Len()); err != nil {
			log.Fatal(err)
		}
		if err := lease.Release(); err != nil { // at once, although the copy may be running
			log.Fatal(err)
		}
	}
	if err := s.Synchronize(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.Stats().InUseBytes, "bytes in use, at most", p.Stats().MaxBytes)
	if err := p.Close(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.Stats().ReservedBytes, "reserved")
	// Output:
	// 0 bytes in use, at most 67108864
	// 0 reserved
}

// Memory lifetime: work that was queued by other means than the lease's own copies is waited for if Release is
// given its stream.
func ExampleLease_Release() {
	dev, s, done := openGPU()
	defer done()
	ctx := context.Background()
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	place, err := dev.Malloc(4096)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(place)
	lease, err := p.Get(ctx, 4096)
	if err != nil {
		log.Fatal(err)
	}
	if err := s.CopyToDevice(place, lease.Pointer(), lease.Len()); err != nil {
		log.Fatal(err)
	}
	if err := lease.Release(s); err != nil {
		log.Fatal(err)
	}
	err = lease.Release()
	fmt.Println(errors.Is(err, cudart.ErrClosed), lease.Bytes() == nil)
	if err := p.Close(); err != nil { // waits for the copy
		log.Fatal(err)
	}
	// Output: true true
}

// Close of a pool with leases counts them. Their memory is unmapped when they are released.
func ExamplePool_Close() {
	dev, _, done := openGPU()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := p.Get(context.Background(), 10_000)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(errors.Is(p.Close(), cudart.ErrInUse))
	_, err = p.Get(context.Background(), 1)
	fmt.Println(errors.Is(err, cudart.ErrClosed))
	if err := lease.Release(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.Close())
	// Output:
	// true
	// true
	// <nil>
}

// Small blocks are cut from shared registrations, and take up to an eighth more than requested.
func Example_sizes() {
	dev, _, done := openGPU()
	defer done()
	p, err := pool.New(dev, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close() // after the leases were released
	for _, n := range []int{1, 1000, 10_000, 3 << 20} {
		before := p.Stats().InUseBytes
		lease, err := p.Get(context.Background(), n)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(n, "bytes in a block of", p.Stats().InUseBytes-before)
		defer lease.Release()
	}
	fmt.Println(p.Stats().ReservedBytes, "reserved")
	// Output:
	// 1 bytes in a block of 64
	// 1000 bytes in a block of 1024
	// 10000 bytes in a block of 10240
	// 3145728 bytes in a block of 3145728
	// 5242880 reserved
}

// At its limit a pool has Get wait, and TryGet return an error.
func Example_limits() {
	dev, _, done := openGPU()
	defer done()
	p, err := pool.New(dev, pool.Options{MaxBytes: 4 << 20})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := p.Get(context.Background(), 4<<20)
	if err != nil {
		log.Fatal(err)
	}
	_, err = p.TryGet(context.Background(), 1)
	fmt.Println(errors.Is(err, hostmem.ErrLimit))
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	_, err = p.Get(ctx, 1)
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	_, err = p.Get(context.Background(), 5<<20)
	fmt.Println(errors.Is(err, hostmem.ErrTooLarge))

	if err := lease.Release(); err != nil {
		log.Fatal(err)
	}
	freed, err := p.Trim(context.Background(), 0)
	fmt.Println(freed, "unmapped,", err)
	fmt.Println(p.Close())
	// Output:
	// true
	// true
	// true
	// 4194304 unmapped, <nil>
	// <nil>
}

// Goroutines share a pool. A block that one of them releases serves another.
func Example_threads() {
	dev, _, done := openGPU()
	defer done()
	p, err := pool.New(dev, pool.Options{MaxBytes: 2 << 20})
	if err != nil {
		log.Fatal(err)
	}
	errs := make(chan error)
	for range 100 {
		go func() {
			lease, err := p.Get(context.Background(), 2<<20) // one at a time
			if err == nil {
				lease.Bytes()[0]++
				err = lease.Release()
			}
			errs <- err
		}()
	}
	for range 100 {
		if err := <-errs; err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(p.Stats().PeakReservedBytes, "reserved at most,", p.Stats().Misses, "pinned")
	fmt.Println(p.Close())
	// Output:
	// 2097152 reserved at most, 1 pinned
	// <nil>
}
