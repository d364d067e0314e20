package reference

import (
	"fmt"
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

func TestWhatGPUsReach(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		gpu       string
		link      hostinfo.PCIe
		direction string
		want      float64 // 0 for none
		source    string  // its start
	}{
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, result.HostToDevice, 55.4, "H200 on PCIe 5.0 x16: 55.4 to 55.5 GB/s reported (nvbandwidth 0.8 and C"},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 55.4, "H200 on PCIe 5.0 x16: 55.4 GB/s reported"},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, result.Both, 98.8, "H200 on PCIe 5.0 x16: 98.8 to 99.3 GB/s reported"},
		{"NVIDIA H100 80GB HBM3", hostinfo.PCIe{Speed: 32, Width: 16}, result.HostToDevice, 55, "H100 on PCIe 5.0 x16: 55 to 57 GB/s reported (NVIDIA/cuda-samples #357"},
		{"NVIDIA H100 80GB HBM3", hostinfo.PCIe{Speed: 32, Width: 16}, result.Both, 0, ""},
		{"NVIDIA H100 80GB HBM3", hostinfo.PCIe{Speed: 16, Width: 16}, result.DeviceToHost, 25, "PCIe 4.0 x16: 25 to 26 GB/s reported (A100"},
		{"NVIDIA GeForce RTX 5090", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 57.3, "RTX 5090 on PCIe 5.0 x16: 57.3 GB/s reported (tinygrad"},
		{"NVIDIA GeForce RTX 5090", hostinfo.PCIe{Speed: 32, Width: 8}, result.HostToDevice, 27.5, "PCIe 5.0 x8: 0.5 times PCIe 5.0 x16: 55 to 57 GB/s reported"},
		{"NVIDIA A100-SXM4-80GB", hostinfo.PCIe{Speed: 16, Width: 16}, result.HostToDevice, 25, "A100 on PCIe 4.0 x16: 25 to 26 GB/s reported"},
		{"NVIDIA RTX A1000", hostinfo.PCIe{Speed: 16, Width: 8}, result.HostToDevice, 23.9 / 2, "PCIe 4.0 x8: 0.5 times PCIe 4.0 x16: 23.9 to 27 GB/s reported"},
		{"NVIDIA GeForce RTX 4090", hostinfo.PCIe{Speed: 16, Width: 16}, result.HostToDevice, 23.9, "RTX 4090 on PCIe 4.0 x16: 23.9 to 27 GB/s reported (NVIDIA/nvbandwidth #15)"},
		{"NVIDIA GeForce RTX 4090", hostinfo.PCIe{Speed: 16, Width: 16}, result.DeviceToHost, 25, "PCIe 4.0 x16: 25 to 26 GB/s reported"},
		{"Tesla P100-PCIE-16GB", hostinfo.PCIe{Speed: 8, Width: 16}, result.HostToDevice, 12.1, "P100 on PCIe 3.0 x16: 12.1 GB/s reported (mpicbg-scicomp/gearshifft #82)"},
		{"Tesla V100-SXM2-32GB", hostinfo.PCIe{Speed: 8, Width: 16}, result.DeviceToHost, 12.9, "PCIe 3.0 x16: 12.9 GB/s reported (P100"},
		{"NVIDIA GH200 480GB", hostinfo.PCIe{}, result.HostToDevice, 346, "GH200 on NVLink-C2C: 346 GB/s reported"},
		{"NVIDIA GH200 480GB", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 0, ""},
		{"NVIDIA GB200", hostinfo.PCIe{Speed: 32, Width: 16}, result.DeviceToHost, 330, "GB200 on NVLink-C2C: 330 GB/s reported"},
		{"NVIDIA GB10", hostinfo.PCIe{Speed: 32, Width: 4}, result.DeviceToHost, 0, ""},
		{"Tesla M2090", hostinfo.PCIe{Speed: 5, Width: 16}, result.HostToDevice, 8 * 128.0 / 148, "PCIe 2.0 x16: computed"},
		{"Tesla M2090", hostinfo.PCIe{Speed: 5, Width: 16}, result.DeviceToHost, 8 * 128.0 / 152, "PCIe 2.0 x16: computed"},
		{"Rubin", hostinfo.PCIe{Speed: 64, Width: 16}, result.HostToDevice, 128 * 242.0 / 256 * 128 / 140, "PCIe 6.0 x16: computed"},
		{"Rubin", hostinfo.PCIe{Speed: 64, Width: 16}, result.Both, 0, ""},
		{"Rubin", hostinfo.PCIe{Speed: 65, Width: 16}, result.HostToDevice, 0, ""},
		{"NVIDIA H200", hostinfo.PCIe{}, result.HostToDevice, 0, ""},
		{"NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, "device_to_device", 0, ""},
	} {
		name := fmt.Sprintf("%s %v %s", c.gpu, c.link, c.direction)
		got := Expect(c.gpu, c.link, copies(c.direction, 1<<30))
		if c.want == 0 {
			assert.Nil(t, got, name)
			continue
		}
		require.NotNil(t, got, name)
		assert.InDelta(t, c.want, got.Value, 1e-9, name)
		assert.Contains(t, got.Source, c.source, name)
		assert.Equal(t, c.source, got.Source[:len(c.source)], name)
	}
}

func TestOfSmallCopiesOnlyWhatWasReported(t *testing.T) {
	t.Parallel()
	h200 := func(s *result.Series) *result.Expected {
		return Expect("NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, s)
	}
	for size, want := range map[int]float64{4 << 10: 1.1, 64 << 10: 13.4, 1 << 20: 45.5, 4 << 20: 52.6, 16 << 20: 55.4} {
		got := h200(copies(result.HostToDevice, size))
		require.NotNil(t, got, size)
		assert.InDelta(t, want, got.Value, 1e-9, size)
	}
	assert.Nil(t, h200(copies(result.HostToDevice, 8<<10)))
	assert.Nil(t, h200(copies(result.DeviceToHost, 4<<10)))
	assert.Nil(t, h200(copies(result.HostToDevice, 16<<20-1)))
	assert.Nil(t, Expect("NVIDIA A100-SXM4-40GB", hostinfo.PCIe{Speed: 16, Width: 16}, copies(result.HostToDevice, 1<<20)))
}

func TestNothingIsKnownOfOtherConditions(t *testing.T) {
	t.Parallel()
	h200 := func(s *result.Series) *result.Expected {
		return Expect("NVIDIA H200", hostinfo.PCIe{Speed: 32, Width: 16}, s)
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
	assert.Nil(t, Expect("NVIDIA GH200 480GB", hostinfo.PCIe{}, with(result.Memory, "write_combined")), "half as fast on Grace")
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
	assert.InDelta(t, 55.4, got.Value, 1e-9)
	s.Labels = s.Labels.With(result.Device, "1")
	assert.Nil(t, expect(s), "the host does not show its link")
	s.Labels = s.Labels.With(result.Device, "all")
	assert.Nil(t, expect(s))
}

// What was measured of a link lies where packets of 128 to 512 bytes leave it.
func TestFiguresFitTheLinks(t *testing.T) {
	t.Parallel()
	for _, f := range figures {
		if f.coherent || f.size > 0 {
			continue
		}
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
			low, high := f.of(direction)
			if high == 0 {
				continue
			}
			assert.Less(t, high, payloadRate(f.link, direction, 512), "%+v", f)
			assert.Greater(t, low, 0.85*payloadRate(f.link, direction, 128), "%+v", f)
			assert.LessOrEqual(t, low, high, "%+v", f)
		}
		assert.NotEmpty(t, f.from)
	}
	h200 := hostinfo.PCIe{Speed: 32, Width: 16}
	assert.InDelta(t, 63.015*128/148, payloadRate(h200, result.HostToDevice, 128), 0.01)
	assert.InDelta(t, 63.015*256/276, payloadRate(h200, result.HostToDevice, 256), 0.01)
	assert.InDelta(t, 63.015*512/536, payloadRate(h200, result.DeviceToHost, 512), 0.01)
}
