package doctor

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// byID returns the finding of an id.
func byID(t *testing.T, found []Finding, id string) Finding {
	t.Helper()
	i := slices.IndexFunc(found, func(one Finding) bool { return one.ID == id })
	require.GreaterOrEqual(t, i, 0, "%s in %v", id, ids(found))
	return found[i]
}

// copied replaces the rates of the only GPU.
func copied(f *Facts, rate float64) *Device {
	d := &f.Devices[0]
	d.Bandwidth.Series = []result.Series{series(result.HostToDevice, rate), series(result.DeviceToHost, rate)}
	return d
}

// The share is of the figure that the sentence names, and the limit is that figure's.
func TestSlowCopiesNameWhoseFigureItIs(t *testing.T) {
	t.Parallel()
	pcie := func(speed float64) func(*Facts) {
		return func(f *Facts) {
			f.Host.GPUs[0].Link = hostinfo.Link{CurrentSpeed: speed, MaxSpeed: speed, CurrentWidth: 16, MaxWidth: 16}
			relink(f)
		}
	}
	for name, c := range map[string]struct {
		change   func(*Facts)
		rate     float64
		of       string
		evidence string
		severity Severity // "" for none
	}{
		"a row of the GPU":          {func(*Facts) {}, 47, "85% of the reference for this GPU and link", "expected (NVIDIA H200 on PCIe 5.0 x16, measured 2026-11-22)", Warning},
		"a row of the GPU, problem": {func(*Facts) {}, 43, "78% of the reference for this GPU and link", "expected (NVIDIA H200 on PCIe 5.0 x16, measured 2026-11-22)", Problem},
		"a row of the GPU, fast":    {func(*Facts) {}, 50, "", "", ""},
		"a row of another GPU":      {func(f *Facts) { f.Devices[0].Name = "NVIDIA H9000" }, 47, "85% of the rate of another GPU on this link", "expected (H100 on PCIe 5.0 x16, cited)", Warning},
		"the link's calculation":    {pcie(5), 5.5, "79% of the calculated rate of this link", ", computed)", Problem},
		"the flag":                  {func(f *Facts) { f.ExpectedRate = 60 }, 54, "90% of the 60.0 GB/s of --expect-bandwidth", "--expect-bandwidth is 60.0 GB/s", Problem},
		"the flag, nearly":          {func(f *Facts) { f.ExpectedRate = 55 }, 54.8, "of the 55.0 GB/s of --expect-bandwidth", "--expect-bandwidth is 55.0 GB/s", Problem},
		"the flag, met":             {func(f *Facts) { f.ExpectedRate = 20 }, 20, "", "", ""},
		"the bridge above":          {func(f *Facts) { f.Devices[0].Link.Bottleneck = &Upstream{Rate: 31.5} }, 20, "75% of what the bridge above carries", "expected (what the bridge above the GPU carries)", Problem},
	} {
		f := relink(well(t))
		c.change(f)
		copied(f, c.rate)
		_, found := Evaluate(f)
		if c.severity == "" {
			assert.NotContains(t, ids(found), "slow_copies", name)
			continue
		}
		one := byID(t, found, "slow_copies")
		assert.Equal(t, c.severity, one.Severity, name)
		assert.Contains(t, one.Summary, c.of, name)
		assert.Contains(t, strings.Join(one.Evidence, "\n"), c.evidence, name)
	}
}

// The page has the limits that count.
func TestThePageOfSlowCopiesHasItsLimits(t *testing.T) {
	t.Parallel()
	page, ok := findings.Get("slow_copies")
	require.True(t, ok)
	for _, text := range []string{
		"a warning below " + units.Share(LowShare) + ", a problem below " + units.Share(slowShare), "less than " + units.Share(halfShare),
		"by more than " + units.Share(unsteady), "the rate of `--expect-bandwidth`, which replaces these: a problem below it",
	} {
		assert.Contains(t, strings.Join(strings.Fields(page.Text), " "), text)
	}
}

// Copies that were measured again: the best sample counts for the hardware, and the spread decides
// whether a host is busy.
func TestSlowCopiesMeasuredAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rates    []float64
		best     float64 // of one sample of the last measurement; 0 for none
		id       string
		severity Severity
		says     string
	}{
		"fast in the end":       {[]float64{45, 46, 54}, 0, "busy", Note, "between 82% and 98% of"},
		"fast in the beginning": {[]float64{54, 46}, 0, "busy", Note, "between 84% and 98% of"},
		"one fast sample":       {[]float64{45, 45, 45}, 54, "busy", Note, "between 82% and 98% of"},
		"steady":                {[]float64{45, 45.5, 45.2}, 0, "slow_copies", Warning, "now reach 83% of the"},
		"steady and slower":     {[]float64{40, 40.1, 40.2}, 0, "slow_copies", Problem, "now reach 73% of the"},
		"of a busy host":        {[]float64{32, 36, 40}, 0, "slow_copies", Warning, "now reach 73% of the"},
		"by half":               {[]float64{27, 27.1}, 0, "slow_copies", Problem, "copies reach 49% of the"},
		"by half, unsteady":     {[]float64{20, 27.1}, 0, "slow_copies", Problem, "copies reach 49% of the"},
	} {
		f := well(t)
		d := &f.Devices[0]
		d.Bandwidth = nil
		for i, rate := range c.rates {
			b := &result.Bench{Series: []result.Series{series(result.HostToDevice, rate), series(result.DeviceToHost, rate)}}
			if i == len(c.rates)-1 && c.best > 0 {
				for k := range b.Series {
					s := &b.Series[k]
					s.Samples = append(s.Samples, rate, c.best)
					s.Stats = result.Summarize(s.Samples)
				}
			}
			d.Take(&Device{Bandwidth: b})
		}
		d.Repeats.Seconds = 31
		_, found := Evaluate(f)
		one := byID(t, found, c.id)
		assert.Equal(t, c.severity, one.Severity, name)
		assert.Contains(t, one.Summary, c.says, name)
		assert.Contains(t, strings.Join(one.Evidence, "\n"), " times in 31.0 s: medians ", name)
		for _, other := range []string{"busy", "slow_copies"} {
			assert.Equal(t, other == c.id, slices.Contains(ids(found), other), "%s: %s", name, other)
		}
		assert.Equal(t, c.id == "slow_copies", f.Slow(d), name)
		assert.Equal(t, strings.HasPrefix(name, "by half"), f.SlowByHalf(d), name)
		assert.Equal(t, slices.Min(c.rates), (&Device{Bandwidth: d.Slower}).Slowest(), name)
		assert.Equal(t, slices.Max(c.rates), d.Slowest(), name)
	}
}

// Wrong bytes and errors of a measurement between the best and the slowest are not lost.
func TestNoMeasurementIsForgotten(t *testing.T) {
	t.Parallel()
	f := well(t)
	d := &f.Devices[0]
	d.Bandwidth = nil
	for i, rate := range []float64{40, 45, 54} {
		b := &result.Bench{Started: time.Unix(int64(i), 0), Series: []result.Series{series(result.HostToDevice, rate)}}
		if i == 1 {
			b.Series[0].Mismatch, b.Errors = "wrong bytes: byte 7", []string{"device to host: cudaErrorUnknown (999): unknown error"}
		}
		d.Take(&Device{Bandwidth: b})
	}
	_, found := Evaluate(f)
	assert.Contains(t, byID(t, found, "wrong_bytes").Evidence, "wrong bytes: byte 7")
	assert.Contains(t, ids(found), "failed_call")
}
