package weights_test

import (
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

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
	// Output:
	// device 0: allocate 272 bytes
	//   embed at 0
	//   norm at 256
	// device 1: allocate 16 bytes
	//   layers.0.up at 0
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
