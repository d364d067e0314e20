package main

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// A context takes hundreds of MiB of a GPU, which others may need: only the GPUs that were asked
// for get one, whatever the command is. The experiments are in TestAllOnOneDevice of package bench.
func TestOnlyTheDevicesAskedForGetAContext(t *testing.T) {
	t.Parallel()
	needsSim(t)
	commands := map[string][]int{
		"--device 1":           {1},
		"--device 2,0":         {0, 2},
		"--device 2 --npd":     {2},
		"verify --device 1":    {1},
		"verify --device 1,2":  {1, 2},
		"devices --device 1":   {1},
		"bench all --device 1": {1},
		"bench all --device 1 --quick --duration 1s --sizes 4K": {1},
		"report --device 1 --full -o FILE":                      {1},
		"capture --device 1 --with-names -o FILE":               {1},
		"watch":             nil,
		"verify --device 7": nil,
		"check --device 1 --format json --output FILE --quiet --timeout 1h --no-host-name --expect-gpus 3 --expect-bandwidth 9 --fail-on note --ignore few_cpus": {1},
	}
	for _, command := range hosttest.Sample(slices.Sorted(maps.Keys(commands))) {
		want := commands[command]
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			sys := on(t, "h200-vm")
			sys.experiments = []measure.Experiment{bench.Link(bench.LinkPlan{SizeBytes: 4096, Samples: 3})}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			sys.after = func(time.Duration) <-chan time.Time { cancel(); return nil } // of watch
			var sim *cudasim.Sim
			sys.open = func(ctx context.Context, _ cudart.Options) (_ *cudart.Runtime, err error) {
				if sim == nil {
					if sim, err = cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)}); err != nil {
						return nil, err
					}
				}
				return cudart.Open(ctx, cudart.Options{Source: sim})
			}
			var stdout, stderr strings.Builder
			code := run(ctx, strings.Fields(strings.ReplaceAll(command, "FILE", filepath.Join(t.TempDir(), "out"))), &stdout, &stderr, sys)
			var got []int
			if sim != nil {
				got = sim.Contexts()
				testgpu.End(t, sim)
			}
			assert.Equal(t, want, got, "%s%s", stdout.String(), stderr.String())
			assert.Equal(t, strings.Contains(command, "7"), code == exitUsage, stderr.String())
		})
	}
}
