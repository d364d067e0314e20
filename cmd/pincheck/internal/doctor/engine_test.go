package doctor

import (
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/kernellog"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/verify"
)

func ids(all []Finding) []string {
	out := []string{}
	for _, f := range all {
		out = append(out, f.ID)
	}
	return out
}

// series is copies between registered memory and a GPU, at a rate in GB/s.
func series(direction string, rate float64) result.Series {
	samples := []float64{rate, rate * 1.001, rate}
	return result.Series{
		Name: "bandwidth", Unit: result.GBPerSecond, Better: result.Higher,
		Labels:  result.Labels{{Key: result.Direction, Value: direction}, {Key: result.Size, Value: "67108864"}, {Key: result.Memory, Value: "registered"}},
		Samples: samples, Stats: result.Summarize(samples), Verified: true,
	}
}

// fine is a GPU with nothing wrong, at the address of the only GPU of the host h200-vm.
func fine(up, down float64) Device {
	return Device{
		Name: "NVIDIA H200", UUID: "GPU-00000000-1111-2222-3333-444444444444", PCIBusID: "0000:00:06.0",
		DeviceMemory: DeviceMemory{MemoryTotal: 140 << 30, MemoryFree: 139 << 30},
		Verify:       &verify.Report{CasesPlanned: 10, Cases: 10, VerifiedBytes: 1000},
		Bandwidth:    &result.Bench{Series: []result.Series{series(result.HostToDevice, up), series(result.DeviceToHost, down)}},
		Attributes:   &Attributes{HostRegisterSupported: true, ManagedMemory: true},
		Health:       &nvml.GPU{},
	}
}

// well are the facts of a healthy host with one H200.
func well(t *testing.T) *Facts {
	t.Helper()
	return &Facts{Host: host(t, "h200-vm"), Library: &Library{Path: "/usr/lib/libcudart.so.13"}, CUDADevices: number(1), Devices: []Device{fine(55.4, 55.3)}}
}

// stopped are the facts of the same host if CUDA does not start.
func stopped(t *testing.T, err error) *Facts {
	t.Helper()
	return WithoutLibrary(&cudart.OpenError{Err: err, Driver: cudart.DriverFacts{LibPath: "/usr/lib/libcuda.so.1"}, Attempts: []cudart.Attempt{
		{Path: "/usr/lib/libcudart.so.13", Found: "system", Runtime: 13000, Err: err},
	}}, host(t, "h200-vm"))
}

func number[T any](v T) *T { return &v }

// relink takes the links from the host, as a run does after it has measured.
func relink(f *Facts) *Facts {
	for i := range f.Devices {
		f.Devices[i].Relink(f.Host)
	}
	return f
}

func failing(f *Facts, text string) { f.Devices[0].Errors = append(f.Devices[0].Errors, text) }

func twoNodes(f *Facts) {
	const gib = 1 << 30
	f.Host.Virt = hostinfo.Virt{}
	f.Host.CPU.Sockets, f.Host.CPU.Threads, f.Host.CPU.Allowed, f.Host.CPU.AllowedMems = 2, 16, "0-15", "0-1"
	f.Host.NUMA = []hostinfo.NUMANode{{ID: 0, CPUs: "0-7", Total: 64 * gib}, {ID: 1, CPUs: "8-15", Total: 64 * gib}}
	f.Host.GPUs[0].NUMANode, f.Host.GPUs[0].CPUs = number(1), "8-15"
}

// logs puts messages into the kernel's log.
func logs(messages ...string) func(*Facts) {
	return func(f *Facts) {
		f.Host.KernelLog = hostinfo.KernelLog{Shown: true, Events: kernellog.Parse("[    9.0] " + strings.ReplaceAll(strings.Join(messages, "\n"), "\n", "\n[    9.0] "))}
	}
}

func container(f *Facts) { f.Host.Virt.Container = "docker" }

func trial(f *Facts, s result.Series) {
	d := &f.Devices[0]
	if d.Trials == nil {
		d.Trials = &result.Bench{}
	}
	d.Trials.Series = append(d.Trials.Series, s)
}

func pinRate(method string, rate float64) result.Series {
	s := series("", rate)
	s.Name, s.Labels = TrialPinRate, result.Labels{{Key: result.Method, Value: method}}
	return s
}

// byNode is copies from memory of a node, at a rate in GB/s.
func byNode(node, direction string, rate float64) result.Series {
	s := series(direction, rate)
	s.Name, s.Labels = TrialByNode, s.Labels.With(TrialNode, node)
	return s
}

// switches makes the host one of four GPUs in pairs, each pair below a bridge of this link,
// and each bridge below a root port.
func switches(f *Facts, up hostinfo.Link) {
	f.Host.Virt = hostinfo.Virt{}
	first := f.Host.GPUs[0]
	f.Host.GPUs, f.Devices = nil, nil
	for i := range 4 {
		g, d := first, fine(55.4, 55.3)
		g.Address = fmt.Sprintf("0000:%02x:00.0", 0x10+i)
		slot, port := g.Link, up
		slot.Address, port.Address = fmt.Sprintf("0000:0%d:0%d.0", 2+i/2, i%2), fmt.Sprintf("0000:00:0%d.0", 1+i/2)
		g.Upstream = []hostinfo.Link{slot, port}
		d.Ordinal, d.PCIBusID = i, g.Address
		f.Host.GPUs, f.Devices = append(f.Host.GPUs, g), append(f.Devices, d)
	}
	f.CUDADevices = number(4)
}

// wide carries what a GPU's link does, narrow half of that.
var wide = hostinfo.Link{CurrentSpeed: 32, CurrentWidth: 16, MaxSpeed: 32, MaxWidth: 16}

// allAtOnce are the rates of copies of all GPUs at once, in GB/s, both ways alike.
func allAtOnce(f *Facts, rates ...float64) {
	f.Together = &result.Bench{}
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
		sum := series(direction, 0)
		sum.Name, sum.Labels = TogetherBandwidth, sum.Labels.With(result.Device, TogetherSum)
		for i, rate := range rates {
			s := series(direction, rate)
			s.Name, s.Labels = TogetherBandwidth, s.Labels.With(result.Device, fmt.Sprint(i))
			f.Together.Series = append(f.Together.Series, s)
		}
		f.Together.Series = append(f.Together.Series, sum)
	}
}

// apart gives each GPU a root port of its own.
func apart(f *Facts) {
	switches(f, wide)
	for i := range f.Host.GPUs {
		f.Host.GPUs[i].Upstream = f.Host.GPUs[i].Upstream[:1]
	}
}

// refused leaves memory of a node unmeasured.
func refused(f *Facts) {
	trial(f, byNode("1", result.HostToDevice, 55.2))
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
		f.Devices[0].Trials.Unmeasured = append(f.Devices[0].Trials.Unmeasured, result.Unmeasured{
			Name: TrialByNode, Labels: result.Labels{{Key: TrialNode, Value: "0"}, {Key: result.Direction, Value: direction}},
			Reason: "binding to node 0 failed (operation not permitted), pages come from any node",
		})
	}
}

func vllm(f *Facts) *Process {
	f.Processes = []Process{{PID: 7, Name: "vllm"}}
	return &f.Processes[0]
}

// noGPU changes the host into one whose PCI bus has other devices only, and no driver.
func gone(f *Facts) {
	f.Host.GPUs, f.Host.NVIDIA = nil, hostinfo.NVIDIA{}
}

// again checks the requirements again after a change of the host.
func again(f *Facts) *Facts {
	f.Requirements = Require(f.Host, noDriver(cudart.DriverFacts{LibPath: f.Opening.DriverLibrary}))
	return f
}

const (
	oom     = "cudaMalloc: 4096 bytes: cudaErrorMemoryAllocation (2): out of memory"
	pinFail = "cudaHostRegister: 4096 bytes: "
)

// troubles make each check find something: make returns facts, change spoils those of a
// healthy host.
type trouble struct {
	id     string
	make   func(*testing.T) *Facts
	change func(*Facts)
	also   []string // findings that are beside it, after it
	before string   // a finding before it
	sev    Severity // if it is not the check's
	says   string   // part of its text
}

var troubles = []trouble{
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 119, pid=7, name=python3, Timeout after 6s of waiting for RPC response from GPU0 GSP!"), sev: Warning, says: "The GPU works now"},
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 31, pid=7, name=python3, Ch 1", "Out of memory: Killed process 7 (python3)"), sev: Note, says: "Killed process 7"},
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 48, pid=7, name=python3, DBE", "NVRM: Xid (PCI:0000:00:06): 45, pid=7, Ch 1"), sev: Warning, says: "uncorrectable ECC error"},
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 74, NVLink: fatal error detected on link 6"), sev: Note, says: "nvlink -e"},
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 109, pid=7, name=python3, Ch 1"), sev: Note, says: "timeout of a context switch"},
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus."), sev: Warning, says: "answers now"},
	{id: "xid", change: logs("NVRM: Xid (PCI:0000:00:06): 143, GPU Initialization Error"), sev: Warning, says: "GPU initialization error"},
	{id: "no_gpu", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoLibrary)
		gone(f)
		f.Opening.DriverLibrary = ""
		f.Requirements = Require(f.Host, noLibrary(cudart.DriverFacts{}))
		return f
	}, says: "pass one through"},
	{id: "gpu_off_bus", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrUnknown)
		f.Host.GPUs[0].OffBus = true
		return f
	}, says: "0000:00:06.0"},
	{id: "no_c_library", make: func(t *testing.T) *Facts {
		f := WithoutLibrary(noLibrary(cudart.DriverFacts{}), host(t, "alpine-musl"))
		f.Host.Cgroup = hostinfo.Cgroup{}
		return f
	}, says: "glibc 2.17"},
	{id: "nouveau_holds_gpu", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		f.Host.NVIDIA = hostinfo.NVIDIA{Modules: []string{"nouveau"}}
		f.Host.GPUs[0].Driver = "nouveau"
		return again(f)
	}, says: "blacklist nouveau"},
	{id: "vfio_holds_gpu", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		f.Host.NVIDIA = hostinfo.NVIDIA{}
		f.Host.GPUs[0].Driver = "vfio-pci"
		return again(f)
	}, says: "driverctl"},
	{id: "no_kernel_module", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		f.Host.NVIDIA, f.Host.GPUs[0].Driver = hostinfo.NVIDIA{}, ""
		return again(f)
	}, says: "modprobe nvidia"},
	{id: "container_gpu_void", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		container(f)
		f.Host.NVIDIA.Nodes = nil
		f.Host.Env = map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"}
		return again(f)
	}, says: "--gpus all"},
	{id: "container_without_gpu", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		container(f)
		f.Host.NVIDIA.Nodes, f.Opening.DriverLibrary = nil, ""
		return again(f)
	}, says: "--gpus all"},
	{id: "capabilities_without_compute", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		container(f)
		f.Host.Env, f.Opening.DriverLibrary = map[string]string{"NVIDIA_DRIVER_CAPABILITIES": "utility"}, ""
		return again(f)
	}, says: "compute,utility"},
	{id: "no_device_nodes", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDevice)
		f.Host.NVIDIA.Nodes = nil
		return again(f)
	}, says: "nvidia-modprobe"},
	{id: "no_device_nodes", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDevice)
		f.Host.NVIDIA.Nodes, f.Host.NVIDIA.NotDevices = f.Host.NVIDIA.Nodes[1:], []string{"/dev/nvidia0"}
		return again(f)
	}, says: "rm -r"},
	{id: "no_uvm", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrUnknown)
		f.Host.NVIDIA.Nodes = []hostinfo.Node{{Path: "/dev/nvidia0"}, {Path: "/dev/nvidiactl"}}
		return again(f)
	}, says: "nvidia-modprobe"},
	{id: "node_permission", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDevice)
		f.Host.NVIDIA.Nodes[0].Closed, f.Host.NVIDIA.Nodes[0].Mode = true, "Dcrw-rw----"
		return f
	}, says: "usermod"},
	{id: "device_cgroup_denies", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDevice)
		container(f)
		f.Host.Cgroup.DevicesAllowed = []string{"c 1:3 rwm", "c 136:* rwm"}
		return f
	}, says: "195"},
	{id: "device_cgroup_denies", make: start(cudart.ErrNoDevice), change: func(f *Facts) {
		f.Host.Env = map[string]string{"SLURM_JOB_ID": "7"}
		refuse(f, eperm)
	}, says: "denies this job"},
	{id: "host_memory_short", make: func(t *testing.T) *Facts {
		f := WithoutAnswer(Probe{Name: "cuda", Stage: StageOpen, State: ProbeKilled, Detail: "signal: killed"}, host(t, "h200-vm"))
		f.Host.Cgroup.Headroom = hostinfo.Limit{Known: true, N: 4 << 10}
		return f
	}, also: []string{"little_headroom"}, says: "signal: killed"},
	{id: "no_driver_library", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDriver)
		f.Opening.DriverLibrary = ""
		return again(f)
	}, says: "libcuda1"},
	{id: "no_runtime_library", make: func(t *testing.T) *Facts {
		return WithoutLibrary(noLibrary(cudart.DriverFacts{LibPath: "/usr/lib/libcuda.so.1"}), host(t, "h200-vm"))
	}, says: "pip install"},
	{id: "library_unusable", make: func(t *testing.T) *Facts {
		e := noLibrary(cudart.DriverFacts{LibPath: "/usr/lib/libcuda.so.1"})
		e.Attempts[0].Path, e.Attempts[0].Err = "/opt/libcudart.so.12", fmt.Errorf("/opt/libcudart.so.12: wrong architecture: built for AARCH64, this process is amd64")
		return WithoutLibrary(e, host(t, "h200-vm"))
	}, says: "AARCH64"},
	{id: "stub_library", make: start(cudart.ErrStubLibrary), says: "stubs directory"},
	{id: "driver_too_old", make: start(cudart.ErrInsufficientDriver), says: "Update the driver"},
	{id: "driver_mismatch", make: start(cudart.ErrSystemDriverMismatch), says: "reload the nvidia modules"},
	{id: "compat_library", make: start(cudart.ErrCompatNotSupportedOnDevice), says: "cuda-compat"},
	{id: "fabric_not_ready", make: start(cudart.ErrSystemNotReady), says: "nvidia-fabricmanager"},
	{id: "gpus_unavailable", make: start(cudart.ErrDevicesUnavailable), says: "exclusive"},
	{id: "open_out_of_memory", make: start(cudart.ErrMemoryAllocation), says: "free -m"},
	{id: "mps_unavailable", make: start(cudart.ErrMpsServerNotReady), says: "nvidia-cuda-mps-control"},
	{id: "driver_init_failed", make: start(cudart.ErrInitializationError), says: "nvidia-smi"},
	{id: "driver_unknown_error", make: start(cudart.ErrUnknown), says: "nvidia_uvm"},
	{id: "failed_open", make: start(cudart.Code(127)), says: "127"},
	{id: "no_device", make: start(cudart.ErrNoDevice), says: "MIG"},
	{id: "driver_hangs", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrUnknown)
		f.Probes = []Probe{{Name: "cuda", Call: "cuInit", State: ProbeHung, Detail: "no answer within 5 s", Seconds: 5}}
		return f
	}, says: "cuInit"},
	{id: "process_not_started", make: unstarted("exit status 127"), says: "ld-linux-x86-64.so.2"},
	{id: "driver_crashes", change: func(f *Facts) {
		f.Probes = []Probe{{Name: "nvml", Call: "nvmlInit_v2", State: ProbeCrashed, Detail: "signal: segmentation fault"}}
	}, says: "nvmlInit_v2"},
	{id: "hmm_breaks_start", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrInitializationError)
		f.Host.Kernel.Release, f.Host.NVIDIA.HMMDisabled = "5.14.0-503.el9.x86_64", number(false)
		return f
	}, says: "uvm_disable_hmm=1"},
	{id: "mig_without_instance", make: func(t *testing.T) *Facts {
		f := start(cudart.ErrDevicesUnavailable)(t)
		on, none := true, 0
		f.NVML = &nvml.Report{GPUs: []nvml.GPU{{MIG: &on, MIGInstances: &none}}}
		return f
	}, says: "0 instances"},
	{id: "hidden_gpu", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDevice)
		f.Host.Env = map[string]string{visibleDevices: "-1"}
		return f
	}, says: "unset"},
	{id: "visible_devices_unknown", make: func(t *testing.T) *Facts {
		f := stopped(t, cudart.ErrNoDevice)
		f.Host.Env = map[string]string{visibleDevices: "7"}
		return f
	}, says: "7 matches none of 1 GPU"},
	{id: "missing_gpus", change: func(f *Facts) {
		other := f.Host.GPUs[0]
		other.Address = "0000:00:07.0"
		f.Host.GPUs = append(f.Host.GPUs, other)
		f.Host.NVIDIA.Nodes = append(f.Host.NVIDIA.Nodes, hostinfo.Node{Path: "/dev/nvidia1"})
	}, says: "0000:00:07.0"},
	{id: "missing_gpus", change: func(f *Facts) { f.ExpectedGPUs = 8 }, says: "8"},
	{id: "gpus_excluded", change: func(f *Facts) {
		other := f.Host.GPUs[0]
		other.Address, other.Driver = "0000:00:07.0", "vfio-pci"
		f.Host.GPUs = append(f.Host.GPUs, other)
	}, says: "0000:00:07.0/driver is vfio-pci"},
	{id: "device_order", change: func(f *Facts) {
		other := f.Host.GPUs[0]
		other.Address = "0000:00:05.0"
		f.Host.GPUs = append(f.Host.GPUs, other)
		d := fine(55.4, 55.3)
		d.Ordinal, d.PCIBusID = 1, other.Address
		f.Devices, f.CUDADevices = append(f.Devices, d), number(2)
	}, says: "PCI_BUS_ID"},
	{id: "launch_blocking", change: func(f *Facts) { f.Host.Env = map[string]string{"CUDA_LAUNCH_BLOCKING": "1"} }, says: "unset CUDA_LAUNCH_BLOCKING"},
	{id: "small_dev_shm", change: func(f *Facts) {
		container(f)
		f.Host.CPU.AllowedCount = 16
		f.Host.Mounts = append(f.Host.Mounts, hostinfo.Mount{Point: "/dev/shm", Type: "tmpfs", Size: hostinfo.Limit{Known: true, N: 64 << 20}})
	}, says: "--shm-size"},
	{id: "inforom_corrupted", change: func(f *Facts) {
		corrupted := true
		f.Devices[0].Health.InfoROMCorrupted = &corrupted
	}, says: "checksum"},
	{id: "memory_spares_used_up", change: func(f *Facts) { f.Devices[0].Health.BanksWithoutSpares = number(2) }, says: "2 memory banks"},
	{id: "memory_spares_used_up", change: func(f *Facts) { f.Devices[0].Health.RetiredPages = number(64) }, says: "64 retired pages"},
	{id: "large_pages_fault", change: func(f *Facts) {
		f.Host.CPU.Model, f.Host.Memory.THP.PageSize, f.Host.NVIDIA.DriverVersion = "arm64 implementer 0x41 part 0xd4f", 512<<20, "595.58.03"
	}, says: "580 is not"},
	{id: "stubs_in_library_path", change: func(f *Facts) {
		f.Host.Env = map[string]string{"LD_LIBRARY_PATH": "/usr/lib:/usr/local/cuda/lib64/stubs/"}
	}, says: "stubs"},
	{id: "several_runtimes", change: func(f *Facts) { f.Library.Attempts = []Attempt{{Path: "/opt/libcudart.so.13", Error: "no"}} }, says: "/opt/libcudart.so.13"},
	{id: "driver_alone", change: func(f *Facts) {
		f.Library = &Library{API: "driver", Path: "/usr/lib/libcuda.so.1", Attempts: []Attempt{
			{Path: "libcudart.so.13", Found: "loader path", Error: "dlopen: no such file"}, {Path: "/opt/libcudart.so.12", Found: "/opt", Error: "truncated: 5 bytes"}}}
	}, says: "/opt/libcudart.so.12 does not work; /usr/lib/libcuda.so.1 is used alone"},

	{id: "wrong_bytes", change: func(f *Facts) {
		f.Devices[0].Verify.MismatchCount = 1
		f.Devices[0].Verify.Mismatches = make([]verify.Mismatch, 1)
	}, says: "Do not trust results"},
	{id: "wrong_bytes", change: func(f *Facts) { f.Devices[0].Verify.Stale = &verify.StaleResult{BadAfter: 1} }},
	{id: "wrong_bytes", change: func(f *Facts) {
		s := &f.Devices[0].Bandwidth.Series[1]
		s.Verified, s.Mismatch = false, "wrong bytes: byte 7 is 0x00, and 0x2a was copied"
		f.Devices[0].Bandwidth.Errors = []string{"GPU 0: compared afterwards: " + s.Mismatch}
	}, says: "byte 7"},
	{id: "failed_round_trips", change: func(f *Facts) { f.Devices[0].Verify.FailureCount = 1 }},
	{id: "failed_round_trips", change: func(f *Facts) { f.Devices[0].Verify.Cases, f.Devices[0].Verify.VerifiedBytes = 0, 0 }, says: "no round trip"},
	{id: "skipped_round_trips", change: func(f *Facts) {
		f.Devices[0].Verify.CasesPlanned, f.Devices[0].Verify.SkippedCases = 20, 10
		f.Devices[0].Verify.Skipped = []verify.Skip{{Cases: 10, Reason: "no memory"}}
	}, says: "no memory"},
	{id: "skipped_round_trips", sev: Warning, change: func(f *Facts) {
		f.Devices[0].Verify.CasesPlanned, f.Devices[0].Verify.SkippedCases = 20, 11
	}},
	{id: "failed_call", change: func(f *Facts) { failing(f, "oops") }, says: "oops"},
	{id: "failed_call", change: func(f *Facts) { f.Devices[0].Bandwidth.Errors = []string{"no memory"} }},
	{id: "failed_call", change: func(f *Facts) {
		f.Host.GPUs[0].Link.CurrentSpeed = 2.5
		f.Devices[0].Bandwidth = &result.Bench{Notes: []string{"registered memory: not measured: not supported"}}
	}},
	{id: "uncorrectable_ecc", change: func(f *Facts) {
		failing(f, "cudaStreamSynchronize: stream: cudaErrorECCUncorrectable (214): uncorrectable ECC error encountered")
	}, says: "ROW_REMAPPER"},
	{id: "uncorrectable_ecc", change: func(f *Facts) { f.Devices[0].Health.UncorrectedVolatile = number(3) }, says: "NVML: 3"},
	{id: "gpu_fault", change: func(f *Facts) {
		f.Devices[0].Verify.FailureCount = 1
		f.Devices[0].Verify.Failures = []verify.Failure{{Error: "cudaMemcpyAsync: cudaErrorLaunchFailure (719): unspecified launch failure"}}
	}, says: "Restart the process"},
	{id: "nvlink_error", change: func(f *Facts) { failing(f, "cudaMemcpyPeer: cudaErrorNvlinkUncorrectable (220): x") }, says: "Xid 74"},
	{id: "gpu_full", change: func(f *Facts) {
		f.Devices[0].MemoryFree = 100 << 20
		for range 18 {
			failing(f, oom)
		}
		f.Devices[0].Verify.FailureCount = 1
		f.Devices[0].Verify.Failures = []verify.Failure{{Error: oom}}
	}, says: "not everything was examined"},
	{id: "gpu_full", change: func(f *Facts) { // as an H200 does with 40 MiB left: CUDA has none for itself
		d := &f.Devices[0]
		d.MemoryTotal, d.MemoryFree, d.Bandwidth, d.Errors = 0, 0, nil, []string{"cudaMemGetInfo: memory of device 0: cudaErrorMemoryAllocation (2): out of memory",
			"cudaHostAlloc: 4194304 bytes, flags 0x0, for device 0: cudaErrorMemoryAllocation (2): out of memory"}
		d.Verify.SkippedCases, d.Verify.Skipped = 1, []verify.Skip{{Reason: oom}}
	}, says: "not everything was examined"},
	{id: "host_memory_short", before: "", change: func(f *Facts) {
		f.Host.Cgroup.Headroom = hostinfo.Limit{Known: true, N: 40 << 20}
		failing(f, pinFail+"cudaErrorMemoryAllocation (2): out of memory")
	}, also: []string{"little_headroom"}},
	{id: "compute_mode_prohibited", change: func(f *Facts) {
		f.Devices[0].Attributes.ComputeMode = 2
		failing(f, "cudaMemGetInfo: cudaErrorDevicesUnavailable (46): busy")
	}, says: "nvidia-smi -c DEFAULT"},
	{id: "compute_mode_exclusive", change: func(f *Facts) { f.Devices[0].Attributes.ComputeMode = 3 }, says: "-c DEFAULT"},
	{id: "compute_mode_exclusive", change: func(f *Facts) {
		f.Devices[0].Attributes.ComputeMode, f.Host.NVIDIA.MPS = 3, "/tmp/nvidia-mps/control"
	}, says: "Leave the mode"},

	{id: "confidential_computing", change: func(f *Facts) {
		f.Devices[0].Attributes.HostRegisterSupported = false
		failing(f, pinFail+"cudaErrorNotSupported (801): operation not supported")
	}, says: "conf-compute"},
	{id: "confidential_computing", change: func(f *Facts) { // the library falls back to cudaHostAlloc
		f.Devices[0].Verify.CasesPlanned, f.Devices[0].Verify.SkippedCases = 11, 1
		f.Devices[0].Verify.Skipped = []verify.Skip{{Cases: 1, Reason: pinFail + "cudaErrorNotSupported (801): operation not supported"}}
	}, also: []string{"skipped_round_trips"}},
	{id: "pin_refused", change: func(f *Facts) { failing(f, pinFail+"cudaErrorInvalidValue (1): invalid argument") }, says: "NVRM"},
	{id: "no_host_register", change: func(f *Facts) { f.Devices[0].Attributes.HostRegisterSupported = false }},
	{id: "pin_over_2gib_leaks", change: func(f *Facts) { f.Host.Kernel.Release = "6.11.0-29-generic" }, says: "6.12 or later"},
	{id: "leaked_pins", change: func(f *Facts) {
		f.Host.Kernel.Release, f.Host.Memory.Total = "6.11.4-arch1", 128<<30
		f.Host.Memory.Unowned = hostinfo.Limit{Known: true, N: 41 << 30}
	}, also: []string{"pin_over_2gib_leaks"}, says: "41 GiB of memory"},
	{id: "pin_512gib", change: func(f *Facts) { f.Host.Memory.Total = 1 << 40 }, says: "256 GiB"},
	{id: "few_mappings", change: func(f *Facts) { f.Host.Memory.MaxMappings = hostinfo.Limit{Known: true, N: 30000} }, says: "vm.max_map_count"},
	{id: "few_mappings", change: func(f *Facts) {
		f.Host.Memory.MaxMappings = hostinfo.Limit{Known: true, N: 65530}
		vllm(f).Mappings = 60000
	}, says: "process 7"},
	{id: "wsl_pin_limit", change: func(f *Facts) { f.Host.Virt.WSL = true }, says: ".wslconfig"},
	{id: "integrated_gpu", change: func(f *Facts) { f.Devices[0].Attributes.UsesHostPageTables = true }, says: "mlock"},

	{id: "row_remap_failed", change: func(f *Facts) {
		f.Devices[0].Health.RemapFailed, f.Devices[0].Health.RemapPending = number(true), number(true)
	}, says: "replaced"},
	{id: "row_remap_pending", change: func(f *Facts) { f.Devices[0].Health.RemapPending = number(true) }, says: "nvidia-smi -r"},
	{id: "throttled", change: func(f *Facts) { f.Devices[0].Health.Throttle = []string{"sw_power_cap", "hw_thermal_slowdown"} }, says: "hot"},
	{id: "throttled", change: func(f *Facts) { f.Devices[0].Health.Throttle = []string{"hw_power_brake_slowdown"} }, says: "power"},
	{id: "locked_memory_clock", change: func(f *Facts) {
		h := f.Devices[0].Health
		h.MemoryClock, h.MemoryClockMax, h.Throttle = 810, 3201, []string{"applications_clocks_setting"}
	}, says: "-rmc"},
	{id: "other_processes", change: func(f *Facts) {
		f.Devices[0].Health.Processes = []nvml.Process{{PID: 9, Name: "python", Memory: 1 << 30}}
	}, says: "Process 9 python: 1 GiB"},
	{id: "persistence_off", change: func(f *Facts) { f.Devices[0].Health.Persistence = number(false) }, says: "persistenced"},

	{id: "narrow_link", sev: Problem, change: func(f *Facts) {
		f.Host.Virt.VM = false
		f.Host.GPUs[0].Link.CurrentWidth = 8
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 27.7), series(result.DeviceToHost, 27.6)}
	}, says: "bifurcation"},
	{id: "narrow_link", sev: Warning, change: func(f *Facts) { // also without a measurement; the instance may be made so
		f.Host.GPUs[0].Link.CurrentWidth, f.Host.GPUs[0].Link.CurrentSpeed = 8, 2.5
		f.Devices[0].Bandwidth = nil
	}},
	{id: "slow_link", change: func(f *Facts) {
		f.Host.GPUs[0].Link.CurrentSpeed = 16
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 25), series(result.DeviceToHost, 25.1)}
	}, says: "PCIe 4.0 of PCIe 5.0"},
	{id: "narrow_upstream", change: func(f *Facts) {
		l := f.Host.GPUs[0].Link
		f.Host.GPUs[0].Upstream = []hostinfo.Link{l, {Address: "0000:00:01.0", CurrentSpeed: 16, CurrentWidth: 8, MaxSpeed: 16, MaxWidth: 16}}
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 13.5), series(result.DeviceToHost, 13.4)}
	}, says: "0000:00:01.0"},
	{id: "narrow_upstream", sev: Note, change: func(f *Facts) {
		l := f.Host.GPUs[0].Link
		f.Host.GPUs[0].Upstream = []hostinfo.Link{l, {Address: "0000:00:01.0", CurrentSpeed: 16, CurrentWidth: 8, MaxSpeed: 16, MaxWidth: 8}}
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 13.5), series(result.DeviceToHost, 13.4)}
	}, says: "by design"},
	{id: "slow_copies", change: func(f *Facts) { f.Devices[0].Bandwidth.Series[1] = series(result.DeviceToHost, 20) },
		says: "expected (NVIDIA H200 on PCIe 5.0 x16, measured 2026-11-22)"},
	{id: "slow_copies", sev: Warning, change: func(f *Facts) { f.Devices[0].Bandwidth.Series[1] = series(result.DeviceToHost, 47) }},
	{id: "slow_copies", change: func(f *Facts) { // an A100 at half its rate
		f.Devices[0].Name = "NVIDIA A100-SXM4-80GB"
		f.Host.GPUs[0].Link = hostinfo.Link{CurrentSpeed: 16, CurrentWidth: 16, MaxSpeed: 16, MaxWidth: 16}
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 12.6), series(result.DeviceToHost, 12.4)}
	}},
	{id: "slow_copies", sev: Problem, change: func(f *Facts) { f.ExpectedRate = 56 }, says: "--expect-bandwidth"},
	{id: "busy", sev: Warning, change: func(f *Facts) {
		f.Devices[0].Bandwidth.Series[1] = series(result.DeviceToHost, 20)
		f.Devices[0].OtherCPUs = number(12.0)
	}, says: "12 of 16 CPUs busy"},
	{id: "asymmetric_copies", change: func(f *Facts) {
		f.Host.GPUs[0].Link = hostinfo.Link{} // not shown: the speed itself is not judged
		f.Devices[0].Bandwidth.Series[1] = series(result.DeviceToHost, 9)
	}, also: []string{"unjudged_copies"}},
	{id: "impossible_rate", change: func(f *Facts) {
		f.Host.GPUs[0].Link = hostinfo.Link{CurrentSpeed: 2.5, CurrentWidth: 16, MaxSpeed: 8, MaxWidth: 16}
	}, says: "virtual machines"},
	{id: "link_errors", change: func(f *Facts) { f.Host.GPUs[0].Errors = &hostinfo.LinkErrors{Correctable: 481} }, says: "AER"},
	{id: "link_errors", sev: Problem, change: func(f *Facts) { f.Host.GPUs[0].Errors = &hostinfo.LinkErrors{Fatal: 1} }},
	{id: "link_errors", change: func(f *Facts) { f.Devices[0].Health.PCIeReplays = number(81) }},
	{id: "unsteady_copies", change: func(f *Facts) { f.Devices[0].Bandwidth.Series[0].Spread = 0.3 }},
	{id: "unsteady_copies", sev: Warning, change: func(f *Facts) { f.Devices[0].Bandwidth.Series[0].Spread = 1.99 }},
	{id: "unjudged_copies", change: func(f *Facts) { f.Host.GPUs[0].Link = hostinfo.Link{} }, says: "does not show the link of the GPU"},
	{id: "unjudged_copies", change: func(f *Facts) {
		f.Host.GPUs[0].Link, f.Simulated = hostinfo.Link{}, true
	}, says: "The GPU is simulated"},
	{id: "unjudged_copies", change: func(f *Facts) { f.Devices[0].Name = "NVIDIA GB10" }, says: "this GPU on this link", also: []string{"write_combined_slow"}},
	{id: "slot_below_card", change: func(f *Facts) {
		f.Host.GPUs[0].Link.CurrentSpeed = 16
		f.Host.GPUs[0].Upstream = []hostinfo.Link{{Address: "0000:00:01.0", CurrentSpeed: 16, CurrentWidth: 16, MaxSpeed: 16, MaxWidth: 16}}
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 25), series(result.DeviceToHost, 25.1)}
	}},
	{id: "slow_together", change: func(f *Facts) { // some fall to a seventh (cuda-samples #357)
		apart(f)
		allAtOnce(f, 55, 55, 7.9, 7.8)
	}, says: "GPUs 2, 3 get as little as 14% of their share"},
	{id: "slow_together", change: func(f *Facts) { // one gets nearly nothing of a link that two share
		switches(f, wide)
		allAtOnce(f, 48, 5, 27, 26)
	}, also: []string{"shared_switch"}, says: "its share of the uplink is 26.5 GB/s"},
	{id: "slow_together", sev: Note, change: func(f *Facts) {
		apart(f)
		allAtOnce(f, 40, 40, 40, 40)
	}, says: "72%"},
	{id: "slow_together", sev: Note, change: func(f *Facts) { // a virtual machine, whose links may be made up
		switches(f, wide)
		f.Host.Virt = hostinfo.Virt{VM: true}
		for i := range f.Host.GPUs {
			f.Host.GPUs[i].Upstream = nil
		}
		allAtOnce(f, 14, 14, 14, 14)
	}, says: "does not show"},
	{id: "other_processes", change: func(f *Facts) { // which copy meanwhile: a note, too
		apart(f)
		allAtOnce(f, 55, 10, 55, 5)
		for i := range f.Devices {
			f.Devices[i].Health.Processes = []nvml.Process{{PID: 9, Name: "python", Memory: 1 << 30}}
		}
	}, also: []string{"slow_together"}},
	{id: "peer_path_loses_bytes", change: func(f *Facts) {
		apart(f)
		f.Host.Virt = hostinfo.Virt{}
		f.PeerPaths = []PeerPath{{From: 0, To: 1, ProofBytes: 16384}, {From: 1, To: 0, ProofBytes: 16384, LostBytes: 16384}}
	}, says: "copies from GPU 1 to GPU 0 lose data without an error"},
	{id: "peer_path_loses_bytes", change: func(f *Facts) { // each of the pairs, and the IOMMU is why
		apart(f)
		for i := range f.Host.GPUs {
			f.Host.GPUs[i].IOMMU = "DMA-FQ"
		}
		for from := range 2 {
			for to := range 4 {
				f.PeerPaths = append(f.PeerPaths, PeerPath{From: from, To: to, ProofBytes: 16384, LostBytes: 1})
			}
		}
	}, says: "iommu=pt"},
	{id: "peer_path_loses_bytes", change: func(f *Facts) { // round trips through another GPU, and no others
		f.Host.Virt = hostinfo.Virt{VM: true}
		v := f.Devices[0].Verify
		v.MismatchCount = 3
		v.Paths = append(v.Paths, verify.PathReport{Path: "peer", Cases: 9, MismatchCount: 3})
		v.Mismatches = []verify.Mismatch{{Case: verify.Case{Path: "peer", SizeBytes: 64}}}
	}, says: "Ask the operator of the host"},
	{id: "peer_path_loses_bytes", change: func(f *Facts) { // the same, where the short proof arrived
		v := f.Devices[0].Verify
		v.MismatchCount = 3
		v.Paths = append(v.Paths, verify.PathReport{Path: "peer", Cases: 9, MismatchCount: 3})
		v.Mismatches = []verify.Mismatch{{Case: verify.Case{Path: "peer", SizeBytes: 64}}}
		f.PeerPaths = []PeerPath{{From: 0, To: 1, ProofBytes: 16384}, {From: 1, To: 0, ProofBytes: 16384}}
	}, says: "between GPU 0 and another GPU lose data"},
	{id: "failed_call", sev: Warning, change: func(f *Facts) { // no proof of a path came to its end
		f.PeerPaths = []PeerPath{{From: 0, To: 1, ProofBytes: 16384, Error: oom}}
	}, says: "from GPU 0 to GPU 1"},
	{id: "wrong_bytes", change: func(f *Facts) { // also through another GPU
		v := f.Devices[0].Verify
		v.MismatchCount = 3
		v.Paths = append(v.Paths, verify.PathReport{Path: "peer", Cases: 9, MismatchCount: 2}, verify.PathReport{Path: "pinned", Cases: 9, MismatchCount: 1})
		v.Mismatches = []verify.Mismatch{{Case: verify.Case{Path: "pinned", SizeBytes: 64}}}
	}},
	{id: "wrong_bytes", change: func(f *Facts) {
		apart(f)
		allAtOnce(f, 55, 55, 55, 55)
		s := &f.Together.Series[4]
		s.Mismatch = "wrong bytes: byte 7 is 0x00, and 0x2a was copied"
		f.Together.Errors = []string{"all devices at once: compared afterwards: " + s.Mismatch}
	}, says: "all GPUs at once"},
	{id: "failed_call", sev: Warning, change: func(f *Facts) {
		apart(f)
		f.Together = &result.Bench{Errors: []string{"all devices at once: " + oom}}
	}, says: "those of each alone did not"},
	{id: "shared_switch", change: func(f *Facts) { // as fast as the links can
		switches(f, wide)
		allAtOnce(f, 27, 26.5, 27, 26.5)
	}, says: "To GPU, all GPUs at once: 53.5 GB/s together"},
	{id: "shared_switch", change: func(f *Facts) {
		l := f.Host.GPUs[0].Link
		l.Address = "0000:00:02.0"
		up := hostinfo.Link{Address: "0000:00:01.0", CurrentSpeed: 32, CurrentWidth: 16, MaxSpeed: 32, MaxWidth: 16}
		f.Host.GPUs[0].Upstream = []hostinfo.Link{l, up}
		other := f.Host.GPUs[0]
		other.Address = "0000:00:07.0"
		l.Address = "0000:00:03.0"
		other.Upstream = []hostinfo.Link{l, up}
		f.Host.GPUs = append(f.Host.GPUs, other)
		d := fine(55.4, 55.3)
		d.Ordinal, d.PCIBusID = 1, other.Address
		f.Devices, f.CUDADevices = append(f.Devices, d), number(2)
	}, says: "GPUs 0, 1 share one link of 63.0 GB/s"},

	{id: "slow_small_copies", change: func(f *Facts) {
		s := series("", 80e-6)
		s.Name = TrialLatency
		trial(f, s)
	}, says: "takes 80.0 µs"},
	{id: "slow_pageable", change: func(f *Facts) {
		s := series(result.HostToDevice, 9.3)
		s.Labels = s.Labels.With(result.Memory, TrialPageable)
		trial(f, s)
	}, says: "To GPU: 9.30 GB/s pageable, 55.4 GB/s pinned"},
	{id: "write_combined_slow", change: func(f *Facts) {
		f.Devices[0].Name, f.Host.GPUs[0].Link = "NVIDIA GH200 480GB", hostinfo.Link{}
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 346), series(result.DeviceToHost, 300)}
	}, says: "cudaHostAllocWriteCombined"},

	{id: "few_cpus", change: func(f *Facts) { f.Host.CPU.Allowed, f.Host.CPU.AllowedCount = "3", 1 }, says: "taskset"},
	{id: "few_cpus", change: func(f *Facts) { f.Host.CPU.Quota = 0.5 }, says: "A CPU quota"},
	{id: "far_cpus", change: func(f *Facts) {
		twoNodes(f)
		f.Host.CPU.Allowed = "0-7"
		f.Devices[0].Bandwidth.Series[0].NUMANode = number(0)
	}, says: "--cpunodebind=1"},
	{id: "far_memory", change: func(f *Facts) { twoNodes(f); f.Host.CPU.AllowedMems = "0" }, says: "cpuset.mems"},
	{id: "pages_far", change: func(f *Facts) { twoNodes(f); f.Devices[0].Bandwidth.Series[0].NUMANode = number(0) }},
	{id: "far_cpus", change: func(f *Facts) { // with what was measured here
		twoNodes(f)
		f.Host.CPU.Allowed = "0-7"
		trial(f, byNode("1", result.HostToDevice, 55.2))
		trial(f, byNode("0", result.HostToDevice, 38.1))
	}, says: "to GPU, 55.2 GB/s with memory of node 1, 38.1 GB/s with memory of node 0"},
	{id: "far_node_slow", change: func(f *Facts) {
		twoNodes(f)
		trial(f, byNode("1", result.HostToDevice, 55.2))
		trial(f, byNode("1", result.DeviceToHost, 55.1))
		trial(f, byNode("0", result.HostToDevice, 54.9))
		trial(f, byNode("0", result.DeviceToHost, 22.0))
	}, says: "reach 40% of the local rate"},
	{id: "far_node_not_measured", change: func(f *Facts) {
		twoNodes(f)
		refused(f)
	}, says: "operation not permitted"},
	{id: "no_sys_nice", change: func(f *Facts) { // it is why
		twoNodes(f)
		container(f)
		f.Host.User = &hostinfo.User{}
		refused(f)
	}, says: "far_node_not_measured"},
	{id: "numa_unknown", change: func(f *Facts) { twoNodes(f); f.Host.GPUs[0].NUMANode = nil }, says: "-1"},
	{id: "sub_numa", change: func(f *Facts) { twoNodes(f); f.Host.CPU.Sockets = 1 }, says: "only near nodes [1]"},
	{id: "no_sys_nice", change: func(f *Facts) { twoNodes(f); container(f); f.Host.User = &hostinfo.User{} }, says: "SYS_NICE"},

	{id: "slow_pinning", change: func(f *Facts) {
		f.Host.Memory.Available = 16 << 30
		trial(f, pinRate(TrialCUDA, 0.6))
	}, says: "pinned_use_cuda_host_register"},
	{id: "slow_pinning", sev: Note, change: func(f *Facts) {
		trial(f, pinRate(TrialCUDA, 3))
		trial(f, pinRate(TrialOurs, 24))
		f.Host.Memory.Available = 64 << 30
	}, says: "cudaHostAlloc pins 64 GB in 21.3 s, threads in 2.67 s"},
	{id: "fragmented_memory", change: func(f *Facts) {
		f.Host.Memory.Free = []hostinfo.FreeZone{{Zone: "Normal", Pages: 1000000, Huge: 512}}
		f.Host.Memory.Stalls = &hostinfo.Stalls{Compact: 9, CompactFail: 8, HugeFaults: 9000, HugeFallback: 5000}
		f.Host.Memory.THP.Defrag = "always"
	}, says: "compact_memory"},
	{id: "thp_off", change: func(f *Facts) { f.Host.Memory.THP.Enabled = "never" }, says: "madvise"},
	{id: "thp_defrag_always", change: func(f *Facts) { f.Host.Memory.THP.Enabled, f.Host.Memory.THP.Defrag = "always", "always" }},
	{id: "pinning_stalls_others", change: func(f *Facts) {
		f.Host.Memory.Available = 1 << 40
		trial(f, pinRate(TrialCUDA, 3))
	}, says: "6 min 7 s"},

	{id: "weights_on_network", change: func(f *Facts) {
		f.Host.Mounts = []hostinfo.Mount{{Point: "/", Type: "ext4"}, {Point: "/models", Type: "nfs4", Network: true}}
		vllm(f).Weights = []WeightFile{{Path: "/models/llama/model-1.safetensors", Size: 5 << 30}, {Path: "/home/x.gguf", Size: 2 << 30}}
	}, says: "nfs4 at /models"},
	{id: "weights_mapped", change: func(f *Facts) { vllm(f).Weights = []WeightFile{{Path: "/home/x.gguf", Size: 2 << 30}} }, says: "--no-mmap"},
	{id: "small_read_ahead", change: func(f *Facts) {
		f.Host.Mounts = []hostinfo.Mount{{Point: "/data", Type: "nfs4", Network: true, ReadAhead: hostinfo.Limit{Known: true, N: 128 << 10}}}
	}, says: "/data (nfs4): 128 KiB"},

	{id: "little_headroom", change: func(f *Facts) {
		f.Host.Cgroup = hostinfo.Cgroup{Version: 2, Path: "/sys/fs/cgroup", LimitFile: "memory.max", MemoryLimit: hostinfo.Limit{Known: true, N: 300 << 20},
			MemoryUsed: hostinfo.Limit{Known: true, N: 100 << 20}, Headroom: hostinfo.Limit{Known: true, N: 200 << 20}}
	}, says: "/sys/fs/cgroup/memory.max is 300 MiB"},
	{id: "memory_high", change: func(f *Facts) {
		f.Host.Cgroup = hostinfo.Cgroup{Version: 2, Path: "/sys/fs/cgroup", LimitFile: "memory.high", MemoryLimit: hostinfo.Limit{Known: true, N: 4 << 30},
			MemoryUsed: hostinfo.Limit{Known: true, N: 4 << 30}, Headroom: hostinfo.Limit{Known: true, N: 0}}
	}, says: "MemoryHigh=infinity"},
	{id: "hugetlb_unused", change: func(f *Facts) {
		f.Host.NUMA[0].Huge = []hostinfo.HugePool{{PageSize: 1 << 30, Total: 64, Free: 60}}
	}, says: "60 GiB is reserved"},
	{id: "strict_overcommit", change: func(f *Facts) {
		f.Host.Memory.Overcommit = number(2)
		f.Host.Memory.CommitLimit, f.Host.Memory.Committed = hostinfo.Limit{Known: true, N: 64 << 30}, hostinfo.Limit{Known: true, N: 63 << 30}
	}, says: "vm.overcommit_memory=0"},
	{id: "memlock_rdma", change: func(f *Facts) { f.Host.InfiniBand, f.Host.MemLock = 2, hostinfo.Limit{Known: true, N: 8 << 20} }, says: "limits RDMA but not CUDA"},
	{id: "swapping", change: func(f *Facts) {
		f.Host.Memory.Available = f.Host.Memory.Total / 20
		f.Host.Memory.Swap, f.Host.Memory.SwapFree = 8<<30, hostinfo.Limit{Known: true, N: 1 << 30}
	}},
	{id: "pinned_by_others", change: func(f *Facts) {
		f.Host.Memory.Available = 20 << 30
		f.Processes = []Process{{PID: 7, Name: "vllm", Pinned: 40 << 30}, {PID: 8, Name: "sglang", Pinned: 50 << 30}, {PID: 9, Name: "idle"}}
	}, says: "Process 8 (sglang) has pinned at least 50 GiB"},
	{id: "little_headroom", change: func(f *Facts) { // with what took it
		f.Host.Memory.Available = 500 << 20
		f.Processes = []Process{{PID: 7, Name: "vllm", Pinned: 40 << 30}}
	}, says: "Process 7 (vllm) has pinned at least 40 GiB"},
	{id: "limits_exceed_memory", change: func(f *Facts) {
		f.Processes = []Process{{PID: 7, Name: "vllm", Cgroup: "/a", MemoryLimit: 100 << 30}, {PID: 8, Name: "sglang", Cgroup: "/b", MemoryLimit: 30 << 30}, {PID: 9, Name: "worker", Cgroup: "/b", MemoryLimit: 30 << 30}}
	}, says: "/b may use 30 GiB, and has pinned at least 0 B: process 8 (sglang), 9 (worker)"},
	{id: "cgroup_below_host", change: func(f *Facts) { f.Host.Cgroup.Headroom = hostinfo.Limit{Known: true, N: 8 << 30} }, says: "may use 8 GiB more"},
	{id: "rounded_pins", change: func(f *Facts) {
		p := vllm(f)
		p.Rounded, p.RoundedBlocks, p.Pinned = 32<<30, 2, 33<<30
	}, says: "of it, 16 GiB, is pinned"},
}

// hypotheses are hosts on which CUDA does not start, for a cause that the code does not tell.
var hypotheses = []trouble{
	{id: "gpu_switched_off", make: noModuleLoaded, change: func(f *Facts) { f.Host.GPUs[0].PowerState, f.Host.GPUs[0].Asleep = "D3cold", true }, says: "D3cold"},
	{id: "other_driver_holds_gpu", make: noModuleLoaded, change: func(f *Facts) { f.Host.GPUs[0].Driver = "nova_core" }, says: "blacklist nova_core"},
	{id: "gpu_too_old_for_driver", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.Host.GPUs[0].DeviceID = "0x102d" }, says: "470 is the last"},
	{id: "gpu_too_old_for_driver", make: start(cudart.ErrNoDevice), change: func(f *Facts) {
		f.Host.GPUs[0].DeviceID, f.Host.NVIDIA.OpenModule, f.Host.NVIDIA.DriverVersion = "0x1db6", true, "570.1"
	}, says: "open kernel module"},
	{id: "module_not_signed", make: noModuleLoaded, change: func(f *Facts) {
		f.Host.Security.SecureBoot, f.Host.NVIDIA.ModuleFile = number(true), "/lib/modules/6/updates/dkms/nvidia.ko"
	}, says: "mokutil"},
	{id: "systemd_denies_devices", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.Host.Virt.Unit = "x.service"; refuse(f, eperm) }, says: "DeviceAllow"},
	{id: "systemd_denies_devices", make: start(cudart.ErrNoDevice), change: func(f *Facts) {
		f.Host.Virt.Unit, f.Host.Virt.PrivateDevices, f.Host.NVIDIA.Nodes = "x.service", true, nil
	}, says: "PrivateDevices=no"},
	{id: "stale_device_node", make: start(cudart.ErrUnknown), change: func(f *Facts) { refuse(f, enxio) }, says: "left over"},
	{id: "stale_device_node", make: start(cudart.ErrUnknown), change: func(f *Facts) { // /dev/null in its place
		container(f)
		f.Host.NVIDIA.Nodes[0].Major = 1
	}, says: "cdi generate"},
	{id: "lsm_denies", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.Host.Security.SELinux = number(true); refuse(f, eacces) }, says: "container_use_devices"},
	{id: "lsm_denies", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.Host.Security.Confinement = "docker-default (enforce)"; refuse(f, eacces) }, says: "Allow rw of /dev/nvidia*"},
	{id: "wsl_no_driver", make: noLibcuda, change: func(f *Facts) { wsl(f) }, also: []string{"wsl_pin_limit"}, says: "wsl --shutdown"},
	{id: "vgpu_guest_driver", make: noLibcuda, change: func(f *Facts) { f.NVML = virtual("GRID RTX2070-4Q") }, says: "guest driver"},
	{id: "driver_library_off_path", make: noLibcuda, change: func(f *Facts) { f.Opening.DriverLibrary = "/run/opengl-driver/lib/libcuda.so.1" }, says: "LD_LIBRARY_PATH=/run/opengl-driver/lib"},
	{id: "few_files", make: start(cudart.ErrOperatingSystem), change: func(f *Facts) { f.Host.OpenFiles = hostinfo.Limit{Known: true, N: 24} }, says: "ulimit -n"},
	{id: "few_files", change: func(f *Facts) {
		f.Host.OpenFiles = hostinfo.Limit{Known: true, N: 24}
		failing(f, "cudaHostRegister: cudaErrorOperatingSystem (304): OS call failed")
	}, says: "Max open files is 24"},
	{id: "few_files", change: func(f *Facts) { // as an H200 does with ulimit -n 24
		f.Host.OpenFiles = hostinfo.Limit{Known: true, N: 24}
		failing(f, "cudaStreamCreateWithPriority: cudaErrorDevicesUnavailable (46): CUDA-capable device(s) is/are busy or unavailable")
	}, says: "Max open files is 24"},
	{id: "few_files", make: unstarted("pipe2: too many open files"), change: func(f *Facts) { f.Host.OpenFiles = hostinfo.Limit{Known: true, N: 12} }, says: "Max open files is 12"},
	{id: "few_tasks", make: unstarted("exit status 2: fakecgo: pthread_create failed: 11"), change: func(f *Facts) { f.Host.Processes = hostinfo.Limit{Known: true, N: 12} }, says: "ulimit -u"},
	{id: "few_tasks", change: func(f *Facts) { // as an H200 does with ulimit -u 24
		f.Host.Processes = hostinfo.Limit{Known: true, N: 24}
		f.Probes = []Probe{{Name: "cuda", Stage: StageCopies, State: ProbeCrashed, Detail: "the process ended early: exit status 2: fakecgo: pthread_create failed: 11"}}
	}, says: "ulimit -u"},
	{id: "few_tasks", make: start(cudart.ErrOperatingSystem), change: func(f *Facts) { f.Host.Processes = hostinfo.Limit{Known: true, N: 30} }, says: "Max processes is 30"},
	{id: "host_memory_short", make: start(cudart.ErrInitializationError), change: func(f *Facts) { f.Host.Memory.Available = 500 << 20 }, also: []string{"little_headroom"}, says: "to start CUDA on 1 GPU"},
	{id: "throttled", change: func(f *Facts) {
		h := f.Devices[0].Health
		h.Throttle, h.SMClock, h.SMClockMax = []string{"sw_power_cap"}, 607, 1530
	}, sev: Note, says: "nvidia-smi -pl"},
	{id: "few_tasks", make: start(cudart.ErrOperatingSystem), change: func(f *Facts) {
		f.Host.Cgroup.Tasks, f.Host.Cgroup.TasksMax = hostinfo.Limit{Known: true, N: 2047}, hostinfo.Limit{Known: true, N: 2048}
	}, says: "pids-limit"},
	{id: "address_space_limit", make: start(cudart.ErrMemoryAllocation), change: func(f *Facts) { f.Host.AddressSpace = hostinfo.Limit{Known: true, N: 46 << 30} }, says: "ulimit -v"},
	{id: "confidential_not_ready", make: start(cudart.ErrSystemNotReady), change: func(f *Facts) { f.NVML = virtual("NVIDIA H100"); f.NVML.ConfidentialComputing = number(true) }, says: "-srs 1"},
	{id: "confidential_vm_plain_gpu", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.Host.Virt.Confidential, f.NVML = "tdx", &nvml.Report{} }, says: "swiotlb"},
	{id: "sandbox_refuses", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.Host.Virt.Sandbox, f.Host.Virt.Container = "gvisor", "gvisor" }, says: "nvproxy"},
	{id: "wsl_gpu_blocked", make: start(cudart.ErrNoDevice), change: func(f *Facts) { wsl(f); f.Opening.DriverLibrary = "/usr/lib/wsl/lib/libcuda.so.1" }, also: []string{"wsl_pin_limit"}, says: "WDDM"},
	{id: "wsl_gpu_blocked", make: start(cudart.ErrNoDevice), change: func(f *Facts) { wsl(f) }, also: []string{"wsl_pin_limit"}, says: "only the toolkit"},
	{id: "vgpu_unlicensed", make: start(cudart.ErrDevicesUnavailable), change: func(f *Facts) { f.NVML = virtual("NVIDIA A10-24Q") }, says: "nvidia-gridd"},
	{id: "vgpu_unlicensed", change: func(f *Facts) {
		f.Devices[0].Name = "GRID A100-4-20C"
		f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 1.4), series(result.DeviceToHost, 1.5)}
	}, says: "slowed down"},
	{id: "gpu_not_initialized", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.NVML = &nvml.Report{} }, says: "RmInitAdapter"},
	{id: "gpu_not_initialized", make: start(cudart.ErrNoDevice), change: func(f *Facts) { f.NVML, f.Host.GPUs[0].NoWindow = &nvml.Report{}, true }, says: "Above 4G Decoding"},
	{id: "uvm_after_suspend", make: start(cudart.ErrUnknown), change: func(f *Facts) { f.Host.Kernel.Suspended = hostinfo.Limit{Known: true, N: 3} }, says: "rmmod nvidia_uvm"},
}

func noModuleLoaded(t *testing.T) *Facts {
	f := stopped(t, cudart.ErrNoDriver)
	f.Host.NVIDIA = hostinfo.NVIDIA{}
	f.Host.GPUs[0].Driver = ""
	f.Requirements = Require(f.Host, noDriver(cudart.DriverFacts{LibPath: "/usr/lib/libcuda.so.1"}))
	return f
}

func noLibcuda(t *testing.T) *Facts {
	f := WithoutLibrary(noDriver(cudart.DriverFacts{}), host(t, "h200-vm"))
	f.Host.NVIDIA.Libraries = nil
	return f
}

func wsl(f *Facts) {
	f.Host.Virt.WSL, f.Host.GPUs, f.Host.NVIDIA = true, nil, hostinfo.NVIDIA{Nodes: []hostinfo.Node{{Path: "/dev/dxg"}}}
}

func virtual(name string) *nvml.Report {
	return &nvml.Report{Count: 1, GPUs: []nvml.GPU{{Name: name}}}
}

// refuse makes the nodes of the GPU fail with an error.
func refuse(f *Facts, text string) {
	for i := range f.Host.NVIDIA.Nodes {
		n := &f.Host.NVIDIA.Nodes[i]
		n.Mode, n.OpenError = "Dcrw-rw-rw-", text
	}
}

// unstarted returns the making of facts of a process that did not start, for this reason.
func unstarted(why string) func(t *testing.T) *Facts {
	return func(t *testing.T) *Facts {
		return WithoutAnswer(Probe{Name: "cuda", Stage: StageOpen, State: ProbeNotStarted, Detail: "/lib64/ld-linux-x86-64.so.2 does not start as a process of its own: " + why}, host(t, "h200-vm"))
	}
}

func start(code cudart.Code) func(*testing.T) *Facts {
	return func(t *testing.T) *Facts {
		return stopped(t, &cudart.Error{Op: "cudaGetDeviceCount", Code: code, Detail: "runtime 13.0"})
	}
}

// Each check finds its trouble, and no check finds another in it.
func TestEachCheckFindsItsTrouble(t *testing.T) {
	t.Parallel()
	tried := map[string]bool{}
	for i, c := range slices.Concat(troubles, hypotheses) {
		name := fmt.Sprintf("%d %s", i, c.id)
		tried[c.id] = true
		f := well(t)
		if c.make != nil {
			f = c.make(t)
		}
		if c.change != nil {
			c.change(f)
		}
		verdict, found := Evaluate(relink(f))
		var same []string
		for _, id := range ids(found) { // of several GPUs
			if len(same) == 0 || same[len(same)-1] != id {
				same = append(same, id)
			}
		}
		if !assert.Equal(t, append([]string{c.id}, c.also...), same, name) {
			continue
		}
		one := found[0]
		if c.sev != "" {
			assert.Equal(t, c.sev, one.Severity, name)
		}
		assert.NotEmpty(t, one.Summary, name)
		assert.NotEmpty(t, one.Remedy, name)
		assert.NotEmpty(t, one.Cost, name)
		text, err := json.Marshal(one)
		require.NoError(t, err, name)
		assert.Contains(t, strings.ReplaceAll(string(text), `\u0026`, "&"), c.says, name)
		want := map[Severity]Verdict{Problem: Problems, Warning: Warnings, Note: Healthy}[one.Severity]
		if c.id == "unjudged_copies" || want == Healthy && len(f.Devices) > 0 && !f.compared(&f.Devices[0]) {
			want = Measured
		}
		assert.NotEmpty(t, one.Certainty, name)
		if len(f.Devices) == 0 && !f.NotStarted() {
			want = Unusable
		}
		assert.Equal(t, want, verdict, name)

		verdict, found = Evaluate(f, append(c.also, c.id)...)
		assert.Empty(t, found, name)
		assert.Contains(t, []Verdict{Healthy, Measured, Unusable, Unknown}, verdict, name)
		assert.Equal(t, f.NotStarted(), verdict == Unknown, name)
	}
	for _, c := range Checks() {
		assert.True(t, tried[c.ID], "no host in trouble for %s", c.ID)
	}
}

// What can be mistaken for trouble.
func TestNothingIsFoundInHealthyHosts(t *testing.T) {
	t.Parallel()
	one := func(name string, rate float64, speed float64, width int) func(*Facts) {
		return func(f *Facts) {
			f.Devices[0].Name = name
			f.Host.GPUs[0].Link = hostinfo.Link{CurrentSpeed: speed, CurrentWidth: width, MaxSpeed: speed, MaxWidth: width}
			f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, rate), series(result.DeviceToHost, rate*1.02)}
		}
	}
	for name, change := range map[string]func(*Facts){
		"as it is":                     func(*Facts) {},
		"just fast enough":             func(f *Facts) { f.Devices[0].Bandwidth.Series[0] = series(result.HostToDevice, 50) },
		"P100":                         one("Tesla P100-PCIE-16GB", 12.1, 8, 16),
		"V100":                         one("Tesla V100-SXM2-32GB", 11.4, 8, 16),
		"A100":                         one("NVIDIA A100-SXM4-80GB", 24.6, 16, 16),
		"RTX 4090":                     one("NVIDIA GeForce RTX 4090", 24.1, 16, 16),
		"RTX 5060 with x8 by design":   one("NVIDIA GeForce RTX 5060", 27.0, 32, 8),
		"idle, not measured":           func(f *Facts) { f.Host.GPUs[0].Link.CurrentSpeed, f.Devices[0].Bandwidth = 2.5, nil },
		"asleep again when it is read": func(f *Facts) { f.Host.GPUs[0].Link.CurrentSpeed = 2.5 },
		"throttled by its power limit": func(f *Facts) { f.Devices[0].Health.Throttle = []string{"sw_power_cap", "gpu_idle"} },
		"low memory clock while idle": func(f *Facts) {
			h := f.Devices[0].Health
			h.MemoryClock, h.MemoryClockMax, h.Throttle = 405, 10501, []string{"gpu_idle", "applications_clocks_setting"}
		},
		"chosen GPUs": func(f *Facts) {
			other := f.Host.GPUs[0]
			other.Address = "0000:00:07.0"
			f.Host.GPUs = append(f.Host.GPUs, other)
			f.Host.Env = map[string]string{visibleDevices: "0"}
		},
		"as many GPUs as expected": func(f *Facts) { f.ExpectedGPUs = 1 },
		"as fast as expected, without a link": func(f *Facts) {
			f.ExpectedRate, f.Host.GPUs[0].Link = 25, hostinfo.Link{}
			f.Devices[0].Bandwidth.Series = []result.Series{series(result.HostToDevice, 25.1), series(result.DeviceToHost, 25)}
		},
		"one of four in a container": func(f *Facts) {
			container(f)
			for i := range 3 {
				other := f.Host.GPUs[0]
				other.Address = fmt.Sprintf("0000:0%d:00.0", i)
				f.Host.GPUs = append(f.Host.GPUs, other)
			}
		},
		"a GPU for a virtual machine": func(f *Facts) {
			other := f.Host.GPUs[0]
			other.Address, other.Driver = "0000:00:07.0", "vfio-pci"
			f.Host.GPUs = append(f.Host.GPUs, other)
		},
		"a MIG instance": func(f *Facts) {
			other := f.Host.GPUs[0]
			other.Address = "0000:00:07.0"
			f.Host.GPUs = append(f.Host.GPUs, other)
			f.Devices[0].Name = "NVIDIA H200 MIG 1g.18gb"
		},
		"two nodes, all of them allowed": twoNodes,
		"two nodes that are equally near": func(f *Facts) {
			twoNodes(f)
			for node, rate := range map[string]float64{"0": 49, "1": 55.2} {
				trial(f, byNode(node, result.HostToDevice, rate))
				trial(f, byNode(node, result.DeviceToHost, rate))
			}
		},
		"two nodes, measured on a busy machine": func(f *Facts) {
			twoNodes(f)
			remote := byNode("0", result.HostToDevice, 30)
			remote.Spread = 0.4
			trial(f, byNode("1", result.HostToDevice, 55.2))
			trial(f, remote)
		},
		"two nodes, of which one was measured": func(f *Facts) {
			twoNodes(f)
			trial(f, byNode("0", result.HostToDevice, 30))
		},
		"two GPUs at once": func(f *Facts) { // two H200s, 2026-11-22
			apart(f)
			allAtOnce(f, 52.7, 54.3)
		},
		"four GPUs at once": func(f *Facts) {
			apart(f)
			allAtOnce(f, 45, 55, 45, 55)
		},
		"GPUs at once on a busy machine": func(f *Facts) {
			apart(f)
			allAtOnce(f, 55, 55, 55, 5)
			for i := range f.Together.Series {
				f.Together.Series[i].Spread = 1.2
			}
		},
		"no memory for all GPUs at once": func(f *Facts) {
			apart(f)
			f.Together = &result.Bench{Notes: []string{"not measured: it takes 640 MiB of host memory"}}
		},
		"GPUs at once, without each alone": func(f *Facts) {
			apart(f)
			allAtOnce(f, 5, 5, 5, 5)
			for i := range f.Devices {
				f.Devices[i].Bandwidth = nil
			}
		},
		"pinned memory that is not resident": func(f *Facts) { vllm(f).Pinned = 120 << 30 },
		"half of the memory pinned": func(f *Facts) {
			f.Host.Memory.Available = f.Host.Memory.Total / 4
			vllm(f).Pinned = f.Host.Memory.Total / 2
		},
		"limits that fit": func(f *Facts) {
			f.Processes = []Process{{PID: 7, Cgroup: "/a", MemoryLimit: 60 << 30}, {PID: 8, Cgroup: "/b", MemoryLimit: 60 << 30}, {PID: 9, Cgroup: "/b", MemoryLimit: 60 << 30}, {PID: 10}}
		},
		"one container": func(f *Facts) {
			f.Processes = []Process{{PID: 7, Cgroup: "/a", MemoryLimit: 120 << 30}, {PID: 8, Cgroup: "/a", MemoryLimit: 120 << 30}}
		},
		"limits above the host's memory": func(f *Facts) {
			f.Processes = []Process{{PID: 7, Cgroup: "/a", MemoryLimit: 900 << 30}, {PID: 8, Cgroup: "/b", MemoryLimit: 900 << 30}}
		},
		"one node, measured": func(f *Facts) {
			trial(f, byNode("0", result.HostToDevice, 55.2))
			trial(f, byNode("1", result.HostToDevice, 5.2))
		},
		"a page cache that fills memory": func(f *Facts) {
			f.Host.Memory.Free = []hostinfo.FreeZone{{Zone: "Normal", Pages: 100000, Huge: 512}}
			f.Host.Memory.Stalls = &hostinfo.Stalls{HugeFaults: 900000, HugeFallback: 900}
		},
		"huge pages in use":       func(f *Facts) { f.Host.NUMA[0].Huge = []hostinfo.HugePool{{PageSize: 1 << 30, Total: 64, Free: 1}} },
		"a kernel mended":         func(f *Facts) { f.Host.Kernel.Release = "6.14.0-24-generic" },
		"a driver's own memory":   func(f *Facts) { f.Host.Memory.Unowned = hostinfo.Limit{Known: true, N: 20 << 30} },
		"small weights":           func(f *Facts) { vllm(f).Weights = []WeightFile{{Path: "/x.gguf", Size: 1 << 20}} },
		"some correctable errors": func(f *Facts) { f.Host.GPUs[0].Errors = &hostinfo.LinkErrors{Correctable: 12} },
		"fast pinning":            func(f *Facts) { trial(f, pinRate(TrialCUDA, 9)); trial(f, pinRate(TrialOurs, 20)) },
		"no facts of the host":    func(f *Facts) { f.Host.Memory, f.Host.CPU, f.Host.NUMA = hostinfo.Memory{}, hostinfo.CPU{}, nil },
		"bandwidth not compared for want of time": func(f *Facts) {
			f.Devices[0].Bandwidth.Series[1].Verified, f.Devices[0].Bandwidth.Complete = false, false
		},
	} {
		f := well(t)
		change(f)
		verdict, found := Evaluate(relink(f))
		if slices.Contains([]string{"chosen GPUs", "one of four in a container", "a GPU for a virtual machine", "a MIG instance"}, name) {
			require.Equal(t, []string{"gpus_excluded"}, ids(found), name)
			assert.Equal(t, Note, found[0].Severity, name)
			found = nil
		}
		assert.Empty(t, ids(found), name)
		want := Healthy
		if f.Devices[0].Bandwidth == nil {
			want = Measured // its bytes came back right
		}
		assert.Equal(t, want, verdict, name)
	}
}

// The captured hosts are healthy ones, apart from what they are kept for.
func TestCapturedHosts(t *testing.T) {
	t.Parallel()
	want := map[string][]string{
		"alpine-musl":           {"little_headroom"},
		"cgroup-v2-high":        {"little_headroom"},
		"cgroup-v2-nested":      {},
		"cgroup-v2-pinned-file": {},
		"container-cgroup-v1":   {"narrow_link", "few_cpus"}, // which are true of it
		"damaged":               {},
		"epyc-dual-cgroup-v2":   {"far_cpus"},
		"h200-vm":               {},
		"no-gpu-cgroup-v1":      {},
		"vmd-cxl":               {},
		"wsl2":                  {},
	}
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "..", "testdata", "hosts", "*.txtar"))
	require.NoError(t, err)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		if _, known := want[name]; !known {
			continue
		}
		f := &Facts{Host: host(t, name), Devices: []Device{}}
		for i, g := range f.Host.GPUs {
			f.Devices = append(f.Devices, Device{Ordinal: i, Name: "Some GPU", PCIBusID: g.Address})
		}
		if len(f.Devices) == 0 {
			f.Devices = append(f.Devices, Device{Name: "Some GPU", PCIBusID: "0000:99:00.0"})
		}
		_, found := Evaluate(relink(f))
		grave := []string{}
		for _, one := range found {
			if one.Severity.AtLeast(Warning) {
				grave = append(grave, one.ID)
			}
		}
		assert.Equal(t, want[name], grave, name)
	}
	assert.GreaterOrEqual(t, len(files), len(want))
}

func TestChecksAreConsistent(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, c := range Checks() {
		assert.Regexp(t, `^[a-z][a-z0-9_]*$`, c.ID)
		assert.False(t, seen[c.ID], "%s is there twice", c.ID)
		seen[c.ID] = true
		assert.NotEmpty(t, c.Title(), c.ID)
		assert.Contains(t, Severities(), c.Severity(), c.ID)
		assert.True(t, c.Host != nil || c.Device != nil, c.ID)
	}
	for _, c := range Checks() {
		for _, id := range suppressedBy(c.ID, func(string) bool { return true }) {
			assert.True(t, seen[id], "%s implies %s, which is no check", c.ID, id)
			assert.NotEqual(t, c.ID, id, "%s follows from itself", c.ID)
		}
	}
}

// Every check has its page, and every page its check.
func TestPages(t *testing.T) {
	t.Parallel()
	var known []string
	for _, c := range Checks() {
		known = append(known, c.ID)
		page, ok := findings.Get(c.ID)
		if !assert.True(t, ok, "cmd/pincheck/internal/findings/%s.md is missing", c.ID) {
			continue
		}
		for _, heading := range []string{"What it means", "How pincheck detects it"} {
			assert.Regexp(t, "(?m)^## "+heading+"\n\n\\S", page.Text, "%s: %s", c.ID, heading)
		}
		for _, link := range regexp.MustCompile(`\]\(([^)]*)\)`).FindAllStringSubmatch(page.Text, -1) {
			if file, local := strings.CutSuffix(link[1], ".md"); local {
				_, there := findings.Get(file)
				assert.True(t, there, "%s links to %s", c.ID, link[1])
			} else {
				assert.Regexp(t, `^https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+$`, link[1], c.ID)
			}
		}
	}
	assert.ElementsMatch(t, known, findings.IDs())
}

// What checks return names a cause of the finding's page, and values for words that it has.
func TestFindingsNameCausesOfTheirPages(t *testing.T) {
	t.Parallel()
	named := 0
	for _, c := range slices.Concat(troubles, hypotheses) {
		f := well(t)
		if c.make != nil {
			f = c.make(t)
		}
		if c.change != nil {
			c.change(f)
		}
		relink(f)
		for _, check := range Checks() {
			var found []Finding
			if check.Host != nil {
				found = check.Host(f)
			}
			for i := range f.Devices {
				if check.Device != nil {
					found = append(found, check.Device(f, &f.Devices[i])...)
				}
			}
			page, ok := findings.Get(check.ID)
			require.True(t, ok, check.ID)
			for _, one := range found {
				named++
				cause, ok := page.Cause(one.because)
				assert.True(t, ok, "%s has no cause %q", check.ID, one.because)
				for word := range one.values {
					assert.Contains(t, cause.Variables(), word, "%s %s", check.ID, one.because)
				}
				if one.means != (meaning{}) {
					assert.NotEmpty(t, causeOf(one.means.page, one.means.cause).Do, "%s: %v", check.ID, one.means)
				}
				assert.Empty(t, one.Cause+one.Cost, "%s: its page has that", check.ID)
			}
		}
	}
	assert.Greater(t, named, len(Checks()))
}

//go:embed *.go
var sources embed.FS

// Every cause of a page with several is one that the checks name. The first is that of findings
// that name none.
func TestCausesOfPagesAreNamed(t *testing.T) {
	t.Parallel()
	files, err := fs.Glob(sources, "*.go")
	require.NoError(t, err)
	source := ""
	for _, file := range files {
		text, err := fs.ReadFile(sources, file)
		require.NoError(t, err)
		if !strings.HasSuffix(file, "_test.go") {
			source += string(text)
		}
	}
	for _, id := range findings.IDs() {
		page, _ := findings.Get(id)
		for _, cause := range page.Causes[1:] {
			assert.True(t, strings.Contains(source, `"`+cause.Name+`"`), "no check names the cause %s of %s", cause.Name, id)
		}
	}
}

// On a machine without a GPU all that is missing is one finding, which names the others.
func TestAFirstCauseHidesItsFollowers(t *testing.T) {
	t.Parallel()
	f := WithoutLibrary(noLibrary(cudart.DriverFacts{}), host(t, "no-gpu-cgroup-v1"))
	verdict, found := Evaluate(f)
	assert.Equal(t, Unusable, verdict)
	require.NotEmpty(t, found)
	assert.Equal(t, "no_gpu", found[0].ID)
	assert.Subset(t, found[0].Suppressed, []string{"no_kernel_module", "no_driver_library", "no_runtime_library"})
	for _, one := range found[1:] {
		assert.NotEqual(t, Problem, one.Severity, one.ID)
	}
}

// One bad GPU hides nothing of another.
func TestFindingsOfOneGPUAreItsOwn(t *testing.T) {
	t.Parallel()
	f := well(t)
	bad := fine(55.4, 55.3)
	bad.Ordinal = 1
	bad.Attributes.ComputeMode = 2
	bad.Errors = []string{"one"}
	f.Devices = append(f.Devices, bad)
	failing(f, "cudaMemcpy: cudaErrorUnknown (999): unknown error")
	_, found := Evaluate(relink(f))
	assert.Equal(t, []string{"compute_mode_prohibited", "failed_call"}, ids(found), "that of GPU 1 is hidden, that of GPU 0 is not")
	assert.Equal(t, 1, *found[0].Device)
	assert.Equal(t, []string{"failed_call"}, found[0].Suppressed)
	assert.Equal(t, 0, *found[1].Device)
	assert.Contains(t, found[1].Remedy, "nvidia_uvm", "what cudart says of the code")
}

// Facts are plain data: those that were read again from JSON are judged alike.
func TestFactsSurviveJSON(t *testing.T) {
	t.Parallel()
	for _, c := range slices.Concat(troubles, hypotheses) {
		f := well(t)
		if c.make != nil {
			f = c.make(t)
		}
		if c.change != nil {
			c.change(f)
		}
		relink(f)
		text, err := json.Marshal(f)
		require.NoError(t, err)
		back := &Facts{}
		require.NoError(t, json.Unmarshal(text, back))
		_, want := Evaluate(f)
		_, got := Evaluate(back)
		assert.Equal(t, ids(want), ids(got), c.id)
	}
}

func TestEveryCodeThatIsNamedHasARemedy(t *testing.T) {
	t.Parallel()
	for _, code := range []cudart.Code{35, 802, 803, 804, 999, 46, 3, 2, 34, 100, 101, 214, 719, 700, 801, 1, 36, 220, 304, 702, 712, 713, 716} {
		means, _ := meaningOf(code)
		assert.NotEmpty(t, causeOf(means.page, means.cause).Do, "%v", code)
	}
	assert.Equal(t, cudart.ErrECCUncorrectable, codeIn("x: cudaErrorECCUncorrectable (214): y"))
	assert.Equal(t, cudart.Code(0), codeIn("cudaErrorX (99999999999999)"))
	assert.Equal(t, cudart.Code(0), codeIn("no code (7)"))
}

// Errors of package cudart and findings of pincheck say the same of a code with which CUDA does not start.
func TestPagesSayWhatErrorsOfCudartSay(t *testing.T) {
	t.Parallel()
	clauses := func(sentences string) string { // as in an error: one sentence without quotes of code
		sentences = strings.TrimSuffix(strings.ReplaceAll(sentences, "`", ""), ".")
		return strings.ToLower(strings.ReplaceAll(sentences, ". ", "; "))
	}
	same := func(code cudart.Code, page, cause string) {
		why, do, _ := strings.Cut((&cudart.OpenError{Err: code}).Remedy(), ": ")
		got := causeOf(page, cause).With(nil)
		assert.Equal(t, strings.ToLower(why), clauses(got.Why), page)
		assert.Equal(t, strings.ToLower(do), clauses(got.Do), page)
	}
	for _, s := range startCodes {
		if len(s.codes) == 1 { // of MPS cudart says nothing
			same(s.codes[0], s.id, "")
		}
	}
	same(cudart.ErrNoDevice, "failed_call", "no_device")
	same(cudart.ErrInvalidDevice, "failed_call", "invalid_device")
}
