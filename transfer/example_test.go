//go:build linux && !android && (amd64 || arm64)

package transfer_test

import (
	"bytes"
	"context"
	"fmt"
	"log"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/transfer"
)

// device is a simulated one; cudart.Open(context.Background(), cudart.Options{}) opens real ones.
func device() (dev *cudart.Device, close func()) {
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
	return dev, func() { rt.Close(); sim.Close() }
}

func ExampleCopier() {
	ctx := context.Background()
	dev, closeDevice := device()
	defer closeDevice()
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	data := bytes.Repeat([]byte("any Go memory "), 1<<18)
	mem, err := dev.Malloc(len(data))
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(mem)
	if err := c.Upload(ctx, mem, data); err != nil {
		log.Fatal(err)
	}
	back := make([]byte, len(data))
	if err := c.Download(ctx, back, mem); err != nil {
		log.Fatal(err)
	}
	fmt.Println(bytes.Equal(data, back), c.Stats().StagedBytes)
	// Output: true 7340032
}

// Many small copies cost a fifth when they are made together.
func ExampleCopier_UploadAll() {
	ctx := context.Background()
	dev, closeDevice := device()
	defer closeDevice()
	c, err := transfer.NewCopier(ctx, dev, transfer.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	table, err := dev.Malloc(100 * 64)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(table)
	var parts []transfer.Part
	for _, row := range []int{93, 4, 17} {
		parts = append(parts, transfer.Part{Device: table + cudart.DevPtr(row*64), Host: make([]byte, 64)})
	}
	if err := c.UploadAll(ctx, parts); err != nil {
		log.Fatal(err)
	}
	fmt.Println(c.Stats().BatchedBytes, "bytes")
	// Output: 192 bytes
}

// A model's weights onto every GPU of a host, or a part onto each.
func ExampleFanout() {
	ctx := context.Background()
	sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	if err != nil {
		log.Fatal(err)
	}
	defer sim.Close()
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim}) // cudart.Options{} for real ones
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()
	devs := rt.Devices()
	f, err := transfer.NewFanout(ctx, devs, transfer.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer f.Close()

	weights := bytes.Repeat([]byte("weights "), 1<<20) // or a file, with UploadFrom
	var mems []cudart.DevPtr
	for _, dev := range devs {
		mem, err := dev.Malloc(len(weights))
		if err != nil {
			log.Fatal(err)
		}
		defer dev.Free(mem)
		mems = append(mems, mem)
	}
	if err := f.Upload(ctx, mems, weights); err != nil {
		log.Fatal(err)
	}
	fmt.Println(f.Stats().StagedBytes, "bytes read,", f.Stats().PeerBytes, "from GPU to GPU")
	// Output:
	// 8388608 bytes read, 8388608 from GPU to GPU
}
