package weights_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/weights"
)

// tinyModel makes a directory with a small model of two files.
func tinyModel() string {
	dir, err := os.MkdirTemp("", "model")
	if err != nil {
		log.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"model-00001-of-00002.safetensors": st(`{"embed":{"dtype":"BF16","shape":[8,4],"data_offsets":[0,64]},"layers.0.up":{"dtype":"F8_E4M3","shape":[4,4],"data_offsets":[64,80]}}`, 80),
		"model-00002-of-00002.safetensors": st(`{"__metadata__":{"format":"pt"},"norm":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}`, 16),
		"model.safetensors.index.json":     []byte(`{"weight_map":{"embed":"model-00001-of-00002.safetensors","layers.0.up":"model-00001-of-00002.safetensors","norm":"model-00002-of-00002.safetensors"}}`),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			log.Fatal(err)
		}
	}
	return dir
}

func ExampleOpenModel() {
	dir := tinyModel()
	defer os.RemoveAll(dir)

	m, err := weights.OpenModel(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	for t := range m.Tensors() {
		fmt.Println(t.Name, t.DType, t.Shape, filepath.Base(t.File.Name()), t.Offset, t.Size)
	}
	// Output:
	// embed BF16 [8 4] model-00001-of-00002.safetensors 141 64
	// layers.0.up F8_E4M3 [4 4] model-00001-of-00002.safetensors 205 16
	// norm F32 [4] model-00002-of-00002.safetensors 97 16
}

func ExampleNewPlan() {
	dir := tinyModel()
	defer os.RemoveAll(dir)

	m, err := weights.OpenModel(dir)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	// All layers go to device 1, everything else to device 0.
	place := func(t *weights.Tensor) int {
		if strings.HasPrefix(t.Name, "layers.") {
			return 1
		}
		return 0
	}
	plan, err := weights.NewPlan(m.Tensors(), place, weights.PlanOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range plan.Devices {
		fmt.Printf("device %d: allocate %d bytes\n", d.Device, d.Bytes)
		for _, p := range d.Tensors {
			fmt.Printf("  %s at %d\n", p.Tensor.Name, p.Offset)
		}
	}
	for _, r := range plan.Reads {
		fmt.Printf("read %d bytes at %d of %s for devices %v\n", r.Size, r.Offset, filepath.Base(r.File.Name()), r.Devices)
	}
	// Output:
	// device 0: allocate 272 bytes
	//   embed at 0
	//   norm at 256
	// device 1: allocate 16 bytes
	//   layers.0.up at 0
	// read 64 bytes at 141 of model-00001-of-00002.safetensors for devices [0]
	// read 16 bytes at 205 of model-00001-of-00002.safetensors for devices [1]
	// read 16 bytes at 97 of model-00002-of-00002.safetensors for devices [0]
}

func ExamplePlan_Load() {
	// A simulated GPU; without Options it is the machine's.
	sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
	if err != nil {
		log.Fatal(err)
	}
	defer sim.Close()
	rt, err := cudart.Open(cudart.Options{Source: sim})
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
		log.Fatal(err) // a *weights.LoadError says which tensors are complete
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

func ExampleFormatError() {
	file := st(`{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8)
	_, err := weights.Parse(strings.NewReader(string(file)), int64(len(file)), "w.safetensors")
	fmt.Println(err)
	var refused *weights.FormatError
	fmt.Println(errors.As(err, &refused), refused.Tensor)
	// Output:
	// weights: read w.safetensors: tensor "w": data_offsets 0 to 8 are 8 bytes, F32 of shape [3] takes 12
	// true w
}
