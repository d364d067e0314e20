package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// losing is a simulated library whose asynchronous copies report success and copy nothing: they
// are cudaPeekAtLastError, which takes no arguments.
type losing struct{ *cudasim.Sim }

func (l losing) Symbol(name string) uintptr {
	if name == "cudaMemcpyAsync" {
		name = "cudaPeekAtLastError"
	}
	return l.Sim.Symbol(name)
}

// Troubles that are easily made on a machine with a GPU. Here the GPU is simulated, and its host
// is read from files of such a host. Each is found by the command as it is run, named by its id,
// with what was seen.
func TestTroublesMadeOnPurpose(t *testing.T) {
	t.Parallel()
	needsSim(t)
	const bus = "0000:00:06.0"
	gpu := func(link cudasim.Link) cudasim.Config {
		return cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: bus, Link: link}}}
	}
	// with is a captured host with the simulated GPU.
	with := func(host string, cfg cudasim.Config) func(*testing.T) system {
		return func(t *testing.T) system {
			sys := on(t, host)
			sys.open = opening(t, cfg)
			return sys
		}
	}
	for _, c := range []struct {
		name    string
		machine func(*testing.T) system
		stalls  string // a function of CUDA, instead of machine: the run is interrupted then
		code    int
		id      string
		device  bool
		seen    string
	}{
		{name: "libcudart hidden", id: "no_runtime_library", code: exitUnusable, seen: "libcudart",
			machine: func(t *testing.T) system {
				return failing(t, "h200-vm", noLibrary(cudart.DriverFacts{LibPath: "/usr/lib/x86_64-linux-gnu/libcuda.so.1"}))
			}},
		{name: "a cgroup limit smaller than the test", id: "host_memory_short", device: true, code: exitWarnings, seen: "memory.max",
			machine: with("container-40-mb", func() cudasim.Config {
				cfg := gpu(cudasim.Link{})
				cfg.HostMemory = 40 << 10 // less than the largest round trip takes
				return cfg
			}())},
		{name: "affinity to one core", id: "few_cpus", code: exitWarnings, seen: "Cpus_allowed_list is 3", machine: oneCPU},
		{name: "THP off", id: "thp_off", code: exitOK, seen: "never", machine: with("thp-never", gpu(cudasim.Link{}))},
		{name: "a link at half width", id: "narrow_link", device: true, code: exitWarnings, seen: "current_link_width is 8",
			machine: with("h200-vm-x8", gpu(cudasim.Link{HostToDevice: cudasim.Speed{Rate: 27}, DeviceToHost: cudasim.Speed{Rate: 27}}))},
		{name: "a slow direction", id: "slow_copies", device: true, code: exitProblems, seen: "From GPU 20.0 GB/s",
			machine: with("h200-vm", gpu(cudasim.Link{DeviceToHost: cudasim.Speed{Rate: 20}}))},
		{name: "a stalled call", id: "driver_hangs", code: exitInterrupted, device: true, seen: "had not returned", stalls: "cudaMemcpyAsync"},
		{name: "corrupted bytes", id: "wrong_bytes", device: true, code: exitProblems, seen: "bytes wrong",
			machine: func(t *testing.T) system {
				sim, err := cudasim.New(gpu(cudasim.Link{}))
				require.NoError(t, err)
				t.Cleanup(func() { testgpu.End(t, sim) })
				sys := on(t, "h200-vm")
				sys.open = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
					return cudart.Open(ctx, cudart.Options{Source: losing{sim}})
				}
				return sys
			}},
		{name: "a refused registration", id: "confidential_computing", device: true, code: exitProblems, seen: "cudaHostRegister",
			machine: with("h200-vm", func() cudasim.Config {
				cfg := gpu(cudasim.Link{})
				cfg.NoRegister = true
				return cfg
			}())},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			args, got := []string{"--quiet", "--format", "json"}, outcome{}
			if c.stalls != "" {
				sim, _ := stalling(t, gpu(cudasim.Link{}), c.stalls, cudasim.Fault{})
				got = interrupted(t, hasty(on(t, "h200-vm")), sim, c.stalls, args...)
			} else {
				got = call(t, c.machine(t), args...)
			}
			assert.Equal(t, c.code, got.code, got.stderr)
			var r report.Result
			require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
			for _, f := range r.Findings {
				if f.ID != c.id {
					continue
				}
				assert.Equal(t, c.device, f.Device != nil, "which GPU")
				assert.Contains(t, strings.Join(f.Evidence, "\n"), c.seen)
				assert.NotEmpty(t, f.Cause+f.Cost)
				assert.NotEmpty(t, f.Remedy)
				return
			}
			assert.Fail(t, "not found", "%s among %v", c.id, r.Findings)
		})
	}
}

// With 24 open files an H200's calls fail with 46 or 304 from some call on. What fails for it is no finding of
// its own, whichever call is the first.
func TestTooFewOpenFilesIsTheOnlyProblem(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, code := range []cudart.Code{cudart.ErrDevicesUnavailable, cudart.ErrOperatingSystem} {
		for _, nth := range []int{1, 2, 5, 30} {
			t.Run(fmt.Sprintf("%d from call %d on", code, nth), func(t *testing.T) {
				t.Parallel()
				sim, err := cudasim.New(cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}}})
				require.NoError(t, err)
				t.Cleanup(func() { testgpu.End(t, sim) })
				for _, function := range []string{"cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags", "cudaMallocManaged"} {
					sim.Fail(function, cudasim.Fault{Nth: nth, Times: -1, Code: code})
				}
				sys := on(t, "h200-vm")
				host := maps.Clone(sys.root.(fstest.MapFS))
				const limits = "proc/self/limits"
				host[limits] = &fstest.MapFile{Data: append(slices.Clone(host[limits].Data), "Max open files            24                   24                   files     \n"...)}
				sys.root = host
				sys.open = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
					return cudart.Open(ctx, cudart.Options{Source: sim})
				}
				got := call(t, sys, "--quiet", "--format", "json")
				assert.Equal(t, exitProblems, got.code, got.stderr)
				var r report.Result
				require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
				passed := doctor.Passed(r.Facts, r.Findings)
				assert.NotContains(t, passed, "calls")
				assert.NotContains(t, passed, "starting CUDA")
				assert.NotContains(t, passed, "data integrity")
				for _, f := range r.Findings {
					assert.Equal(t, f.ID == "few_files", f.Severity.AtLeast(doctor.Warning), "%s: %s %v", f.ID, f.Summary, f.Evidence)
				}
			})
		}
	}
}
