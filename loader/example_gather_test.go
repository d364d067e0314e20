//go:build linux && !android && (amd64 || arm64)

package loader_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/kernel"
	"github.com/gopinned/pinned/loader"
)

// The GPU gathers the batches from pinned memory.
func ExampleInMemory_pinned() {
	dev, stream, done := openGPU()
	defer done()
	ctx := context.Background()

	data, err := hostmem.Alloc(ctx, dev, 10*8, hostmem.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer data.Close() // after the loader
	for i := range 10 {
		binary.LittleEndian.PutUint64(data.Bytes()[8*i:], uint64(i*i))
	}
	src, err := loader.InMemory([]int{8}, data.Bytes())
	if err != nil {
		log.Fatal(err)
	}
	printOnDevice(ctx, dev, stream, src, loader.Options{BatchSize: 4})

	// Output:
	// batch 0 of epoch 0 [0 1 4 9]
	// batch 1 of epoch 0 [16 25 36 49]
	// batch 2 of epoch 0 [64 81]
}

// A data set in six files, of which at most four are registered at a time: two windows of two. A batch has samples of one window, or of
// two that follow each other.
func ExampleShards() {
	dev, stream, done := openGPU()
	defer done()
	ctx := context.Background()

	dir, err := os.MkdirTemp("", "shards")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	var paths []string
	for shard := range 6 {
		var samples []byte
		for i := range 2 {
			samples = binary.LittleEndian.AppendUint64(samples, uint64(10*shard+i))
		}
		paths = append(paths, filepath.Join(dir, fmt.Sprint("shard-", shard)))
		if err := os.WriteFile(paths[shard], samples, 0o600); err != nil {
			log.Fatal(err)
		}
	}
	src, err := loader.Shards([]int{8}, 4*os.Getpagesize(), paths...)
	if err != nil {
		log.Fatal(err)
	}
	printOnDevice(ctx, dev, stream, src, loader.Options{BatchSize: 3, Shuffle: true, Seed: 2})

	// Output:
	// batch 0 of epoch 0 [30 31 10]
	// batch 1 of epoch 0 [11 40 51]
	// batch 2 of epoch 0 [50 41 0]
	// batch 3 of epoch 0 [20 21 1]
}

// A kernel changes each batch where it lies on the device, before the loop gets it.
func ExampleOptions_onDevice() {
	dev, stream, done := openGPUWith(map[string]cudasim.KernelFunc{"double": func(l *cudasim.Launch) {
		x := cudasim.Elements[uint64](l.Write(cudasim.Arg[cudart.DevPtr](l, 0), 8*cudasim.Arg[int](l, 1)))
		for i := range x {
			x[i] *= 2
		}
	}})
	defer done()
	ctx := context.Background()

	ptx := ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry double(.param .u64 x, .param .u64 n) { ret; }\n" // nvcc --ptx
	m, err := kernel.Load(ctx, dev, []byte(ptx))
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close() // after the loader
	double, err := m.Kernel(ctx, "double")
	if err != nil {
		log.Fatal(err)
	}
	printOnDevice(ctx, dev, stream, squares, loader.Options{
		BatchSize: 4,
		OnDevice: func(s *cudart.Stream, b *loader.Batch) error {
			return double.Launch(s, kernel.Threads(b.Len(), 256), kernel.Arg(b.Field(0)), kernel.Arg(b.Len()))
		},
	})

	// Output:
	// batch 0 of epoch 0 [0 2 8 18]
	// batch 1 of epoch 0 [32 50 72 98]
	// batch 2 of epoch 0 [128 162]
}

// printOnDevice prints the numbers of an epoch's batches, as the device has them.
func printOnDevice(ctx context.Context, dev *cudart.Device, stream *cudart.Stream, src loader.Source, o loader.Options) {
	l, err := loader.New(ctx, dev, src, o)
	if err != nil {
		log.Fatal(err)
	}
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		if err := batch.Use(stream); err != nil {
			log.Fatal(err)
		}
		if err := stream.Synchronize(ctx); err != nil {
			log.Fatal(err)
		}
		numbers := make([]uint64, batch.Len())
		if err := dev.CopyToHost(unsafe.Pointer(&numbers[0]), batch.Field(0), 8*len(numbers)); err != nil {
			log.Fatal(err)
		}
		fmt.Println(batch, numbers)
	}
	if err := l.Close(); err != nil {
		log.Fatal(err)
	}
}
