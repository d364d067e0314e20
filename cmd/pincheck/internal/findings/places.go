package findings

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Where a process runs decides how it gets what it lacks. A page writes a need in braces, such as {gpu}, and a remedy
// has the words of the place: hostinfo's Places has the names. The first place of a host that has words for a need
// counts, then the words for any known place ("*"), then the general ones (""), which the page itself has.
//
// Commands of the host, which need root there, are written as on a machine of one's own (`sudo modprobe nvidia`):
// see owners.
type words struct{ places, do string } // places are joined by ", "

// Places that share words.
const (
	rented  = "colab, kaggle, sagemaker, paperspace, runpod, vast" // by services: no user of them reaches the host
	podmans = "podman, podman without root"
	dockers = "docker, docker desktop, docker on jetson"
)

// What the words rest on, as of November 2026. Read in documentation or by the maintainers: podman-update(1) (4.3 has
// it), distrobox-create(1) and distrobox-init(1) (--nvidia), github.com/containers/toolbox/pull/1497,
// github.com/NVIDIA/enroot doc/cmd/start.md and doc/standard-hooks.md, github.com/NVIDIA/pyxis/wiki/Usage,
// github.com/lxc/incus doc/reference/devices_gpu.md, LXD's instance options, which Incus has from it (a percentage of
// limits.cpu.allowance is no quota; limits.kernel; limits.cpu.nodes), snapcraft.io/docs/opengl-interface (for CUDA
// too), systemd.resource-control(5) (AllowedMemoryNodes), Red Hat's guide to NUMAPolicy, docker/docs issue 14523
// (WSL's limits count in Docker Desktop), kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus.
// Seen in public scripts and guides only: keep-groups, nvidia.com/gpu=all, Apptainer's --nv and --nvccli, .wslconfig,
// Proxmox's dev0, nvidia.runtime, PropagateResourceLimitsExcept, --gpu-bind=closest, the variables of services.
// Not looked up: all others, among them the menus of services, Flatpak, a Jetson's runtime, Docker's CDI and restart,
// appArmorProfile, memoryManagerPolicy, MPS in containers.
var needs = map[string][]words{
	"gpu": {
		{"kubernetes", "Set a limit of nvidia.com/gpu in the resources of the container."},
		{"docker on jetson", "Start the container with the NVIDIA runtime: `docker run --runtime nvidia IMAGE`."},
		{"docker desktop", "Start the container with the GPU: `docker run --gpus all IMAGE`. Docker Desktop has GPUs only on Windows, with the WSL 2 engine (Settings > General)."},
		{"docker", "Start the container with the GPU: `docker run --gpus all IMAGE`."},
		{podmans, "Start the container with the GPU: `podman run --device nvidia.com/gpu=all IMAGE`."},
		{"toolbox", "Update Toolbx to a version that passes NVIDIA's driver on, and enter the container again: `toolbox enter NAME`."},
		{"distrobox", "Create the container with the driver: `distrobox create --nvidia --name NAME --image IMAGE`."},
		{"apptainer", "Run the image with the GPU: `apptainer exec --nv IMAGE PROGRAM`."},
		{"enroot", "Start the container with the GPU: `enroot start --env NVIDIA_VISIBLE_DEVICES=all --env NVIDIA_DRIVER_CAPABILITIES=compute,utility NAME`."},
		{"lxc", "Give the container the GPU, with Incus: `incus config device add NAME gpu gpu`. Mount the driver's libraries too: `incus config set NAME nvidia.runtime=true`. With Proxmox pass each node, such as dev0: /dev/nvidia0."},
		{"flatpak", "Run the application with the GPU: `flatpak run --device=all APP`. Update the extension with the driver's libraries: `flatpak update`."},
		{"snap", "Connect the interface of the GPU: `sudo snap connect SNAP:opengl`."},
		{"slurm", "Request a GPU: `srun --gres=gpu:1 PROGRAM`."},
		{"colab", "Select a GPU in the menu Runtime > Change runtime type."},
		{"kaggle", "Select a GPU in the notebook's menu Settings > Accelerator."},
		{"sagemaker", "Select an instance type with a GPU, such as ml.g5.xlarge."},
		{rented, "Select a machine with a GPU."},
		{"", "Start the container with the GPU: `docker run --gpus all IMAGE`. In Kubernetes set a limit of nvidia.com/gpu."},
	},
	"toolkit": {
		{"kubernetes", "The node needs NVIDIA's device plugin, or the GPU Operator."},
		{"docker, docker on jetson", "The host needs NVIDIA's container toolkit: `sudo nvidia-ctk runtime configure --runtime=docker`."},
		{podmans, "The host needs NVIDIA's container toolkit: `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`."},
		{"*", "The host needs NVIDIA's driver."},
		{"", "The host needs NVIDIA's container toolkit: `sudo nvidia-ctk runtime configure --runtime=docker`."},
	},
	"driver libraries": {
		{"kubernetes", "Set NVIDIA_DRIVER_CAPABILITIES to compute,utility in the env of the container, and run it with the runtime class nvidia."},
		{dockers, "Start the container with NVIDIA's runtime, which adds the driver's libraries: `docker run --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE`."},
		{podmans, "Start the container with the driver's libraries: `podman run --device nvidia.com/gpu=all IMAGE`."},
		{"toolbox", "Update Toolbx to a version that passes NVIDIA's driver on, and enter the container again: `toolbox enter NAME`."},
		{"distrobox", "Create the container with the driver: `distrobox create --nvidia --name NAME --image IMAGE`."},
		{"apptainer", "Run the image with the driver's libraries: `apptainer exec --nv IMAGE PROGRAM`."},
		{"enroot", "Start the container with the driver's libraries: `enroot start --env NVIDIA_VISIBLE_DEVICES=all --env NVIDIA_DRIVER_CAPABILITIES=compute,utility NAME`."},
		{"lxc", "Mount the driver's libraries, with Incus: `incus config set NAME nvidia.runtime=true`. With Proxmox install the libraries of the same version in the container, without the kernel module."},
		{"flatpak", "Update the extension with the driver's libraries (org.freedesktop.Platform.GL.nvidia): `flatpak update`."},
		{"snap", "Connect the interface of the GPU: `sudo snap connect SNAP:opengl`."},
		{"*", "Install the driver's user libraries in the version of the kernel module, or use an image that has them."},
		{"", "Have the container's runtime add the driver's libraries: NVIDIA_DRIVER_CAPABILITIES must contain compute, such as with Docker: `docker run --runtime=nvidia -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE`."},
	},
	"container tools": { // github.com/NVIDIA/nvidia-container-toolkit/issues/520
		{dockers, "Update Docker Desktop to 4.31 or later, or NVIDIA's container toolkit in the distribution to 1.14.4 or later."},
		{"", "Update NVIDIA's container toolkit in the distribution to 1.14.4 or later."},
	},
	"compute": {
		{"kubernetes", "Set the variable to compute,utility in the env of the container."},
		{dockers, "Start the container with compute and its other flags: `docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE`."},
		{podmans, "Start the container with compute and its other flags: `podman run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE`."},
		{"enroot", "Start the container with compute: `enroot start --env NVIDIA_DRIVER_CAPABILITIES=compute,utility NAME`."},
		{"lxc", "Set the capabilities of the container: `incus config set NAME nvidia.driver.capabilities=compute,utility`."},
		{"slurm", "Set the variable for the container of the job: `NVIDIA_DRIVER_CAPABILITIES=compute,utility srun --container-image=IMAGE PROGRAM`."},
		{"", "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility."},
	},
	"device access": {
		{"kubernetes", "Start the pod again. If it loses the GPU again after a while, have the node's administrator upgrade NVIDIA's container toolkit, and use CDI."},
		{dockers, "Start the container again, which allows its nodes: `docker restart CONTAINER`. If it loses the GPU again after a while, upgrade NVIDIA's container toolkit, or use CDI: `docker run --device nvidia.com/gpu=all IMAGE`."},
		{podmans, "Start the container again, which allows its nodes: `podman restart CONTAINER`. If that does not help, pass the GPU by CDI: `podman run --device nvidia.com/gpu=all IMAGE`."},
		{"lxc", "Allow the nodes, with Incus: `incus config device add NAME gpu gpu`. With Proxmox pass each node, such as dev0: /dev/nvidia0."},
		{"flatpak", "Run the application with all devices: `flatpak run --device=all APP`."},
		{"snap", "Connect the interface of the GPU: `sudo snap connect SNAP:opengl`."},
		{"slurm", "Request the GPU: `srun --gres=gpu:1 PROGRAM`. Slurm denies jobs the GPUs that they did not request (ConstrainDevices)."},
		{"systemd", "Add the nodes to DeviceAllow in the unit: `sudo systemctl edit UNIT`."},
		{"*", "Start the container again with the nodes of the GPU allowed."},
		{"", "Allow the nodes where the control group was made: in DeviceAllow of the unit or slice, or by starting the container again."},
	},
	"uvm node": {
		{"kubernetes", "Have NVIDIA's device plugin pass the node: set a limit of nvidia.com/gpu instead of mounting nodes by hand."},
		{dockers, "Start the container with the node and its other flags: `docker run --device /dev/nvidia-uvm --device /dev/nvidia-uvm-tools IMAGE`."},
		{podmans, "Start the container with the node and its other flags: `podman run --device /dev/nvidia-uvm --device /dev/nvidia-uvm-tools IMAGE`."},
		{"apptainer", "Run the image with the node: `apptainer exec --nv IMAGE PROGRAM`."},
		{"lxc", "Pass the node, with Incus: `incus config device add NAME uvm unix-char source=/dev/nvidia-uvm`. With Proxmox: dev1: /dev/nvidia-uvm."},
		{"flatpak", "Run the application with all devices: `flatpak run --device=all APP`."},
		{"snap", "Connect the interface of the GPU: `sudo snap connect SNAP:opengl`."},
		{"*", "Start the container again after the node exists on the host."},
		{"", "Pass /dev/nvidia-uvm and /dev/nvidia-uvm-tools into the container, such as with Docker: `docker run --device /dev/nvidia-uvm --device /dev/nvidia-uvm-tools IMAGE`."},
	},
	"node permission": {
		{"kubernetes", "Add the group of the nodes to securityContext.supplementalGroups of the pod."},
		{dockers, "Start the container with the group of the nodes: `docker run --group-add GID IMAGE`."},
		{podmans, "Keep the groups of the user in the container: `podman run --group-add keep-groups IMAGE`."},
		{"lxc", "Pass the nodes with a mode that allows it, with Incus: `incus config device set NAME gpu mode=0666`. With Proxmox: dev0: /dev/nvidia0,mode=0666."},
		{"systemd", "Add SupplementaryGroups= with the group of the nodes to the unit: `sudo systemctl edit UNIT`."},
		{rented, "Run the program as the user of the image that may open them."},
		{"", "Add the user to the group of the nodes, often video or render: `sudo usermod -aG video USER`. Or load the module with NVreg_DeviceFileMode=0666."},
	},
	"device specification": {
		{"kubernetes", "Restart NVIDIA's device plugin on the node, then start the pod again."},
		{dockers + ", " + podmans, "Update the CDI specification: `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`. Then create the container again."},
		{"lxc", "Pass the node by its path, which follows the number: with Incus by type unix-char, with Proxmox by dev1: /dev/nvidia-uvm."},
		{"*", "Start the container again, so that it gets the present nodes."},
		{"", "Update the CDI specification: `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`. Then create the container again."},
	},
	"node number": {
		{"lxc", "Allow the number that /proc/devices shows: lxc.cgroup2.devices.allow: `c N:* rwm`. Or pass the node as dev1: /dev/nvidia-uvm, which follows the number."},
		{"*", "Start the container again, so that the present number is allowed."},
		{"", "Allow the number that /proc/devices shows, such as with LXC: lxc.cgroup2.devices.allow: `c N:* rwm`."},
	},
	"labels": {
		{dockers, "For one container turn labels off: `docker run --security-opt label=disable IMAGE`."},
		{podmans, "For one container turn labels off: `podman run --security-opt label=disable IMAGE`."},
		{"kubernetes", "For one pod set securityContext.seLinuxOptions.type to a type that may use GPUs."},
		{"", "For one program use a policy for its type."},
	},
	"profile": {
		{dockers, "Or start the container without a profile: `docker run --security-opt apparmor=unconfined IMAGE`."},
		{podmans, "Or start the container without a profile: `podman run --security-opt apparmor=unconfined IMAGE`."},
		{"kubernetes", "Or set securityContext.appArmorProfile.type to Unconfined."},
		{"lxc", "Or set lxc.apparmor.profile to unconfined."},
		{"snap", "Or connect the interface of the GPU: `sudo snap connect SNAP:opengl`."},
		{"", "Or run the program without a profile."},
	},
	"memory": {
		{"kubernetes", "Raise resources.limits.memory of the container."},
		{"docker desktop, wsl", "Give WSL more memory: set memory=SIZE in .wslconfig, then restart it: `wsl --shutdown`."},
		{"docker, docker on jetson", "Raise the limit of the container: `docker update --memory=SIZE --memory-swap=SIZE CONTAINER`."},
		{podmans, "Raise the limit of the container: `podman update --memory=SIZE CONTAINER`."},
		{"lxc", "Raise the limit of the container: `incus config set NAME limits.memory=SIZE`."},
		{"slurm", "Request more memory: `sbatch --mem=SIZE SCRIPT`."},
		{"systemd", "Raise the limit of the unit: `sudo systemctl set-property UNIT MemoryMax=SIZE`."},
		{"colab", "Select a runtime with more memory in the menu Runtime > Change runtime type."},
		{rented, "Select a machine with more memory."},
		{"*", "Raise the memory limit of the session or job that started the container."},
		{"", "Raise the memory limit of the container, job or unit, such as with Docker: `docker update --memory=SIZE CONTAINER`."},
	},
	"smaller memory": {
		{"kubernetes", "Set requests as high as limits, so that the scheduler keeps such pods apart."},
		{dockers, "Lower the limits until they fit together: `docker update --memory=SIZE CONTAINER`."},
		{podmans, "Lower the limits until they fit together: `podman update --memory=SIZE CONTAINER`."},
		{"lxc", "Lower the limits until they fit together: `incus config set NAME limits.memory=SIZE`."},
		{"slurm", "Request less memory: `sbatch --mem=SIZE SCRIPT`."},
		{"systemd", "Lower the limits until they fit together: `sudo systemctl set-property UNIT MemoryMax=SIZE`."},
		{"*", "Lower the limits until they fit together."},
		{"", "Lower the limits until they fit together: `docker update --memory=SIZE CONTAINER`. In Kubernetes set requests as high as limits, so that the scheduler keeps such pods apart."},
	},
	"cpu quota": {
		{"kubernetes", "Raise resources.limits.cpu of the container."},
		{"docker desktop, wsl", "Give WSL more processors: set processors=8 in .wslconfig, then restart it: `wsl --shutdown`."},
		{"docker, docker on jetson", "Raise the quota: `docker update --cpus=8 CONTAINER`."},
		{podmans, "Raise the quota: `podman update --cpus=8 CONTAINER`."},
		{"lxc", "Raise the quota: `incus config set NAME limits.cpu.allowance=800ms/100ms`."},
		{"slurm", "Request more CPUs: `sbatch --cpus-per-task=8 SCRIPT`."},
		{"systemd", "Raise the quota of the unit: `sudo systemctl set-property UNIT CPUQuota=800%`."},
		{rented, "Select a machine with more CPUs."},
		{"*", "Raise the CPU quota of the session or job that started the container."},
		{"", "Raise the quota: `docker update --cpus=8 CONTAINER`. With Kubernetes raise resources.limits.cpu, with systemd CPUQuota=."},
	},
	"tasks": {
		{"kubernetes", "Raise podPidsLimit of the kubelet."},
		{dockers, "Raise the limit of the container: `docker update --pids-limit=-1 CONTAINER`."},
		{podmans, "Raise the limit of the container: `podman update --pids-limit=-1 CONTAINER`."},
		{"lxc", "Raise the limit of the container: `incus config set NAME limits.processes=SIZE`."},
		{"slurm", "Ask the administrator to raise TasksMax of slurmd."},
		{"systemd", "Raise the limit of the unit: `sudo systemctl set-property UNIT TasksMax=infinity`."},
		{"*", "Raise the task limit (pids.max) of the session or job that started the container."},
		{"", "Raise the limit: --pids-limit=-1 for a container, TasksMax= for a unit of systemd, podPidsLimit of the kubelet."},
	},
	"user tasks": {
		{dockers, "Start the container with a higher limit: `docker run --ulimit nproc=65536 IMAGE`."},
		{podmans, "Start the container with a higher limit: `podman run --ulimit nproc=65536 IMAGE`."},
		{"lxc", "Raise the limit of the container: `incus config set NAME limits.kernel.nproc=65536`."},
		{"systemd", "Set LimitNPROC=65536 in the unit: `sudo systemctl edit UNIT`."},
		{"*", "Raise the limit of the shell: `ulimit -u 65536`."},
		{"", "Raise the limit of the shell: `ulimit -u 65536`. For all sessions of the user set nproc in /etc/security/limits.conf."},
	},
	"files": {
		{"kubernetes", "Raise LimitNOFILE of the node's container runtime."},
		{dockers, "Start the container with a higher limit: `docker run --ulimit nofile=65536 IMAGE`."},
		{podmans, "Start the container with a higher limit: `podman run --ulimit nofile=65536 IMAGE`."},
		{"lxc", "Raise the limit of the container: `incus config set NAME limits.kernel.nofile=65536`."},
		{"systemd", "Set LimitNOFILE=65536 in the unit: `sudo systemctl edit UNIT`."},
		{"*", "Raise the limit of the shell: `ulimit -n 65536`."},
		{"", "Raise the limit of the shell: `ulimit -n 65536`. For a unit of systemd set LimitNOFILE=65536, for a container --ulimit nofile=65536."},
	},
	"locked memory": {
		{"kubernetes", "Raise LimitMEMLOCK of the node's container runtime."},
		{dockers, "Start the container without the limit: `docker run --ulimit memlock=-1 IMAGE`."},
		{podmans, "Start the container without the limit: `podman run --ulimit memlock=-1 IMAGE`."},
		{"lxc", "Remove the limit of the container: `incus config set NAME limits.kernel.memlock=unlimited`."},
		{"slurm", "Ask the administrator to set PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, and LimitMEMLOCK=infinity for slurmd."},
		{"systemd", "Set LimitMEMLOCK=infinity in the unit: `sudo systemctl edit UNIT`."},
		{"*", "Raise the limit of the shell: `ulimit -l unlimited`."},
		{"", "Raise the limit of the shell: `ulimit -l unlimited`. For a unit of systemd set LimitMEMLOCK=infinity, for a container --ulimit memlock=-1."},
	},
	"address space": {
		{"slurm", "Remove the limit in the job script: `ulimit -v unlimited`. If it comes from the cluster, set VSizeFactor=0 in slurm.conf."},
		{"systemd", "Set LimitAS=infinity in the unit: `sudo systemctl edit UNIT`."},
		{"lxc", "Remove the limit of the container: `incus config set NAME limits.kernel.as=unlimited`."},
		{"*", "Remove the limit in the shell or entrypoint: `ulimit -v unlimited`."},
		{"", "Remove the limit in the shell or the job script: `ulimit -v unlimited`. With Slurm set VSizeFactor=0, with Grid Engine h_vmem."},
	},
	"data limit": {
		{"systemd", "Set LimitDATA=infinity in the unit: `sudo systemctl edit UNIT`."},
		{"lxc", "Remove the limit of the container: `incus config set NAME limits.kernel.data=unlimited`."},
		{dockers, "Start the container without the limit: `docker run --ulimit data=-1 IMAGE`."},
		{podmans, "Start the container without the limit: `podman run --ulimit data=-1 IMAGE`."},
		{"", "Remove the limit in the shell or the job script: `ulimit -d unlimited`."},
	},
	"shared memory": {
		{"kubernetes", "Mount an emptyDir with medium: Memory at /dev/shm in the pod."},
		{dockers, "Start the container with more: `docker run --shm-size=8g IMAGE`."},
		{podmans, "Start the container with more: `podman run --shm-size=8g IMAGE`."},
		{"apptainer, enroot, slurm", "Its size is the node's: ask the administrator for more."},
		{rented, "Use fewer workers, or select a machine with more memory."},
		{"", "Mount it with more: `sudo mount -o remount,size=8G /dev/shm`."},
	},
	"numa node": {
		{"kubernetes", "Set topologyManagerPolicy: single-numa-node in the configuration of the kubelet."},
		{dockers, "Start the container on the GPU's node: `docker run --cpuset-cpus=CPUS --cpuset-mems=<NODE> IMAGE`."},
		{podmans, "Start the container on the GPU's node: `podman run --cpuset-cpus=CPUS --cpuset-mems=<NODE> IMAGE`."},
		{"lxc", "Place the container on the GPU's node: `incus config set NAME limits.cpu.nodes=<NODE>`."},
		{"slurm", "Run the job near its GPU: `srun --gpu-bind=closest PROGRAM`."},
		{"systemd", "Set NUMAPolicy=bind, NUMAMask=*NODE* and CPUAffinity=numa in the unit: `sudo systemctl edit UNIT`."},
		{rented, "Select a machine with one NUMA node."},
		{"", "Run the program on the GPU's node: `numactl --cpunodebind=<NODE> --membind=<NODE> PROGRAM`."},
	},
	"memory node": {
		{"kubernetes", "Set memoryManagerPolicy: Static and topologyManagerPolicy: single-numa-node in the configuration of the kubelet."},
		{dockers, "Allow node *NODE*: `docker update --cpuset-mems=<NODE> CONTAINER`."},
		{podmans, "Allow node *NODE*: `podman update --cpuset-mems=<NODE> CONTAINER`."},
		{"slurm", "Request CPUs of node *NODE*, as the job's cpuset has no memory of it: `srun --gpu-bind=closest PROGRAM`."},
		{"systemd", "Allow node *NODE*: `sudo systemctl set-property UNIT AllowedMemoryNodes=<NODE>`."},
		{"", "Allow node *NODE* in cpuset.mems of the control group."},
	},
	"memory placement": {
		{"kubernetes", "Allow it: add SYS_NICE to securityContext.capabilities of the container."},
		{dockers, "Allow it: `docker run --cap-add SYS_NICE IMAGE`."},
		{podmans, "Allow it: `podman run --cap-add SYS_NICE IMAGE`."},
		{"*", "Allow the process to place memory: it needs CAP_SYS_NICE, or a seccomp profile without that condition."},
		{"", "Allow the container to place memory: `docker run --cap-add SYS_NICE IMAGE`."},
	},
	"whole container": {
		{"kubernetes", "Or use the static CPU manager of the kubelet, which binds whole containers."},
		{dockers + ", " + podmans, "Or bind the whole container with --cpuset-cpus and --cpuset-mems."},
		{"", "Or bind the whole container to the node by its cpuset."},
	},
	"visible gpus": {
		{"slurm", "Slurm sets the variable: request GPUs: `srun --gres=gpu:1 PROGRAM`."},
		{"kubernetes", "Remove CUDA_VISIBLE_DEVICES from the env of the container and its image: the pod's limit selects its GPUs."},
		{dockers, "Start the container without the variable (-e, or ENV of its image), or unset it in its shell: `unset CUDA_VISIBLE_DEVICES`."},
		{"systemd", "Remove the variable from Environment= of the unit: `sudo systemctl edit UNIT`."},
		{rented, "Unset the variable before the notebook imports its framework: `unset CUDA_VISIBLE_DEVICES`."},
		{"", "Unset the variable: `unset CUDA_VISIBLE_DEVICES`."},
	},
	"library path": {
		{"toolbox", "Enter the container again, which mounts the host's libraries: `toolbox enter NAME`."},
		{"distrobox", "Start the container again, which mounts the host's libraries: `distrobox stop NAME; distrobox enter NAME`. If it was created without them: `distrobox create --nvidia --name NAME --image IMAGE`."},
		{"kubernetes", "Set LD_LIBRARY_PATH to *DIR* in the env of the container."},
		{dockers, "Start the container with the directory: `docker run -e LD_LIBRARY_PATH=<DIR> IMAGE`. In an image use ENV."},
		{podmans, "Start the container with the directory: `podman run -e LD_LIBRARY_PATH=<DIR> IMAGE`. In an image use ENV."},
		{"systemd", "Add Environment=LD_LIBRARY_PATH=*DIR* to the unit: `sudo systemctl edit UNIT`."},
		{"", "Add the directory: `export LD_LIBRARY_PATH=<DIR>${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}`. Or add it to /etc/ld.so.conf.d and run ldconfig."},
	},
	"compat library": {
		{dockers + ", " + podmans + ", kubernetes, apptainer, enroot, containerd, container, gvisor", "Use an image of the CUDA version that the driver supports, or remove the package cuda-compat (*DIR*) from the image."},
		{"", "Remove *DIR* (package cuda-compat) from LD_LIBRARY_PATH and /etc/ld.so.conf.d, and update the loader cache: `sudo ldconfig`. Or use a CUDA version that the driver supports."},
	},
	"other library": {
		{dockers + ", " + podmans + ", kubernetes, apptainer, enroot, containerd, container, gvisor", "Remove *LIBRARY* and its package from the image: the runtime brings the driver's own."},
		{"", "Remove its directory from LD_LIBRARY_PATH and /etc/ld.so.conf.d, or put the directory of the driver's own libcuda.so.1 first."},
	},
	"gvisor": {
		{"docker", "Start runsc with --nvproxy, and the container with the GPU: `docker run --runtime=runsc --gpus all IMAGE`."},
		{"kubernetes", "Have the node's administrator start runsc with --nvproxy, and use a runtime class with NVIDIA's hook for GPU pods."},
		{rented, "Select a machine with a GPU."},
		{"*", "Start runsc with --nvproxy and NVIDIA's hook."},
		{"", "Start runsc with --nvproxy. With containerd, use a runtime class with NVIDIA's hook for GPU pods."},
	},
	"mps": {
		{dockers, "Start the container with MPS's directory and the host's IPC: `docker run --ipc=host -v /tmp/nvidia-mps:/tmp/nvidia-mps IMAGE`."},
		{podmans, "Start the container with MPS's directory and the host's IPC: `podman run --ipc=host -v /tmp/nvidia-mps:/tmp/nvidia-mps IMAGE`."},
		{"kubernetes", "Use the sharing by MPS of NVIDIA's device plugin, or set hostIPC and mount /tmp/nvidia-mps from the node."},
		{"apptainer", "Bind MPS's directory: `apptainer exec --nv --bind /tmp/nvidia-mps IMAGE PROGRAM`."},
		{"", "Set CUDA_MPS_PIPE_DIRECTORY to the directory that the daemon uses (/tmp/nvidia-mps if it is not set)."},
	},
	"jetson": {
		{dockers, "Start the container with the NVIDIA runtime: `docker run --runtime=nvidia IMAGE`."},
		{podmans, "Start the container with the GPU: `podman run --device nvidia.com/gpu=all IMAGE`."},
		{"kubernetes", "Run the pod with the runtime class nvidia."},
		{"apptainer", "Run the image with the GPU: `apptainer exec --nv IMAGE PROGRAM`."},
		{"", "Start the container with the NVIDIA runtime, or pass the GPU by CDI (nvidia.com/gpu=all)."},
	},
}

var need = regexp.MustCompile(`\{([a-z ]+)\}`)

// at returns a text with the words of the first of the places that has some, for each need, and says of commands of
// the host who can run them.
func at(text string, places []string) string {
	text = need.ReplaceAllStringFunc(text, func(braced string) string {
		rows := byPlace()[braced[1:len(braced)-1]]
		for _, place := range withRest(places) {
			if do := rows[place]; do != "" {
				return do
			}
		}
		return braced // a page of another need is an error of parse
	})
	return byOwner(text, places)
}

// byPlace returns the words for each need by place. The places that any need has words for are those of need "".
var byPlace = sync.OnceValue(func() map[string]map[string]string {
	known := map[string]string{}
	all := map[string]map[string]string{"": known}
	for name, rows := range needs {
		all[name] = map[string]string{}
		for _, row := range rows {
			for place := range strings.SplitSeq(row.places, ", ") {
				all[name][place] = cmp.Or(all[name][place], row.do)
				known[place] = place
			}
		}
	}
	return all
})

// withRest returns the places in the order in which they count, with what counts after them.
func withRest(places []string) []string {
	if slices.ContainsFunc(places, func(place string) bool { return byPlace()[""][place] != "" }) {
		return append(slices.Clone(places), "*", "")
	}
	return append(slices.Clone(places), "")
}

// owners are who can run a command of the host for a process in a place. The commands keep their sudo where the user
// may have it.
var owners = []owner{
	{rented, "needs the operator of the service", false},
	{"kubernetes, slurm, apptainer, enroot", "needs an administrator of the node", false},
	{dockers + ", " + podmans + ", toolbox, distrobox, lxc, flatpak, containerd, container, gvisor, systemd-nspawn", "on the host", true},
}

// hostCommand matches a command of the host in code quotes, with the colon before it.
var hostCommand = regexp.MustCompile("(:?) ?`((?:[^`]*\\bsudo |systemctl |runsc |nvidia-cuda-mps-control|echo \\w+ \\| nvidia-cuda)[^`]*)`")

// An owner is who can run a command of the host.
type owner struct {
	places, who string
	sudo        bool
}

func ownerOf(places []string) *owner {
	for i, o := range owners {
		for place := range strings.SplitSeq(o.places, ", ") {
			if slices.Contains(places, place) {
				return &owners[i]
			}
		}
	}
	return nil
}

// byOwner says of each command of the host who can run it, where that is not the reader.
func byOwner(text string, places []string) string {
	o := ownerOf(places)
	if o == nil {
		return text
	}
	var out strings.Builder
	last := 0
	for _, m := range hostCommand.FindAllStringSubmatchIndex(text, -1) {
		out.WriteString(text[last:m[0]])
		command := text[m[4]:m[5]]
		if !o.sudo {
			command = strings.ReplaceAll(command, "sudo ", "")
		}
		before := out.String()
		if sentence := before[strings.LastIndex(before, ". ")+1:]; !o.sudo || !strings.Contains(sentence, "on the host") {
			out.WriteString(" (" + o.who + ")")
		}
		out.WriteString(text[m[2]:m[3]] + " `" + command + "`")
		last = m[1]
	}
	return out.String() + text[last:]
}
