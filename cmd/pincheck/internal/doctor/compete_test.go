package doctor

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
)

// A remedy that cannot be undone, or that stops the work of others, is under Last, which is printed for certain
// causes only.
func TestDrasticRemediesNeedCertainty(t *testing.T) {
	t.Parallel()
	last := 0
	for _, id := range findings.IDs() {
		page, _ := findings.Get(id)
		for _, cause := range page.Causes {
			for _, m := range drastic.FindAllStringSubmatch(cause.Do, -1) {
				assert.NotEmpty(t, m[1], "%s %s: Do says %s", id, cause.Name, m[2])
			}
			if cause.LastResort == "" {
				continue
			}
			last++
			for _, c := range []Certainty{Certain, Likely, Possible} {
				f := Finding{ID: id, because: cause.Name, Certainty: c}
				f.describe()
				assert.Equal(t, c == Certain, f.Remedy != cause.With(nil).Do, "%s %s %s", id, cause.Name, c)
			}
		}
	}
	assert.Positive(t, last)
}

// The surest cause that can lead to the code is the finding, and names the others.
func TestTheSurestHypothesisWins(t *testing.T) {
	t.Parallel()
	f := start(cudart.ErrNoDevice)(t)
	f.NVML = &nvml.Report{} // NVML shows no GPU: likely not initialized
	_, found := Evaluate(f)
	require.Equal(t, []string{"gpu_not_initialized"}, ids(found))
	assert.Equal(t, Likely, found[0].Certainty)
	assert.Contains(t, found[0].Suppressed, "no_device", "which is a guess")

	refuse(f, enxio) // and nothing is behind its node, which is certain
	_, found = Evaluate(f)
	require.Equal(t, []string{"stale_device_node"}, ids(found))
	assert.Equal(t, Certain, found[0].Certainty)
	assert.Empty(t, found[0].Alternatives)

	f.Host.Virt.Sandbox = "gvisor" // of two that are likely the first is the finding, the other one may be it
	for i := range f.Host.NVIDIA.Nodes {
		f.Host.NVIDIA.Nodes[i].OpenError = ""
	}
	_, found = Evaluate(f)
	require.Equal(t, []string{"sandbox_refuses"}, ids(found))
	require.Len(t, found[0].Alternatives, 1)
	assert.Contains(t, found[0].Alternatives[0], "gpu_not_initialized: ")
}

// What cannot lead to the code is no cause: a GPU that is lost stays beside it.
func TestACauseThatCannotLeadToTheCodeHidesNothing(t *testing.T) {
	t.Parallel()
	for _, code := range []cudart.Code{cudart.ErrInsufficientDriver, cudart.ErrSystemDriverMismatch} {
		f := start(code)(t)
		lost := f.Host.GPUs[0]
		lost.Address, lost.OffBus, lost.PowerState = "0000:00:07.0", true, "D0"
		f.Host.GPUs = append(f.Host.GPUs, lost)
		_, found := Evaluate(f)
		assert.Len(t, found, 2, "%v: %v", code, ids(found))
		assert.Contains(t, ids(found), "gpu_off_bus", code)
	}
}

// What contradicts a cause makes it less sure.
func TestEvidenceAgainstACause(t *testing.T) {
	t.Parallel()
	f := start(cudart.ErrSystemNotReady)(t)
	f.NVML = virtual("NVIDIA A100 80GB PCIe")
	_, found := Evaluate(f)
	require.Equal(t, []string{"fabric_not_ready"}, ids(found))
	assert.Equal(t, Possible, found[0].Certainty)
	assert.Contains(t, found[0].Because(), "Possible: ")
	assert.Contains(t, found[0].Because(), " But this kind of GPU has no NVSwitch.")
}

// CUDA takes the entries up to the first that names no GPU.
func TestCUDAVisibleDevicesIsReadAsByCUDA(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]choice{
		"0":        {named: 1},
		"0,1":      {named: 2},
		" 1 , 0 ":  {named: 2},
		"0,-1,1":   {1, "-1", "negative"},
		"0,2":      {1, "2", "missing"},
		"0,bash":   {1, "bash", "no_name"},
		"0,0":      {0, "0", "twice"},
		"MIG-1":    {0, "MIG-1", "mig"},
		"GPU-dead": {0, "GPU-dead", "missing"},
		"GPU-aaaa": {named: 1},
	} {
		off := false
		f := &Facts{Opening: &Opening{Code: int(cudart.ErrNoDevice)}, Host: &hostinfo.Host{}}
		f.NVML = &nvml.Report{Count: 1, GPUs: []nvml.GPU{{MIG: &off}}}
		f.Host.NVIDIA.Nodes = []hostinfo.Node{{Path: "/dev/nvidia0"}, {Path: "/dev/nvidia1"}}
		f.Host.NVIDIA.Boards = []hostinfo.Board{{UUID: "GPU-aaaa-1"}, {UUID: "GPU-bbbb-2"}}
		f.Host.GPUs = []hostinfo.PCIDevice{{Driver: "nvidia"}, {Driver: "nvidia"}}
		assert.Equal(t, want, f.chosen(value), value)
	}
	for value, hides := range map[string]bool{"": true, "-1": true, "none": true, "NoDevFiles": true, "0": false, "bash": false} {
		assert.Equal(t, hides, hidesDevices(value), value)
	}
}

// What was not read has not passed.
func TestAnEmptyHostHasPassedNothing(t *testing.T) {
	t.Parallel()
	verdict, found := Evaluate(&Facts{Host: &hostinfo.Host{}, Devices: []Device{{}}})
	assert.Equal(t, Unknown, verdict)
	assert.Empty(t, found)
	assert.Equal(t, []string{"GPU access", "visible GPUs"}, Passed(&Facts{Host: &hostinfo.Host{}, Devices: []Device{{}}}, found))
	assert.Contains(t, Passed(well(t), nil), "memory budget")
}

// Calls of one GPU that failed alike are one finding, which counts them.
func TestCallsThatFailedAlikeAreOneFinding(t *testing.T) {
	t.Parallel()
	f := well(t)
	for _, call := range []string{"cudaMalloc", "cudaStreamCreate", "cudaEventCreate", "cudaMemcpyAsync", "cudaEventRecord"} {
		failing(f, call+": cudaErrorDevicesUnavailable (46): CUDA-capable device(s) is/are busy or unavailable")
	}
	failing(f, "cudaMemGetInfo: cudaErrorInvalidValue (1): invalid argument")
	failing(f, "cudaFree: cudaErrorCudartUnloading (4): driver shutting down")
	failing(f, "open /dev/shm: out of space")
	failing(f, "mmap: out of addresses")
	_, found := Evaluate(f)
	var texts []string
	for _, one := range found {
		if one.ID == "failed_call" {
			texts = append(texts, one.Summary)
		}
	}
	const one = "not everything could be examined"
	assert.Equal(t, []string{one + ": 5 calls failed", one, one, one, one}, texts)
}
