//go:build linux && !android && (amd64 || arm64)

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A row that needs more GPUs than there are is left out, which is no failure; a row that a goal names is measured
// too.
func TestTableOfFourGPUs(t *testing.T) {
	needsProcesses(t)
	out := t.TempDir() + "/table.json"
	code, err := run(t.Context(), []string{"table", "-sim", "-sim-gpus", "4", "-dir", t.TempDir(), "-sample-time", "1ms",
		"-rows", "gpus/[48]/(16-gor|fanout/)|gpus/contexts", "-out", out})
	require.NoError(t, err)
	assert.Equal(t, exitSame, code)
	text, err := os.ReadFile(out)
	require.NoError(t, err)
	var got table
	require.NoError(t, json.Unmarshal(text, &got))
	assert.Len(t, got.Host.GPUs, 4)
	rows := map[string]tableRow{}
	var order []string
	for _, r := range got.Rows {
		assert.False(t, r.Failed, "%+v", r)
		if !strings.HasSuffix(r.Row, " cpu") {
			order = append(order, r.Row)
		}
		rows[r.Row] = r
	}
	assert.Equal(t, []string{"gpus/contexts-on-others", "gpus/8/fanout/2GiB", "gpus/8/16-goroutines/1MiB", "gpus/4/fanout/2GiB",
		"gpus/4/16-goroutines/1MiB", "gpus/4/16-goroutines/1MiB p99", "gpus/2/16-goroutines/1MiB", "gpus/2/16-goroutines/1MiB p99"}, order)
	assert.Equal(t, "needs 8 GPUs", rows["gpus/8/fanout/2GiB"].Note)
	assert.Equal(t, "fanout-4 was not built", rows["gpus/4/fanout/2GiB"].Note)
	assert.Len(t, rows["gpus/4/fanout/2GiB"].Samples, tableSamples)
	p99 := rows["gpus/4/16-goroutines/1MiB p99"]
	assert.Equal(t, rows["gpus/2/16-goroutines/1MiB p99"].Measured, p99.Value)
	assert.NotNil(t, p99.Met)
	assert.True(t, *rows["gpus/contexts-on-others"].Met)
}

func TestGoalsOfATable(t *testing.T) {
	t.Parallel()
	row := func(name, unit string, value float64, goals ...goal) *measurement {
		m := &measurement{rowInfo: rowInfo{Name: name, Goals: goals}, onlyNew: true, inC: map[string]beside{}}
		assert.NoError(t, m.add(newBuild, &sample{Figures: []figure{{Value: value, Unit: unit}}}))
		return m
	}
	beatsC := row("beats C", "GB/s", 96, goal{Ratio: 0.95})
	beatsC.inC[""] = beside{Name: "C line", Value: 100}
	withoutC := row("without C", "GB/s", 96, goal{Ratio: 0.95})
	withoutC.withoutC = "it was not built"
	broken := row("broken", "GB/s", 1)
	broken.err = errors.New("wrong bytes")
	missing := row("missing", "GB/s", 1)
	missing.err = replyError{text: "needs 8 GPUs", leftOut: true}
	result := &comparisonResult{measurements: []*measurement{
		beatsC, withoutC, broken, missing,
		row("file", "GB/s", 100), row("slow", "GB/s", 89, goal{Row: "file", Ratio: 0.9}), row("fast", "GB/s", 90, goal{Row: "file", Ratio: 0.9}),
		row("of broken", "GB/s", 90, goal{Row: "broken", Ratio: 0.9}),
		row("base", "µs", 100), row("late", "µs", 151, goal{Row: "base", Ratio: 1.5}), row("in time", "µs", 150, goal{Row: "base", Ratio: 1.5}),
		row("none", contextsUnit, 0, goal{}), row("some", contextsUnit, 1, goal{}),
	}}
	result.hellos[newBuild] = &hello{}
	got := map[string]string{}
	made := tableOf(result, hostFacts{})
	for _, r := range made.Rows {
		switch {
		case r.Failed:
			got[r.Row] = "failed: " + r.Note
		case r.Met != nil && *r.Met:
			got[r.Row] = "yes"
		case r.Met != nil:
			got[r.Row] = "no"
		default:
			got[r.Row] = r.Note
		}
	}
	assert.Equal(t, map[string]string{"beats C": "yes", "without C": "it was not built", "broken": "failed: wrong bytes", "missing": "needs 8 GPUs",
		"file": "", "slow": "no", "fast": "yes", "of broken": "no figure of broken", "base": "", "late": "no", "in time": "yes", "none": "yes", "some": "no"}, got)
	var text strings.Builder
	made.writeText(&text)
	for _, want := range []string{`(?m)^slow +89 GB/s +100 file +0.89 +>= 0.9x +NO$`, `(?m)^late +151 µs +100 base +1.51 +<= 1.5x +NO$`,
		`(?m)^none +0 contexts +0 +yes$`, `(?m)^beats C +96 GB/s +100 C line +0.96 +>= 0.95x +yes$`, `(?m)^broken .* FAILED: wrong bytes$`, `(?m)^missing .* left out: needs 8 GPUs$`} {
		assert.Regexp(t, want, text.String())
	}
}

// Rows for which no time is left are failures, and none is begun.
func TestTableEndsInTime(t *testing.T) {
	t.Parallel()
	h := fake(3, func(*rand.Rand) float64 { return 1 })
	c := h.comparison()
	c.budget = time.Nanosecond
	result, err := c.runAlone(t.Context())
	require.NoError(t, err)
	made := tableOf(result, hostFacts{})
	require.Len(t, made.Rows, 4, "two figures of the first row")
	assert.False(t, made.Rows[0].Failed)
	assert.Equal(t, "not begun within 1ns", made.Rows[2].Note)
	assert.True(t, made.Rows[2].Failed && made.Rows[3].Failed)
	assert.Equal(t, 1, h.started, "one build runs")
}

// Work on one GPU that makes a context on another one is found, and so is work that none sees.
func TestContextsOnOthersAreCounted(t *testing.T) {
	t.Parallel()
	for others, work := range []func(f *fixture, gpu int) error{
		workOn,
		func(f *fixture, gpu int) error { return errors.Join(workOn(f, gpu), workOn(f, 3)) },
		func(f *fixture, gpu int) error { return errors.Join(workOn(f, gpu), workOn(f, 0), workOn(f, 1)) },
	} {
		f := simulated(t)
		s, err := contextsAfter(work)(f)
		require.NoError(t, err)
		assert.Equal(t, float64(others), s.Figures[0].Value)
		require.NoError(t, f.close())
	}
	f := simulated(t)
	_, err := contextsAfter(func(*fixture, int) error { return nil })(f)
	assert.ErrorContains(t, err, "nothing of this process is seen")
	require.NoError(t, f.close())
}

// One program in C is run for each number of GPUs, and gets a folder if it copies files.
func TestProgramsOfSeveralGPUs(t *testing.T) {
	needsProcesses(t)
	dir, files := t.TempDir(), t.TempDir()
	script := "#!/bin/sh\nfor last; do :; done\necho \"BenchmarkFanout/$6/$last/ 2 100 ns/op 95 GB/s\"\n"
	require.NoError(t, os.WriteFile(dir+"/fanout", []byte(script), 0o700))
	b := &baseline{dir: dir, files: files, outputs: map[string][]line{}, errs: map[string]error{}}
	for _, gpus := range gpuCounts {
		for fromFile, last := range map[bool]string{false: "2048", true: files} {
			lines, err := b.lines(t.Context(), fanoutProgram(gpus, fromFile))
			require.NoError(t, err)
			_, v, ok := fastest(lines, fmt.Sprintf("Fanout/%d/%s/", gpus, last), "GB/s", "GB/s")
			assert.True(t, ok, "%d GPUs, file %v: %v", gpus, fromFile, lines)
			assert.Equal(t, 95.0, v)
		}
	}
}

// The lines of a program that is ended count, since each is a result.
func TestProgramsThatAreEnded(t *testing.T) {
	needsProcesses(t)
	dir := t.TempDir()
	for name, script := range map[string]string{"ring": "echo BenchmarkA 2 100 ns/op 95 GB/s; : >$0.printed; exec sleep 100", "pin": "exec sleep 100"} {
		require.NoError(t, os.WriteFile(dir+"/"+name, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
	}
	b := &baseline{dir: dir, outputs: map[string][]line{}, errs: map[string]error{}}
	ctx, end := context.WithCancel(t.Context())
	go func() {
		for {
			if _, err := os.Stat(dir + "/ring.printed"); err == nil {
				end()
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	lines, err := b.lines(ctx, "ring")
	require.NoError(t, err)
	assert.Len(t, lines, 1)
	b.limit = time.Nanosecond
	_, err = b.lines(t.Context(), "pin")
	assert.ErrorContains(t, err, "not done after 1ns")
}

func TestMemoryInUseByAddress(t *testing.T) {
	t.Parallel()
	f := simulated(t)
	require.NoError(t, f.open())
	devices := f.rt.Devices()[:2]
	text := "00000000:FF:00.0, 7\n"
	for i := range devices {
		text += fmt.Sprintf("0000%s, %d\n", strings.ToUpper(devices[1-i].PCIBusID()), 10+i)
	}
	used := make([]int, 2)
	require.NoError(t, usedOf(text, devices, used))
	assert.Equal(t, []int{11 * mib, 10 * mib}, used)
	assert.ErrorContains(t, usedOf("00000000:FF:00.0, 7\n", devices, used), "lists no GPU at "+devices[0].PCIBusID())
	require.NoError(t, f.close())
}
