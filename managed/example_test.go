//go:build linux && !android && (amd64 || arm64)

package managed_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/managed"
)

const mib = 1 << 20

// open opens device 0, here a simulated GPU with 64 MiB, with a stream and an allocator.
func open(o managed.Options) (dev *cudart.Device, s *cudart.Stream, a *managed.Allocator, done func()) {
	return openDevice(cudasim.DeviceConfig{Memory: 64 * mib}, o)
}

func openDevice(cfg cudasim.DeviceConfig, o managed.Options) (dev *cudart.Device, s *cudart.Stream, a *managed.Allocator, done func()) {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{Devices: []cudasim.DeviceConfig{cfg}}) // cudart.Options{} for a real one
	check(err)
	dev, err = rt.Device(0)
	check(err)
	s, err = dev.NewStream(cudart.StreamOptions{})
	check(err)
	a, err = managed.New(context.Background(), dev, o)
	check(err)
	return dev, s, a, func() { check(errors.Join(s.Close(), a.Close(), rt.Close())) }
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// The CPU writes, the GPU works, and the CPU reads.
func Example() {
	ctx := context.Background()
	dev, s, a, done := open(managed.Options{Reserve: 8 * mib})
	defer done()

	m, err := a.Alloc(ctx, 4*mib, managed.AllocOptions{Label: "features"})
	check(err)
	x := hostmem.Slice[float32](m.Bytes())
	for i := range x {
		x[i] = 1
	}
	check(m.Whole().Prefetch(ctx, s, dev.Location()))
	check(s.Memset(m.Ptr(), 0, m.Len()/2))
	check(s.Synchronize(ctx))
	fmt.Println(x[0], x[len(x)-1])
	fmt.Println(a.Stats().Labels["features"].Allocated, "bytes")
	check(m.Close())

	// Output:
	// 0 1
	// 4194304 bytes
}

// Coherence: on a device without concurrent access, HostBytes waits until the CPU may access the
// memory.
func ExampleMemory_HostBytes() {
	ctx := context.Background()
	windows := cudasim.DeviceConfig{Attributes: map[cudart.Attr]int{cudart.AttrConcurrentManagedAccess: 0}}
	_, s, a, done := openDevice(windows, managed.Options{AllowExclusive: true})
	defer done()

	m, err := a.Alloc(ctx, mib, managed.AllocOptions{})
	check(err)
	check(s.Memset(m.Ptr(), 7, m.Len()))
	b, err := m.HostBytes(ctx) // m.Bytes() while the GPU works would crash the process
	check(err)
	fmt.Println(b[0])
	check(m.Close())

	// Output: 7
}

// Moving: memory goes to the device at the speed of the link, is overwritten there, and a part of
// it comes back.
func ExampleAllocator_Move() {
	ctx := context.Background()
	dev, s, a, done := open(managed.Options{})
	defer done()

	m, err := a.Alloc(ctx, 8*mib, managed.AllocOptions{})
	check(err)
	m.Bytes()[4*mib] = 1
	check(a.Move(ctx, dev.Location(), m.Whole()))
	check(m.Range(0, 4*mib).Discard(ctx, s)) // the Memset overwrites it: nothing to copy before
	check(s.Memset(m.Ptr(), 2, 4*mib))
	check(s.Synchronize(ctx)) // Move is not ordered with the stream
	check(a.Move(ctx, cudart.HostLocation(), m.Range(0, 4*mib)))
	fmt.Println(m.Bytes()[0], m.Bytes()[4*mib])
	check(m.Close())

	// Output: 2 1
}

// Memory that all read has a copy on the host and on the device.
func ExampleRange_Advise() {
	ctx := context.Background()
	dev, s, a, done := open(managed.Options{})
	defer done()

	m, err := a.Alloc(ctx, 8*mib, managed.AllocOptions{})
	check(err)
	table := m.Range(0, 2*mib)
	check(table.Advise(ctx, cudart.AdviseReadMostly, cudart.HostLocation()))
	check(table.Prefetch(ctx, s, dev.Location()))
	check(s.Synchronize(ctx))
	at, err := dev.RangeAttributes(m.Ptr(), table.Len)
	check(err)
	fmt.Println("read mostly:", at.ReadMostly)
	check(m.Close())

	// Output: read mostly: true
}

// Oversubscription: memory beyond the capacity is refused, unless Options.Oversubscribe allows it
// on the host.
func ExampleOptions_oversubscribe() {
	ctx := context.Background()
	for _, oversubscribe := range []bool{false, true} {
		_, _, a, done := open(managed.Options{Oversubscribe: oversubscribe})
		m, err := a.Alloc(ctx, 100*mib, managed.AllocOptions{})
		fmt.Println(errors.Is(err, managed.ErrOversubscribed), m.OnHost())
		if err == nil {
			check(m.Close())
		}
		done()
	}

	// Output:
	// true false
	// false true
}

// Oversubscription: 128 MiB go through 16 MiB of the device memory.
func ExamplePlan() {
	ctx := context.Background()
	_, s, a, done := open(managed.Options{Oversubscribe: true})
	defer done()

	m, err := a.Alloc(ctx, 128*mib, managed.AllocOptions{})
	check(err)
	const part = 2 * mib
	var steps []managed.Step
	for off := 0; off < m.Len(); off += part {
		steps = append(steps, managed.Step{m.Range(off, part).As(managed.ReadWrite)})
	}
	p, err := a.NewPlan(steps, managed.PlanOptions{Budget: 16 * mib, Chunk: part})
	check(err)
	check(p.Run(ctx, s, func(step int) error {
		return s.Memset(m.Ptr()+cudart.DevPtr(step*part), byte(step), part)
	}))
	fmt.Println(m.Bytes()[0], m.Bytes()[m.Len()-1]) // it is on the host again
	check(m.Close())

	// Output: 0 63
}

// Reserve: a library needs 40 MiB of device memory, and managed memory occupies 48 of 64.
func ExampleAllocator_Reclaim() {
	ctx := context.Background()
	dev, s, a, done := open(managed.Options{})
	defer done()

	m, err := a.Alloc(ctx, 48*mib, managed.AllocOptions{})
	check(err)
	check(a.Move(ctx, dev.Location(), m.Whole()))
	moved, err := a.Reclaim(ctx, s, 40*mib)
	check(err)
	free, _, err := dev.MemInfo()
	check(err)
	fmt.Println(moved/mib, "MiB moved;", free >= 40*mib)
	check(m.Close())

	// Output: 48 MiB moved; true
}

// Memory lifetime: an allocator whose memory is not closed is in use.
func ExampleAllocator_CloseContext() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, _, a, done := open(managed.Options{})
	defer done()

	m, err := a.Alloc(ctx, mib, managed.AllocOptions{})
	check(err)
	err = a.CloseContext(ctx)
	fmt.Println(errors.Is(err, cudart.ErrInUse))
	check(m.CloseContext(ctx)) // waits for the device's work
	check(a.CloseContext(ctx))
	_, err = a.Alloc(ctx, mib, managed.AllocOptions{})
	fmt.Println(errors.Is(err, cudart.ErrClosed))

	// Output:
	// true
	// true
}

// Threads: goroutines share an allocator.
func ExampleAllocator_goroutines() {
	ctx := context.Background()
	_, _, a, done := open(managed.Options{})
	defer done()

	errs := make(chan error)
	for range 4 {
		go func() {
			m, err := a.Alloc(ctx, mib, managed.AllocOptions{})
			if err == nil {
				err = m.Close()
			}
			errs <- err
		}()
	}
	for range 4 {
		check(<-errs)
	}
	fmt.Println(a.Stats().Allocs, a.Stats().Allocated)

	// Output: 4 0
}
