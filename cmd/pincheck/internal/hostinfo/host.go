package hostinfo

import (
	"io/fs"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Host is all that was read. The package's comment says what zero means.
type Host struct {
	Kernel Kernel `json:"kernel"`
	Distro Distro `json:"distro"`
	Libc   Libc   `json:"libc"`
	Virt   Virt   `json:"virtualization"`
	CPU    CPU    `json:"cpu"`
	Memory Memory `json:"memory"`
	Cgroup Cgroup `json:"cgroup"`
	// MemLock is the soft RLIMIT_MEMLOCK. It limits mlock and RDMA, not CUDA.
	MemLock Limit `json:"memlock_bytes"`
	// AddressSpace is the soft RLIMIT_AS (ulimit -v), in bytes, and OpenFiles the soft RLIMIT_NOFILE.
	AddressSpace Limit      `json:"address_space_bytes,omitzero"`
	DataSize     Limit      `json:"data_bytes,omitzero"` // soft RLIMIT_DATA (ulimit -d)
	OpenFiles    Limit      `json:"open_files,omitzero"`
	Processes    Limit      `json:"processes,omitzero"` // soft RLIMIT_NPROC (ulimit -u), of all threads of the user
	Security     Security   `json:"security,omitzero"`
	Power        Power      `json:"power,omitzero"`
	NUMA         []NUMANode `json:"numa_nodes,omitempty"`
	// User has the credentials by which the kernel lets this process open a device; nil if unknown.
	User *User `json:"user,omitempty"`
	// Mounts are the file systems that data can be loaded from, and what reads of them are
	// like.
	Mounts []Mount `json:"mounts,omitempty"`
	// InfiniBand is the number of RDMA devices.
	InfiniBand int `json:"infiniband_devices,omitempty"`
	// PCICount is the number of devices of any kind on the PCI bus. If it is 0
	// the bus is hidden, or there is none: a GPU may exist all the same.
	PCICount int               `json:"pci_devices,omitempty"`
	NVIDIA   NVIDIA            `json:"nvidia"`
	GPUs     []PCIDevice       `json:"pci_gpus,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	// KernelLog has what the kernel's log contains about GPUs since boot.
	KernelLog KernelLog `json:"kernel_log,omitzero"`
}

// Read reads the host with root directory fsys, which is [Root] for the host of
// this process. environ is in the form of os.Environ; Read takes only the variables
// that affect CUDA. Read never fails: what cannot be read is unknown.
func Read(fsys fs.FS, environ []string) *Host {
	f := files{fsys}
	limits := parseLimits(f.text("proc/self/limits"))
	h := &Host{
		Kernel:   readKernel(f),
		Distro:   readDistro(f),
		Libc:     readLibc(f),
		Memory:   readMemory(f),
		Cgroup:   readCgroup(f),
		MemLock:  limits["Max locked memory"],
		Security: readSecurity(f),
		Power:    readPower(f),
		NUMA:     readNUMA(f),
		NVIDIA:   readNVIDIA(f, environ),
		PCICount: len(f.names(linux.PCIDevices)),
		GPUs:     readGPUs(f),
		Env:      keepEnv(environ),
		User:     readUser(f),
		Mounts:   readMounts(f),

		InfiniBand: len(f.names("sys/class/infiniband")),

		AddressSpace: limits["Max address space"],
		DataSize:     limits["Max data size"],
		OpenFiles:    limits["Max open files"],
		Processes:    limits["Max processes"],
	}
	h.CPU = readCPU(f, h.Cgroup)
	h.KernelLog = readKernelLog(f, h.Kernel)
	h.Virt = readVirt(f, environ)
	return h
}

// reportedVariables are the variables that are reported. They contain no secrets.
var reportedVariables = []string{
	"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MPS_PIPE_DIRECTORY",
	"CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PINNED_CUDART",
	"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "SLURM_JOB_ID", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS",
}

func keepEnv(environ []string) map[string]string {
	var out map[string]string
	for _, name := range reportedVariables {
		if v, ok := LookupEnv(environ, name); ok {
			if out == nil {
				out = map[string]string{}
			}
			out[name] = v
		}
	}
	return out
}

// LookupEnv returns the value of a variable in the form of os.Environ. The last entry counts.
func LookupEnv(environ []string, name string) (value string, ok bool) {
	for _, entry := range environ {
		if n, v, isPair := strings.Cut(entry, "="); isPair && n == name {
			value, ok = v, true
		}
	}
	return value, ok
}
