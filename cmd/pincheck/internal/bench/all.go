package bench

import "github.com/gopinned/pinned/cmd/pincheck/internal/measure"

// All returns the experiments, in the order in which they are listed and run.
func All() []measure.Experiment {
	return []measure.Experiment{
		Bandwidth(),
		Latency(),
		memory,
		alloc,
		overlap(wall()),
		frames(wall(), mapLocked),
		loading(fullGrid, quickGrid),
		files,
		blocks(),
		Calls(),
		managedMemory,
	}
}
