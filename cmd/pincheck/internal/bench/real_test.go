package bench

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/internal/testgpu"
)

// All experiments run with small copies on one device: on the machine's if a real one was
// asked for, and else on one of three, of which the others get no context.
func TestAllOnOneDevice(t *testing.T) {
	var sim *cudasim.Sim
	var dev *cudart.Device
	if testgpu.Real() {
		dev = testgpu.Device(t)
	} else {
		var rt *cudart.Runtime
		var err error
		sim, rt = testgpu.Sim(t, cudasim.Config{Devices: make([]cudasim.DeviceConfig, 3)})
		dev, err = rt.Device(1)
		require.NoError(t, err)
	}
	for _, e := range append(All(), Link(LinkPlan{SizeBytes: 1 << 20}), Trials(true)) {
		t.Run(e.Name, func(t *testing.T) {
			if e.Name == memoryName { // starts processes
				hosttest.StartsPrograms(t)
			}
			if sim != nil {
				t.Parallel()
			}
			b, err := measure.Run(t.Context(), e, measure.Env{
				Devices: []*cudart.Device{dev},
				Options: measure.Options{Quick: true, Sizes: []int{1 << 20}, Duration: time.Millisecond},
			}, nil)
			require.NoError(t, err)
			assert.True(t, b.Complete)
			assert.Empty(t, b.Errors)
			assert.NotEmpty(t, b.Series)
			assert.Equal(t, e.Explain != nil, len(b.Answers) > 0)
			if sim != nil {
				assert.Subset(t, []int{1}, sim.Contexts())
			}
			for _, s := range b.Series {
				assert.Empty(t, s.Mismatch, "%s %v", s.Name, s.Labels)
			}
		})
	}
}

// What the doctor measures, at its own sizes, on all GPUs of the machine. Far nodes are
// measured, or a note says why not.
func TestTheDoctorsMeasurementsOnTheMachine(t *testing.T) {
	if !testgpu.Real() {
		t.Skip("needs PINNED_TEST_GPU=1: the simulated forms are TestCopiesByNode and TestTogether")
	}
	devices := testgpu.Device(t).Runtime().Devices()
	host := hostinfo.Read(os.DirFS("/"), os.Environ())
	for _, dev := range devices {
		b, err := measure.Run(t.Context(), Trials(true), measure.Env{Devices: []*cudart.Device{dev}, Host: host}, nil)
		require.NoError(t, err)
		require.Empty(t, b.Errors)
		own, remote, ok := remotest(host, dev.PCIBusID())
		byNode := b.Select(result.View{Series: doctor.TrialByNode})
		if !ok {
			assert.Empty(t, byNode)
			t.Logf("%v: one NUMA node, or none that is named", dev)
			continue
		}
		assert.Equal(t, 4, len(byNode)+len(b.Unmeasured), "both ways, for each node of %d and %d", own, remote)
		for _, s := range byNode {
			assert.True(t, s.Verified)
			t.Logf("%v: %v %.1f GB/s", dev, s.Labels, s.Median)
		}
		t.Log(b.Notes)
	}
	if len(devices) < 2 {
		return
	}
	b, err := measure.Run(t.Context(), Together(LinkPlan{}, 0), measure.Env{Devices: devices}, nil)
	require.NoError(t, err)
	require.Empty(t, b.Errors)
	require.Len(t, b.Series, 2*(len(devices)+1))
	for _, s := range b.Series {
		assert.True(t, s.Verified)
		t.Logf("%v %.1f GB/s", s.Labels, s.Median)
	}
	t.Logf("%d GPUs at once: %.2f s", len(devices), b.Seconds)
}
