package main

import (
	"time"

	"github.com/gopinned/pinned/loader"
)

// Loaders of samples in memory.
func init() {
	const target = 100 * time.Millisecond
	memory := func(batch int, shuffle bool) func(*fixture) (*task, error) {
		return loadBy(loader.Options{BatchSize: batch, Shuffle: shuffle}, func(f *fixture) (loader.Source, error) {
			return loader.Memory([]int{sampleBytes}, f.source())
		})
	}
	register(
		row{name: "loader/memory/shuffled/16", unit: "samples/s", target: target, c: inC("loader Loader/memory/shuffled/16/"), prepare: memory(16, true)},
		row{name: "loader/memory/shuffled/256", unit: "samples/s", target: target, quick: true, twoCores: true, busy: true,
			c: inC("loader Loader/memory/shuffled/256/"), prepare: memory(256, true)},
		row{name: "loader/memory/shuffled/4096", unit: "samples/s", target: target, c: inC("loader Loader/memory/shuffled/4096/"), prepare: memory(4096, true)},
		row{name: "loader/memory/ordered/16", unit: "samples/s", target: target, c: inC("loader Loader/memory/ordered/16/"), prepare: memory(16, false)},
		row{name: "loader/memory/ordered/256", unit: "samples/s", target: target, c: inC("loader Loader/memory/ordered/256/"), prepare: memory(256, false)},
	)
}
