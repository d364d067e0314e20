package doctor

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
)

// A remedy has the words of the place where the process runs.
func TestRemediesAreOfThePlace(t *testing.T) {
	t.Parallel()
	const gpu, memory, quota = "container_without_gpu", "little_headroom", "few_cpus/quota"
	for name, c := range map[string]struct {
		virt hostinfo.Virt
		env  map[string]string
		want map[string]string // by finding, and its cause if that is not the first
		not  string
	}{
		"bare":                {want: map[string]string{memory: "docker update --memory=SIZE CONTAINER"}},
		"docker":              {virt: hostinfo.Virt{Container: "docker"}, want: map[string]string{gpu: "docker run --gpus all IMAGE", memory: "docker update --memory=SIZE --memory-swap=SIZE CONTAINER"}, not: "Kubernetes"},
		"kubernetes":          {virt: hostinfo.Virt{Container: "kubernetes"}, want: map[string]string{gpu: "nvidia.com/gpu in the resources", memory: "resources.limits.memory", quota: "resources.limits.cpu"}, not: "docker run"},
		"podman":              {virt: hostinfo.Virt{Container: "podman"}, want: map[string]string{gpu: "podman run --device nvidia.com/gpu=all IMAGE"}, not: "docker run"},
		"apptainer":           {virt: hostinfo.Virt{Container: "apptainer"}, want: map[string]string{gpu: "apptainer exec --nv IMAGE PROGRAM"}, not: "docker run"},
		"a unit":              {virt: hostinfo.Virt{Unit: "train.service"}, want: map[string]string{memory: "MemoryMax=SIZE", quota: "CPUQuota=800%"}, not: "docker"},
		"a unit's container":  {virt: hostinfo.Virt{Unit: "docker.service", Container: "docker"}, want: map[string]string{memory: "docker update"}, not: "systemctl"},
		"a job":               {env: map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, want: map[string]string{memory: "sbatch --mem=SIZE SCRIPT", quota: "--cpus-per-task"}, not: "docker"},
		"a job without a GPU": {virt: hostinfo.Virt{Container: "enroot"}, env: map[string]string{"SLURM_JOB_ID": "7"}, want: map[string]string{gpu: "srun --gres=gpu:1 PROGRAM"}, not: "docker run"},
		"a job's container":   {virt: hostinfo.Virt{Container: "enroot"}, env: map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, want: map[string]string{gpu: "enroot start", memory: "sbatch --mem"}, not: "docker run"},
		"another runtime":     {virt: hostinfo.Virt{Container: "containerd"}, want: map[string]string{gpu: "In Kubernetes set"}},
	} {
		places := (&hostinfo.Host{Virt: c.virt, Env: c.env}).Places()
		for id, want := range c.want {
			id, cause, _ := strings.Cut(id, "/")
			f := Finding{ID: id, because: cause}
			f.describe(places...)
			assert.Contains(t, f.Remedy, want, "%s: %s", name, id)
			assert.NotContains(t, f.Remedy, "{", "%s: %s", name, id)
			if c.not != "" {
				assert.NotContains(t, f.Remedy, c.not, "%s: %s", name, id)
			}
		}
	}
	assert.Empty(t, (*hostinfo.Host)(nil).Places())
}

// MPS needs the exclusive mode: whatever shows it, nobody is told to turn the mode off.
func TestTheModeStaysWhereMPSRuns(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Facts){
		"pipe": func(f *Facts) { f.Host.NVIDIA.MPS = "/tmp/nvidia-mps/control" },
		"server": func(f *Facts) {
			f.NVML.GPUs[0].Processes = []nvml.Process{{PID: 7, Name: "nvidia-cuda-mps-server"}}
		},
	} {
		exclusive := 3
		f := &Facts{Host: &hostinfo.Host{}, NVML: &nvml.Report{Count: 1, GPUs: []nvml.GPU{{ComputeMode: &exclusive, Processes: []nvml.Process{{PID: 8, Name: "train"}}}}}}
		change(f)
		found := computeModes(exclusive)(f)
		require.Len(t, found, 1, name)
		found[0].ID = "compute_mode_exclusive"
		found[0].describe("docker")
		assert.NotContains(t, found[0].Remedy, "-c DEFAULT", name)
		assert.Contains(t, found[0].Remedy, "docker run --ipc=host", name)
	}
}
