package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/loader"
)

func init() {
	const target = 100 * time.Millisecond
	register(row{name: "loader/own-source-past-caches/256", unit: "samples/s", target: target, prepare: load(256, 0, ownSourcePastCaches)})
	register(row{name: "loader/own-batches-past-caches/256", unit: "samples/s", target: target, prepare: load(256, 0, ownBatchesPastCaches)})
	for _, batch := range []int{16, 256, 4096} {
		register(row{name: fmt.Sprintf("loader/gathered/%d", batch), unit: "samples/s", target: target, twoCores: batch == 256, prepare: gathered(batch)})
	}
}

// ownSourcePastCaches is ownSource that copies as the loader offers it.
func ownSourcePastCaches(f *fixture) (loader.Source, error) {
	mem := f.source()
	return loader.Func(samplesOf(f), []int{sampleBytes}, func(_ context.Context, i int, sample [][]byte) error {
		loader.Copy(sample[0], mem[i*sampleBytes:][:sampleBytes])
		return nil
	}), nil
}

// ownBatches is a source of one's own that reads many samples in one call.
type ownBatches struct {
	loader.Source
	mem []byte
}

func (o ownBatches) ReadBatch(_ context.Context, indices []int, samples [][]byte) error {
	loader.CopySamples(samples[0], o.mem, sampleBytes, indices)
	return nil
}

func ownBatchesPastCaches(f *fixture) (loader.Source, error) {
	source, err := ownSourcePastCaches(f)
	return ownBatches{source, f.source()}, err
}

// gathered is batches of pinned memory that the GPU gathers.
func gathered(batch int) func(*fixture) (*task, error) {
	return func(f *fixture) (*task, error) {
		dev, err := f.device(0)
		if err != nil {
			return nil, err
		}
		pinned, err := hostmem.Alloc(f.ctx, dev, len(f.source()), hostmem.Options{})
		if err != nil {
			return nil, err
		}
		mem := pinned.Bytes()
		inParallel(mem, func(part []byte, off int) { copy(part, f.source()[off:]) })
		t, err := load(batch, 0, func(*fixture) (loader.Source, error) { return loader.Pinned([]int{sampleBytes}, mem) })(f)
		if err != nil {
			return nil, errors.Join(err, pinned.Close())
		}
		closeLoader := t.close
		t.close = func() error { return errors.Join(closeLoader(), pinned.Close()) }
		return t, nil
	}
}
