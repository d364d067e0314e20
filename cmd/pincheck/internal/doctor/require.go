package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// State is whether a requirement is met.
type State string

// The states.
const (
	Present   State = "present"
	Missing   State = "missing"
	Uncertain State = "unknown" // the host does not show it
)

// Requirement is one part that a usable GPU needs of the host.
type Requirement struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	State  State  `json:"state"`
	Detail string `json:"detail,omitempty"` // what was found, or searched for
	Remedy string `json:"remedy,omitempty"` // if it is missing

	because string          // name of the cause on the finding's page, "" for its first, until Remedy is known
	values  findings.Values // for the words of the cause
}

// Require checks each part that a GPU needs, after a failure to open the library, or if
// the library shows no device (opening is nil then). Each part depends on those before
// it, so the first one that is missing should be mended first.
func Require(host *hostinfo.Host, opening error) []Requirement {
	failed := &cudart.OpenError{}
	explained := errors.As(opening, &failed)
	container := host.Virt.Container != ""
	all := []Requirement{
		requireLibc(host),
		requireGPU(host, container),
		requireModule(host, container),
		requireNodes(host, container),
		requireDriverLibrary(failed.Driver, opening == nil, explained, withoutLibrary(host)),
		requireRuntime(failed.Attempts, opening),
	}
	for i := range all {
		r := &all[i]
		if r.State == Missing {
			r.Remedy = r.remedy(host, r.because)
		}
		r.because, r.values = "", nil
	}
	return all
}

// remedy returns the remedy for a requirement that a host lacks, for a cause on its finding's page.
func (r *Requirement) remedy(h *hostinfo.Host, cause string) string {
	return causeOf("no_"+r.ID, cause).With(r.values, h.Places()...).Do
}

func requireLibc(h *hostinfo.Host) Requirement {
	r := Requirement{ID: "c_library", Name: "C library", State: Present, Detail: strings.TrimSpace(h.Libc.Kind + " " + h.Libc.Version)}
	switch h.Libc.Kind {
	case "":
		r.State, r.Detail = Uncertain, "no dynamic loader in the usual directories"
	case "musl":
		r.State = Missing
		r.Detail = "no glibc: this system has musl (" + h.Libc.Loader + ")"
	}
	return r
}

func requireGPU(h *hostinfo.Host, container bool) Requirement {
	r := Requirement{ID: "gpu", Name: "NVIDIA GPU", State: Present}
	switch {
	case len(h.GPUs) > 0:
		var list []string
		for _, g := range h.GPUs {
			list = append(list, fmt.Sprintf("%s (10de:%s)", g.Address, strings.TrimPrefix(g.DeviceID, "0x")))
		}
		r.Detail = strings.Join(list, ", ")
	case len(h.NVIDIA.Boards) > 0:
		r.Detail = h.NVIDIA.Boards[0].Address + " " + h.NVIDIA.Boards[0].Model
	case h.NVIDIA.HasNode("/dev/dxg"):
		r.Detail = "/dev/dxg (WSL)"
	case h.Virt.Tegra:
		r.Detail = "part of the chip: " + cmp.Or(h.Virt.Board, "Tegra")
	case h.NVIDIA.HasGPUNode():
		r.State, r.Detail = Uncertain, "not on the visible PCI bus, although a device node exists"
	case h.PCICount == 0, h.Virt.Sandbox != "", h.Virt.WSL:
		r.State, r.Detail = Uncertain, "the PCI bus is not visible (/sys/bus/pci/devices)"
	default:
		r.State = Missing
		r.Detail = "none of " + units.Things(h.PCICount, "PCI device", "PCI devices") + " is an NVIDIA GPU (/sys/bus/pci/devices)"
		switch {
		case h.Virt.VM:
			r.because = "vm"
		case container:
			r.because = "container"
		default:
			r.because = "host"
		}
	}
	return r
}

func boundDriver(h *hostinfo.Host) string {
	for _, g := range h.GPUs {
		if g.Driver != "" {
			return g.Driver
		}
	}
	return ""
}

// tegraNode is a device node of a GPU that is part of the chip, which has none of the others.
const tegraNode = "/dev/nvmap"

func requireNodes(h *hostinfo.Host, container bool) Requirement {
	r := Requirement{ID: "device_nodes", Name: "device nodes", State: Present}
	var found, absent []string
	for _, n := range h.NVIDIA.Nodes {
		found = append(found, n.Path)
	}
	r.Detail = strings.Join(found, " ")
	if h.Virt.WSL {
		if !h.NVIDIA.HasNode("/dev/dxg") {
			r.State, r.Detail = Missing, "no /dev/dxg"
			r.because = "wsl"
		}
		return r
	}
	if !h.NVIDIA.HasGPUNode() {
		absent = append(absent, "/dev/nvidia0")
	}
	for _, name := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if !h.NVIDIA.HasNode(name) {
			absent = append(absent, name)
		}
	}
	if len(absent) == 0 {
		return r
	}
	if h.Virt.Tegra && (h.NVIDIA.HasNode(tegraNode) || !container) {
		r.Detail = strings.TrimSpace("of the chip: " + r.Detail)
		return r
	}
	if h.Virt.Tegra {
		absent = []string{tegraNode}
	}
	r.State = Missing
	r.Detail = "no " + strings.Join(absent, ", no ")
	if len(found) > 0 {
		r.Detail += "; found " + strings.Join(found, " ")
	}
	r.because = "host"
	if others := h.NVIDIA.NotDevices; len(others) > 0 {
		r.Detail += "; no device but a file or directory: " + strings.Join(others, " ")
		r.because = "file"
	}
	if container {
		r.because = "container"
	}
	return r
}

// hooked are containers to which a hook of NVIDIA's adds the driver's libraries where NVIDIA_VISIBLE_DEVICES asks for it.
var hooked = []string{"docker", "enroot", "containerd", "container"}

// withoutLibrary returns the cause of a missing libcuda on the finding's page.
func withoutLibrary(h *hostinfo.Host) string {
	_, set := h.Env["NVIDIA_VISIBLE_DEVICES"]
	switch {
	case h.Virt.Container == "" && h.Virt.Tegra:
		return "jetson"
	case h.Virt.Container == "":
		return "host"
	case !set && h.NVIDIA.HasGPUNode() && slices.Contains(hooked, h.Virt.Container) && !h.Virt.Tegra && !h.Virt.WSL:
		return "unset"
	}
	return "container"
}

func requireDriverLibrary(d cudart.DriverFacts, inUse, explained bool, without string) Requirement {
	r := Requirement{ID: "driver_library", Name: "driver library", State: Present, Detail: d.LibPath}
	switch {
	case d.LibPath != "":
	case inUse:
		r.Detail = "in use"
	case !explained:
		r.State, r.Detail = Uncertain, "not searched"
	default:
		r.State = Missing
		r.Detail = "no libcuda.so.1"
		r.because = without
	}
	return r
}

func requireRuntime(attempts []cudart.Attempt, opening error) Requirement {
	r := Requirement{ID: "runtime_library", Name: "runtime library", State: Present, Detail: "in use"}
	if opening == nil {
		return r
	}
	for _, a := range attempts {
		// A library that could be called exists, though the call failed.
		if ce := (*cudart.Error)(nil); errors.Is(a.Err, cudart.ErrNoDriver) || errors.As(a.Err, &ce) {
			if strings.HasPrefix(path.Base(a.Path), "libcuda.so") {
				r.Detail = "not needed: " + a.Path + " is used alone"
				return r
			}
			r.Detail = a.Path
			if a.Runtime != 0 {
				r.Detail += fmt.Sprintf(" (%s)", a.Runtime)
			}
			return r
		}
	}
	if !errors.Is(opening, cudart.ErrNoLibrary) {
		r.State, r.Detail = Uncertain, opening.Error()
		return r
	}
	r.State = Missing
	r.Detail = "no libcudart.so of version 11 to 13 loads"
	for _, a := range attempts {
		if path.IsAbs(a.Path) {
			r.Detail = fmt.Sprintf("%s does not load: %v", a.Path, a.Err)
			break
		}
	}
	r.because = ""
	return r
}
