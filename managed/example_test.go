//go:build linux && !android && (amd64 || arm64)

package managed_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/managed"
)

// openDevice opens device 0, here of a simulated GPU with 64 MiB.
func openDevice() (dev *cudart.Device, close func()) {
	sim, err := cudasim.New(cudasim.Config{Devices: []cudasim.DeviceConfig{{Memory: 64 << 20}}})
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(cudart.Options{Source: sim}) // cudart.Options{} for a real one
	if err != nil {
		log.Fatal(err)
	}
	if dev, err = rt.Device(0); err != nil {
		log.Fatal(err)
	}
	return dev, func() { _ = rt.Close(); _ = sim.Close() }
}

func Example() {
	ctx := context.Background()
	dev, done := openDevice()
	defer done()
	a, err := managed.New(ctx, dev, managed.Options{Reserve: 8 << 20})
	if err != nil {
		log.Fatal(err)
	}
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	m, err := a.AllocLabel(ctx, "features", 4<<20)
	if err != nil {
		log.Fatal(err)
	}
	x := hostmem.Slice[float32](m)
	for i := range x {
		x[i] = 1 // the CPU writes
	}
	if err := m.All().Prefetch(ctx, s, dev.Location()); err != nil {
		log.Fatal(err)
	}
	if err := s.Memset(m.DevPtr(), 0, m.Len()/2); err != nil { // the GPU works
		log.Fatal(err)
	}
	if err := s.Synchronize(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(x[0], x[len(x)-1])
	fmt.Println(a.Stats().Labels["features"].Allocated, "bytes")
	_, err = a.Alloc(ctx, 60<<20)
	fmt.Println("refused:", err != nil)
	if err := m.Close(); err != nil {
		log.Fatal(err)
	}
	if err := s.Close(); err != nil {
		log.Fatal(err)
	}
	if err := a.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// 0 1
	// 4194304 bytes
	// refused: true
}

// 128 MiB go through 16 MiB of the device memory.
func ExamplePlan() {
	ctx := context.Background()
	dev, done := openDevice()
	defer done()
	a, err := managed.New(ctx, dev, managed.Options{Oversubscribe: true})
	if err != nil {
		log.Fatal(err)
	}
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	m, err := a.Alloc(ctx, 128<<20)
	if err != nil {
		log.Fatal(err)
	}
	const part = 2 << 20
	var steps []managed.Step
	for off := 0; off < m.Len(); off += part {
		steps = append(steps, managed.Step{m.Range(off, part).Write()})
	}
	p, err := a.NewPlan(steps, managed.PlanOptions{Budget: 16 << 20, Chunk: part})
	if err != nil {
		log.Fatal(err)
	}
	err = p.Run(ctx, s, func(step int) error {
		return s.Memset(m.DevPtr()+cudart.DevPtr(step*part), byte(step), part)
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(m.Bytes()[0], m.Bytes()[m.Len()-1]) // it is on the host again
	if err := m.Close(); err != nil {
		log.Fatal(err)
	}
	if err := s.Close(); err != nil {
		log.Fatal(err)
	}
	if err := a.Close(); err != nil {
		log.Fatal(err)
	}
	// Output: 0 63
}
