package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
)

// The table of -scale has a row for each number of nodes and each way to have the memory. Whether a row
// fits is computed before it begins: one that does not stays empty and says why, and nothing is
// allocated for it. Managed memory is never more than what the card has free, so that no
// row moves memory of another program.

// defaultScale are the numbers of nodes of -scale alone.
var defaultScale = scale{1_000_000, 2_000_000, 3_000_000, 10_000_000}

// scale is the value of -scale: numbers of nodes.
type scale []int

func (s *scale) String() string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint([]int(*s)), " ", ","), "[]")
}

// IsBoolFlag makes -scale alone valid.
func (s *scale) IsBoolFlag() bool { return true }

func (s *scale) Set(text string) error {
	*s = nil
	switch text {
	case "true":
		*s = slices.Clone(defaultScale)
		return nil
	case "false":
		return nil
	}
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(part)
		if err != nil || n < 1 {
			return errors.New("want numbers of nodes, such as -scale=1000000,2000000")
		}
		*s = append(*s, n)
	}
	return nil
}

// A way is how a row has its memory.
type way struct {
	name    string
	options options
}

// ways returns the rows of one number of nodes.
func (o options) ways() []way {
	device, unified, budget := o, o, o
	device.managed, device.budget = false, 0
	unified.managed, unified.budget = true, 0
	budget.managed, budget.budget = true, o.scaleBudget()
	moved := "by a plan"
	if !o.plan {
		moved = "by faults"
	}
	return []way{{"device memory", device}, {"managed memory", unified}, {fmt.Sprintf("budget of %.2f, %s", budget.budget, moved), budget}}
}

func (o options) scaleBudget() float64 { return cmp.Or(o.budget, 0.25) }

// A counter is a backend that adds up what is allocated.
type counter struct {
	backend
	large, small int // bytes
}

func (c *counter) alloc(_ context.Context, _ string, n int, small bool) (*memory, error) {
	if small {
		c.small += 4 * n
	} else {
		c.large += 4 * n
	}
	return &memory{n: n}, nil
}

// need returns the bytes that a network takes: of memory that may be managed, and of memory that never is.
func (o options) need(ctx context.Context) (large, small int, err error) {
	var c counter
	_, err = allocateModel(ctx, &graph{sizes: o.graph}, &c, o.panelWidth(), o.staged())
	return c.large, c.small + 8*o.epochs, err
}

// hostBytes is the size of the edges in host memory.
func (s sizes) hostBytes() int { return 12*s.edges() + 4*s.Nodes }

// fits returns why a way cannot run, or "".
func (o options) fits(ctx context.Context, free int) (string, error) {
	large, small, err := o.need(ctx)
	if err != nil {
		return "", err
	}
	host := o.graph.hostBytes()
	if o.managed {
		host += large // where it begins
	}
	if available, ok := hostmem.Available(); ok && float64(host) > 0.8*float64(available) {
		return fmt.Sprintf("needs %.1f GB of host memory, %.1f GB are available", gigabytes(host), gigabytes(available)), nil
	}
	if need := large + small + reserve; need > free {
		return fmt.Sprintf("needs %.1f GB, %.1f GB of the card are free", gigabytes(need), gigabytes(free)), nil
	}
	return "", nil
}

func gigabytes(n int) float64 { return float64(n) / 1e9 }

// rowFormat is that of gcn.py, too.
const rowFormat = "%12s  %-28s %10s %10s %12s  %s"

func writeRow(out io.Writer, nodes, way, seconds, gigabytes, loss, note string) error {
	_, err := fmt.Fprintln(out, strings.TrimRight(fmt.Sprintf(rowFormat, nodes, way, seconds, gigabytes, loss, note), " "))
	return err
}

// runScale writes the table.
func runScale(ctx context.Context, o options, out io.Writer) error {
	if _, err := o.freeMemory(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "%d edges a node, %d features, hidden %d, %d classes; s: median of the epochs after the first; GB: at most on the card\n",
		o.graph.EdgesPerNode, o.graph.Features, o.graph.Hidden, o.graph.Classes)
	if err := writeRow(out, "nodes", "memory", "s", "GB", "last loss", ""); err != nil {
		return err
	}
	var failed []error // rows that fitted
	for _, nodes := range o.scale {
		o.graph.Nodes = nodes
		failed = append(failed, o.scaleRows(ctx, out))
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}

// scaleRows writes the rows of one number of nodes. The errors are those of rows that fitted.
func (o options) scaleRows(ctx context.Context, out io.Writer) error {
	nodes := strconv.Itoa(o.graph.Nodes)
	var g *graph // when a row needs it
	var failed []error
	first := math.NaN() // loss
	for _, w := range o.ways() {
		free, err := o.freeMemory(ctx)
		if err != nil {
			return err
		}
		note, err := w.options.fits(ctx, free)
		if err != nil {
			return err
		}
		if note != "" {
			if err := writeRow(out, nodes, w.name, "", "", "", note); err != nil {
				return err
			}
			continue
		}
		if g == nil {
			g = newGraph(o.graph)
		}
		result, peak, err := w.options.measure(ctx, g)
		switch {
		case ctx.Err() != nil:
			return err
		case errors.Is(err, cudart.ErrMemoryAllocation), errors.Is(err, errors.ErrUnsupported):
			err = writeRow(out, nodes, w.name, "", "", "", err.Error())
		case err != nil:
			failed = append(failed, fmt.Errorf("%s nodes, %s: %w", nodes, w.name, err))
			err = writeRow(out, nodes, w.name, "", "", "", "failed")
		default:
			loss := result.Losses[len(result.Losses)-1]
			if math.IsNaN(first) {
				first = loss
			}
			if !(math.Abs(loss-first) <= 1e-3*math.Abs(first)) {
				failed = append(failed, fmt.Errorf("%s nodes, %s: loss %v, and %v in the row before", nodes, w.name, loss, first))
			}
			err = writeRow(out, nodes, w.name, fmt.Sprintf("%.3f", later(result.Seconds)), fmt.Sprintf("%.2f", gigabytes(peak)), fmt.Sprintf("%.6f", loss), "")
		}
		if err != nil {
			return err
		}
	}
	if o.python != "" {
		failed = append(failed, o.torchRows(ctx, g, out))
	}
	return errors.Join(failed...)
}

// later returns the median of the epochs after the first, which makes pages and loads kernels.
func later(seconds []float64) float64 {
	rest := seconds[min(1, len(seconds)-1):]
	return slices.Sorted(slices.Values(rest))[len(rest)/2]
}

// measure trains a network, and returns the memory on the card.
func (o options) measure(ctx context.Context, g *graph) (result outcome, peak int, err error) {
	b, err := newGPU(ctx, o, io.Discard)
	if err != nil {
		return outcome{}, 0, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if result, err = train(ctx, o, g, b, io.Discard); err != nil {
		return outcome{}, 0, err
	}
	peak = b.plain.Peak
	if b.unified != nil {
		n := b.unified.Stats().Peak
		if o.budget > 0 {
			n = min(n, int(o.budget*float64(g.bytes())))
		}
		peak += n
	}
	return result, peak, nil
}

// freeMemory returns the bytes that the card has free.
func (o options) freeMemory(ctx context.Context) (free int, err error) {
	rt, err := o.open(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, rt.Close()) }()
	dev, err := rt.Device(o.device)
	if err != nil {
		return 0, err
	}
	free, _, err = dev.MemInfo()
	return free, err
}

//go:embed gcn.py
var script string

// torchFloor is what PyTorch takes at least: the indices, the features, and a row of the hidden
// layer for each edge.
func (s sizes) torchFloor() int { return 16*s.edges() + 4*s.Nodes*s.Features + 4*s.edges()*s.Hidden }

// torchRows has gcn.py write its rows, by a graph in a temporary file. One row of PyTorch has no more of the card than the
// row with the budget.
func (o options) torchRows(ctx context.Context, g *graph, out io.Writer) (err error) {
	nodes := strconv.Itoa(o.graph.Nodes)
	free, err := o.freeMemory(ctx)
	if err != nil {
		return err
	}
	note := ""
	if need := o.graph.torchFloor(); need > free {
		note = fmt.Sprintf("need at least %.1f GB, %.1f GB of the card are free", gigabytes(need), gigabytes(free))
	} else if g == nil {
		note = "need the graph, for which no row had room"
	}
	if note != "" {
		return writeRow(out, nodes, "PyTorch, PyG GCNConv", "", "", "", note)
	}
	file, err := os.CreateTemp("", "gcn-*.bin")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(file.Name())) }()
	if err := errors.Join(file.Close(), g.write(file.Name())); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, o.python, "-", file.Name(), "--table", "--epochs", strconv.Itoa(o.epochs), "--rate", fmt.Sprint(o.rate),
		"--device", fmt.Sprintf("cuda:%d", o.device), "--limit", fmt.Sprint(gigabytes(int(o.scaleBudget()*float64(o.graph.bytes())))))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), out, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s nodes: %s: %w", nodes, o.python, err)
	}
	return nil
}
