package cudart

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
)

// An OpenError is the reason why [Open] returned no Runtime. It unwraps to
// [ErrNoLibrary], to [ErrNoDriver], to the failed call of the library that got
// furthest, so that errors.Is finds its [Code], or to the error of [Open]'s
// context.
type OpenError struct {
	Err      error       // the reason that matters most among Attempts
	Attempts []Attempt   // libraries that were tried
	Searched []string    // places that were searched, none if a library was named
	Driver   DriverFacts // parts of the driver on this host, none for an Options.Source
	// Stuck is the call that had not returned when the context of [Open] ended, such as
	// "cudaGetDeviceCount". Empty if there was none.
	Stuck  string
	source bool // the library was an Options.Source
}

// DriverFacts are the parts of NVIDIA's driver that this process can see. libcudart needs all of
// them, and a container may lack some.
type DriverFacts struct {
	LibPath             string   // libcuda.so.1, "" if it was not found
	KernelModuleVersion string   // "580.159.04", "" if no module is loaded
	DeviceNodes         []string // /dev/nvidiactl, /dev/nvidia0, /dev/dxg, …
}

// String lists the parts, with "none" for one that is missing.
func (d DriverFacts) String() string {
	return fmt.Sprintf("libcuda %s, kernel module %s, device nodes %s", cmp.Or(d.LibPath, "none"),
		cmp.Or(d.KernelModuleVersion, "none"), cmp.Or(strings.Join(d.DeviceNodes, " "), "none"))
}

// Unwrap returns Err.
func (e *OpenError) Unwrap() error { return e.Err }

// Error returns the reason, each library that was tried, the places that were
// searched, the parts of the driver unless the library was an Options.Source, and the
// remedy, on several lines.
func (e *OpenError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cudart: open: %v", e.Err)
	for _, a := range e.Attempts {
		fmt.Fprintf(&b, "\n\ttried %s (%s): %v", a.Path, a.Found, a.Err)
	}
	if errors.Is(e.Err, ErrNoLibrary) && len(e.Searched) > 0 {
		fmt.Fprintf(&b, "\n\tlooked in %s", strings.Join(e.Searched, ", "))
	}
	if !e.source {
		fmt.Fprintf(&b, "\n\tdriver: %v", e.Driver)
	}
	fmt.Fprintf(&b, "\n\twhat helps: %s", e.Remedy())
	return b.String()
}

// Remedy returns what to do. If the text of Err does not explain the error, Remedy explains it
// first.
func (e *OpenError) Remedy() string {
	for _, r := range remedies {
		switch {
		case !errors.Is(e.Err, r.err):
		case r.err == ErrNoLibrary && !e.source && e.Driver.LibPath == "":
			return r.do + "; and an NVIDIA GPU with its driver, whose libcuda.so.1 was not found either"
		case r.means == "":
			return r.do
		default:
			return r.means + ": " + r.do
		}
	}
	return "see the error, and whether nvidia-smi works"
}

// remedies are the ways in which opening a library fails on hosts that are not set
// up right, or broken.
var remedies = []struct {
	err       error
	means, do string
}{
	{ErrNoLibrary, "",
		"install CUDA's runtime library (package cuda-cudart, or pip install nvidia-cuda-runtime), or name one with " + libraryEnv + "=/path/to/libcudart.so.12"},
	{errNotReturned, "the driver hangs, or needs more time",
		"see whether nvidia-smi hangs too, and dmesg for lines with NVRM and Xid; reset the GPU (nvidia-smi -r) or reboot"},
	{ErrNoDriver, "",
		"install an NVIDIA driver or, in a container, start it with the GPU (--gpus all, or the nvidia runtime class)"},
	{errDamagedDriver, "",
		"install the driver again, or copy its libcuda.so.1 again into the container's image"},
	{errIncompleteDriver, "",
		"see which package its libcuda.so.1 belongs to (readlink -f, then dpkg -S or rpm -qf): install the driver's own, and remove what stands in for it"},
	{ErrInsufficientDriver, "the driver is older than the library",
		"update the driver (CUDA 13 needs 580 or later, CUDA 12 525, CUDA 11 450), or name an older libcudart with " + libraryEnv},
	{ErrStubLibrary, "the libcuda.so.1 that the dynamic loader found is the toolkit's stub, which is for linking only",
		"remove the stubs directory from LD_LIBRARY_PATH and /etc/ld.so.conf.d, so that the driver's own libcuda.so.1 is found"},
	{ErrSystemNotReady, "the driver waits for a part of the system that is not running, usually the fabric manager on hosts with NVSwitch",
		"install nvidia-fabricmanager in the driver's version and start it: sudo systemctl start nvidia-fabricmanager; with confidential computing, set the GPUs ready: sudo nvidia-smi conf-compute -srs 1"},
	{ErrSystemDriverMismatch, "the loaded kernel module and the driver's libcuda.so.1 have different versions, as after an upgrade of the driver",
		"end all programs that use the GPU and reload the nvidia modules; restart a container that was started before the upgrade"},
	{ErrCompatNotSupportedOnDevice, "libcuda.so.1 is newer than the kernel module, and this GPU does not support that (forward compatibility is for data center GPUs)",
		"remove the compat directory (/usr/local/cuda/compat, package cuda-compat) from LD_LIBRARY_PATH and /etc/ld.so.conf.d, or update the driver"},
	{ErrDevicesUnavailable, "every GPU is busy or closed to this process",
		"see nvidia-smi: another process holds a GPU whose compute mode is exclusive, the mode is prohibited, or MIG is on without an instance; if neither MPS nor a scheduler needs the exclusive mode, allow all processes: sudo nvidia-smi -c DEFAULT"},
	{ErrMemoryAllocation, "the GPU's memory, or the host's or container's, is full",
		"see nvidia-smi for the processes that hold GPU memory; for host memory check the container's limit, and: free -m"},
	{ErrInitializationError, "the nodes cannot be opened, the GPU does not answer, or the process was forked after its parent used CUDA",
		"check whether nvidia-smi works and whether this user may open /dev/nvidia*; start processes anew (exec) instead of forking them after their parent used CUDA"},
	{ErrNoDevice, "CUDA shows this process no GPU",
		"see CUDA_VISIBLE_DEVICES: unset it, or name GPUs that exist: nvidia-smi -L; a container must have been started with the GPU"},
	{ErrInvalidDevice, "a requested GPU does not exist",
		"see CUDA_VISIBLE_DEVICES: unset it, or name GPUs and MIG instances that exist: nvidia-smi -L"},
	{ErrUnknown, "nvidia_uvm is not loaded, has no device node, or lost its state in a suspend; or the GPU does not answer",
		"look into the kernel log: sudo dmesg | grep -e NVRM -e Xid; check that the module nvidia_uvm is loaded and /dev/nvidia-uvm exists: sudo nvidia-modprobe -c 0 -u; after a suspend and resume, reload nvidia_uvm: sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm"},
}
