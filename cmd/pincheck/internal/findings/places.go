package findings

import (
	"regexp"
	"slices"
)

// Where a process runs decides how it gets what it lacks. A page writes a need in braces, such as {gpu}, and a remedy
// has the words of the place. The first place of a host that has words for a need counts.
//
//	place       words for
//	kubernetes  a pod
//	docker      Docker, and Docker Desktop
//	podman      Podman, toolbox and distrobox
//	apptainer   Apptainer and Singularity
//	enroot      enroot, and pyxis
//	lxc         Incus, LXD and Proxmox
//	flatpak     Flatpak
//	slurm       a job of Slurm
//	systemd     a unit of systemd
//	""          any other place, and the page itself
var needs = map[string][]struct{ place, do string }{
	"gpu": {
		{"kubernetes", "Set a limit of nvidia.com/gpu in the resources of the container."},
		{"docker", "Start the container with the GPU: `docker run --gpus all IMAGE`."},
		{"podman", "Start the container with the GPU: `podman run --device nvidia.com/gpu=all IMAGE`."},
		{"apptainer", "Run the image with the GPU: `apptainer exec --nv IMAGE PROGRAM`."},
		{"enroot", "Start the container with the GPU: `enroot start --env NVIDIA_VISIBLE_DEVICES=all NAME`."},
		{"lxc", "Give the container the GPU, with Incus: `incus config device add NAME gpu gpu`. With Proxmox pass each node, such as dev0: /dev/nvidia0."},
		{"flatpak", "Run the application with the GPU: `flatpak run --device=all APP`."},
		{"slurm", "Request a GPU: `srun --gres=gpu:1 PROGRAM`."},
		{"", "Start the container with the GPU: `docker run --gpus all IMAGE`. In Kubernetes set a limit of nvidia.com/gpu."},
	},
	"memory": {
		{"kubernetes", "Raise resources.limits.memory of the container."},
		{"docker", "Raise the limit of the container: `docker update --memory=SIZE --memory-swap=SIZE CONTAINER`."},
		{"podman", "Raise the limit of the container: `podman update --memory=SIZE CONTAINER`."},
		{"lxc", "Raise the limit of the container: `incus config set NAME limits.memory=SIZE`."},
		{"slurm", "Request more memory: `sbatch --mem=SIZE SCRIPT`."},
		{"systemd", "Raise the limit of the unit: `sudo systemctl set-property UNIT MemoryMax=SIZE`."},
		{"", "Raise the memory limit of the container, job or unit, such as with Docker: `docker update --memory=SIZE CONTAINER`."},
	},
	"cpu quota": {
		{"kubernetes", "Raise resources.limits.cpu of the container."},
		{"docker", "Raise the quota: `docker update --cpus=8 CONTAINER`."},
		{"podman", "Raise the quota: `podman update --cpus=8 CONTAINER`."},
		{"lxc", "Raise the quota: `incus config set NAME limits.cpu.allowance=100%`."},
		{"slurm", "Request more CPUs: `sbatch --cpus-per-task=8 SCRIPT`."},
		{"systemd", "Raise the quota of the unit: `sudo systemctl set-property UNIT CPUQuota=800%`."},
		{"", "Raise the quota: `docker update --cpus=8 CONTAINER`. With Kubernetes raise resources.limits.cpu, with systemd CPUQuota=."},
	},
	"tasks": {
		{"kubernetes", "Raise podPidsLimit of the kubelet."},
		{"docker", "Raise the limit of the container: `docker update --pids-limit=-1 CONTAINER`."},
		{"podman", "Raise the limit of the container: `podman update --pids-limit=-1 CONTAINER`."},
		{"systemd", "Raise the limit of the unit: `sudo systemctl set-property UNIT TasksMax=infinity`."},
		{"", "Raise the limit: --pids-limit=-1 for a container, TasksMax= for a unit of systemd, podPidsLimit of the kubelet."},
	},
	"files": {
		{"docker", "Start the container with a higher limit: `docker run --ulimit nofile=65536 IMAGE`."},
		{"podman", "Start the container with a higher limit: `podman run --ulimit nofile=65536 IMAGE`."},
		{"systemd", "Set LimitNOFILE=65536 in the unit: `sudo systemctl edit UNIT`."},
		{"", "Raise the limit of the shell: `ulimit -n 65536`. For a unit of systemd set LimitNOFILE=65536, for a container --ulimit nofile=65536."},
	},
	"locked memory": {
		{"docker", "Start the container without the limit: `docker run --ulimit memlock=-1 IMAGE`."},
		{"podman", "Start the container without the limit: `podman run --ulimit memlock=-1 IMAGE`."},
		{"systemd", "Set LimitMEMLOCK=infinity in the unit: `sudo systemctl edit UNIT`."},
		{"", "Raise the limit of the shell: `ulimit -l unlimited`. For a unit of systemd set LimitMEMLOCK=infinity, for a container --ulimit memlock=-1."},
	},
	"numa node": {
		{"kubernetes", "Set topologyManagerPolicy: single-numa-node in the configuration of the kubelet."},
		{"docker", "Start the container on the GPU's node: `docker run --cpuset-cpus=CPUS --cpuset-mems=<N> IMAGE`."},
		{"podman", "Start the container on the GPU's node: `podman run --cpuset-cpus=CPUS --cpuset-mems=<N> IMAGE`."},
		{"slurm", "Run the job near its GPU: `srun --gpu-bind=closest PROGRAM`."},
		{"systemd", "Set NUMAPolicy=bind, NUMAMask=*N* and CPUAffinity=numa in the unit: `sudo systemctl edit UNIT`."},
		{"", "Run the program on the GPU's node: `numactl --cpunodebind=<N> --membind=<N> PROGRAM`."},
	},
	"memory placement": {
		{"kubernetes", "Allow it: add SYS_NICE to securityContext.capabilities of the container."},
		{"docker", "Allow it: `docker run --cap-add SYS_NICE IMAGE`."},
		{"podman", "Allow it: `podman run --cap-add SYS_NICE IMAGE`."},
		{"", "Allow the container to place memory: `docker run --cap-add SYS_NICE IMAGE`."},
	},
}

var need = regexp.MustCompile(`\{([a-z ]+)\}`)

// at returns a text with the words of the first of the places that has some, for each need.
func at(text string, places []string) string {
	return need.ReplaceAllStringFunc(text, func(braced string) string {
		rows := needs[braced[1:len(braced)-1]]
		for _, place := range append(slices.Clone(places), "") {
			for _, row := range rows {
				if row.place == place {
					return row.do
				}
			}
		}
		return braced // a page of another need is an error of parse
	})
}
