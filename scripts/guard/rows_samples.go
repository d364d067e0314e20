package main

import (
	"context"
	"time"

	"github.com/gopinned/pinned/loader"
)

func init() {
	register(row{name: "loader/own-source-past-caches/256", unit: "samples/s", target: 100 * time.Millisecond, prepare: load(256, 0, ownSourcePastCaches)})
}

// ownSourcePastCaches is ownSource that copies as the loader offers it.
func ownSourcePastCaches(f *fixture) (loader.Source, error) {
	mem := f.source()
	return loader.Func(samplesOf(f), []int{sampleBytes}, func(_ context.Context, i int, sample [][]byte) error {
		loader.Copy(sample[0], mem[i*sampleBytes:][:sampleBytes])
		return nil
	}), nil
}
