package main

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/hosttest"
)

// A skippedTime is a clock on which only pauses take time, and those none of the test's.
type skippedTime struct {
	mu     sync.Mutex
	passed time.Duration
	pauses []time.Duration
}

func (c *skippedTime) since() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.passed
}

func (c *skippedTime) now() time.Time { return time.Time{}.Add(c.since()) }

func (c *skippedTime) after(d time.Duration) <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.passed += d
	c.pauses = append(c.pauses, d)
	ch := make(chan time.Time, 1)
	ch <- time.Time{}.Add(c.passed)
	return ch
}

// slowHost is a host with a simulated GPU whose copies have a share of the link that depends on the time and on the number of the copy.
func slowHost(t *testing.T, share func(at time.Duration, n int) float64) (system, *skippedTime) {
	t.Helper()
	clock := &skippedTime{}
	sys := on(t, "h200-vm")
	sys.after, sys.now = clock.after, clock.now
	sys.open = opening(t, cudasim.Config{Devices: []cudasim.DeviceConfig{{
		Name: "NVIDIA H200", PCIBusID: "0000:00:06.0", LinkShare: func(n int) float64 { return share(clock.since(), n) },
	}}})
	return sys, clock
}

// withRates is normal for rates that the link model alone decides, and that are the same in each run.
func withRates(s string) string {
	for _, v := range volatile {
		if !strings.Contains(v.with, "P %") {
			s = v.pattern.ReplaceAllString(s, v.with)
		}
	}
	return s
}

// Links that are slow in different ways: what is slow for a while, or at some copies, is a neighbour and no problem of the hardware.
// What stays slow by less than a half is reported as it is now, after half a minute; what is slow by half is
// reported at once. The golden files are what pincheck prints.
func TestSlowLinks(t *testing.T) {
	t.Parallel()
	needsSim(t)
	until := func(end time.Duration, share float64) func(time.Duration, int) float64 {
		return func(at time.Duration, _ int) float64 {
			if at < end {
				return share
			}
			return 1
		}
	}
	const ever = time.Hour
	const half = 27.1 / 55.4
	for _, c := range hosttest.Sample([]struct {
		name     string
		share    func(at time.Duration, n int) float64
		args     string
		code     int
		id       string
		severity doctor.Severity
		pauses   int
	}{
		{name: "3s", share: until(3*time.Second, 0.85), code: exitOK, id: "busy", severity: doctor.Note, pauses: 2},
		{name: "30s", share: until(30*time.Second, 0.7), code: exitOK, id: "busy", severity: doctor.Note, pauses: 5},
		{name: "every-other-copy", share: func(_ time.Duration, n int) float64 { return 1 - 0.4*float64(n%2) }, code: exitOK, id: "busy", severity: doctor.Note},
		{name: "x8", share: until(ever, half), code: exitProblems, id: "slow_copies", severity: doctor.Problem},
		{name: "for-good", share: until(ever, 0.85), code: exitWarnings, id: "slow_copies", severity: doctor.Warning, pauses: 5},
		{name: "busy-for-good", share: func(_ time.Duration, n int) float64 { return 0.6 + 0.03*float64(n%5) }, code: exitWarnings, id: "slow_copies", severity: doctor.Warning, pauses: 5},
		{name: "below-the-flag", share: until(ever, 1), args: "--expect-bandwidth 60", code: exitProblems, id: "slow_copies", severity: doctor.Problem, pauses: 5},
		{name: "below-the-flag-3s", share: until(3*time.Second, 0.95), args: "--expect-bandwidth 54", code: exitOK, id: "busy", severity: doctor.Note, pauses: 2},
		{name: "healthy", share: until(0, 1), code: exitOK},
	}) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			sys, clock := slowHost(t, c.share)
			got := call(t, sys, append([]string{"--quiet"}, strings.Fields(c.args)...)...)
			assert.Equal(t, c.code, got.code, got.stdout)
			assert.Equal(t, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second}[:c.pauses], append([]time.Duration{}, clock.pauses...))
			goldenText(t, "slow-link-"+c.name+".txt", withRates(got.stdout))

			sys, _ = slowHost(t, c.share)
			got = call(t, sys, append([]string{"--quiet", "--format", "json"}, strings.Fields(c.args)...)...)
			var r report.Result
			require.NoError(t, json.Unmarshal([]byte(got.stdout), &r))
			found := map[string]doctor.Severity{}
			for _, f := range r.Findings {
				if f.ID == "busy" || f.ID == "slow_copies" || f.ID == "unsteady_copies" && f.Severity.AtLeast(doctor.Warning) {
					found[f.ID] = f.Severity
				}
			}
			want := map[string]doctor.Severity{}
			if c.id != "" {
				want[c.id] = c.severity
			}
			assert.Equal(t, want, found)
		})
	}
}
