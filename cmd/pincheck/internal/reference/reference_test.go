package reference

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
)

// copies is a series of copies between pinned memory and GPU 0.
func copies(direction string, size int, more ...result.Label) *result.Series {
	labels := result.Labels{{Key: result.Device, Value: "0"}, {Key: result.Direction, Value: direction},
		{Key: result.Size, Value: fmt.Sprint(size)}, {Key: result.Memory, Value: "registered"}}
	for _, l := range more {
		labels = labels.With(l.Key, l.Value)
	}
	return &result.Series{Name: "bandwidth", Unit: result.GBPerSecond, Labels: labels}
}

// on is a GPU on a link, on a host of which nothing is known.
func on(gpu string, link hostinfo.PCIe) Machine { return MachineOf(nil, gpu, link) }

func TestWhatGPUsReach(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		gpu       string
		link      hostinfo.PCIe
		direction string
		want      float64 // 0 for none
		source    string  // its start
	}{
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, result.HostToDevice, 55.32, "reference/nvidia-h200-pcie5-x16.json: NVIDIA H200 on PCIe 5.0 x16, host to device, 1 GiB, measured 2026-11-22: median of 3, 55.2 to 55.4 GB/s (testdata/results/bench-h200-2026-11-22.json)"},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 55.3, "reference/nvidia-h200-pcie5-x16.json: NVIDIA H200 on PCIe 5.0 x16, device to host, 1 GiB"},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, result.Both, 101.6, "reference/nvidia-h200-pcie5-x16.json: NVIDIA H200 on PCIe 5.0 x16, both, 1 GiB"},
		{"NVIDIA H100 80GB HBM3", hostinfo.PCIe{Speed: 32, Width: 16}, result.HostToDevice, 55, "reference/h100-pcie5-x16.json: H100 on PCIe 5.0 x16, host to device, cited: 55 to 57 GB/s (https://github.com/NVIDIA/cuda-samples/issues/357 "},
		{"NVIDIA H100 80GB HBM3", hostinfo.PCIe{Speed: 32, Width: 16}, result.Both, 0, ""},
		{"NVIDIA H100 80GB HBM3", hostinfo.PCIe{Speed: 16, Width: 16}, result.DeviceToHost, 25, "reference/a100-pcie4-x16.json: A100 on PCIe 4.0 x16, device to host, cited: 25 to 26 GB/s"},
		{"NVIDIA GeForce RTX 5090", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 57.3, "reference/rtx-5090-pcie5-x16.json: RTX 5090 on PCIe 5.0 x16, device to host, cited: 57.3 GB/s"},
		{"NVIDIA GeForce RTX 5090", hostinfo.PCIe{Speed: 32, Width: 8}, result.HostToDevice, 27.5, "PCIe 5.0 x8: 0.5 times reference/h100-pcie5-x16.json: H100 on PCIe 5.0 x16"},
		{"NVIDIA A100-SXM4-80GB", hostinfo.PCIe{Speed: 16, Width: 16}, result.HostToDevice, 25, "reference/a100-pcie4-x16.json: "},
		{"NVIDIA RTX A1000", hostinfo.PCIe{Speed: 16, Width: 8}, result.HostToDevice, 23.9 / 2, "PCIe 4.0 x8: 0.5 times reference/rtx-4090-pcie4-x16.json: RTX 4090 on PCIe 4.0 x16, host to device, cited: 23.9 to 27 GB/s"},
		{"NVIDIA GeForce RTX 4090", hostinfo.PCIe{Speed: 16, Width: 16}, result.HostToDevice, 23.9, "reference/rtx-4090-pcie4-x16.json: "},
		{"NVIDIA GeForce RTX 4090", hostinfo.PCIe{Speed: 16, Width: 16}, result.DeviceToHost, 25, "reference/a100-pcie4-x16.json: "},
		{"Tesla P100-PCIE-16GB", hostinfo.PCIe{Speed: 8, Width: 16}, result.HostToDevice, 12.1, "reference/p100-pcie3-x16.json: "},
		{"Tesla V100-SXM2-32GB", hostinfo.PCIe{Speed: 8, Width: 16}, result.DeviceToHost, 12.9, "reference/p100-pcie3-x16.json: P100"},
		{"NVIDIA GH200 480GB", hostinfo.PCIe{}, result.HostToDevice, 346, "reference/gh200.json: GH200 on NVLink-C2C, host to device, cited: 346 GB/s"},
		{"NVIDIA GH200 480GB", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 0, ""},
		{"NVIDIA GB200", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 330, "reference/gb200.json: "},
		{"NVIDIA GB10", hostinfo.PCIe{Speed: 32, Width: 4}, result.DeviceToHost, 0, ""},
		{"Tesla M2090", hostinfo.PCIe{Speed: 5, Width: 16}, result.HostToDevice, 6.919, "reference/pcie2-x16.json: PCIe 2.0 x16, host to device, computed: 5 GT/s x 16 lanes"},
		{"Tesla M2090", hostinfo.PCIe{Speed: 5, Width: 4}, result.DeviceToHost, 6.737 / 4, "PCIe 2.0 x4: 0.25 times reference/pcie2-x16.json: "},
		{"Rubin", hostinfo.PCIe{Speed: 64, Width: 16}, result.HostToDevice, 110.6, "reference/pcie6-x16.json: "},
		{"Rubin", hostinfo.PCIe{Speed: 64, Width: 16}, result.Both, 0, ""},
		{"Rubin", hostinfo.PCIe{Speed: 65, Width: 16}, result.HostToDevice, 0, ""},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 32}, result.HostToDevice, 0, ""},
		{"NVIDIA H200", hostinfo.PCIe{}, result.HostToDevice, 0, ""},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, "device_to_device", 0, ""},
	} {
		name := fmt.Sprintf("%s %v %s", c.gpu, c.link, c.direction)
		got := Builtin().Expect(on(c.gpu, c.link), copies(c.direction, 1<<30))
		if c.want == 0 {
			assert.Nil(t, got, name)
			continue
		}
		require.NotNil(t, got, name)
		assert.InDelta(t, c.want, got.Value, 1e-9, name)
		assert.True(t, strings.HasPrefix(got.Source, c.source), "%s: %s", name, got.Source)
	}
}

// Copies are compared with those of their size, and large ones with those of the nearest large size.
func TestRowsAreOfTheirSize(t *testing.T) {
	t.Parallel()
	h200 := on("NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16})
	for size, want := range map[int]float64{4 << 10: 0, 1 << 20: 0, 4 << 20: 53, 8 << 20: 0, 16<<20 - 1: 0, 16 << 20: 54.94, 64 << 20: 54.94, 256 << 20: 54.94, 768 << 20: 55.32, 4 << 30: 55.32} {
		got := Builtin().Expect(h200, copies(result.HostToDevice, size))
		if want == 0 {
			assert.Nil(t, got, size)
			continue
		}
		require.NotNil(t, got, size)
		assert.InDelta(t, want, got.Value, 1e-9, size)
	}
	assert.Nil(t, Builtin().Expect(on("NVIDIA A100-SXM4-40GB", hostinfo.PCIe{Speed: 16, Width: 16}), copies(result.HostToDevice, 4<<20)))
}

func TestNothingIsKnownOfOtherConditions(t *testing.T) {
	t.Parallel()
	h200 := func(s *result.Series) *result.Expected {
		return Builtin().Expect(on("NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}), s)
	}
	with := func(key, value string) *result.Series {
		return copies(result.HostToDevice, 1<<30, result.Label{Key: key, Value: value})
	}
	for _, memory := range []string{"registered", "cuda_host_alloc", "write_combined"} {
		assert.NotNil(t, h200(with(result.Memory, memory)), memory)
	}
	for _, memory := range []string{"pageable", "staged", "mapped", "managed", ""} {
		assert.Nil(t, h200(with(result.Memory, memory)), memory)
	}
	assert.Nil(t, Builtin().Expect(on("NVIDIA GH200 480GB", hostinfo.PCIe{}), with(result.Memory, "write_combined")), "half as fast on Grace")
	assert.NotNil(t, h200(with(result.Method, "async")))
	assert.Nil(t, h200(with(result.Method, "zero_copy")))
	assert.Nil(t, h200(with("devices_at_once", "8")))
	assert.Nil(t, h200(with(result.Size, "large")))
	pin := copies(result.HostToDevice, 1<<30)
	pin.Name = "pin_rate"
	assert.Nil(t, h200(pin), "the rate of pinning is the processor's")
	latency := copies(result.HostToDevice, 1<<30)
	latency.Unit = result.Seconds
	assert.Nil(t, h200(latency))
}

func TestNewFindsTheSeriesGPU(t *testing.T) {
	t.Parallel()
	fsys, err := hosttest.Load("../../../../testdata/hosts/h200-vm.txtar")
	require.NoError(t, err)
	host := hostinfo.Read(fsys, nil)
	require.NotEmpty(t, host.GPUs)
	expect := New(host, []GPU{{Label: "0", Name: "NVIDIA H200", PCIBusID: host.GPUs[0].Address}, {Label: "1", Name: "NVIDIA H200", PCIBusID: "0000:ff:1f.0"}})
	s := copies(result.HostToDevice, 1<<30)
	got := expect(s)
	require.NotNil(t, got)
	assert.InDelta(t, 55.32, got.Value, 1e-9)
	s.Labels = s.Labels.With(result.Device, "1")
	assert.Nil(t, expect(s), "the host does not show its link")
	s.Labels = s.Labels.With(result.Device, "all")
	assert.Nil(t, expect(s))
}
