package doctor

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostinfo"
	"github.com/gopinned/pinned/internal/hostinfo/hosttest"
	"github.com/gopinned/pinned/internal/measure"
	"github.com/gopinned/pinned/verify"
)

func host(t *testing.T, name string, environ ...string) *hostinfo.Host {
	t.Helper()
	fsys, err := hosttest.Load(filepath.Join("..", "..", "testdata", "hosts", name+".txtar"))
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
			says: map[string]string{"gpu": "passed through", "kernel_module": "container's host", "device_nodes": "--gpus all", "driver_library": "NVIDIA_DRIVER_CAPABILITIES", "runtime_library": "--library"},
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

func ids(all []Finding) []string {
	out := []string{}
	for _, f := range all {
		out = append(out, f.ID)
	}
	return out
}

func TestCheckWithoutGPU(t *testing.T) {
	t.Parallel()
	f := WithoutLibrary(noLibrary(cudart.DriverFacts{}), host(t, "alpine-musl"))
	verdict, found := Check(f)
	assert.Equal(t, NoGPU, verdict)
	assert.Equal(t, []string{"no_c_library", "no_driver_library", "no_runtime_library"}, ids(found))
	require.Len(t, f.Search.Attempts, 1)
	assert.Equal(t, "13.0", f.Search.Attempts[0].RuntimeVersion)
	assert.Contains(t, f.Search.Attempts[0].Error, "dlopen")

	for value, id := range map[string]string{"": "hidden_gpu", "-1": "hidden_gpu", "NoDevFiles": "hidden_gpu", "0": "no_device"} {
		h := host(t, "h200-vm", "CUDA_VISIBLE_DEVICES="+value)
		_, found = Check(&Facts{Host: h, Requirements: Require(h, nil)})
		assert.Equal(t, []string{id}, ids(found), "CUDA_VISIBLE_DEVICES=%q", value)
	}
}

// fine is a device with nothing wrong, at the address of the only GPU of the
// host h200-vm.
func fine(h2d, d2h float64) Device {
	one := func(d measure.Direction, v float64) measure.Series {
		s := []float64{v, v * 1.001, v}
		return measure.Series{Direction: d, Samples: s, Stats: measure.Summarize(s)}
	}
	return Device{
		PCIBusID:  "0000:00:06.0",
		Verify:    &verify.Report{Cases: 10, VerifiedBytes: 1000},
		Bandwidth: &measure.Result{Series: []measure.Series{one(measure.HostToDevice, h2d), one(measure.DeviceToHost, d2h)}},
	}
}

func TestCheckDevice(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		h2d     float64
		change  func(*Device, *hostinfo.PCIDevice)
		want    []string
		healthy bool
		// measured is that nothing is wrong, and speeds could not be judged.
		measured bool
	}{
		{name: "fine", h2d: 55.4, want: []string{}, healthy: true},
		{name: "just fast enough", h2d: 47.4, want: []string{}, healthy: true},
		{name: "too slow", h2d: 47.1, want: []string{"slow_copies"}},
		{name: "half the lanes, and as fast as they allow", h2d: 27.7, want: []string{"narrow_link"},
			change: func(d *Device, p *hostinfo.PCIDevice) {
				p.Link.CurrentWidth = 8
				d.Bandwidth.Series = d.Bandwidth.Series[:1]
			}},
		{name: "a generation lower under load", h2d: 27.7, want: []string{"slow_link"},
			change: func(d *Device, p *hostinfo.PCIDevice) {
				p.Link.CurrentSpeed = 16
				d.Bandwidth.Series = d.Bandwidth.Series[:1]
			}},
		{name: "trained down, not measured", want: []string{}, healthy: true,
			change: func(d *Device, p *hostinfo.PCIDevice) { p.Link.CurrentSpeed, d.Bandwidth = 2.5, nil }},
		{name: "no link shown", h2d: 1, want: []string{}, measured: true,
			change: func(d *Device, p *hostinfo.PCIDevice) { p.Link = hostinfo.Link{} }},
		{name: "a narrow bridge", h2d: 13.5, want: []string{"narrow_upstream"},
			change: func(d *Device, p *hostinfo.PCIDevice) {
				p.Upstream = []hostinfo.Link{p.Link, {Address: "0000:00:01.0", CurrentSpeed: 16, CurrentWidth: 8, MaxSpeed: 16, MaxWidth: 16}}
				d.Bandwidth.Series = d.Bandwidth.Series[:1]
			}},
		{name: "wrong bytes", h2d: 55.4, want: []string{"wrong_bytes"},
			change: func(d *Device, _ *hostinfo.PCIDevice) {
				d.Verify.MismatchCount = 1
				d.Verify.Mismatches = make([]verify.Mismatch, 1)
			}},
		{name: "wrong after synchronising", h2d: 55.4, want: []string{"wrong_bytes"},
			change: func(d *Device, _ *hostinfo.PCIDevice) { d.Verify.Stale = &verify.StaleResult{BadAfter: 1} }},
		{name: "a failure", h2d: 55.4, want: []string{"failed_round_trips"},
			change: func(d *Device, _ *hostinfo.PCIDevice) { d.Verify.FailureCount = 1 }},
		{name: "nothing verified", h2d: 55.4, want: []string{"failed_round_trips"},
			change: func(d *Device, _ *hostinfo.PCIDevice) { d.Verify.Cases = 0 }},
		{name: "an error", h2d: 55.4, want: []string{"failed_call"},
			change: func(d *Device, _ *hostinfo.PCIDevice) { d.Errors = []string{"oops"} }},
		{name: "unsteady", h2d: 55.4, want: []string{"unsteady_copies"}, healthy: true,
			change: func(d *Device, _ *hostinfo.PCIDevice) { d.Bandwidth.Series[0].Spread = 0.3 }},
	} {
		h := host(t, "h200-vm")
		d := fine(c.h2d, 55.3)
		if c.change != nil {
			c.change(&d, &h.GPUs[0])
		}
		d.Relink(h)
		f := &Facts{Host: h, Devices: []Device{d}}
		verdict, found := Check(f)
		assert.Equal(t, c.want, ids(found), c.name)
		assert.Equal(t, c.healthy, verdict == Healthy, c.name)
		assert.Equal(t, c.measured, verdict == Measured, c.name)
		for _, one := range found {
			require.NotNil(t, one.Device, c.name)
			assert.NotEmpty(t, one.Summary, c.name)
			assert.NotEmpty(t, one.Remedy, c.name)
		}
	}
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
