//go:build linux

package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/loader"
)

// BenchmarkLoader is samples of 4 KiB that reach the GPU in batches: of sources that wait 2 ms for each sample, as for a
// disk or a network, and of memory. ns/op and cpu-s/GB are of samples.
func BenchmarkLoader(b *testing.B) { bench(b, "Loader") }

// sampleBytes is the size of a sample: 1024 float32.
const sampleBytes = 4 * kib

type sources func(*fixture) loader.Source

var _ = func() bool {
	for _, workers := range []int{16, 64, 256, 1024, 4096} {
		name, thousand, most := fmt.Sprint(workers), workers == 1024, workers == 4096
		add("Loader", row{name: "slow/" + name, quick: thousand || most, twoCores: thousand, busy: most, prepare: slow(256, workers, false)})
		if thousand || most {
			add("Loader", row{name: "slow-normalised/" + name, quick: most, prepare: slow(256, workers, true)})
		}
	}
	for _, batch := range []int{16, 256, 4096} {
		name, usual := fmt.Sprint(batch), batch == 256
		add("Loader",
			row{name: "memory/shuffled/" + name, quick: usual, twoCores: usual, busy: usual, prepare: load(batch, true, inMemory)},
			row{name: "gathered/" + name, twoCores: usual, prepare: load(batch, true, inPinnedMemory)})
		if batch < 4096 {
			add("Loader", row{name: "memory/ordered/" + name, prepare: load(batch, false, inMemory)})
		}
	}
	return add("Loader",
		row{name: "slow/4096/batches-of-4096", prepare: slow(4096, 4096, false)},
		row{name: "slow-normalised/4096/batches-of-4096", quick: true, prepare: slow(4096, 4096, true)},
		row{name: "own-source/256", quick: true, prepare: load(256, true, ownSource)},
		row{name: "own-source/256/4-workers", prepare: loadBy(loader.Options{BatchSize: 256, Shuffle: true, Workers: 4}, ownSource)},
		row{name: "own-source-past-caches/256", prepare: load(256, true, ownSourcePastCaches)},
		row{name: "own-batches-past-caches/256", prepare: load(256, true, ownBatchesPastCaches)})
}()

func inMemory(f *fixture) loader.Source {
	return must(loader.InMemory([]int{sampleBytes}, f.source()))(f)
}

// inPinnedMemory has batches that the GPU gathers.
func inPinnedMemory(f *fixture) loader.Source {
	mem := f.pinned(f.device(0), len(f.source()))
	inParallel(mem, func(part []byte, off int) { copy(part, f.source()[off:]) })
	return must(loader.InMemory([]int{sampleBytes}, mem))(f)
}

// read is a program's own source, which reads each sample from memory.
func read(f *fixture, one func(to, from []byte)) loader.Source {
	mem := f.source()
	return loader.Func(len(mem)/sampleBytes, []int{sampleBytes}, func(_ context.Context, i int, sample [][]byte) error {
		one(sample[0], mem[i*sampleBytes:][:sampleBytes])
		return nil
	})
}

func ownSource(f *fixture) loader.Source { return read(f, func(to, from []byte) { copy(to, from) }) }

// ownSourcePastCaches is ownSource that copies as the loader offers it.
func ownSourcePastCaches(f *fixture) loader.Source {
	return read(f, func(to, from []byte) { loader.Copy(to, from) })
}

// ownBatches is a source of one's own that reads many samples in one call.
type ownBatches struct {
	loader.Source
	mem []byte
}

func (o ownBatches) ReadBatch(_ context.Context, indices []int, samples [][]byte) error {
	return loader.CopySamples(samples[0], o.mem, sampleBytes, indices)
}

func ownBatchesPastCaches(f *fixture) loader.Source { return ownBatches{ownSource(f), f.source()} }

// waiting is a source whose samples take 2 ms to come, and no time of the CPU.
type waiting struct{ loader.Source }

func (w waiting) Read(ctx context.Context, i int, sample [][]byte) error {
	time.Sleep(2 * time.Millisecond)
	return w.Source.Read(ctx, i, sample)
}

// normalise scales a sample to a mean and a deviation.
func normalise(_ context.Context, _ int, sample [][]byte) error {
	x := unsafe.Slice((*float32)(pointer(sample[0])), len(sample[0])/4)
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

// slow is a loader of a source that waits, by so many workers.
func slow(batch, workers int, transformed bool) func(*fixture) task {
	o := loader.Options{BatchSize: batch, Workers: workers, Shuffle: true}
	if transformed {
		o.Transform = normalise
	}
	return loadBy(o, func(f *fixture) loader.Source { return waiting{ownSource(f)} })
}

func load(batch int, shuffle bool, source sources) func(*fixture) task {
	return loadBy(loader.Options{BatchSize: batch, Shuffle: shuffle}, source)
}

func loadBy(o loader.Options, source sources) func(*fixture) task {
	return func(f *fixture) task {
		dev := f.device(0)
		src := source(f)
		l := must(loader.New(ctx, dev, src, o))(f)
		f.later(l.Close)
		s := f.stream(dev)
		f.later(func() error { return s.Synchronize(ctx) })
		// What a row waits for takes 50 ms at least.
		batches := times(max(1, 25*o.Workers/o.BatchSize))
		return task{bytes: batches * o.BatchSize * sampleBytes, count: batches * o.BatchSize,
			loop:   func(m *meter) error { return consume(m, l, s, batches) },
			verify: func(func() error) error { return checkBatches(dev, l, o, f.source()) }}
	}
}

// consume loops over epochs. It counts from a batch that comes when all workers have long begun.
func consume(m *meter, l *loader.Loader, s *cudart.Stream, batches int) error {
	start, warm := time.Now(), 50*time.Millisecond
	if times(100) < 100 {
		warm = 0
	}
	began, count := false, 0
	for {
		for batch, err := range l.Batches(ctx) {
			if err != nil {
				return err
			}
			if err := batch.Use(s); err != nil {
				return err
			}
			if count++; began && count%batches > 0 || time.Since(start) < warm {
				continue
			}
			if began = true; !m.next() {
				return nil
			}
			count = 0
		}
	}
}

// checkBatches compares all samples of an epoch's first batches with those of the source.
func checkBatches(dev *cudart.Device, l *loader.Loader, o loader.Options, mem []byte) error {
	want := [][]byte{make([]byte, sampleBytes)}
	batches := 0
	for batch, err := range l.Batches(ctx) {
		if err != nil {
			return err
		}
		if err := batch.Wait(ctx); err != nil {
			return err
		}
		got := make([]byte, batch.Len()*sampleBytes)
		if err := dev.CopyToHost(pointer(got), batch.Field(0), len(got)); err != nil {
			return err
		}
		for k, i := range batch.Indices() {
			copy(want[0], mem[i*sampleBytes:])
			if o.Transform != nil {
				if err := o.Transform(ctx, i, want); err != nil {
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
