package verify_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/verify"
)

// device returns a simulated device. On a machine with a GPU use cudart.Open(context.Background(), cudart.Options{}).
func device() (sim *cudasim.Sim, dev *cudart.Device, closeAll func()) {
	sim, err := cudasim.New(cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	if dev, err = rt.Device(0); err != nil {
		log.Fatal(err)
	}
	return sim, dev, func() { rt.Close(); sim.Close() }
}

func ExampleRun() {
	_, dev, closeAll := device()
	defer closeAll()
	report, err := verify.Run(context.Background(), dev, verify.Plan{
		Paths: []verify.Path{"pinned", "pageable"},
		Sizes: []int{1, 4097, 2<<20 + 1},
	})
	if err != nil {
		log.Fatal(err) // cancelled, or a plan that makes no sense
	}
	if err := report.Err(); err != nil {
		log.Fatal(err) // a mismatch, or a call failed
	}
	fmt.Println(report.Cases, "round trips,", report.MismatchCount, "mismatches")
	// Output: 21 round trips, 0 mismatches
}

// A pattern that shows the place of each byte, at offsets that are not aligned.
func ExamplePlan() {
	_, dev, closeAll := device()
	defer closeAll()
	report, err := verify.Run(context.Background(), dev, verify.Plan{
		Paths:    []verify.Path{"pinned"},
		Sizes:    []int{65537},
		Streams:  []int{4}, // which share each copy
		Patterns: []verify.Pattern{"counter"},
		Offsets:  []verify.Offset{{Source: 1, Device: 3, Return: 5}},
		Variants: 1,
		NoStale:  true,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(report.Cases, "round trip of", report.VerifiedBytes, "bytes:", report.Err())
	// Output: 1 round trip of 65537 bytes: <nil>
}

// A mismatch says where it is and what the bytes are.
func ExampleMismatch() {
	m := verify.Mismatch{
		Case:                verify.Case{Path: "pinned", Pattern: "counter", SizeBytes: 8192, Streams: 1},
		FirstBadOffsetBytes: 4096, LastBadOffsetBytes: 8191, BadBytes: 4096, BadBits: 16384, Regions: 1,
		ExpectedHex: "0010", FoundHex: "9383",
		PageBytes: 4096, PageOf: "device address", Cause: "stale", At: "device",
	}
	fmt.Println(m)
	// Output: pinned counter 8 KiB: 4096 of 8192 bytes wrong, the first at offset 4096: expected 00 10, found 93 83; follows 4 KiB pages of the device address; stale: the upload did not arrive
}

// Run releases what it allocates.
func Example_memoryLifetime() {
	sim, dev, closeAll := device()
	defer closeAll()
	plan := verify.Plan{Paths: []verify.Path{"registered", "copier"}, Sizes: []int{1000}}
	if _, err := verify.Run(context.Background(), dev, plan); err != nil {
		log.Fatal(err)
	}
	if err := dev.Runtime().Close(); err != nil {
		log.Fatal(err)
	}
	fmt.Println("not released:", sim.Check())
	// Output: not released: <nil>
}

// Bytes are complete only after the stream was synchronized.
func ExampleStaleRead() {
	_, dev, closeAll := device()
	defer closeAll()
	r, err := verify.StaleRead(context.Background(), dev)
	if err != nil {
		log.Fatal(err)
	}
	if r.Shown() { // nearly always, unless the host is busy
		log.Printf("before synchronizing %d of %d bytes were old", r.StaleBefore, r.SampledBytes)
	}
	fmt.Println("mismatches after synchronizing:", r.BadAfter)
	// Output: mismatches after synchronizing: 0
}
