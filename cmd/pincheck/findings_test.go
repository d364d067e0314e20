package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/peers"
	"github.com/gopinned/pinned/internal/testgpu"
)

// Programs that read results find what they may expect in the program itself.
func TestSchema(t *testing.T) {
	t.Parallel()
	got := call(t, on(t, "h200-vm"), "schema")
	assert.Equal(t, exitOK, got.code)
	assert.True(t, json.Valid([]byte(got.stdout)))
	assert.Contains(t, got.stdout, `"schema_version"`)
}

func TestExplain(t *testing.T) {
	t.Parallel()
	sys := on(t, "h200-vm")
	got := call(t, sys, "explain", "slow_copies")
	assert.Equal(t, exitOK, got.code)
	assert.True(t, strings.HasPrefix(got.stdout, "slow_copies\n"))
	assert.Contains(t, got.stdout, "https://github.com/NVIDIA/nvbandwidth/issues/24")

	got = call(t, sys, "explain")
	assert.Equal(t, exitOK, got.code)
	assert.True(t, strings.HasPrefix(got.stdout, fmt.Sprintf("%d findings. P is a problem, W a warning, N a note.\nTo read about one, run: pincheck explain ID\n\nGPU and kernel module\n", len(doctor.Checks()))))
	assert.Contains(t, got.stdout, "\n  P  no_gpu                        this machine has no NVIDIA GPU\n")
	assert.Contains(t, got.stdout, "\n\nFiles\n  W  weights_on_network            weights are mapped from a network file system\n")
	for line := range strings.Lines(got.stdout) {
		assert.LessOrEqual(t, len(line), 80+len("\n"))
	}
	for _, c := range doctor.Checks() {
		assert.Regexp(t, "\n  "+strings.ToUpper(string(c.Severity()[:1]))+"  "+c.ID+" ", got.stdout)
	}
	for args, says := range map[string]string{
		"few_cpu":              `no finding "few_cpu". Did you mean few_cpus?`,
		"slow_copy":            "Did you mean slow_copies?",
		"numa":                 "Did you mean numa_unknown or sub_numa?",
		"nothing":              "For a list, run: pincheck explain",
		"a b":                  "want one id",
		"no_gpu --format json": "no flag --format",
	} {
		got = call(t, sys, append([]string{"explain"}, strings.Fields(args)...)...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Contains(t, got.stdout+got.stderr, says, args)
	}
}

// oneCPU is the host h200-vm, of which the process may use one CPU: a warning.
func oneCPU(t *testing.T) system {
	sys := on(t, "h200-vm")
	host := sys.root.(fstest.MapFS)
	host["proc/self/status"] = &fstest.MapFile{Data: []byte("Cpus_allowed_list:\t3\n")}
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}}})
	return sys
}

func TestWarningsHaveAnExitCodeOfTheirOwn(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, c := range hosttest.Sample([]struct {
		args    []string
		code    int
		verdict doctor.Verdict
		ids     []string
	}{
		{nil, exitWarnings, doctor.Warnings, []string{"few_cpus"}},
		{[]string{"--fail-on", "problem"}, exitOK, doctor.Warnings, []string{"few_cpus"}},
		{[]string{"--fail-on", "note"}, exitWarnings, doctor.Warnings, []string{"few_cpus"}},
		{[]string{"--ignore", "few_cpus"}, exitOK, doctor.Healthy, []string{}},
		{[]string{"--ignore", "thp_off,few_cpus"}, exitOK, doctor.Healthy, []string{}},
		{[]string{"--expect-gpus", "2"}, exitProblems, doctor.Problems, []string{"missing_gpus", "few_cpus"}},
		{[]string{"--expect-bandwidth", "63", "--ignore", "few_cpus"}, exitProblems, doctor.Problems, []string{"slow_copies"}},
		{[]string{"--expect-gpus", "2", "--ignore", "missing_gpus", "--ignore", "few_cpus"}, exitOK, doctor.Healthy, []string{}},
	}) {
		got := call(t, oneCPU(t), append([]string{"--quiet", "--format", "json"}, c.args...)...)
		assert.Equal(t, c.code, got.code, "%v", c.args)
		var r report.Result
		require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
		assert.Equal(t, c.verdict, r.Verdict, "%v", c.args)
		found := []string{}
		for _, f := range r.Findings {
			found = append(found, f.ID)
			assert.NotEmpty(t, f.Evidence, f.ID)
		}
		assert.Equal(t, c.ids, found, "%v", c.args)
	}
	for args, says := range map[string]string{
		"--fail-on never":        "--fail-on never: want problem, warning or note",
		"--ignore slow_copy":     "Did you mean slow_copies?",
		"--expect-gpus -1":       "must not be negative",
		"--expect-bandwidth NaN": "want a rate",
	} {
		got := call(t, on(t, "h200-vm"), strings.Fields(args)...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Contains(t, got.stderr, says, args)
	}
}

// What a link cannot carry is wrong usage, before anything is copied; where no link is known it is accepted.
func TestExpectedBandwidthAboveTheLink(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, args := range [][]string{{}, {"report", "-o", filepath.Join(t.TempDir(), "x.html")}} {
		got := call(t, oneCPU(t), append(args, "--quiet", "--expect-bandwidth", "100")...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Contains(t, got.stderr, "--expect-bandwidth 100 GB/s: PCIe 5.0 x16, the link of GPU 0, carries 63.0 GB/s each way at most", args)
		assert.Empty(t, got.stdout, args)
	}
	got := call(t, oneCPU(t), "--npd", "--expect-bandwidth", "100")
	assert.Equal(t, report.NPDUnknown, got.code)
	sys := oneCPU(t)
	for name := range sys.root.(fstest.MapFS) {
		if strings.HasSuffix(name, "max_link_speed") {
			delete(sys.root.(fstest.MapFS), name)
		}
	}
	got = call(t, sys, "--expect-bandwidth", "100", "--format", "json")
	assert.Equal(t, exitProblems, got.code)
	assert.Contains(t, got.stderr, "--expect-bandwidth 100 GB/s: what the link carries is not known of GPU 0\n")
	assert.Contains(t, got.stdout, "slow_copies")
}

// One GPU that cannot be described hides none of the others.
func TestOneBadGPUHidesNoOther(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.open = func(context.Context, cudart.Options) (*cudart.Runtime, error) {
		endSims(t) // another each time, which fails anew
		sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
		require.NoError(t, err)
		sims.Store(t, sim)
		sim.Fail("cudaGetDeviceProperties", cudasim.Fault{Nth: 2, Code: cudart.ErrUnknown})
		return cudart.Open(context.Background(), cudart.Options{Source: sim})
	}
	got := call(t, sys, "--quiet")
	assert.Equal(t, exitProblems, got.code)
	assert.Contains(t, got.stdout, "Problem  CUDA counts a GPU whose properties cannot be read")
	assert.Contains(t, got.stdout, "0 Simulated GPU  ")
	assert.Contains(t, got.stdout, "2 Simulated GPU  ")
}

// One direction of one pair among four GPUs loses what is copied, and every call succeeds.
func TestAPathBetweenGPUsThatLosesBytes(t *testing.T) {
	t.Parallel()
	needsSim(t)
	for _, lost := range [][2]int{{0, 1}, {3, 1}} { // the round trips of GPU 0 go by GPU 1, and none by 3 to 1
		sys := on(t, "h200-vm")
		sys.open = opening(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4), LostPeerCopies: [][2]int{lost}})
		got := call(t, sys, "--quiet")
		assert.Equal(t, exitProblems, got.code)
		assert.Contains(t, got.stdout, " peer_path_loses_bytes\n")
		text := strings.Join(strings.Fields(got.stdout), " ")
		assert.Contains(t, text, fmt.Sprintf("copies from GPU %d to GPU %d lose data without an error", lost[0], lost[1]))
		assert.Contains(t, text, fmt.Sprintf("16384 of 16384 bytes from GPU %d to GPU %d did not arrive", lost[0], lost[1]))
		assert.NotContains(t, got.stdout, "wrong_bytes")
	}
}

// Two GPUs are also measured at once, after each alone, and only for bandwidth.
func TestAllGPUsAtOnce(t *testing.T) {
	t.Parallel()
	needsSim(t)
	sys := on(t, "h200-vm")
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}, {PCIBusID: "0000:00:07.0"}}})
	got := call(t, sys, "--quiet", "--format", "json")
	r, err := report.Read([]byte(got.stdout))
	require.NoError(t, err)
	require.NotNil(t, r.Together)
	assert.True(t, r.Together.Complete)
	assert.Len(t, r.Together.Series, 6)
	assert.Empty(t, r.Together.Errors)
	assert.Equal(t, []doctor.PeerPath{{From: 0, To: 1, ProofBytes: peers.ProofBytes}, {From: 1, To: 0, ProofBytes: peers.ProofBytes}}, r.PeerPaths)
	for _, f := range r.Findings {
		assert.NotEqual(t, "slow_together", f.ID, "the simulated links share nothing")
	}

	for _, args := range []string{"verify", "--device 1"} {
		sys = on(t, "h200-vm")
		sys.open = opening(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
		got = call(t, sys, append(strings.Fields(args), "--quiet", "--format", "json")...)
		r, err = report.Read([]byte(got.stdout))
		require.NoError(t, err, args)
		assert.Nil(t, r.Together, args)
	}
}

// stalling returns a simulated GPU whose calls of fn do not return, and what lets them. The
// end of the test does that too: then all that the program held is released.
func stalling(t *testing.T, cfg cudasim.Config, fn string, f cudasim.Fault) (sim *cudasim.Sim, unblock func()) {
	t.Helper()
	sim, err := cudasim.New(cfg)
	require.NoError(t, err)
	unblock = sim.Block(fn, f)
	t.Cleanup(func() {
		unblock()
		testgpu.End(t, sim)
	})
	return sim, unblock
}

// hasty is a machine that waits less for calls that do not return: as long as all others take.
func hasty(sys system) system {
	sys.callGrace, sys.tick = 200*time.Millisecond, 200*time.Millisecond
	return sys
}

// interrupted runs the command, and interrupts it when a function of CUDA is called.
func interrupted(t *testing.T, sys system, sim *cudasim.Sim, fn string, args ...string) outcome {
	t.Helper()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	sim.OnCall(func(name string, _ int) {
		if name == fn {
			interrupt()
		}
	})
	sys.open = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
		rt, err := cudart.Open(ctx, cudart.Options{Source: sim})
		if failed := (*cudart.OpenError)(nil); errors.As(err, &failed) {
			failed.Driver.LibPath = "/usr/lib/libcuda.so.1" // of the simulated library
		}
		return rt, err
	}
	var stdout, stderr bytes.Buffer
	code := run(ctx, args, &stdout, &stderr, sys)
	return outcome{stdout.String(), stderr.String(), code}
}

// A call that had not returned when the run was ended is named, and no problem: it may take longer.
// There may be a GPU, whatever is known of it until then.
func TestCallsThatAnInterruptMeets(t *testing.T) {
	t.Parallel()
	needsSim(t)
	var waiting sync.WaitGroup // for calls, most of the time: all at once, with a simulator each
	defer waiting.Wait()
	for _, c := range []struct {
		fn, command string
		described   bool // the GPU
	}{
		{"cudaDriverGetVersion", "check", false},
		{"cudaGetDeviceCount", "check", false},
		{"cudaGetDeviceCount", "verify", false},
		{"cudaGetDeviceCount", "devices", false},
		{"cudaGetDeviceCount", "bench link", false},
		{"cudaGetDeviceProperties", "bench link", false},
		{"cudaMemGetInfo", "check", true},
		{"cudaMalloc", "verify", true},
		{"cudaMemcpyAsync", "check", true},
		{"cudaHostUnregister", "check", true},
	} {
		waiting.Go(func() {
			t.Run(c.fn+" in "+c.command, func(t *testing.T) {
				sim, unblock := stalling(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}}}, c.fn, cudasim.Fault{Times: -1})
				sys := hasty(on(t, "h200-vm"))
				sys.experiments = []measure.Experiment{bench.Link(bench.LinkPlan{})}
				got := interrupted(t, sys, sim, c.fn, append(strings.Fields(c.command), "--quiet", "--format", "json")...)
				unblock()
				assert.Equal(t, exitInterrupted, got.code)
				r := resultOf(t, got)
				assert.Equal(t, doctor.Incomplete, r.Verdict)
				assert.Nil(t, r.Opening)
				require.NotEmpty(t, r.Findings)
				assert.Equal(t, "driver_hangs", r.Findings[0].ID)
				assert.Equal(t, c.fn+" had not returned when the run ended", r.Findings[0].Summary)
				for _, f := range r.Findings {
					assert.Equal(t, doctor.Note, f.Severity, "%s", f.Summary)
				}
				require.NotNil(t, r.Host)
				assert.Equal(t, c.described, len(r.Devices) == 1, "it was described before")
			})
		})
	}
}

// Experiments run in this process: those that hang are left alone when the run is ended.
func TestAStalledExperimentIsNamed(t *testing.T) {
	t.Parallel()
	needsSim(t)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	for _, fn := range []string{"cudaMemGetInfo", "cudaMemcpyAsync"} {
		waiting.Go(func() {
			t.Run(fn, func(t *testing.T) {
				sim, unblock := stalling(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{PCIBusID: "0000:00:06.0"}}}, fn, cudasim.Fault{Times: -1})
				sys := on(t, "h200-vm")
				sys.releaseGrace = 100 * time.Millisecond
				sys.experiments = []measure.Experiment{bench.Link(bench.LinkPlan{SizeBytes: 1 << 20, Copies: 1, Samples: 3})}
				got := interrupted(t, sys, sim, fn, "bench", "link", "--quiet", "--format", "json")
				unblock()
				assert.Equal(t, exitInterrupted, got.code, got.stderr)
				r, err := report.Read([]byte(got.stdout))
				require.NoError(t, err)
				require.NotEmpty(t, r.Probes, fn)
				assert.Equal(t, fn+" on device 0", r.Probes[0].Call)
				assert.Equal(t, doctor.ProbeUnfinished, r.Probes[0].State)
				assert.Len(t, r.Devices, 1, "it was described before")
			})
		})
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	for _, lines := range []bool{false, true} {
		sys := on(t, "h200-vm")
		host := sys.root.(fstest.MapFS)
		const thp = "sys/kernel/mm/transparent_hugepage/enabled"
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		looks := 0
		sys.after = func(d time.Duration) <-chan time.Time {
			assert.Equal(t, 5*time.Second, d)
			switch looks++; looks {
			case 1: // nothing has changed
			case 2:
				host[thp] = &fstest.MapFile{Data: []byte("always madvise [never]\n")}
			case 3:
				host[thp] = &fstest.MapFile{Data: []byte("always [madvise] never\n")}
			default:
				cancel()
			}
			now := make(chan time.Time, 1)
			now <- time.Now()
			return now
		}
		args := []string{"watch", "--interval", "5s", "--damping", "1/1"}
		if lines {
			args = append(args, "--format", "jsonl")
		}
		var stdout, stderr bytes.Buffer
		assert.Equal(t, exitOK, run(ctx, args, &stdout, &stderr, sys), stderr.String())
		text := strings.Split(strings.TrimSpace(stdout.String()), "\n")
		if !lines {
			require.Len(t, text, 3, stdout.String())
			assert.Contains(t, text[0], "no findings")
			assert.Contains(t, text[1], " + note thp_off: transparent huge pages are off")
			assert.Contains(t, text[2], " - note thp_off: ")
			continue
		}
		require.Len(t, text, 2, stdout.String())
		for i, want := range []string{"appeared", "ended"} {
			var c change
			require.NoError(t, json.Unmarshal([]byte(text[i]), &c))
			assert.Equal(t, want, c.Change)
			assert.Equal(t, "thp_off", c.Finding.ID)
			assert.NotEmpty(t, c.Finding.Evidence)
		}
	}
	for args, says := range map[string]string{
		"--interval 1ms":  "must be at least 1s",
		"--format csv":    "want text or jsonl",
		"--sim":           "no flag --sim: watch only reads this host",
		"--interval soon": "want a time",
		"--damping 2/3":   "what comes and goes at every look is in 2 of 3: want at least 3/3",
		"--damping 4/3":   "want k/n",
		"--damping 3":     "want k/n",
		"--damping 3/4x":  "want k/n",
		"--textfile /x/y": "names end in .prom",
		"extra":           "takes no argument",
	} {
		got := call(t, on(t, "h200-vm"), append([]string{"watch"}, strings.Fields(args)...)...)
		assert.Equal(t, exitUsage, got.code, args)
		assert.Contains(t, got.stderr, says, args)
	}
}

// Without a GPU the doctor is done at once, and says what a host can tell.
func TestWatchWithoutGPU(t *testing.T) {
	t.Parallel()
	sys := on(t, "no-gpu-cgroup-v1")
	ctx, cancel := context.WithCancel(t.Context())
	sys.after = func(time.Duration) <-chan time.Time { cancel(); return nil }
	var stdout bytes.Buffer
	assert.Equal(t, exitOK, run(ctx, []string{"watch"}, &stdout, &stdout, sys))
	assert.Contains(t, stdout.String(), "+ problem no_gpu: this machine has no NVIDIA GPU")
	assert.NotContains(t, stdout.String(), "no_driver_library")
}

// watch does not ask CUDA how many GPUs it shows.
func TestWatchMissesGPUs(t *testing.T) {
	t.Parallel()
	sys := on(t, "h200-vm")
	ctx, cancel := context.WithCancel(t.Context())
	sys.after = func(time.Duration) <-chan time.Time { cancel(); return nil }
	var stdout, stderr bytes.Buffer
	assert.Equal(t, exitOK, run(ctx, []string{"watch", "--expect-gpus", "9", "--format", "jsonl"}, &stdout, &stderr, sys), stderr.String())
	assert.Contains(t, stdout.String(), "8 of 9 GPUs missing")
	assert.Contains(t, stdout.String(), "GPUs with NVIDIA's driver: 1; --expect-gpus: 9")
	assert.NotContains(t, stdout.String(), "cudaGetDeviceCount")
}

func TestLicenses(t *testing.T) {
	t.Parallel()
	sys := failing(t, "h200-vm", errors.New("licenses must not open a library"))
	got := call(t, sys, "licenses")
	assert.Equal(t, exitOK, got.code)
	for _, module := range []string{"Go: LICENSE", "purego: LICENSE", "cobra: LICENSE"} {
		assert.Contains(t, got.stdout, module)
	}
	assert.Equal(t, exitUsage, call(t, sys, "licenses", "--format", "json").code)
	assert.Equal(t, exitUsage, call(t, sys, "licenses", "all").code)
}
