//go:build linux && !android && (amd64 || arm64)

package loader_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"strconv"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/loader"
)

// openGPU opens a simulated GPU, so that the examples run anywhere. Programs call
// cudart.Open(context.Background(), cudart.Options{}).
func openGPU() (dev *cudart.Device, s *cudart.Stream, done func()) {
	return openGPUWith(nil)
}

// openGPUWith is openGPU with Go functions instead of kernels.
func openGPUWith(kernels map[string]cudasim.KernelFunc) (dev *cudart.Device, s *cudart.Stream, done func()) {
	rt, err := cudasim.Open(context.Background(), cudasim.Config{Kernels: kernels})
	if err != nil {
		log.Fatal(err)
	}
	if dev, err = rt.Device(0); err != nil {
		log.Fatal(err)
	}
	if s, err = dev.NewStream(cudart.StreamOptions{}); err != nil {
		log.Fatal(err)
	}
	return dev, s, func() {
		if err := errors.Join(s.Close(), rt.Close()); err != nil {
			log.Fatal(err)
		}
	}
}

// squares are samples of one number each.
var squares = loader.Func(10, []int{8}, func(_ context.Context, i int, sample [][]byte) error {
	binary.LittleEndian.PutUint64(sample[0], uint64(i*i))
	return nil
})

// An epoch of three batches.
func Example() {
	dev, stream, done := openGPU()
	defer done()
	ctx := context.Background()

	l, err := loader.New(ctx, dev, squares, loader.Options{BatchSize: 4})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		if err := batch.Use(stream); err != nil {
			log.Fatal(err)
		}
		// Here a program launches kernels on stream, with batch.Field(0).
		fmt.Println(batch, batch.Indices())
	}
	fmt.Println(l.Stats().Bytes, "bytes")

	// Output:
	// batch 0 of epoch 0 [0 1 2 3]
	// batch 1 of epoch 0 [4 5 6 7]
	// batch 2 of epoch 0 [8 9]
	// 80 bytes
}

// Samples in memory: the pixels of images, and their labels.
func ExampleInMemory() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	const pixels, label = 784, 1
	images, labels := make([]byte, 1000*pixels), make([]byte, 1000*label)
	source, err := loader.InMemory([]int{pixels, label}, images, labels)
	if err != nil {
		log.Fatal(err)
	}
	l, err := loader.New(ctx, dev, source, loader.Options{BatchSize: 256, Shuffle: true})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(batch, len(batch.Host(0)), "bytes of pixels", len(batch.Host(1)), "of labels")
	}

	// Output:
	// batch 0 of epoch 0 200704 bytes of pixels 256 of labels
	// batch 1 of epoch 0 200704 bytes of pixels 256 of labels
	// batch 2 of epoch 0 200704 bytes of pixels 256 of labels
	// batch 3 of epoch 0 181888 bytes of pixels 232 of labels
}

// A program that validates after every second batch, and after each epoch.
func ExampleLoader_Epochs() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	l, err := loader.New(ctx, dev, squares, loader.Options{BatchSize: 4})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	steps := 0
	for epoch := range l.Epochs(2) {
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(batch)
			if steps++; steps%2 == 0 {
				break
			}
		}
		fmt.Println("validate in epoch", epoch)
	}

	// Output:
	// batch 0 of epoch 0
	// batch 1 of epoch 0
	// validate in epoch 0
	// batch 2 of epoch 0
	// validate in epoch 0
	// batch 0 of epoch 1
	// validate in epoch 1
	// batch 1 of epoch 1
	// batch 2 of epoch 1
	// validate in epoch 1
}

// A batch that is retained is valid after its turn: here until the next one, for a comparison of
// the two.
func ExampleBatch_Retain() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	l, err := loader.New(ctx, dev, squares, loader.Options{BatchSize: 5, Prefetch: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	var last *loader.Batch
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		batch.Retain()
		if last != nil {
			fmt.Println(numbersOf(last), numbersOf(batch), l.Stats().Retained, "retained")
			if err := last.Release(); err != nil {
				log.Fatal(err)
			}
		}
		last = batch
	}
	if err := last.Release(); err != nil {
		log.Fatal(err)
	}

	// Output:
	// [0 1 4 9 16] [25 36 49 64 81] 2 retained
}

// The host waits for the copy of a batch and reads it back.
func ExampleBatch_Wait() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	l, err := loader.New(ctx, dev, squares, loader.Options{BatchSize: 5})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		if err := batch.Wait(ctx); err != nil {
			log.Fatal(err)
		}
		list := make([]uint64, batch.Len())
		if err := dev.CopyToHost(unsafe.Pointer(&list[0]), batch.Field(0), 8*len(list)); err != nil {
			log.Fatal(err)
		}
		fmt.Println(list)
	}

	// Output:
	// [0 1 4 9 16]
	// [25 36 49 64 81]
}

// In a second of which copies took 950 ms, the copy is the bottleneck.
func ExampleStats_Bottleneck() {
	stats := loader.Stats{
		Elapsed:    time.Second,
		BatchWaits: 900 * time.Millisecond,
		Consuming:  100 * time.Millisecond,
		Reading:    3 * time.Second, // of all workers
		Copying:    950 * time.Millisecond,
	}
	fmt.Println(stats.Bottleneck())

	// Output: copy
}

// A loop that is left leaves the rest of the epoch to the next one.
func ExampleLoader_Batches() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	l, err := loader.New(ctx, dev, squares, loader.Options{BatchSize: 3})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for steps := 0; steps < 6; fmt.Println("left after", steps) {
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(batch, batch.Indices())
			if steps++; steps%3 == 0 {
				break
			}
		}
	}

	// Output:
	// batch 0 of epoch 0 [0 1 2]
	// batch 1 of epoch 0 [3 4 5]
	// batch 2 of epoch 0 [6 7 8]
	// left after 3
	// batch 3 of epoch 0 [9]
	// left after 4
	// batch 0 of epoch 1 [0 1 2]
	// batch 1 of epoch 1 [3 4 5]
	// left after 6
}

// An epoch that is left out after its first batch.
func ExampleLoader_EndEpoch() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	l, err := loader.New(ctx, dev, squares, loader.Options{BatchSize: 3})
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	for range 2 {
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(batch, batch.Indices())
			break
		}
		if err := l.EndEpoch(); err != nil {
			log.Fatal(err)
		}
	}

	// Output:
	// batch 0 of epoch 0 [0 1 2]
	// batch 0 of epoch 1 [0 1 2]
}

// A program that ends after two batches goes on with the third.
func ExamplePosition() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()
	options := loader.Options{BatchSize: 3, Shuffle: true, Seed: 42}

	run := func(maxBatches int) (at loader.Position) {
		l, err := loader.New(ctx, dev, squares, options)
		if err != nil {
			log.Fatal(err)
		}
		defer l.Close()
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(batch, batch.Indices())
			at = batch.Position()
			if maxBatches--; maxBatches == 0 {
				break
			}
		}
		return at
	}
	saved, err := json.Marshal(run(2))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(saved))
	if err := json.Unmarshal(saved, &options.Start); err != nil {
		log.Fatal(err)
	}
	run(0)

	// Output:
	// batch 0 of epoch 0 [1 8 6]
	// batch 1 of epoch 0 [9 2 7]
	// {"epoch":0,"batch":2,"order":"10 samples in batches of 3, shuffled with seed 42"}
	// batch 2 of epoch 0 [4 3 0]
	// batch 3 of epoch 0 [5]
}

// A few samples that cannot be read are left out.
func ExampleOptions_errors() {
	dev, _, done := openGPU()
	defer done()
	ctx := context.Background()

	lines := []string{"1", "2", "three", "4", "5", "6"}
	numbers := loader.Func(len(lines), []int{8}, func(_ context.Context, i int, sample [][]byte) error {
		n, err := strconv.ParseUint(lines[i], 10, 64)
		binary.LittleEndian.PutUint64(sample[0], n)
		return err
	})
	for _, skip := range []bool{false, true} {
		l, err := loader.New(ctx, dev, numbers, loader.Options{BatchSize: 2, SkipErrors: skip})
		if err != nil {
			log.Fatal(err)
		}
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				fmt.Println(err)
				break
			}
			fmt.Println(batch, batch.Indices())
		}
		fmt.Println(l.Stats().Skipped, "skipped")
		if err := l.Close(); err != nil {
			log.Fatal(err)
		}
	}

	// Output:
	// batch 0 of epoch 0 [0 1]
	// loader: sample 2, batch 1 of epoch 0: strconv.ParseUint: parsing "three": invalid syntax
	// 0 skipped
	// batch 0 of epoch 0 [0 1]
	// batch 1 of epoch 0 [3]
	// batch 2 of epoch 0 [4 5]
	// 1 skipped
}
