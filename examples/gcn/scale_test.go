package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// onSim are options of a small network on a simulated GPU with so much memory.
func onSim(t *testing.T, memory int) (options, *cudasim.Sim) {
	t.Helper()
	o := options{graph: sizes{Nodes: 1, EdgesPerNode: 6, Features: 48, Hidden: 70, Classes: 7, Seed: 3}, epochs: 3, rate: 1,
		blas: true, plan: true, inPlace: true, budget: 0.5, panel: 16}
	sim, _ := testgpu.Sim(t, cudasim.Config{Kernels: simulatedKernels, Devices: []cudasim.DeviceConfig{{Memory: memory}}})
	o.source = sim
	return o, sim
}

// rowsOf returns the fields of the rows of a table, by nodes and way.
func rowsOf(t *testing.T, table string) (rows [][]string) {
	t.Helper()
	lines := strings.Split(strings.TrimRight(table, "\n"), "\n")
	require.Greater(t, len(lines), 2, table)
	for _, line := range lines[2:] {
		line += strings.Repeat(" ", 120)
		row := []string{line[:12], line[14:42], line[43:53], line[54:64], line[65:77], line[79:]}
		for i := range row {
			row[i] = strings.TrimSpace(row[i])
		}
		rows = append(rows, row)
	}
	return rows
}

func TestScaleHasARowForEachWay(t *testing.T) {
	t.Parallel()
	o, _ := onSim(t, 4<<30)
	o.scale = scale{200, 300}
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), o, &out), out.String())
	rows := rowsOf(t, out.String())
	require.Len(t, rows, 6, out.String())
	for i, row := range rows {
		assert.Equal(t, []string{"200", "300"}[i/3], row[0])
		assert.Equal(t, []string{"device memory", "managed memory", "budget of 0.50, by a plan"}[i%3], row[1])
		assert.Regexp(t, `^\d+\.\d{3}$`, row[2])
		assert.Regexp(t, `^\d+\.\d\d$`, row[3])
		assert.Equal(t, rows[i/3*3][4][:4], row[4][:4], "the losses are those of one network")
		assert.Empty(t, row[5])
	}
}

// What is computed beforehand is what is allocated.
func TestNeedIsWhatIsAllocated(t *testing.T) {
	t.Parallel()
	o, _ := onSim(t, 4<<30)
	o.graph.Nodes = 300
	for _, w := range o.ways() {
		large, small, err := w.options.need(t.Context())
		require.NoError(t, err)
		want := large + small
		if w.options.budget > 0 {
			want = int(w.options.budget*float64(o.graph.bytes())) + small
			assert.Greater(t, large, o.graph.bytes(), "and a panel of the sum")
		} else {
			assert.Equal(t, o.graph.bytes(), large)
		}
		_, peak, err := w.options.measure(t.Context(), newGraph(o.graph))
		require.NoError(t, err)
		assert.Equal(t, want, peak, w.name)
	}
}

// Rows that do not fit are not begun: nothing is allocated.
func TestScaleBeginsNoRowThatDoesNotFit(t *testing.T) {
	t.Parallel()
	o, sim := onSim(t, 256<<20) // less than the reserve
	o.scale, o.python = scale{200}, filepath.Join(t.TempDir(), "none")
	o.graph.Hidden = 1 << 18
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), o, &out))
	rows := rowsOf(t, out.String())
	require.Len(t, rows, 4, out.String())
	for i, row := range rows {
		assert.Equal(t, []string{"", "", ""}, row[2:5])
		if i < 3 {
			assert.Regexp(t, `^needs \d+\.\d GB, 0\.3 GB of the card are free$`, row[5])
		} else {
			assert.Equal(t, "need at least 1.5 GB, 0.3 GB of the card are free", row[5])
		}
	}
	assert.Zero(t, sim.Calls("cudaMalloc"))
	assert.Zero(t, sim.Calls("cudaMallocManaged"))

	// Memory that is gone when it is asked for is a reason, too, and other errors fail.
	o, sim = onSim(t, 4<<30)
	o.scale = scale{200}
	sim.Fail("cudaMallocManaged", cudasim.Fault{Code: cudart.ErrMemoryAllocation})
	out.Reset()
	require.NoError(t, run(t.Context(), o, &out))
	rows = rowsOf(t, out.String())
	assert.NotEmpty(t, rows[0][2])
	assert.Contains(t, rows[1][5], "out of memory")
}

// The rows of PyTorch come from gcn.py, which reads the graph that was written and is gone afterwards.
func TestScaleStartsPython(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	python := filepath.Join(dir, "python")
	require.NoError(t, os.WriteFile(python, []byte(`#!/bin/sh
test -s "$2" || exit 3
cat > "`+dir+`/script"
echo "$2" > "`+dir+`/graph"
shift 2
echo "$@"
`), 0o777))
	o, _ := onSim(t, 4<<30)
	o.scale, o.python = scale{200}, python
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), o, &out), out.String())
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	assert.Equal(t, "--table --epochs 3 --rate 1 --device cuda:0 --limit 5.24e-05", lines[len(lines)-1])
	got, err := os.ReadFile(filepath.Join(dir, "script"))
	require.NoError(t, err)
	assert.Equal(t, script, string(got))
	name, err := os.ReadFile(filepath.Join(dir, "graph"))
	require.NoError(t, err)
	assert.NoFileExists(t, strings.TrimSpace(string(name)))

	o.python = "false"
	require.ErrorContains(t, run(t.Context(), o, &out), "200 nodes: false: exit status 1")
}

func TestScaleEndsWithItsContext(t *testing.T) {
	t.Parallel()
	o, _ := onSim(t, 4<<30)
	o.scale = scale{200, 300}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, run(ctx, o, &bytes.Buffer{}), context.Canceled)
}

func TestScaleFlag(t *testing.T) {
	t.Parallel()
	var s scale
	require.NoError(t, s.Set("true"))
	assert.Equal(t, defaultScale, s)
	require.NoError(t, s.Set("5,7"))
	assert.Equal(t, "5,7", s.String())
	for _, text := range []string{"", "0", "1,", "-3", "1e6", "99999999999999999999"} {
		assert.ErrorContains(t, s.Set(text), "want numbers of nodes", text)
	}
}

// gcn.py computes what this program computes, where there is a PyTorch for the CPU.
func TestPyTorchComputesTheSame(t *testing.T) {
	t.Parallel()
	python := os.Getenv("PINNED_TEST_TORCH") // a Python with PyTorch
	if python == "" {
		t.Skip("needs PyTorch: set PINNED_TEST_TORCH to a Python that has it")
	}
	dir := t.TempDir()
	graph, losses := filepath.Join(dir, "graph.bin"), filepath.Join(dir, "losses.json")
	o := options{graph: sizes{Nodes: 300, EdgesPerNode: 6, Features: 48, Hidden: 70, Classes: 7, Seed: 3}, epochs: 4, rate: 1, cpu: true, output: output{write: graph, json: losses}}
	require.NoError(t, run(t.Context(), o, &bytes.Buffer{}))
	out, err := exec.Command(python, "gcn.py", graph, "--epochs", "4", "--rate", "1", "--losses", losses, "--device", "cpu").CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Contains(t, string(out), "losses of 4 epochs differ by ")
	out, err = exec.Command(python, "gcn.py", graph, "--table", "--device", "cpu").CombinedOutput()
	require.NoError(t, err, string(out))
	rows := rowsOf(t, "\n\n"+string(out))
	require.Len(t, rows, 2)
	assert.Equal(t, []string{"300", "PyTorch"}, rows[0][:2])
	assert.Regexp(t, `^\d\.\d{6}$`, rows[0][4])
}
