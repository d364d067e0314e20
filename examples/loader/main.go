// Loader feeds a GPU with batches of samples: vectors that are read at random
// from a data set that takes two milliseconds to answer, and normalised on the
// way.
//
//	go run ./examples/loader [-samples N] [-batch N] [-workers N] [-epochs N] [-sim]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/device"
	"github.com/gopinned/pinned/loader"
)

func main() {
	var o options
	flag.IntVar(&o.samples, "samples", 100_000, "samples of the data set")
	flag.IntVar(&o.batch, "batch", 256, "samples of a batch")
	flag.IntVar(&o.workers, "workers", 1024, "samples that are read at once")
	flag.IntVar(&o.epochs, "epochs", 2, "times to go through the data set")
	flag.BoolVar(&o.sim, "sim", false, "use a simulated GPU")
	flag.Parse()
	device.Main(func(ctx context.Context) error { return run(ctx, o, os.Stdout) })
}

type options struct {
	samples, batch, workers, epochs int
	sim                             bool
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.epochs < 1 {
		return fmt.Errorf("-epochs %d: must be positive", o.epochs)
	}
	dev, err := device.First(ctx, o.sim)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Runtime().Close()) }()
	stream, err := dev.NewStream(cudart.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()

	l, err := loader.New(ctx, dev, vectors{o.samples}, loader.Options{BatchSize: o.batch, Workers: o.workers, Shuffle: true, Transform: normalise})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	for epoch := range l.Epochs(o.epochs) {
		start, batches, samples := time.Now(), 0, 0
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				return err
			}
			if err := batch.Use(stream); err != nil {
				return err
			}
			// Here a program launches its kernels on stream, with
			// batch.Field(vector), batch.Field(label) and batch.Len().
			batches, samples = batches+1, samples+batch.Len()
		}
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		took := time.Since(start)
		fmt.Fprintf(out, "epoch %d: %d samples in %d batches on %v in %v, %.0f samples/s\n",
			epoch, samples, batches, dev, took.Round(time.Millisecond), float64(samples)/took.Seconds())
	}
	st := l.Stats()
	fmt.Fprintf(out, "%d bytes by way of %d bytes of pinned memory; the bottleneck is the %s\n", st.Bytes, st.PinnedBytes, st.Bottleneck())
	return nil
}

// The fields of a sample.
const (
	vector = iota // width float32
	label         // an int32

	width = 1024
)

// vectors is the data set.
type vectors struct{ n int }

func (v vectors) Len() int      { return v.n }
func (v vectors) Fields() []int { return []int{vector: 4 * width, label: 4} }

// Read stands for whatever a data set is: a file, an object store, a database.
func (v vectors) Read(ctx context.Context, i int, sample [][]byte) error {
	select {
	case <-time.After(2 * time.Millisecond):
	case <-ctx.Done():
		return ctx.Err()
	}
	random := rand.New(rand.NewPCG(uint64(i), 0))
	for j := range floats(sample[vector]) {
		floats(sample[vector])[j] = random.Float32()
	}
	*(*int32)(unsafe.Pointer(&sample[label][0])) = int32(i % 10)
	return nil
}

// normalise makes the mean of a vector zero, and its standard deviation one.
func normalise(_ context.Context, _ int, sample [][]byte) error {
	x := floats(sample[vector])
	var sum, squares float64
	for _, y := range x {
		sum += float64(y)
		squares += float64(y) * float64(y)
	}
	mean := sum / width
	scale := 1 / math.Sqrt(squares/width-mean*mean)
	for i, y := range x {
		x[i] = float32((float64(y) - mean) * scale)
	}
	return nil
}

func floats(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}
