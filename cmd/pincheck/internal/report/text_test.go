package report

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// found returns findings of a severity: "ID SUMMARY" of the host, or "N ID SUMMARY" of GPU N.
func found(s doctor.Severity, all ...string) (out []doctor.Finding) {
	for _, text := range all {
		f := doctor.Finding{Severity: s}
		if text[0] >= '0' && text[0] <= '9' {
			gpu := int(text[0] - '0')
			f.Device, text = &gpu, text[2:]
		}
		f.ID, f.Summary, _ = strings.Cut(text, " ")
		out = append(out, f)
	}
	return out
}

// The verdict says what is wrong and where: each GPU is named once, with all that is said of it.
func TestVerdictNamesEachGPUOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		findings []doctor.Finding
		want     string
	}{
		{found(doctor.Problem, "2 slow copies at 54%", "2 link x8 of x16", "2 ecc errors", "2 calls failed"), "GPU 2: copies at 54%, and x8 of x16; 2 further problems"},
		{found(doctor.Problem, "0 slow copies at 54%", "1 link x8 of x16"), "GPU 0: copies at 54%; GPU 1: x8 of x16"},
		{found(doctor.Problem, "0 slow copies at 54%", "1 slow copies at 54%"), "GPUs 0, 1: copies at 54%"},
		{found(doctor.Problem, "0 link x8", "1 link x8", "2 link x8", "3 link x8", "0 slow copies at 54%"), "GPU 0: x8, and copies at 54%; GPUs 1 to 3: x8"},
		{found(doctor.Problem, "missing 1 of 4 GPUs missing", "2 slow copies at 54%"), "1 of 4 GPUs missing; GPU 2: copies at 54%"},
		{found(doctor.Problem, "0 x same", "x same"), "GPU 0: same; same"},
		{append(found(doctor.Problem, "slow it is slow"), found(doctor.Warning, "thp off", "0 few few CPUs")...), "it is slow; 2 warnings"},
		{append(found(doctor.Warning, "thp off"), found(doctor.Note, "0 n note")...), "off"},
	} {
		assert.Equal(t, c.want, problemsText(&Result{Findings: c.findings}), "%v", c.findings)
	}
}

// What is printed of a healthy host fits a screen, also of eight GPUs; all the rest is there for who asks.
func TestTextOfAHealthyHostFitsAScreen(t *testing.T) {
	t.Parallel()
	r := results(t)["healthy"]
	one := r.Devices[0]
	for i := range 7 {
		d := one
		d.Ordinal, d.Name = i+1, "NVIDIA RTX 6000 Ada Generation"
		r.Devices = append(r.Devices, d)
	}
	text := render(t, r, Text, Style{})
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	assert.LessOrEqual(t, len(lines), 25, text) // with two references, of two types of GPU
	for _, line := range lines {
		assert.LessOrEqual(t, len([]rune(line)), 80, "%s", line)
	}
	for _, part := range []string{"0 NVIDIA H200", "7 RTX 6000 Ada", "Healthy: all 8 GPUs copy at full speed"} {
		assert.Contains(t, text, part)
	}
	verbose := render(t, r, Text, Style{Verbose: true})
	for _, part := range []string{"Passed  ", "(median of 3, ", r.Devices[0].UUID, "compute capability 9.0", "not /opt/venv/lib/libcudart.so.13.2"} {
		assert.NotContains(t, text, part)
		assert.Contains(t, verbose, part)
	}
	assert.NotContains(t, verbose, "--verbose")
}

// A host with one problem begins with it, and says all of it.
// What ends a Go process at the next signal is shown without --verbose.
func TestTextHasTheNotesOfTheLibrary(t *testing.T) {
	t.Parallel()
	r := results(t)["healthy"]
	r.Library.Notes = []string{"signal 10 (user defined signal 1) has a handler without SA_ONSTACK, in /lib/libonnxruntime.so"}
	text := strings.Join(strings.Fields(render(t, r, Text, Style{})), " ")
	assert.Contains(t, text, "Signal 10 (user defined signal 1) has a handler without SA_ONSTACK, in /lib/libonnxruntime.so.")
}

func TestTextBeginsWithTheProblem(t *testing.T) {
	t.Parallel()
	r := results(t)["healthy"]
	gpu := 0
	r.Findings = slices.Concat([]doctor.Finding{{ID: "slow_copies", Severity: doctor.Problem, Device: &gpu, Summary: "copies at 54%", Evidence: []string{"29.9 GB/s"},
		Cause: "an IOMMU", Cost: "half", Remedy: "first see: `dmesg | grep -e NVRM -e Xid -e AER -e DMAR -e IOMMU -e VT-d -e 'PCIe Bus Error'`"}}, found(doctor.Note, "0 n a note"))
	r.Conclude(false)
	lines := strings.Split(render(t, r, Text, Style{}), "\n")
	require.Greater(t, len(lines), 12)
	assert.Equal(t, []string{
		"Problem: GPU 0: copies at 54%.",
		"",
		"Problem  GPU 0: copies at 54%                                        slow_copies",
		"  Seen   29.9 GB/s.",
		"  Why    An IOMMU",
		"  Cost   Half",
		"  Do     First see:",
		"           dmesg | grep -e NVRM -e Xid -e AER -e DMAR -e IOMMU -e VT-d -e 'PCIe Bus Error'",
	}, lines[:8], "a command is in one line, however long")
	assert.Contains(t, lines, "  n  GPU 0: a note.", "notes are short")
}

// Findings that are the same of several GPUs are one, unless all is asked for.
func TestTextMergesFindingsOfGPUs(t *testing.T) {
	t.Parallel()
	r := &Result{Command: "check", Complete: true, Findings: found(doctor.Problem, "0 x bad", "1 x bad", "3 x bad", "2 y worse")}
	text := render(t, r, Text, Style{})
	assert.Equal(t, 1, strings.Count(text, " x\n")-1, text) // and at the end, of explain
	assert.Regexp(t, `(?m)^Problem  GPUs 0, 1, 3: bad +x$`, text)
	assert.Equal(t, 3, strings.Count(render(t, r, Text, Style{Verbose: true}), " x\n")-1)
}

// An experiment has one table, and no plot, unless all is asked for.
func TestTextOfAnExperimentHasOneTable(t *testing.T) {
	t.Parallel()
	b := result.Bench{Name: "x", Answers: []string{"fast"}, Notes: []string{"a note"}, Errors: []string{"one failed"}, Complete: true}
	for i := range 3 {
		name := fmt.Sprintf("s%d", i)
		b.Views = append(b.Views, result.View{Title: "View " + name, Series: name, X: "size_bytes"})
		for _, size := range []string{"1024", "2048"} {
			b.Series = append(b.Series, result.Single(name, result.Labels{{Key: "size_bytes", Value: size}}, result.GBPerSecond, 5))
		}
	}
	r := &Result{Command: "bench", Complete: true, Facts: &doctor.Facts{Host: &hostinfo.Host{}}, Benches: []result.Bench{b}}
	text, verbose := render(t, r, Text, Style{}), render(t, r, Text, Style{Verbose: true})
	for _, part := range []string{"fast\n", "View s0", "Error      one failed"} {
		assert.Contains(t, text, part)
		assert.Contains(t, verbose, part)
	}
	for _, part := range []string{"View s1", "View s2", "████", "a note", "Method"} {
		assert.NotContains(t, text, part)
		assert.Contains(t, verbose, part)
	}
	b.Views = nil
	r.Benches[0] = b
	assert.Equal(t, 6, strings.Count(render(t, r, Text, Style{}), "5.00 GB/s"), "what no table shows is listed")
}

// Where no process started, no driver is at fault, simulated or not.
func TestAProcessThatIsNotStartedIsNoFaultOfTheDriver(t *testing.T) {
	t.Parallel()
	for _, simulated := range []bool{false, true} {
		r := &Result{Command: "check", Complete: true, Facts: doctor.WithoutAnswer(doctor.Probe{Name: "cuda", State: doctor.ProbeNotStarted, Detail: "/lib/ld.so does not start"}, &hostinfo.Host{})}
		r.Simulated = simulated
		r.Conclude(true)
		_, text, _ := verdictText(r)
		assert.Equal(t, doctor.Problems, r.Verdict)
		assert.Contains(t, text, "could not start its child process")
		require.Len(t, r.Findings, 1)
		assert.Equal(t, "process_not_started", r.Findings[0].ID)
		assert.Equal(t, []string{"/lib/ld.so does not start"}, r.Findings[0].Evidence)
	}
}
