//go:build linux && !android && (amd64 || arm64)

package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/transfer"
)

// Numbers and structs go to the GPU and come back without package unsafe.
func ExampleUploadSlice() {
	sim, err := cudasim.New(cudasim.Config{}) // in place of a GPU
	if err != nil {
		log.Fatal(err)
	}
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err != nil {
		log.Fatal(err)
	}

	weights := []float32{0.5, -1.25, 3}
	mem, err := dev.Malloc(4 * len(weights))
	if err != nil {
		log.Fatal(err)
	}
	if err := transfer.UploadSlice(ctx, c, mem, weights); err != nil {
		log.Fatal(err)
	}
	back := make([]float32, len(weights))
	if err := transfer.DownloadSlice(ctx, c, back, mem); err != nil {
		log.Fatal(err)
	}
	fmt.Println(back)

	type vertex struct {
		Position [3]float32
		Color    [4]uint8
	}
	owned, err := dev.Alloc(3 * 16) // with its size
	if err != nil {
		log.Fatal(err)
	}
	vertices, err := cudart.ViewOf[vertex](owned)
	if err != nil {
		log.Fatal(err)
	}
	orange := []vertex{{Color: [4]uint8{255, 128, 0, 255}}}
	if err := transfer.UploadElements(ctx, c, vertices, orange); err != nil {
		log.Fatal(err)
	}
	fmt.Println(transfer.DownloadElements(ctx, c, make([]vertex, 4), vertices)) // of three

	if err := errors.Join(c.Close(), dev.Free(mem), owned.Close(), rt.Close(), sim.Check(), sim.Close()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// [0.5 -1.25 3]
	// transfer: download a []transfer_test.vertex of 4 elements: 3 elements on the device for 4: cudaErrorInvalidValue (1): invalid argument
}
