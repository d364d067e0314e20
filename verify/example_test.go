package verify_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/verify"
)

// On a machine with a GPU leave Options empty.
func ExampleRun() {
	sim, err := cudasim.New(cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer sim.Close()
	rt, err := cudart.Open(cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}

	report, err := verify.Run(context.Background(), dev, verify.Plan{
		Paths: []verify.Path{verify.PathPinned, verify.PathPageable},
		Sizes: []int{1, 4097, 2<<20 + 1},
	})
	if err != nil {
		log.Fatal(err) // cancelled, or a plan that makes no sense
	}
	if err := report.Err(); err != nil {
		log.Fatal(err) // bytes came back wrong, or a call failed
	}
	fmt.Println(report.Cases, "round trips,", report.MismatchCount, "mismatches")
	// Output: 21 round trips, 0 mismatches
}
