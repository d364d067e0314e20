package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/loader"
)

// sampleBytes is the size of a sample: 1024 float32.
const sampleBytes = 4 * kib

// Loaders of sources that wait 2 ms for each sample, as for a disk or a network, and of a source in memory.
func init() {
	const slow = 200 * time.Millisecond
	for _, workers := range []int{16, 64, 256, 1024, 4096} {
		for _, normalised := range []bool{false, true} {
			name := "loader/slow"
			if normalised {
				name += "-normalised"
				if workers < 1024 {
					continue
				}
			}
			register(row{name: fmt.Sprintf("%s/%d", name, workers), unit: "samples/s", target: slow,
				quick: workers == 4096 || workers == 1024 && !normalised, twoCores: workers == 1024 && !normalised, busy: workers == 4096 && !normalised,
				prepare: load(256, workers, slowSource(normalised))})
		}
	}
	register(
		row{name: "loader/slow/4096/batches-of-4096", unit: "samples/s", target: slow, prepare: load(4096, 4096, slowSource(false))},
		row{name: "loader/slow-normalised/4096/batches-of-4096", unit: "samples/s", target: slow, quick: true, prepare: load(4096, 4096, slowSource(true))},
		row{name: "loader/own-source/256", unit: "samples/s", target: 100 * time.Millisecond, quick: true, prepare: load(256, 0, ownSource)},
	)
}

// A data set is the source of the fixture, cut into samples.
func samplesOf(f *fixture) int { return len(f.source()) / sampleBytes }

// ownSource is a program's own source, which copies each sample from memory.
func ownSource(f *fixture) (loader.Source, error) {
	mem := f.source()
	return loader.Func(samplesOf(f), []int{sampleBytes}, func(_ context.Context, i int, sample [][]byte) error {
		copy(sample[0], mem[i*sampleBytes:])
		return nil
	}), nil
}

// waiting is a source whose samples take 2 ms to come, and no time of the CPU.
type waiting struct{ loader.Source }

func (w waiting) Read(ctx context.Context, i int, sample [][]byte) error {
	time.Sleep(2 * time.Millisecond)
	return w.Source.Read(ctx, i, sample)
}

// normalised scales each sample to a mean and a deviation.
type normalised struct{ loader.Source }

func (normalised) Transform(_ context.Context, _ int, sample [][]byte) error {
	x := floats(sample[0])
	var sum, squares float32
	for _, v := range x {
		sum += v
	}
	mean := sum / float32(len(x))
	for _, v := range x {
		squares += (v - mean) * (v - mean)
	}
	factor := 1.1 / (float32(math.Sqrt(float64(squares)/float64(len(x)-1))) + 1e-6)
	for i, v := range x {
		x[i] = (v-mean)*factor + 0.1
	}
	return nil
}

func slowSource(transformed bool) func(*fixture) (loader.Source, error) {
	return func(f *fixture) (loader.Source, error) {
		src, err := ownSource(f)
		if err != nil {
			return nil, err
		}
		if src = (waiting{src}); transformed {
			src = normalised{src}
		}
		return src, nil
	}
}

// load measures a loader with shuffled batches.
func load(batch, workers int, source func(*fixture) (loader.Source, error)) func(*fixture) (*task, error) {
	return loadBy(loader.Options{BatchSize: batch, Workers: workers, Shuffle: true}, source)
}

func loadBy(o loader.Options, source func(*fixture) (loader.Source, error)) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		dev, err := f.device(0)
		if err != nil {
			return nil, err
		}
		src, err := source(f)
		if err != nil {
			return nil, err
		}
		l, err := loader.New(f.ctx, dev, src, o)
		if err != nil {
			return nil, err
		}
		s, err := dev.NewStream(streamOptions)
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
		return &task{
			sample: func(target time.Duration) (sample, error) { return consume(f.ctx, l, s, target) },
			verify: func() error { return f.checkBatches(dev, l, src) },
			close:  func() error { return errors.Join(s.Synchronize(f.ctx), l.Close(), s.Close()) },
		}, nil
	}
}

// consume loops over epochs. It counts from a batch that comes when a quarter of the target's time is over, and all
// workers have long begun, until one that comes after the target's time.
func consume(ctx context.Context, l *loader.Loader, s *cudart.Stream, target time.Duration) (sample, error) {
	start := time.Now()
	var began time.Time
	var used time.Duration
	count := 0
	for {
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				return sample{}, err
			}
			if err := batch.Use(s); err != nil {
				return sample{}, err
			}
			switch {
			case !began.IsZero():
				count += batch.Len()
			case time.Since(start) >= target/4:
				began, used = time.Now(), cpuTime()
			}
			if count > 0 && time.Since(began) >= target {
				result := figures("samples/s", since(began), count, 0)
				result.Figures = append(result.Figures, cpuFigure(used, count*sampleBytes))
				return result, nil
			}
		}
	}
}

// checkBatches compares all samples of an epoch's first batches with those of the source.
func (f *fixture) checkBatches(dev *cudart.Device, l *loader.Loader, src loader.Source) error {
	want := [][]byte{make([]byte, sampleBytes)}
	batches := 0
	for batch, err := range l.Batches(f.ctx) {
		if err != nil {
			return err
		}
		if err := batch.Wait(f.ctx); err != nil {
			return err
		}
		got := make([]byte, batch.Len()*sampleBytes)
		if err := dev.CopyToHost(pointer(got), batch.Field(0), len(got)); err != nil {
			return err
		}
		for k, i := range batch.Indices() {
			copy(want[0], f.source()[i*sampleBytes:])
			if t, ok := src.(loader.Transformer); ok {
				if err := t.Transform(f.ctx, i, want); err != nil {
					return err
				}
			}
			if err := equal(got[k*sampleBytes:][:sampleBytes], want[0]); err != nil {
				return fmt.Errorf("sample %d of %v: %w", i, batch, err)
			}
		}
		if batches++; batches == 4 {
			return nil
		}
	}
	if batches == 0 {
		return errors.New("no batch")
	}
	return nil
}
