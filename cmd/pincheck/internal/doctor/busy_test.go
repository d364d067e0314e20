package doctor

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// Slow copies are those of a busy machine where the host shows that others were at work, and a
// problem of this one where it does not: there is a false alarm on either side.
func TestSlowCopiesBesideOthers(t *testing.T) {
	t.Parallel()
	process := func(f *Facts) {
		f.Devices[0].Health.Processes = []nvml.Process{{PID: 9, Name: "python", Memory: 1 << 30}}
	}
	spread := func(f *Facts) { f.Devices[0].Bandwidth.Series[0].Spread = 1.01 * unsteady }
	filled := func(f *Facts) { f.Devices[0].MemoryFree = 100 << 30 }
	utilized := func(percent int) func(*Facts) {
		return func(f *Facts) { f.Devices[0].Health.Utilization = &percent }
	}
	cpus := func(n float64) func(*Facts) { return func(f *Facts) { f.Devices[0].OtherCPUs = &n } }
	again := func(rate float64) func(*Facts) {
		return func(f *Facts) {
			f.Devices[0].Slower = &result.Bench{Series: []result.Series{series(result.HostToDevice, rate), series(result.DeviceToHost, 55.3)}}
		}
	}
	const rate = 35.0 // of 55.4
	for name, c := range map[string]struct {
		change []func(*Facts)
		busy   bool
	}{
		"nothing is known":            {nil, false},
		"idle":                        {[]func(*Facts){utilized(0), cpus(0.2)}, false},
		"a process that does nothing": {[]func(*Facts){process, utilized(0), cpus(0.2)}, false},
		"a process, and two measurements that agree":  {[]func(*Facts){process, again(0.9 * rate)}, false},
		"memory of others":                            {[]func(*Facts){filled}, false},
		"an unsteady link":                            {[]func(*Facts){spread, cpus(0.2)}, false},
		"an unsteady link, and nothing is known":      {[]func(*Facts){spread}, false},
		"a desktop":                                   {[]func(*Facts){utilized(busyGPU - 1), cpus(3.9)}, false},
		"a process that copies":                       {[]func(*Facts){process, spread}, true},
		"a process that copied":                       {[]func(*Facts){process, again(0.8 * rate)}, true},
		"a process that does not show":                {[]func(*Facts){filled, spread}, true},
		"a process that computes":                     {[]func(*Facts){utilized(busyGPU)}, true},
		"programs that need the CPUs":                 {[]func(*Facts){cpus(4)}, true},
		"programs that need the CPUs, and a process":  {[]func(*Facts){cpus(4), process}, true},
		"a limit by the user, and a process computes": {[]func(*Facts){utilized(99), func(f *Facts) { f.ExpectedRate = 50 }}, false},
	} {
		f := well(t)
		f.Devices[0].Bandwidth.Series[0] = series(result.HostToDevice, rate)
		for _, change := range c.change {
			change(f)
		}
		verdict, found := Evaluate(f)
		if c.busy {
			assert.Equal(t, Warnings, verdict, name)
			assert.Contains(t, ids(found), "busy", name)
			assert.NotContains(t, ids(found), "slow_copies", name)
			assert.NotContains(t, ids(found), "unsteady_copies", name)
		} else {
			assert.Equal(t, Problems, verdict, name)
			assert.Contains(t, ids(found), "slow_copies", name)
			assert.NotContains(t, ids(found), "busy", name)
		}

		f = well(t) // and copies as fast as they should be are neither
		for _, change := range c.change {
			change(f)
		}
		f.Devices[0].Slower = nil
		verdict, _ = Evaluate(f)
		assert.Equal(t, Healthy, verdict, name)
	}
}

// Of two measurements the better one counts, and wrong bytes of the other are not lost.
func TestTheBetterOfTwoMeasurements(t *testing.T) {
	t.Parallel()
	bench := func(rate float64) *result.Bench {
		return &result.Bench{Series: []result.Series{series(result.HostToDevice, rate), series(result.DeviceToHost, 55.3)}}
	}
	for _, rates := range [][2]float64{{30, 55}, {55, 30}} {
		f := well(t)
		d := &f.Devices[0]
		d.Bandwidth = nil
		trials := []*result.Bench{{Name: "first"}, {Name: "second"}}
		for i, rate := range rates {
			b := bench(rate)
			if rate == 30 {
				b.Series[0].Mismatch = "wrong bytes: byte 7"
			}
			d.Take(&Device{Bandwidth: b, Beside: Beside{Trials: trials[i], OtherCPUs: number(rate)}})
		}
		assert.Equal(t, 55.0, d.Slowest())
		assert.Equal(t, 30.0, (&Device{Bandwidth: d.Slower}).Slowest())
		assert.Equal(t, 30.0, *d.OtherCPUs, "the fewer")
		assert.Equal(t, map[float64]string{30: "second", 55: "first"}[rates[0]], d.Trials.Name, "of the better one")
		_, found := Evaluate(f)
		assert.Contains(t, ids(found), "wrong_bytes")
		i := slices.IndexFunc(found, func(one Finding) bool { return one.ID == "busy" })
		require.GreaterOrEqual(t, i, 0)
		assert.Equal(t, Note, found[i].Severity)
		assert.Contains(t, found[i].Summary, "reached between 55% and 100% of the reference for this GPU and link, measured 2 times", "whichever was the first")
		assert.Contains(t, found[i].Evidence, "To GPU, measured 2 times: medians 30.0 GB/s to 55.0 GB/s, samples 30.0 GB/s to 55.1 GB/s")
		d.Repeats = nil // as of a version that measured twice at most
		_, found = Evaluate(f)
		i = slices.IndexFunc(found, func(one Finding) bool { return one.ID == "unsteady_copies" })
		require.GreaterOrEqual(t, i, 0)
		assert.Equal(t, []string{"The slower direction reached 30.0 GB/s in one and 55.0 GB/s in the other"}, found[i].Evidence)
	}
	d := Device{Bandwidth: bench(30)}
	d.Take(&Device{Bandwidth: &result.Bench{Series: []result.Series{series(result.HostToDevice, 55)}}})
	assert.Equal(t, 30.0, d.Slowest(), "one that has less than the other is not better")
}

// Copies that are slow in two measurements, and others were at work in one of them only: they do
// not explain it.
func TestSlowInAnIdleMeasurementToo(t *testing.T) {
	t.Parallel()
	for _, cpus := range [][2]float64{{12, 0.2}, {0.2, 12}} {
		for _, rates := range [][2]float64{{34, 35}, {35, 34}} {
			f := well(t)
			d := &f.Devices[0]
			d.Bandwidth = nil
			for i, rate := range rates {
				d.Take(&Device{Beside: Beside{OtherCPUs: number(cpus[i])}, Bandwidth: &result.Bench{
					Series: []result.Series{series(result.HostToDevice, rate), series(result.DeviceToHost, 55.3)},
				}})
			}
			verdict, found := Evaluate(f)
			assert.Equal(t, Problems, verdict)
			assert.Contains(t, ids(found), "slow_copies")
			assert.NotContains(t, ids(found), "busy")
		}
	}
}

// A limit of the user counts on a busy machine, too; what was seen of others is not kept back.
func TestOthersBesideALimitOfTheUser(t *testing.T) {
	t.Parallel()
	f := well(t)
	f.ExpectedRate = 56
	f.Devices[0].Health.Utilization = number(99)
	_, found := Evaluate(f)
	i := slices.IndexFunc(found, func(one Finding) bool { return one.ID == "slow_copies" })
	require.GreaterOrEqual(t, i, 0)
	assert.Contains(t, found[i].Evidence, "Kernels ran for 99% of the last second before the examination (NVML)")
}
