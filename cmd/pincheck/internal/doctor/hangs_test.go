package doctor

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/verify"
)

// What did not return is named in plain words, whichever stage it was in: the GPU, the call if
// it is known, how far the stage was, and which time is which.
func TestWhatDoesNotReturn(t *testing.T) {
	t.Parallel()
	silent, slow := "its process sent nothing for 15s", "did not return in 10s"
	for name, c := range map[string]struct {
		probe   Probe
		device  bool
		summary string
		seen    []string
	}{
		"a round trip": {
			Probe{Device: number(0), Stage: StageRoundTrips, After: "managed zeros 6 MiB", Detail: silent, Seconds: 16.1}, true,
			"a round trip does not return",
			[]string{"4 of 10 round trips had completed, the last one managed zeros 6 MiB", silent + "; abandoned, 16.1 s after the examination of this GPU began"},
		},
		"a call in a round trip": {
			Probe{Device: number(0), Stage: StageRoundTrips, Call: "cudaMemcpyAsync on device 0", Detail: slow, Seconds: 23}, true,
			"cudaMemcpyAsync does not return",
			[]string{"4 of 10 round trips had completed", slow + "; abandoned, 23.0 s after the examination of this GPU began"},
		},
		"the free memory": {
			Probe{Device: number(0), Stage: StageMemory, Call: "cudaMemGetInfo on device 0", Detail: slow, Seconds: 31}, true,
			"cudaMemGetInfo does not return", []string{slow + "; abandoned, 31.0 s after the examination of this GPU began"},
		},
		"bandwidth": {
			Probe{Device: number(0), Stage: StageCopies, Detail: silent, Seconds: 18}, true,
			"the measurement of copies does not return", []string{silent + "; abandoned, 18.0 s after the examination of this GPU began"},
		},
		"its turn": {
			Probe{Device: number(0), Stage: StageWaiting, Detail: silent, Seconds: 18}, true,
			"waiting for other GPUs does not return", []string{silent + "; abandoned, 18.0 s after the examination of this GPU began"},
		},
		"the library, for one GPU": {
			Probe{Device: number(0), Stage: StageOpen, Detail: "its process sent nothing for 1m15s", Seconds: 75}, true,
			"opening the CUDA library does not return", []string{"its process sent nothing for 1m15s; abandoned, 1 min 15 s after the examination of this GPU began"},
		},
		"the library": {
			Probe{Name: "cuda", Stage: StageOpen, Call: "cudaGetDeviceCount", Detail: "did not return in 1m0s", Seconds: 60}, false,
			"cudaGetDeviceCount does not return", []string{"did not return in 1m0s; abandoned, 1 min 0 s after opening the CUDA library began"},
		},
		"NVML": {
			Probe{Name: "nvml", Stage: StageNVML, Call: "nvmlInit_v2", Detail: slow, Seconds: 10}, false,
			"nvmlInit_v2 does not return", []string{slow + "; abandoned, 10.0 s after reading the management library (NVML) began"},
		},
		"all GPUs": {
			Probe{Stage: StageTogether, Detail: silent, Seconds: 17}, false,
			"the measurement with all GPUs at once does not return", []string{silent + "; abandoned, 17.0 s after the measurement with all GPUs at once began"},
		},
		"a call with all GPUs": {
			Probe{Stage: StageTogether, Call: "cudaMemcpyAsync on device 3", Detail: slow, Seconds: 17}, false,
			"cudaMemcpyAsync on device 3, with all GPUs at once, does not return", []string{slow + "; abandoned, 17.0 s after the measurement with all GPUs at once began"},
		},
		"an experiment": {
			Probe{Name: "cuda", Call: "cudaMemcpy on device 0", Detail: "had not returned 5s after the end of the run", Seconds: 30}, false,
			"cudaMemcpy on device 0 does not return", []string{"had not returned 5s after the end of the run; abandoned, 30.0 s after this run began"},
		},
		"a GPU that was not described": {
			Probe{Device: number(7), Stage: StageMemory, Detail: silent, Seconds: 17}, false,
			"reading the amount of free memory does not return", []string{silent + "; abandoned, 17.0 s after the examination of GPU 7 began"},
		},
	} {
		f := well(t)
		f.Devices[0].Verify = &verify.Report{CasesPlanned: 10, Cases: 4}
		c.probe.State = ProbeHung
		f.Probes = []Probe{c.probe}
		_, found := Evaluate(f)
		require.NotEmpty(t, found, name)
		one := found[0]
		assert.Equal(t, "driver_hangs", one.ID, name)
		assert.Equal(t, c.device, one.Device != nil, name)
		assert.Equal(t, c.summary, one.Summary, name)
		assert.Equal(t, c.seen, one.Evidence, name)
		assert.Equal(t, c.probe.Call == "", strings.Contains(one.Cause, "SIGSTOP"), "%s: all of a process that is silent may have been stopped", name)
		assert.NotContains(t, Passed(f, found), "data integrity", "%s: they were not proved", name)

		f.Probes[0].State, f.Probes[0].Detail = ProbeUnfinished, "had not returned at the end: interrupted"
		verdict, found := Evaluate(f)
		require.Len(t, found, 1, name)
		assert.Equal(t, "driver_hangs", found[0].ID, name)
		assert.Equal(t, Note, found[0].Severity, "%s: the end of the run says nothing of it", name)
		assert.Equal(t, strings.Replace(c.summary, "does not return", "had not returned when the run ended", 1), found[0].Summary, name)
		assert.Contains(t, found[0].Evidence[len(found[0].Evidence)-1], "had not returned at the end: interrupted, ", name)
		assert.NotEqual(t, Problems, verdict, name)

		f.Probes[0].State, f.Probes[0].Detail = ProbeKilled, "signal: killed"
		_, found = Evaluate(f)
		require.NotEmpty(t, found, name)
		assert.Equal(t, "driver_crashes", found[0].ID, name)
		assert.Contains(t, found[0].Evidence[len(found[0].Evidence)-1], "signal: killed, ", name)
		assert.Regexp(t, "^the process for .* was killed$", found[0].Summary, name)
		assert.Contains(t, found[0].Cause, "memory", "%s: this signal comes from outside, and no library is damaged", name)

		f.Probes[0].State, f.Probes[0].Detail = ProbeCrashed, "signal: segmentation fault"
		_, found = Evaluate(f)
		require.NotEmpty(t, found, name)
		assert.Equal(t, strings.Replace(c.summary, "does not return", "ends the process", 1), found[0].Summary, name)
		assert.Contains(t, found[0].Cause, "library", name)
	}
}
