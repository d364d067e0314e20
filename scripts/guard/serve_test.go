//go:build linux && !android && (amd64 || arm64)

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/dynlib"
)

// asGuard has this test's executable be a guard.
const asGuard = "PINNED_TEST_AS_GUARD"

func TestMain(m *testing.M) {
	if os.Getenv(asGuard) != "" {
		main()
	}
	os.Exit(m.Run())
}

// simulated returns a fixture with simulated GPUs, whose samples are as short as can be.
func simulated(t *testing.T) *fixture {
	f := newFixture(context.Background(), 8, t.TempDir())
	f.sampleTime = time.Millisecond
	t.Cleanup(func() { _ = os.RemoveAll(shmFolder(f.dir)) })
	return f
}

// session sends commands to serve, and returns the replies.
func session(t *testing.T, f *fixture, rows []row, commands ...string) []reply {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, serve(f, rows, strings.NewReader(strings.Join(commands, "\n")), &out))
	var replies []reply
	for decoder := json.NewDecoder(&out); decoder.More(); {
		var r reply
		require.NoError(t, decoder.Decode(&r))
		replies = append(replies, r)
	}
	require.NotEmpty(t, replies)
	return replies
}

// All rows are prepared, which verifies their bytes, measured and closed, and leave nothing on the GPU.
func TestAllRowsAreMeasured(t *testing.T) {
	t.Parallel()
	var commands []string
	var rows []row
	for _, r := range registered {
		if r.once == nil {
			commands = append(commands, "prepare "+r.name, "sample "+r.name, "close "+r.name)
			rows = append(rows, r)
		}
	}
	replies := session(t, simulated(t), registered, commands...)
	require.NotNil(t, replies[0].Hello)
	assert.Len(t, replies[0].Hello.GPUs, 8)
	assert.Len(t, replies[0].Hello.Rows, len(registered))
	for i, r := range rows {
		prepared, sampled, closed := replies[1+3*i], replies[2+3*i], replies[3+3*i]
		if r.name == "files/on-disk/upload/256MiB" && prepared.LeftOut {
			continue // this system's folder for temporary files is in memory
		}
		assert.Empty(t, prepared.Error+sampled.Error+closed.Error, r.name)
		if assert.NotNil(t, sampled.Sample, r.name) {
			assert.Equal(t, r.unit, sampled.Sample.Figures[0].Unit, r.name)
			m := &measurement{}
			assert.NoError(t, m.add(newBuild, sampled.Sample), r.name)
		}
	}
}

func TestRowsAboutFirstCallsAreMeasured(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, r := range registered {
		if r.once == nil {
			continue
		}
		for _, verify := range []bool{true, false} { // the first one writes the files
			f := newFixture(context.Background(), 8, dir)
			f.verify = verify
			var out bytes.Buffer
			require.NoError(t, once(f, registered, r.name, &out))
			var answer reply
			require.NoError(t, json.Unmarshal(out.Bytes(), &answer))
			assert.Empty(t, answer.Error, r.name)
			assert.NoError(t, (&measurement{}).add(newBuild, answer.Sample), r.name)
		}
	}
}

// idle is a library whose copies, prefetches and kernels do nothing, and report success: all but cudaMemcpy, by which rows
// look at the bytes.
type idle struct {
	*cudasim.Sim
	noop uintptr
}

func (l idle) Symbol(name string) uintptr {
	switch name {
	case "cudaMemcpyAsync", "cudaMemcpyPeerAsync", "cudaMemcpyBatchAsync", "cudaMemPrefetchAsync", "cudaMemPrefetchBatchAsync", "cuLaunchKernel":
		return l.noop
	}
	return l.Sim.Symbol(name)
}

// A row that moves nothing would be fast: each finds out that it does not do what it measures.
func TestRowsThatMoveNothingFail(t *testing.T) {
	t.Parallel()
	libc, err := dynlib.Open("libc.so.6")
	require.NoError(t, err)
	f := simulated(t)
	f.wrap = func(sim *cudasim.Sim) cudart.Source { return idle{sim, libc.Symbol("pthread_condattr_destroy")} }
	var commands []string
	var rows []row
	for _, r := range registered {
		group, _, _ := strings.Cut(r.name, "/")
		if r.of == "" && r.once == nil && group != "kernel" && group != "control" {
			commands, rows = append(commands, "prepare "+r.name), append(rows, r)
		}
	}
	replies := session(t, f, registered, commands...)
	for i, r := range rows {
		assert.Contains(t, replies[1+i].Error, "verify: ", r.name)
	}
	// And those that go by cudaMemcpy.
	f = simulated(t)
	require.NoError(t, f.open())
	dev, p, err := f.memory(0, 0)
	require.NoError(t, err)
	nothing := func() error { return nil }
	assert.Error(t, f.checkUpload(dev, p, mib, nothing, f.source))
	assert.Error(t, f.checkDownload(dev, p, mib, nothing, f.target))
	require.NoError(t, f.put(dev, p, f.source()))
	require.NoError(t, f.onDevice(dev, p, f.source()))
	for _, at := range []int{0, mib/2 + 1, mib - 1} {
		f.source()[at] ^= 1
		assert.Error(t, f.onDevice(dev, p, f.source()), "byte %d", at)
		f.source()[at] ^= 1
	}
	require.NoError(t, f.close())
}

func TestServerRefusesWhatCannotBeDone(t *testing.T) {
	t.Parallel()
	const name = "calls/stream-query"
	replies := session(t, simulated(t), registered, "sample "+name, "close "+name, "dance "+name, "prepare nothing", "prepare "+name, "prepare "+name)
	for i, failed := range []bool{true, true, true, true, false, true} {
		assert.Equal(t, failed, replies[1+i].Error != "", "command %d: %+v", i, replies[1+i])
	}
}

func TestServerSurvivesAPanic(t *testing.T) {
	t.Parallel()
	rows := []row{{name: "bad", prepare: func(*fixture) (*task, error) { panic("at the disco") }}, registered[0]}
	replies := session(t, simulated(t), rows, "prepare bad", "prepare "+registered[0].name)
	assert.Contains(t, replies[1].Error, "at the disco")
	assert.Empty(t, replies[2].Error)
}

func TestNamesOfRows(t *testing.T) {
	t.Parallel()
	names := map[string]row{}
	quick, inVariants := 0, map[string]int{}
	for _, r := range registered {
		assert.NotContains(t, names, r.name)
		assert.NotContains(t, r.name, " ", "the protocol cuts at blanks")
		assert.NotEqual(t, r.prepare == nil, r.once == nil, "%s is prepared, or measured once", r.name)
		assert.NotEmpty(t, r.unit, r.name)
		assert.Contains(t, append(slices.Collect(maps.Keys(scale)), "GB/s", "samples/s", "million/s", contextsUnit), r.unit)
		names[r.name] = r
		for _, c := range r.c {
			program, lines, _ := strings.Cut(c, " ")
			assert.Contains(t, programs, program, r.name)
			assert.NotEmpty(t, lines, r.name)
		}
		if r.quick {
			quick++
		}
		if r.twoCores {
			inVariants["two-cores"]++
		}
		if r.busy {
			inVariants["busy"]++
		}
	}
	for _, r := range registered {
		if r.of != "" {
			assert.Contains(t, names, r.of, r.name)
			assert.Equal(t, names[r.of].unit, r.unit, r.name)
		}
	}
	for _, v := range variants[1:] {
		assert.Positive(t, inVariants[strings.TrimSuffix(v.prefix, "/")], v.prefix)
	}
	t.Logf("%d rows, %d of them quick, in variants %v", len(names), quick, inVariants)
}

// needsProcesses skips a test under qemu-user, which cannot start programs of its own architecture.
func needsProcesses(t *testing.T) {
	if os.Getenv("PINNED_TEST_EXEC") != "" {
		t.Skip("programs of " + runtime.GOARCH + " cannot be started directly (qemu-user without binfmt_misc)")
	}
	t.Setenv(asGuard, "1")
}

// Two processes of this executable are compared, under each variant. What the verdict is depends on the host.
func TestTwoProcessesAreCompared(t *testing.T) {
	needsProcesses(t)
	out := t.TempDir() + "/result.json"
	self, err := os.Executable()
	require.NoError(t, err)
	code, err := run(t.Context(), []string{"compare", "-sim", "-old", self, "-new", self, "-dir", t.TempDir(), "-out", out, "-time", "1ns", "-sample-time", "1ms",
		"-rows", "calls/copy64-wait|kernel/launch"})
	require.NoError(t, err)
	assert.Contains(t, []int{exitSame, exitWorse}, code)
	text, err := os.ReadFile(out)
	require.NoError(t, err)
	var r report
	require.NoError(t, json.Unmarshal(text, &r))
	assert.Empty(t, r.Failed)
	assert.Empty(t, r.LeftOut)
	cores := map[string]bool{}
	for _, row := range r.Rows {
		cores[row.Row] = true
		assert.GreaterOrEqual(t, len(row.NewSamples), minPairs, row.Row)
		assert.Len(t, row.OldSamples, len(row.NewSamples), row.Row)
	}
	for _, name := range []string{"calls/copy64-wait", "two-cores/calls/copy64-wait", "busy/calls/copy64-wait-cancellable"} {
		assert.Contains(t, cores, name)
	}
	left, err := os.ReadDir("/dev/shm")
	require.NoError(t, err)
	for _, entry := range left {
		assert.NotContains(t, entry.Name(), "pinned-guard-")
	}
}

// A process that hangs or dies does not take the comparison with it.
func TestAProcessThatEndsIsStartedAgain(t *testing.T) {
	needsProcesses(t)
	self, err := os.Executable()
	require.NoError(t, err)
	c, err := startChild(t.Context(), self, 1, "-sim", "-dir", t.TempDir())
	require.NoError(t, err)
	assert.Equal(t, 1, c.hello().Cores, "GOMAXPROCS follows the CPUs that it may run on")
	require.NoError(t, c.cmd.Process.Kill())
	_, err = c.request(t.Context(), "prepare calls/stream-query")
	var answer replyError
	require.Error(t, err)
	assert.NotErrorAs(t, err, &answer)
	assert.Error(t, c.close())

	c, err = startChild(t.Context(), self, 0, "-sim", "-dir", t.TempDir())
	require.NoError(t, err)
	s, err := c.request(t.Context(), "once -verify first/calls")
	require.NoError(t, err)
	assert.NoError(t, (&measurement{}).add(newBuild, s))
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.request(gone, "once first/calls")
	assert.ErrorContains(t, err, "first/calls")
	_, err = c.request(t.Context(), "prepare nothing")
	assert.ErrorAs(t, err, &answer)
	assert.NoError(t, c.close())

	_, err = startChild(t.Context(), self, 0, "-no-such-flag")
	assert.ErrorContains(t, err, "has ended")
}

func TestPlantedTimeIsMeasured(t *testing.T) {
	t.Parallel()
	const passed = 10 * time.Millisecond
	assert.GreaterOrEqual(t, stretched(time.Now().Add(-passed), 15), passed*115/100)
	assert.GreaterOrEqual(t, stretched(time.Now().Add(-passed), 0), passed)
}

func TestWrongUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{nil, {"dance"}, {"compare"}, {"compare", "-old", "a", "-new", "b", "-samples", "7"},
		{"compare", "-old", "a", "-new", "b", "-rows", "("}, {"once"}, {"load"}, {"compare", "-old", "a", "-new", "b", "more"}} {
		code, _ := run(t.Context(), args)
		assert.Equal(t, exitUsage, code, "%v", args)
	}
}

func TestFilesThatDoNotFitAreLeftOut(t *testing.T) {
	t.Parallel()
	var why leftOut
	_, err := simulated(t).ownFile(cached, 1<<60)
	assert.ErrorAs(t, err, &why)
	assert.ErrorContains(t, err, "has room for")
}
