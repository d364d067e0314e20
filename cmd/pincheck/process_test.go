package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe/child"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
)

// asProgram makes the test binary the program itself. Stuck names a function of CUDA that
// does not return in the processes that this starts, and a file that is made when it is called;
// gpus is how many simulated GPUs they have.
const (
	asProgram = "PINCHECK_TEST_MAIN"
	stuck     = "PINCHECK_TEST_STUCK"
	gpus      = "PINCHECK_TEST_GPUS"
)

// scripted is what these processes do.
func scripted() probe.Local {
	l := probe.Local{ReadHost: thisHost, Adjust: tiny}
	if n, err := strconv.Atoi(os.Getenv(gpus)); err == nil {
		l.OpenLibrary = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
			sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, n)})
			if err != nil {
				return nil, err
			}
			return cudart.Open(ctx, cudart.Options{Source: sim})
		}
		l.Limit = time.Hour // no machine is too slow
		return l
	}
	fn, file, ok := strings.Cut(os.Getenv(stuck), " ")
	if !ok {
		return l
	}
	l.Tick, l.Limit = 20*time.Millisecond, 3*time.Second
	l.OpenLibrary = func(ctx context.Context, _ cudart.Options) (*cudart.Runtime, error) {
		sim, err := cudasim.New(cudasim.Config{Devices: make([]cudasim.DeviceConfig, 2)})
		if err != nil {
			return nil, err
		}
		sim.Block(fn, cudasim.Fault{Times: -1})
		sim.OnCall(func(name string, _ int) {
			if name == fn {
				_ = os.WriteFile(file, nil, 0o600)
			}
		})
		return cudart.Open(ctx, cudart.Options{Source: sim})
	}
	return l
}

func TestMain(m *testing.M) {
	child.Serve(children(scripted())) // probes and experiments start this executable again
	if os.Getenv(asProgram) != "" {
		sys := thisMachine()
		// A busy machine takes longer than a second to end its processes, and to hear what they call:
		// they report it after three quarters of callGrace, and are listened to for the rest.
		sys.releaseGrace, sys.callGrace = time.Minute, 8*time.Second
		runOn(sys)
	}
	os.Exit(m.Run())
}

// A pipe that is closed early, as by head, is no error to report: it has its own exit code, and is not the end
// by a signal.
func TestClosedPipe(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("pipes of Windows have other errors")
	}
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	cmd := hosttest.Command(t.Context(), os.Args[0], "version")
	var stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), asProgram+"=1"), w, &stderr
	err = cmd.Run()
	require.NoError(t, w.Close())
	require.ErrorAs(t, err, new(*exec.ExitError))
	assert.Equal(t, exitOutput, cmd.ProcessState.ExitCode())
	assert.Empty(t, stderr.String())
}

// A call that never returns is a finding, and neither SIGINT, SIGTERM nor --timeout waits for
// it: this is the whole program, with its processes.
func TestADriverThatNeverReturns(t *testing.T) {
	t.Parallel()
	needsSim(t)
	hosttest.StartsPrograms(t)
	// Where the tests were started by nohup, their processes would ignore SIGHUP, and so would pincheck.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	for _, c := range []struct {
		name, fn, timeout string
		signal            os.Signal
		code              int
		verdict           doctor.Verdict
	}{
		{"by itself, at the start", "cudaGetDeviceCount", "", nil, exitUnusable, doctor.Unusable},
		{"by itself", "cudaMemcpyAsync", "", nil, exitProblems, doctor.Problems},
		{"timeout", "cudaMemGetInfo", "2s", nil, exitIncomplete, doctor.Incomplete},
		{"SIGINT", "cudaMemcpy", "", os.Interrupt, exitInterrupted, doctor.Incomplete},
		{"SIGTERM", "cudaGetDeviceCount", "", syscall.SIGTERM, exitInterrupted, doctor.Incomplete},
		{"SIGHUP", "cudaGetDeviceCount", "", syscall.SIGHUP, exitInterrupted, doctor.Incomplete},
	} {
		waiting.Go(func() {
			t.Run(c.name, func(t *testing.T) {
				called := filepath.Join(t.TempDir(), "called")
				args := []string{"--quiet", "--format", "json"}
				if c.timeout != "" {
					args = append(args, "--timeout", c.timeout)
				}
				cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
				var stdout, stderr bytes.Buffer
				cmd.Stdout, cmd.Stderr = &stdout, &stderr
				cmd.Env = append(os.Environ(), asProgram+"=1", stuck+"="+c.fn+" "+called)
				require.NoError(t, cmd.Start())
				if c.signal != nil {
					for _, err := os.Stat(called); err != nil; _, err = os.Stat(called) {
						time.Sleep(5 * time.Millisecond)
					}
					require.NoError(t, cmd.Process.Signal(c.signal))
				}
				_ = cmd.Wait() // the code is looked at below
				require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s%s", stdout.String(), stderr.String())
				r, err := report.Read(stdout.Bytes())
				require.NoError(t, err, stderr.String())
				assert.Equal(t, c.verdict, r.Verdict)
				if c.fn == "cudaGetDeviceCount" { // also of a run that was ended meanwhile
					require.NotEmpty(t, r.Probes, stdout.String())
					assert.Contains(t, r.Probes[0].Call, c.fn)
				}
				if c.signal == nil && c.timeout == "" {
					// A finding too, unless the machine of the test has no GPU, which comes first.
					require.NotEmpty(t, r.Probes)
					assert.Equal(t, doctor.ProbeHung, r.Probes[0].State)
					assert.Contains(t, r.Probes[0].Call, c.fn)
				}
			})
		})
	}
}

// Eight GPUs, as the whole program with its processes: each is verified and measured, and all of
// them at once. TestEightGPUsSideBySide has the order.
func TestEightGPUs(t *testing.T) {
	t.Parallel()
	needsSim(t)
	hosttest.StartsPrograms(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "--quiet", "--format", "json")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = append(os.Environ(), asProgram+"=1", gpus+"=8")
	_ = cmd.Run() // the code is that of the machine of the test
	r, err := report.Read(stdout.Bytes())
	require.NoError(t, err, stderr.String())
	assert.True(t, r.Complete)
	assert.Empty(t, r.Errors)
	require.Len(t, r.Devices, 8)
	for _, d := range r.Devices {
		require.NotNil(t, d.Verify)
		assert.Equal(t, d.Verify.CasesPlanned, d.Verify.Cases+d.Verify.SkippedCases)
		require.NotNil(t, d.Bandwidth)
		assert.Len(t, d.Bandwidth.Series, 2)
		assert.Empty(t, d.Errors)
	}
	require.NotNil(t, r.Together)
	assert.Len(t, r.Together.Series, 2*9, "each GPU and their sum, each way")
	for _, p := range r.Probes {
		assert.Equal(t, "nvml", p.Name, "the machine of the test may have a library that hangs")
	}
}
