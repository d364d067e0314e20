//go:build linux && !android && (amd64 || arm64)

package weights_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/weights"
)

func ExampleLoadModel() {
	// A simulated GPU; without Options it is the machine's.
	rt, err := cudasim.Open(context.Background(), cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()
	dir := tinyModel()
	defer os.RemoveAll(dir)

	l, err := weights.LoadModel(context.Background(), rt.Devices()[0], dir, weights.LoadOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	p, err := l.Ptr("norm")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("norm has an address:", p != 0)
	for part := range l.All() {
		fmt.Println(part.Tensor.Name, part.Tensor.DType, part.Tensor.Shape, "at byte", part.Offset)
	}
	// Output:
	// norm has an address: true
	// embed BF16 [8 4] at byte 0
	// layers.0.up F8_E4M3 [4 4] at byte 256
	// norm F32 [4] at byte 512
}

// A load ends with its context.
func ExampleLoadModel_canceled() {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()
	dir := tinyModel()
	defer os.RemoveAll(dir)

	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("the server stops")
	cancel(cause)
	_, err = weights.LoadModel(ctx, rt.Devices()[0], dir, weights.LoadOptions{})
	fmt.Println(errors.Is(err, context.Canceled), errors.Is(err, cause))
	// Output: true true
}

func ExamplePlan_Load() {
	// A simulated GPU; without Options it is the machine's.
	rt, err := cudasim.Open(context.Background(), cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()

	dir := tinyModel()
	defer os.RemoveAll(dir)
	m, err := weights.OpenModel(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()

	// Norms go to all devices, of everything else each has a part of the rows.
	var shares []weights.Share
	for t := range m.Tensors() {
		for d := range rt.Devices() {
			part := t.Whole()
			if t.Name != "norm" {
				n := t.Shape[0]
				if part, err = t.Rows(n*d/2, n*(d+1)/2); err != nil {
					log.Fatal(err)
				}
			}
			shares = append(shares, weights.Share{Part: part, Device: d})
		}
	}
	plan, err := weights.PlanShares(shares, weights.PlanOptions{})
	if err != nil {
		log.Fatal(err)
	}
	memory := map[int]weights.Memory{}
	for _, d := range plan.Devices {
		dev := rt.Devices()[d.Device]
		p, err := dev.Malloc(d.Bytes)
		if err != nil {
			log.Fatal(err)
		}
		defer dev.Free(p)
		memory[d.Device] = weights.Memory{Device: dev, Ptr: p, Bytes: d.Bytes}
	}
	if err := plan.Load(context.Background(), memory, weights.LoadOptions{}); err != nil {
		log.Fatal(err) // a *weights.LoadError lists the complete tensors
	}
	for _, p := range plan.Devices[1].Tensors {
		got := make([]byte, p.Size)
		if err := rt.Devices()[1].CopyToHost(unsafe.Pointer(&got[0]), memory[1].Ptr+cudart.DevPtr(p.Offset), p.Size); err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: bytes %d to %d of %d, at %d of device 1\n", p.Tensor.Name, p.From, p.From+len(got), p.Tensor.Size, p.Offset)
	}
	// Output:
	// embed: bytes 32 to 64 of 64, at 0 of device 1
	// layers.0.up: bytes 8 to 16 of 16, at 256 of device 1
	// norm: bytes 0 to 16 of 16, at 512 of device 1
}

func ExampleSave() {
	// A simulated GPU; without Options it is the machine's.
	rt, err := cudasim.Open(context.Background(), cudasim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer rt.Close()
	dev := rt.Devices()[0]
	memory, err := dev.Malloc(4096)
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Free(memory)
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)

	saving, err := weights.Save(context.Background(), filepath.Join(dir, "model.safetensors"), []weights.SavedTensor{
		{Name: "embed", DType: weights.BF16, Shape: []int{32, 64}, Memory: weights.Memory{Device: dev, Ptr: memory, Bytes: 4096}},
		{Name: "scale", DType: weights.F32, Shape: []int{1}, Host: []byte{0, 0, 128, 63}},
	}, weights.SaveOptions{Metadata: map[string]string{"format": "pt"}})
	if err != nil {
		log.Fatal(err)
	}
	// The tensors may change from here on.
	if err := saving.Wait(context.Background()); err != nil {
		log.Fatal(err)
	}
	if err := weights.Verify(context.Background(), dir); err != nil {
		log.Fatal(err)
	}
	m, err := weights.OpenModel(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	for t := range m.Tensors() {
		fmt.Println(t.Name, t.DType, t.Shape, "at byte", t.Offset)
	}
	// Output:
	// scale F32 [1] at byte 4096
	// embed BF16 [32 64] at byte 4100
}
