package report

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

func TestNPD(t *testing.T) {
	t.Parallel()
	speeds := func(up, down float64) *result.Bench {
		direction := func(direction string, median float64) result.Series {
			return result.Series{Labels: result.Labels{{Key: result.Direction, Value: direction}}, Stats: result.Stats{Median: median}}
		}
		return &result.Bench{Series: []result.Series{direction(result.HostToDevice, up), direction(result.DeviceToHost, down)}}
	}
	two := &doctor.Facts{Devices: []doctor.Device{{Bandwidth: speeds(55.4, 54)}, {Bandwidth: speeds(55.1, 55)}}}
	one := 1
	problems := []doctor.Finding{{ID: "narrow_link", Severity: doctor.Problem, Device: &one, Summary: "the PCIe link runs at x8 of x16"}, {Severity: doctor.Note, Summary: "a note"}}
	warning := []doctor.Finding{{ID: "thp_off", Severity: doctor.Warning, Summary: "transparent huge pages are off"}}
	withPCI := &doctor.Facts{Host: &hostinfo.Host{GPUs: []hostinfo.PCIDevice{{}}}}
	for _, c := range []struct {
		r      Result
		want   string
		status int
	}{
		{Result{Verdict: doctor.Healthy, Facts: two}, "2 GPUs healthy, H2D 55.1 GB/s, D2H 54.0 GB/s", NPDOK},
		{Result{Verdict: doctor.Healthy, Facts: &doctor.Facts{Devices: make([]doctor.Device, 1)}}, "1 GPU healthy", NPDOK},
		{Result{Verdict: doctor.Healthy, Facts: &doctor.Facts{Simulated: true, Devices: make([]doctor.Device, 1)}}, "simulated: 1 GPU healthy", NPDOK},
		{Result{Verdict: doctor.Measured, Facts: two}, "2 GPUs work, speed not judged, H2D 55.1 GB/s, D2H 54.0 GB/s", NPDUnknown},
		{Result{Verdict: doctor.Incomplete, Facts: two, Stopped: "interrupted"}, "no verdict: interrupted", NPDUnknown},
		{Result{Verdict: doctor.Problems, Facts: two, Findings: problems}, "narrow_link: GPU 1: the PCIe link runs at x8 of x16", NPDNotOK},
		{Result{Verdict: doctor.Problems, Facts: two, Findings: append(problems, problems...)}, "(+1) narrow_link: GPU 1: the PCIe link runs at x8 of x16", NPDNotOK},
		{Result{Verdict: doctor.Problems, Facts: two}, "problems found", NPDNotOK},
		{Result{Verdict: doctor.Unusable, Facts: withPCI, Findings: []doctor.Finding{{Severity: doctor.Problem, Summary: "NVIDIA kernel module missing"}}},
			"no usable GPU: NVIDIA kernel module missing", NPDNotOK},
		{Result{Verdict: doctor.Unusable, Facts: &doctor.Facts{Host: &hostinfo.Host{}}}, "no NVIDIA GPU on the PCI bus of this host", NPDUnknown},
		{Result{Verdict: doctor.Unusable}, "no NVIDIA GPU on the PCI bus of this host", NPDUnknown},
		{Result{Verdict: "incomplete", Facts: two, Findings: problems}, "no verdict (incomplete)", NPDUnknown},
		{Result{Verdict: "incomplete", Facts: two, Findings: []doctor.Finding{{ID: "wrong_bytes", Severity: doctor.Problem, Summary: "bytes came back wrong"}}},
			"wrong_bytes: bytes came back wrong", NPDNotOK},
		{Result{Verdict: doctor.Warnings, Facts: two, Findings: warning}, "warning: thp_off: transparent huge pages are off", NPDOK},
		{Result{}, "no verdict ()", NPDUnknown},
	} {
		message, status := NPD(&c.r)
		assert.Equal(t, c.want, message)
		assert.Equal(t, c.status, status, message)
	}
	assert.Equal(t, "check failed: no memory", NPDError(errors.New("no\nmemory")))
}

func TestNPDLineIsShort(t *testing.T) {
	t.Parallel()
	for n := range 100 {
		for _, letter := range []string{"x", "µ", "世", "🙂"} {
			line := npdLine(strings.Repeat("x", n) + strings.Repeat(letter, 60))
			assert.LessOrEqual(t, len(line), 80)
			assert.True(t, utf8.ValidString(line), "%q", line)
			assert.GreaterOrEqual(t, len(line), min(60, 80-3))
		}
	}
	assert.Equal(t, strings.Repeat("x", 80), npdLine(strings.Repeat("x", 80)))
	assert.Equal(t, strings.Repeat("x", 77)+"...", npdLine(strings.Repeat("x", 81)))
	assert.NotContains(t, npdLine("a\x1b[31m\nb"), "\x1b")
}
