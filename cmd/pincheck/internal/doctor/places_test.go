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
		"bare":                     {want: map[string]string{memory: "docker update --memory=SIZE CONTAINER"}},
		"docker":                   {virt: hostinfo.Virt{Container: "docker"}, want: map[string]string{gpu: "docker run --gpus all IMAGE", memory: "docker update --memory=SIZE --memory-swap=SIZE CONTAINER"}, not: "Kubernetes"},
		"kubernetes":               {virt: hostinfo.Virt{Container: "kubernetes"}, want: map[string]string{gpu: "nvidia.com/gpu in the resources", memory: "resources.limits.memory", quota: "resources.limits.cpu"}, not: "docker run"},
		"podman":                   {virt: hostinfo.Virt{Container: "podman"}, want: map[string]string{gpu: "podman run --device nvidia.com/gpu=all IMAGE"}, not: "docker run"},
		"apptainer":                {virt: hostinfo.Virt{Container: "apptainer"}, want: map[string]string{gpu: "apptainer exec --nv IMAGE PROGRAM"}, not: "docker run"},
		"a unit":                   {virt: hostinfo.Virt{Unit: "train.service"}, want: map[string]string{memory: "MemoryMax=SIZE", quota: "CPUQuota=800%"}, not: "docker"},
		"a unit's container":       {virt: hostinfo.Virt{Unit: "docker.service", Container: "docker"}, want: map[string]string{memory: "docker update"}, not: "systemctl"},
		"a job":                    {env: map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, want: map[string]string{memory: "sbatch --mem=SIZE SCRIPT", quota: "--cpus-per-task"}, not: "docker"},
		"a job without a GPU":      {virt: hostinfo.Virt{Container: "enroot"}, env: map[string]string{"SLURM_JOB_ID": "7"}, want: map[string]string{gpu: "srun --gres=gpu:1 PROGRAM"}, not: "docker run"},
		"a job's container":        {virt: hostinfo.Virt{Container: "enroot"}, env: map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, want: map[string]string{gpu: "enroot start", memory: "sbatch --mem"}, not: "docker run"},
		"docker on a Jetson":       {virt: hostinfo.Virt{Container: "docker", Tegra: true}, want: map[string]string{gpu: "docker run --runtime nvidia IMAGE", memory: "docker update"}, not: "--gpus"},
		"docker desktop":           {virt: hostinfo.Virt{Container: "docker", WSL: true, DockerDesktop: true}, want: map[string]string{gpu: "Settings > General", memory: ".wslconfig"}, not: "docker update"},
		"toolbox":                  {virt: hostinfo.Virt{Container: "toolbox"}, want: map[string]string{gpu: "toolbox enter NAME"}, not: "podman"},
		"distrobox":                {virt: hostinfo.Virt{Container: "distrobox"}, want: map[string]string{gpu: "distrobox create --nvidia", "driver_library_off_path": "distrobox stop NAME"}, not: "LD_LIBRARY_PATH"},
		"wsl":                      {virt: hostinfo.Virt{WSL: true, VM: true}, want: map[string]string{memory: "memory=SIZE in .wslconfig", quota: "processors=8"}, not: "docker"},
		"a snap":                   {virt: hostinfo.Virt{Container: "snap"}, want: map[string]string{gpu: "sudo snap connect SNAP:opengl"}},
		"a notebook":               {virt: hostinfo.Virt{Container: "docker", Service: "colab"}, want: map[string]string{gpu: "Runtime > Change runtime type", memory: "more memory", "thp_off": "needs the operator of the service"}, not: "docker"},
		"a job's docker":           {virt: hostinfo.Virt{Container: "docker"}, env: map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, want: map[string]string{gpu: "docker run", "locked_memory_clock": "(needs an administrator of the node): `nvidia-smi -rmc; nvidia-smi -rac`"}, not: "sudo"},
		"an image's own libcuda":   {virt: hostinfo.Virt{Container: "podman"}, want: map[string]string{"driver_mismatch/other_library": "from the image", "compat_library/newer": "Use an image"}, not: "LD_LIBRARY_PATH"},
		"a denied node in a job":   {env: map[string]string{"SLURM_JOB_ID": "7"}, want: map[string]string{"device_cgroup_denies": "ConstrainDevices", "hidden_gpu": "Slurm sets the variable"}, not: "unset CUDA"},
		"a rootless container":     {virt: hostinfo.Virt{Container: "podman", Mapped: true}, want: map[string]string{"node_permission": "keep-groups"}, not: "usermod"},
		"a container's kernel log": {virt: hostinfo.Virt{Container: "lxc"}, want: map[string]string{"gpu_off_bus": "(on the host): `sudo dmesg", gpu: "nvidia.runtime=true"}, not: "docker"},
		"another runtime":          {virt: hostinfo.Virt{Container: "containerd"}, want: map[string]string{gpu: "In Kubernetes set"}},
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
