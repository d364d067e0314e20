package cudart

import (
	"errors"
	"fmt"
	"strings"
)

// An OpenError says why [Open] found nothing to work with. It unwraps to
// [ErrNoLibrary] or [ErrNoDriver], or to the error of the library which all
// depends on, which errors.Is tells.
type OpenError struct {
	Err      error
	Attempts []Attempt   // libraries that were tried
	Looked   []string    // places where libraries were looked for
	Driver   DriverFacts // what there is of a driver
}

// DriverFacts tells which parts of NVIDIA's driver a host shows this process.
// libcudart needs all of them, and a container may lack any.
type DriverFacts struct {
	LibPath             string   // libcuda.so.1, "" when it was not found
	KernelModuleVersion string   // "580.159.04", "" when no module is loaded
	DeviceNodes         []string // /dev/nvidiactl, /dev/nvidia0, /dev/dxg, ...
}

// String tells each part and whether it is there.
func (d DriverFacts) String() string {
	part := func(what, have string) string {
		if have == "" {
			have = "none"
		}
		return what + " " + have
	}
	return strings.Join([]string{
		part("libcuda", d.LibPath),
		part("kernel module", d.KernelModuleVersion),
		part("device nodes", strings.Join(d.DeviceNodes, " ")),
	}, ", ")
}

// Unwrap returns the reason.
func (e *OpenError) Unwrap() error { return e.Err }

// Error tells what was tried, where, and what would help.
func (e *OpenError) Error() string {
	var b strings.Builder
	b.WriteString(e.Err.Error())
	for _, a := range e.Attempts {
		fmt.Fprintf(&b, "\n\ttried %s (%s): %v", a.Path, a.Found, a.Err)
	}
	if errors.Is(e.Err, ErrNoLibrary) && len(e.Looked) > 0 {
		fmt.Fprintf(&b, "\n\tlooked in %s", strings.Join(e.Looked, ", "))
	}
	fmt.Fprintf(&b, "\n\tdriver: %v", e.Driver)
	fmt.Fprintf(&b, "\n\twhat helps: %s", e.Remedy())
	return b.String()
}

// Remedy says what to do about it.
func (e *OpenError) Remedy() string {
	switch {
	case errors.Is(e.Err, ErrNoDriver):
		return "install an NVIDIA driver or, in a container, start it with the GPU (--gpus all, or the nvidia runtime class)"
	case errors.Is(e.Err, ErrInsufficientDriver):
		return "update the driver, or name an older libcudart with " + LibraryEnv
	case errors.Is(e.Err, ErrNoLibrary):
		return "install CUDA's runtime library (package cuda-cudart, or pip install nvidia-cuda-runtime), or name one with " + LibraryEnv + "=/path/to/libcudart.so.12"
	}
	return "see the error, and run nvidia-smi"
}
