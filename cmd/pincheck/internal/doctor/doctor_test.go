package doctor

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hosttest"
)

func host(t *testing.T, name string, environ ...string) *hostinfo.Host {
	t.Helper()
	fsys, err := hosttest.Load(filepath.Join("..", "..", "..", "..", "testdata", "hosts", name+".txtar"))
	require.NoError(t, err)
	return hostinfo.Read(fsys, environ)
}

func states(all []Requirement) map[string]State {
	out := map[string]State{}
	for _, r := range all {
		out[r.ID] = r.State
	}
	return out
}

func remedy(all []Requirement, id string) string {
	for _, r := range all {
		if r.ID == id {
			return r.Remedy
		}
	}
	return ""
}

// noLibrary is the error of Open if there is no libcudart.
func noLibrary(d cudart.DriverFacts) *cudart.OpenError {
	return &cudart.OpenError{Err: cudart.ErrNoLibrary, Driver: d, Attempts: []cudart.Attempt{
		{Path: "libcudart.so.13", Found: "loader path", Runtime: 13000, Err: errors.New("dlopen: no such file")},
	}}
}

// noDriver is the error of Open if a libcudart finds no driver.
func noDriver(d cudart.DriverFacts) *cudart.OpenError {
	return &cudart.OpenError{Err: cudart.ErrNoDriver, Driver: d, Attempts: []cudart.Attempt{
		{Path: "/usr/lib/libcudart.so.12", Found: "system", Runtime: 12040, Err: fmt.Errorf("cudaDriverGetVersion: %w", cudart.ErrNoDriver)},
	}}
}

func TestRequireChecksEachPart(t *testing.T) {
	t.Parallel()
	libcuda := cudart.DriverFacts{LibPath: "/usr/lib/libcuda.so.1"}
	refused := &cudart.Error{Op: "cuInit", Code: cudart.ErrUnknown, API: cudart.DriverAPI}
	for _, c := range []struct {
		name    string
		host    string
		opening error
		want    map[string]State
		says    map[string]string // part of a remedy, by requirement
	}{
		{
			name: "nothing at all", host: "no-gpu-cgroup-v1", opening: noLibrary(cudart.DriverFacts{}),
			want: map[string]State{"c_library": Present, "gpu": Missing, "kernel_module": Missing, "device_nodes": Missing, "driver_library": Missing, "runtime_library": Missing},
			says: map[string]string{"gpu": "pass one through", "kernel_module": "container's host", "device_nodes": "--gpus all", "driver_library": "NVIDIA_DRIVER_CAPABILITIES", "runtime_library": "--library"},
		},
		{
			name: "only libcudart missing", host: "h200-vm", opening: noLibrary(libcuda),
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Present, "driver_library": Present, "runtime_library": Missing},
			says: map[string]string{"runtime_library": "pip install nvidia-cuda-runtime", "gpu": ""},
		},
		{
			name: "only libcuda missing", host: "h200-vm", opening: noDriver(cudart.DriverFacts{}),
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Present, "driver_library": Missing, "runtime_library": Present},
			says: map[string]string{"driver_library": "libcuda1"},
		},
		{
			name: "only a device node missing", host: "container-cgroup-v1", opening: noDriver(libcuda),
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Missing, "driver_library": Present, "runtime_library": Present},
			says: map[string]string{"device_nodes": "--gpus all"},
		},
		{
			name: "no libcudart, and a driver that refuses", host: "h200-vm", opening: &cudart.OpenError{Err: refused, Driver: libcuda, Attempts: []cudart.Attempt{
				{Path: "libcudart.so.13", Found: "loader path", Err: errors.New("dlopen: no such file")}, {Path: libcuda.LibPath, Found: "the driver's library", Runtime: 13000, Err: refused}}},
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Present, "driver_library": Present, "runtime_library": Present},
		},
		{
			name: "musl", host: "alpine-musl", opening: noLibrary(cudart.DriverFacts{}),
			want: map[string]State{"c_library": Missing, "gpu": Uncertain, "kernel_module": Present, "device_nodes": Present, "driver_library": Missing, "runtime_library": Missing},
			says: map[string]string{"c_library": "glibc 2.17"},
		},
		{
			name: "WSL needs no module", host: "wsl2", opening: noLibrary(libcuda),
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Present, "driver_library": Present, "runtime_library": Missing},
		},
		{
			name: "no device though all is there", host: "h200-vm", opening: nil,
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Present, "driver_library": Present, "runtime_library": Present},
		},
		{
			name: "an error of another kind", host: "h200-vm", opening: errors.New("odd"),
			want: map[string]State{"c_library": Present, "gpu": Present, "kernel_module": Present, "device_nodes": Present, "driver_library": Uncertain, "runtime_library": Uncertain},
		},
	} {
		all := Require(host(t, c.host), c.opening)
		assert.Equal(t, c.want, states(all), c.name)
		for id, part := range c.says {
			assert.Contains(t, remedy(all, id), part, "%s: %s", c.name, id)
		}
		for _, r := range all {
			assert.NotEmpty(t, r.Detail, "%s: %s", c.name, r.ID)
			assert.Equal(t, r.State == Missing, r.Remedy != "", "%s: %s: a remedy for what is missing, and for nothing else", c.name, r.ID)
		}
	}
}

func TestRequireModule(t *testing.T) {
	t.Parallel()
	h := host(t, "h200-vm")
	h.NVIDIA.DriverVersion = ""
	h.GPUs[0].Driver = "nouveau"
	assert.Contains(t, remedy(Require(h, noLibrary(cudart.DriverFacts{})), "kernel_module"), "blacklist nouveau")
	h.GPUs[0].Driver = "vfio-pci"
	assert.Contains(t, remedy(Require(h, noLibrary(cudart.DriverFacts{})), "kernel_module"), "virtual machine")
	h.GPUs[0].Driver = ""
	assert.Contains(t, remedy(Require(h, noLibrary(cudart.DriverFacts{})), "kernel_module"), "modprobe nvidia")
	h.NVIDIA.Nodes = nil
	assert.Contains(t, remedy(Require(h, noLibrary(cudart.DriverFacts{})), "device_nodes"), "nvidia-modprobe")

	hidden := &hostinfo.Host{}
	assert.Equal(t, Uncertain, states(Require(hidden, nil))["gpu"], "a bus that is not shown says nothing")
}

// The bridge at the other end of the device's own link is not another bottleneck, and a
// bridge that is fast enough is none.
func TestBottleneck(t *testing.T) {
	t.Parallel()
	h := host(t, "epyc-dual-cgroup-v2")
	h100, l40s, unknown := Device{PCIBusID: "0000:01:00.0"}, Device{PCIBusID: "00000000:C3:00.0"}, Device{PCIBusID: "0000:99:00.0"}
	for _, d := range []*Device{&h100, &l40s, &unknown} {
		d.Relink(h)
	}
	assert.Nil(t, h100.Link.Bottleneck)
	assert.InDelta(t, 4, h100.Link.PathRate(), 0.01)
	require.NotNil(t, l40s.Link.Bottleneck)
	assert.InDelta(t, 15.75, l40s.Link.PathRate(), 0.01)
	assert.Equal(t, 1, *l40s.NUMANode)
	assert.Nil(t, unknown.Link)
	assert.Zero(t, unknown.Link.PathRate())
}

// Where NVML returned from the first GPU only, the others may have no MIG.
func TestAReportOfNVMLThatEndedEarly(t *testing.T) {
	t.Parallel()
	yes, none := true, 0
	report := &nvml.Report{Count: 1, GPUs: []nvml.GPU{{MIG: &yes, MIGInstances: &none}}}
	assert.Len(t, migWithoutInstance(&Facts{Host: &hostinfo.Host{}, NVML: report}), 1)
	report.Count = 2
	assert.Empty(t, migWithoutInstance(&Facts{Host: &hostinfo.Host{}, NVML: report}))
}

// What a host shows comes to its GPUs with SetHost. A link that was read under load stays.
func TestSetHostGivesGPUsTheirLinks(t *testing.T) {
	t.Parallel()
	h := host(t, "h200-vm")
	underLoad := &Link{Speed: 32, Width: 8}
	f := &Facts{Devices: []Device{{PCIBusID: h.GPUs[0].Address}, {PCIBusID: h.GPUs[0].Address, Link: underLoad}}, NodeErrors: map[string]string{"/dev/nvidia0": "operation not permitted"}}
	f.SetHost(h)
	assert.Equal(t, hostinfo.PCIe{Speed: 32, Width: 16}, f.Devices[0].Link.Now())
	assert.Equal(t, h.GPUs[0].CPUs, f.Devices[0].LocalCPUs)
	assert.Same(t, underLoad, f.Devices[1].Link)
	assert.Equal(t, "operation not permitted", f.Host.NVIDIA.Nodes[slices.IndexFunc(f.Host.NVIDIA.Nodes, func(n hostinfo.Node) bool { return n.Path == "/dev/nvidia0" })].OpenError)
	assert.Empty(t, f.Requirements)

	none := 0
	f = &Facts{CUDADevices: &none, Devices: []Device{}}
	f.SetHost(h)
	assert.Equal(t, Require(h, nil), f.Requirements)
}
