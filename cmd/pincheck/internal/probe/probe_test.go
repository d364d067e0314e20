package probe

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/bench"
	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe/child"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// scripted is a machine whose calls do what the name of the library says: "cudaMalloc blocks",
// "cudaMalloc crashes" and so on, on GPU 1 of two if there is a choice.
var scripted = Local{
	OpenLibrary: func(ctx context.Context, o cudart.Options) (*cudart.Runtime, error) {
		sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
		if err != nil {
			return nil, err
		}
		fn, does, _ := strings.Cut(o.Library, " ")
		switch does {
		case "blocks":
			sim.Block(fn, cudasim.Fault{Times: -1})
		case "fails":
			sim.Fail(fn, cudasim.Fault{Nth: 2, Code: cudart.ErrUnknown})
		case "waits":
			sim.OnCall(func(called string, _ int) {
				if called == fn {
					time.Sleep(500 * time.Millisecond)
				}
			})
		case "stops":
			sim.OnCall(func(called string, _ int) {
				if called == fn {
					p, _ := os.FindProcess(os.Getpid())
					_ = p.Signal(syscall.Signal(19)) // SIGSTOP, which not all platforms name
					select {}
				}
			})
		case "crashes", "dies": // of a fault; by the kernel's hand
			end := map[string]syscall.Signal{"crashes": syscall.SIGABRT, "dies": syscall.SIGKILL}[does]
			sim.OnCall(func(called string, _ int) {
				if called == fn {
					p, _ := os.FindProcess(os.Getpid())
					_ = p.Signal(end)
					select {}
				}
			})
		}
		return cudart.Open(ctx, cudart.Options{Source: sim})
	},
	ReadNVML: func(calling func(string, *nvml.Report)) (*nvml.Report, error) {
		r := &nvml.Report{Library: "scripted", Count: 3}
		for range slowCalls() {
			calling("nvmlDeviceGetName", r)
			time.Sleep(300 * time.Millisecond)
		}
		if slowCalls() > 0 {
			return r, nil
		}
		for i := range 2 {
			calling("nvmlDeviceGetHandleByIndex_v2", r)
			calling("nvmlDeviceGetName", r)
			r.GPUs = append(r.GPUs, nvml.GPU{Index: i, Name: "simulated"})
		}
		calling("nvmlDeviceGetHandleByIndex_v2", r)
		select {}
	},
	ReadHost: func() *hostinfo.Host { return &hostinfo.Host{} },
	Adjust: func(p Plans) Plans {
		p.Verify.Variants, p.Verify.MaxBytes, p.Verify.NoStale = 1, 4097, true
		p.Bandwidth = bench.LinkPlan{SizeBytes: 1 << 20, Copies: 2, Samples: 3}
		p.Together = p.Bandwidth
		return p
	},
	Tick: 20 * time.Millisecond,
}

// slow is the variable that has the number of calls that NVML makes, each of them slow.
const slow = "PINCHECK_TEST_SLOW_CALLS"

func slowCalls() int {
	n, _ := strconv.Atoi(os.Getenv(slow)) // 0 without
	return n
}

// hasty is scripted with calls that may take little.
func hasty() Local {
	l := scripted
	l.Limit = 3 * time.Second
	return l
}

// late is the variable that has the time which a process takes to start. Calls may take a second then.
const late = "PINCHECK_TEST_LATE"

func TestMain(m *testing.M) {
	l := hasty()
	if d, err := time.ParseDuration(os.Getenv(late)); err == nil {
		time.Sleep(d)
		l.Limit = time.Second
	}
	child.Serve(Children(l))
	os.Exit(m.Run())
}

func needsProcesses(t *testing.T) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the simulated GPU runs on Linux only")
	}
	hosttest.StartsPrograms(t)
}

var all = Steps{Verify: true, Bandwidth: true}

// Each of these calls never returns: the examination ends all the same, and names the call.
func TestCallsThatNeverReturn(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	p := Prober{Local: hasty(), Isolated: true}
	var calls sync.WaitGroup
	for _, fn := range []string{"cudaGetDeviceCount", "cudaDriverGetVersion", "cudaGetDeviceProperties"} {
		calls.Go(func() {
			out, err := p.Open(t.Context(), Request{Library: fn + " blocks"})
			assert.NoError(t, err, fn)
			if assert.Len(t, out.Facts.Probes, 1, fn) {
				probe := out.Facts.Probes[0]
				assert.GreaterOrEqual(t, probe.Seconds, 1.0, "three, less what came before the call")
				probe.Seconds = 0
				assert.Equal(t, doctor.Probe{
					Name: "cuda", Stage: doctor.StageOpen, Call: fn, State: doctor.ProbeHung, Detail: "did not return in 3s",
				}, probe)
			}
			assert.Empty(t, out.Facts.Devices)
		})
	}
	calls.Wait() // so that few processes have to answer within the second in which they are listened to
	for _, fn := range []string{"cudaMemGetInfo", "cudaMalloc", "cudaHostRegister", "cudaMemcpyAsync", "cudaMemcpy", "cudaStreamQuery", "cudaEventRecord", "cudaHostUnregister", "cudaFree"} {
		calls.Go(func() {
			out, err := p.Device(t.Context(), Request{Library: fn + " blocks", Device: 1, Steps: all}, func(Device) {})
			assert.NoError(t, err, fn)
			assert.Equal(t, "gpu 1", out.Probe.Name)
			assert.Equal(t, doctor.ProbeHung, out.Probe.State, fn)
			assert.Equal(t, fn+" on device 1", out.Probe.Call)
			assert.Equal(t, "did not return in 3s", out.Probe.Detail)
			assert.Equal(t, 1, *out.Probe.Device)
			stage := doctor.StageRoundTrips
			if fn == "cudaMemGetInfo" {
				stage = doctor.StageMemory
			}
			assert.Equal(t, stage, out.Probe.Stage, fn)
			assert.Equal(t, fn == "cudaMemGetInfo", out.Facts.MemoryTotal == 0, "what was found before is there: %s", fn)
		})
	}
	calls.Wait()
}

// A process that starts late has all of its time to name the call.
func TestAProcessThatStartsLate(t *testing.T) {
	needsProcesses(t)
	t.Setenv(late, "1500ms")
	l := scripted
	l.Limit = time.Second
	out, err := Prober{Local: l, Isolated: true}.Open(t.Context(), Request{Library: "cudaGetDeviceCount blocks"})
	require.NoError(t, err)
	require.Len(t, out.Facts.Probes, 1)
	assert.Equal(t, doctor.ProbeHung, out.Facts.Probes[0].State)
	assert.Equal(t, "cudaGetDeviceCount", out.Facts.Probes[0].Call)
}

// A process that a fault ended is told from one that somebody killed.
func TestProcessesThatDie(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	p := Prober{Local: hasty(), Isolated: true}
	for does, want := range map[string]struct {
		state  doctor.ProbeState
		detail string
	}{
		"crashes": {doctor.ProbeCrashed, "SIGABRT"},
		"dies":    {doctor.ProbeKilled, "signal: killed"},
	} {
		out, err := p.Open(t.Context(), Request{Library: "cudaGetDeviceCount " + does})
		require.NoError(t, err)
		require.Len(t, out.Facts.Probes, 1)
		assert.Equal(t, want.state, out.Facts.Probes[0].State)
		assert.Equal(t, doctor.StageOpen, out.Facts.Probes[0].Stage)
		assert.Empty(t, out.Facts.Probes[0].Call, "which call it was is not known")
		assert.Contains(t, out.Facts.Probes[0].Detail, want.detail)

		gpu, err := p.Device(t.Context(), Request{Library: "cudaMemcpyAsync " + does, Device: 1, Steps: all}, func(Device) {})
		require.NoError(t, err)
		assert.Equal(t, want.state, gpu.Probe.State)
		assert.Equal(t, "gpu 1", gpu.Probe.Name)
		assert.Equal(t, 1, *gpu.Probe.Device)
		assert.Equal(t, doctor.StageRoundTrips, gpu.Probe.Stage, "what it did then")
		assert.Positive(t, gpu.Facts.MemoryTotal, "what was found before is there")
	}
}

// A process that is stopped says nothing more: what it did last is named.
func TestAProcessThatIsStopped(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	l := hasty()
	l.Silence = 3 * time.Second
	out, err := Prober{Local: l, Isolated: true}.Device(t.Context(), Request{Library: "cudaMemcpyAsync stops", Device: 1, Steps: all}, func(Device) {})
	require.NoError(t, err)
	assert.Equal(t, doctor.ProbeHung, out.Probe.State)
	assert.Equal(t, "its process sent nothing for 3s", out.Probe.Detail)
	assert.Equal(t, 1, *out.Probe.Device)
	assert.Equal(t, doctor.StageRoundTrips, out.Probe.Stage)
	assert.Contains(t, []string{"", "cudaMemcpyAsync on device 1"}, out.Probe.Call, "known if the process still ran at a tick")
	assert.Positive(t, out.Facts.MemoryTotal, "what was found before is there")
}

// A context that ends names the call that had not returned, in a process and without.
func TestContextsThatEndDuringACall(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	for _, isolated := range []bool{true, false} {
		ctx, cancel := context.WithCancelCause(t.Context())
		p := Prober{Local: scripted, Isolated: isolated}
		if isolated {
			p.Local = hasty()
		}
		out, err := p.Device(ctx, Request{Library: "cudaMemGetInfo blocks", Device: 1}, func(d Device) {
			if slices.Contains(d.Inside, "cudaMemGetInfo on device 1") { // others are inside for a moment
				cancel(assert.AnError)
			}
		})
		require.NoError(t, err)
		assert.Equal(t, doctor.ProbeUnfinished, out.Probe.State, "isolated: %v; it may take longer", isolated)
		assert.Equal(t, "cudaMemGetInfo on device 1", out.Probe.Call)
		assert.Equal(t, "had not returned at the end: "+assert.AnError.Error(), out.Probe.Detail)
	}
}

// The end of a run says nothing of a call that has not taken its time yet.
func TestWhatHangsAndWhatWasNotFinished(t *testing.T) {
	t.Parallel()
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(assert.AnError)
	for _, c := range []struct {
		ctx    context.Context
		inside time.Duration
		state  doctor.ProbeState
		detail string
	}{
		{ended, 9 * time.Second, doctor.ProbeUnfinished, "had not returned at the end: " + assert.AnError.Error()},
		{ended, 10 * time.Second, doctor.ProbeHung, "did not return in 10s"},
		{t.Context(), 10 * time.Second, doctor.ProbeHung, "did not return in 10s"},
	} {
		assert.Equal(t, doctor.Probe{Call: "cudaFree", State: c.state, Detail: c.detail}, unreturned(c.ctx, "cudaFree", c.inside, 10*time.Second))
	}
}

// Eight GPUs without persistence mode start one after the other, and the first call waits for all.
func TestTheFirstCallMayTakeLonger(t *testing.T) {
	t.Parallel()
	e := &examination{send: func(Device) {}}
	assert.Equal(t, 30*time.Second, e.callLimit(Request{}, 1))
	assert.Equal(t, 100*time.Second, e.callLimit(Request{}, 8))
	e.begun()
	assert.Equal(t, 10*time.Second, e.callLimit(Request{}, 8))
	assert.Equal(t, time.Minute, e.callLimit(Request{Steps: Steps{Full: true}}, 8))
}

// Calls of one function that overlap, each of them soon done, are not one that hangs.
func TestCallsThatOverlapDoNotHang(t *testing.T) {
	t.Parallel()
	sim, err := cudasim.New(cudasim.Config{})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { testgpu.End(t, sim) })
	rt, err := cudart.Open(context.Background(), cudart.Options{Source: sim})
	require.NoError(t, err)
	dev, err := rt.Device(0)
	require.NoError(t, err)
	done := make(chan error, 1)
	begin := func() (end func()) { // returns when the call is inside the library
		returns := make(chan struct{})
		inside := make(chan struct{})
		sim.OnCall(func(string, int) { close(inside); <-returns })
		go func() { _, _, err := dev.MemInfo(); done <- err }()
		<-inside
		return func() { close(returns); assert.NoError(t, <-done) }
	}

	watching, stop := context.WithCancel(t.Context())
	end, ticks := begin(), 0
	ongoing := &examination{started: true, send: func(d Device) {
		assert.Len(t, d.Inside, 1, "one of them is inside at any time")
		if ticks++; ticks > 60 {
			stop()
		}
		if ticks%3 == 0 {
			last := end
			end = begin()
			last()
		}
	}}
	l := Local{Tick: time.Millisecond, Limit: 20 * time.Millisecond}
	got := l.watch(watching, t.Context(), rt, Request{}, ongoing)
	end()
	assert.Empty(t, got, "after %d ticks", ticks)
	require.NoError(t, rt.Close())
}

// What is under way when a context ends, and returns soon after, does not hang.
func TestAContextThatEndsWhileTheLibraryOpens(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	for _, isolated := range []bool{true, false} {
		for _, does := range []string{"waits", "blocks"} {
			ctx, cancel := context.WithCancelCause(t.Context())
			p := Prober{Local: scripted, Isolated: isolated}
			p.Grace = 200 * time.Millisecond
			if does == "waits" {
				p.Grace = time.Minute // until it has returned
			}
			ended := time.AfterFunc(100*time.Millisecond, func() { cancel(assert.AnError) })
			out, err := p.Open(ctx, Request{Library: "cudaGetDeviceCount " + does})
			require.NoError(t, err)
			require.False(t, ended.Stop())
			if does == "waits" {
				assert.Empty(t, out.Facts.Probes, "isolated: %v", isolated)
				assert.Len(t, out.Facts.Devices, 2)
				continue
			}
			require.Len(t, out.Facts.Probes, 1)
			assert.Equal(t, doctor.ProbeUnfinished, out.Facts.Probes[0].State)
			assert.Nil(t, out.Facts.Opening, "that has not failed")
			assert.Equal(t, "had not returned at the end: "+assert.AnError.Error(), out.Facts.Probes[0].Detail)
			assert.Less(t, out.Facts.Probes[0].Seconds, 30.0, "what it took, not what it may take")
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := Prober{Local: scripted, Isolated: isolated}.Open(ended, Request{Library: "cudaGetDeviceCount blocks"})
		require.ErrorIs(t, err, context.Canceled, "no call was made")
	}
}

// The time in which this process is stopped does not count: a time limit of the context would have
// passed afterwards, and a call that is about to return be reported.
func TestTheLimitOfOpeningCountsWhileThisProcessRuns(t *testing.T) {
	t.Parallel()
	l := Local{Limit: time.Millisecond, OpenLibrary: func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
		_, timed := ctx.Deadline()
		assert.False(t, timed)
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}}
	_, err := l.Open(t.Context(), Request{})
	require.ErrorContains(t, err, "time limit of 1ms")
	require.NoError(t, t.Context().Err())
}

// Of several calls that have not returned at the end, the one that has been inside for longest is named.
func TestTheCallThatIsInsideLongestIsNamed(t *testing.T) {
	t.Parallel()
	sim, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	var calls sync.WaitGroup
	defer calls.Wait()
	block := func(fn string, call func()) {
		t.Helper()
		t.Cleanup(sim.Block(fn, cudasim.Fault{}))
		calls.Go(call)
		require.NoError(t, sim.AwaitBlocked(t.Context(), fn, 1))
	}
	defer sim.ResetFaults() // before the calls are waited for
	block("cudaMemGetInfo", func() { _, _, _ = dev.MemInfo() })
	ongoing := &examination{send: func(d Device) {
		switch len(d.Inside) {
		case 1:
			block("cudaHostAlloc", func() {
				p, err := dev.HostAlloc(4096, 0)
				assert.NoError(t, err)
				assert.NoError(t, dev.FreeHost(p))
			})
		case 2:
			assert.Equal(t, []string{"cudaHostAlloc on device 0", "cudaMemGetInfo on device 0"}, d.Inside)
			cancel(assert.AnError)
		}
	}}
	got := Local{Tick: time.Millisecond, Grace: time.Millisecond}.watch(t.Context(), ctx, rt, Request{}, ongoing)
	assert.Equal(t, "cudaMemGetInfo on device 0", got.Call)
	assert.Equal(t, doctor.ProbeUnfinished, got.State)
}

func TestExamination(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	for _, isolated := range []bool{true, false} {
		p := Prober{Local: scripted, Isolated: isolated}
		opened, err := p.Open(t.Context(), Request{Simulate: true})
		require.NoError(t, err)
		require.Len(t, opened.Facts.Devices, 1)
		assert.Empty(t, opened.Errors)
		assert.Zero(t, opened.Facts.Devices[0].MemoryTotal, "it takes a context to read that")

		shares := []float64{0}
		gpu, err := p.Device(t.Context(), Request{Simulate: true, Steps: all}, func(d Device) { shares = append(shares, d.Share) })
		require.NoError(t, err)
		assert.Empty(t, gpu.Errors)
		assert.Empty(t, gpu.Facts.Errors)
		assert.Equal(t, doctor.ProbeOK, gpu.Probe.State)
		assert.Positive(t, gpu.Facts.MemoryTotal)
		require.NotNil(t, gpu.Facts.Verify)
		assert.Equal(t, gpu.Facts.Verify.CasesPlanned, gpu.Facts.Verify.Cases)
		require.NotNil(t, gpu.Facts.Bandwidth)
		assert.Len(t, gpu.Facts.Bandwidth.Series, 2)
		assert.IsNonDecreasing(t, shares)
	}
}

// A GPU whose turn comes later is verified before, and waits with all that takes long to make.
func TestTurns(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	for _, p := range []Prober{{Local: scripted, Isolated: true}, {Local: here(t)}} {
		turn := make(chan struct{})
		once := sync.OnceFunc(func() { close(turn) })
		waited := false
		out, err := p.Device(t.Context(), Request{Device: 1, Steps: all, Turn: turn}, func(d Device) {
			switch d.Stage {
			case doctor.StageWaiting:
				waited = true
				assert.Nil(t, d.Facts.Bandwidth)
				assert.Equal(t, d.Facts.Verify.CasesPlanned, d.Facts.Verify.Cases)
				once()
			case doctor.StageCopies:
				assert.True(t, waited)
			}
		})
		require.NoError(t, err)
		assert.True(t, waited)
		assert.Equal(t, doctor.ProbeOK, out.Probe.State)
		assert.NotNil(t, out.Facts.Bandwidth)

		ctx, cancel := context.WithCancelCause(t.Context())
		out, err = p.Device(ctx, Request{Device: 1, Steps: all, Turn: make(chan struct{})}, func(d Device) {
			if d.Stage == doctor.StageWaiting {
				cancel(assert.AnError)
			}
		})
		require.NoError(t, err)
		assert.Nil(t, out.Facts.Bandwidth)
		assert.NotNil(t, out.Facts.Verify)
		assert.NotEqual(t, doctor.ProbeHung, out.Probe.State, "it was in no call")
	}
}

// Round trips go by a GPU with peer access, if one of those that may be used has it.
func TestPeerOfADevice(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 4), NoPeerAccess: [][2]int{{1, 2}}})
	dev, err := rt.Device(1)
	require.NoError(t, err)
	for _, c := range []struct {
		ordinals []int
		want     int
	}{{[]int{2, 3, 0}, 3}, {[]int{2}, 2}, {[]int{9, 0}, 0}} {
		got := peerOf(dev, c.ordinals)
		require.NotNil(t, got)
		assert.Equal(t, c.want, got.Ordinal())
	}
	assert.Nil(t, peerOf(dev, nil))
}

// here is the machine with two GPUs, in this process.
func here(t *testing.T) Local {
	l := scripted
	l.OpenLibrary = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
		sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { testgpu.End(t, sim) })
		return cudart.Open(ctx, cudart.Options{Source: sim})
	}
	return l
}

// All GPUs at once are one step, whose calls may hang or crash as those of one GPU.
func TestTogether(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	for _, p := range []Prober{{Local: scripted, Isolated: true}, {Local: here(t)}} {
		var last Device
		out, err := p.Device(t.Context(), Request{Steps: Steps{Together: []int{0, 1}, Rate: 55}}, func(d Device) { last = d })
		require.NoError(t, err)
		assert.Empty(t, out.Errors)
		assert.Empty(t, out.Facts.Errors)
		assert.Equal(t, doctor.ProbeOK, out.Probe.State)
		require.NotNil(t, out.Together)
		assert.Len(t, out.Together.Series, 6, "two devices and their sum, each way")
		assert.Equal(t, "copying with all GPUs at once", last.Step)

		out, err = p.Device(t.Context(), Request{Steps: Steps{Together: []int{0, 7}}}, func(Device) {})
		require.NoError(t, err)
		assert.NotEmpty(t, out.Facts.Errors, "there are two")
	}
	p := Prober{Local: hasty(), Isolated: true}
	for does, state := range map[string]doctor.ProbeState{"cudaMalloc blocks": doctor.ProbeHung, "cudaMemcpyAsync crashes": doctor.ProbeCrashed} {
		out, err := p.Device(t.Context(), Request{Library: does, Steps: Steps{Together: []int{0, 1}}}, func(Device) {})
		require.NoError(t, err)
		assert.Equal(t, state, out.Probe.State, does)
		assert.Equal(t, "all gpus", out.Probe.Name, does)
		assert.Nil(t, out.Probe.Device, does)
		assert.Equal(t, doctor.StageTogether, out.Probe.Stage, does)
	}
}

// There is no memory for all of them: that is said, and is no failure.
func TestTogetherWithoutMemory(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	l := here(t)
	l.Adjust = func(p Plans) Plans {
		p.Together = bench.LinkPlan{SizeBytes: 1 << 50}
		return p
	}
	out, err := Prober{Local: l}.Device(t.Context(), Request{Steps: Steps{Together: []int{0, 1}}}, func(Device) {})
	require.NoError(t, err)
	assert.Empty(t, out.Facts.Errors)
	require.NotNil(t, out.Together)
	assert.Empty(t, out.Together.Series)
	assert.Contains(t, out.Together.Notes[0], "not measured: ")
}

// One GPU that CUDA cannot describe does not hide the other.
func TestOneGPUThatFails(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	p := Prober{Local: scripted, Isolated: true}
	for _, fn := range []string{"cudaGetDeviceProperties", "cudaDeviceGetPCIBusId"} {
		opened, err := p.Open(t.Context(), Request{Library: fn + " fails"})
		require.NoError(t, err)
		require.Len(t, opened.Facts.Devices, 1)
		assert.Equal(t, 0, opened.Facts.Devices[0].Ordinal)
		require.Len(t, opened.Facts.DeviceErrors, 1)
		assert.Contains(t, opened.Facts.DeviceErrors[0], fn+": device 1")
		assert.Equal(t, 2, *opened.Facts.CUDADevices)
		gpu, err := p.Device(t.Context(), Request{Library: fn + " fails", Device: 1}, func(Device) {})
		require.NoError(t, err)
		assert.Contains(t, gpu.Facts.Errors[0], fn)
	}
}

// One GPU whose call never returns leaves those that were read before.
func TestAGPUThatNVMLDoesNotReturnFrom(t *testing.T) {
	t.Parallel()
	needsProcesses(t)
	out, err := Prober{Local: hasty(), Isolated: true}.NVML(t.Context(), Request{})
	require.NoError(t, err)
	assert.Equal(t, doctor.Probe{
		Name: "nvml", Stage: doctor.StageNVML, Call: "nvmlDeviceGetHandleByIndex_v2", State: doctor.ProbeHung, Detail: "did not return in 3s", Seconds: out.Probe.Seconds,
	}, out.Probe)
	assert.Equal(t, &nvml.Report{Library: "scripted", Count: 3, GPUs: []nvml.GPU{{Name: "simulated"}, {Index: 1, Name: "simulated"}}}, out.Report)
}

// On a slow host, or where each GPU must start, all calls together take long, and none hangs.
func TestNVMLThatIsSlow(t *testing.T) {
	needsProcesses(t)
	t.Setenv(slow, "18") // 5.4 seconds
	read := func(limit time.Duration, check func(NVML)) {
		p := Prober{Local: scripted, Isolated: true}
		p.Limit = limit
		out, err := p.NVML(t.Context(), Request{})
		assert.NoError(t, err)
		assert.NotNil(t, out.Report, "what was read")
		check(out)
	}
	var both sync.WaitGroup
	both.Go(func() {
		read(5*time.Second, func(out NVML) {
			assert.Equal(t, doctor.ProbeOK, out.Probe.State, "%+v", out.Probe)
			assert.Greater(t, out.Probe.Seconds, 5.0, "more than one call may take")
		})
	})
	both.Go(func() {
		read(2500*time.Millisecond, func(out NVML) {
			assert.Equal(t, doctor.ProbeFailed, out.Probe.State, "it ends in time, and no call is accused")
			assert.Equal(t, "not done in 5s", out.Probe.Detail)
		})
	})
	both.Wait()
}

func TestNVMLWithoutALibrary(t *testing.T) {
	t.Parallel()
	out, err := Prober{}.NVML(t.Context(), Request{})
	require.NoError(t, err)
	if out.Report == nil {
		assert.Equal(t, doctor.ProbeFailed, out.Probe.State)
		assert.NotEmpty(t, out.Probe.Detail)
	}
}

// Device nodes that cannot be opened are named: control groups of version 2 show nothing.
func TestDeviceNodesAreOpened(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := filepath.Join(dir, "nvidia0")
	require.NoError(t, os.WriteFile(open, nil, 0o600))
	h := &hostinfo.Host{NVIDIA: hostinfo.NVIDIA{Nodes: []hostinfo.Node{{Path: open}, {Path: dir}}}}
	errs := openNodes(h)
	assert.Len(t, errs, 1)
	assert.Contains(t, errs[dir], "directory")
	f := &doctor.Facts{NodeErrors: errs}
	f.SetHost(h)
	assert.Empty(t, f.Host.NVIDIA.Nodes[0].OpenError)
	assert.Equal(t, errs[dir], f.Host.NVIDIA.Nodes[1].OpenError)
}
