//go:build linux && !android && (amd64 || arm64)

package blocks_test

import (
	"context"
	"fmt"
	"log"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/transfer/blocks"
)

// A pool of pages comes to the device in the order of a list, in the order of a stream.
func Example() {
	ctx := context.Background()
	sim, err := cudasim.New(cudasim.Config{}) // without it Open finds a real library
	if err != nil {
		log.Fatal(err)
	}
	defer sim.Close()
	rt, err := cudart.Open(ctx, cudart.Options{Source: sim})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()
	dev, err := rt.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	copier, err := blocks.New(ctx, dev, blocks.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer copier.Close()
	pages, err := hostmem.Alloc(ctx, dev, 4*16, hostmem.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer pages.Close()
	copy(pages.Bytes(), "the first page, the second one, the third page, the fourth one. ")
	mem, err := dev.Alloc(2 * 16)
	if err != nil {
		log.Fatal(err)
	}
	defer mem.Close()
	s, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	loaded, err := copier.CopyToDevice(ctx, s, blocks.Copy{
		Host: pages.Bytes(), HostIndex: []uint32{3, 1}, Device: mem.Ptr(), DeviceLen: mem.Len(), Size: 16,
	})
	if err != nil {
		log.Fatal(err)
	}
	// Kernels on s may use the pages from here on; the CPU waits.
	if err := loaded.Wait(ctx); err != nil {
		log.Fatal(err)
	}
	result := make([]byte, 2*16)
	if err := dev.CopyToHost(unsafe.Pointer(&result[0]), mem.Ptr(), len(result)); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", result)
	// Output: the fourth one. the second one,
}
