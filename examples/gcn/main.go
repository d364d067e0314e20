// Gcn trains a graph network of two layers on a random graph, in full batches, and prints
// the loss, the time of each epoch, and the memory that it took.
//
//	go run ./examples/gcn -nodes 2000000 -epochs 3
//	go run ./examples/gcn -nodes 2000000 -managed
//	go run ./examples/gcn -nodes 2000000 -managed -budget 0.25
//	go run ./examples/gcn -nodes 2000000 -managed -budget 0.25 -plan=false
//	go run ./examples/gcn -nodes 10000 -cpu
//	go run ./examples/gcn -nodes 1000 -sim
//
// With -managed all large memory is unified memory (cudaMallocManaged). With -budget no more
// than that share of it may be in device memory at a time: a plan moves it to the device ahead
// of the work (managed.Plan). Without a plan, page faults move the pages that the work accesses. With
// a plan the features' means stay on the host, and the device reads and writes them over the
// link (managed.InPlace); with -in_place=false they move, too. So a graph may be larger than
// device memory.
//
// -write stores the graph and the first weights in a file, with which gcn.py beside this file
// trains the same network in PyTorch, and compares the losses:
//
//	go run ./examples/gcn -nodes 100000 -write graph.bin -json losses.json
//	python3 examples/gcn/gcn.py graph.bin --losses losses.json
//
// -scale prints a table over 1, 2, 3 and 10 million nodes, or those of -scale=N,N: the time of an epoch and the
// memory on the card, with all memory on the card, with unified memory, and with a budget (-budget, or 0.25).
// Rows that do not fit what the card has free are not begun. With -python PyTorch and
// torch_geometric have rows, too, and PyTorch one with no more memory than the budget:
//
//	go run ./examples/gcn -scale
//	go run ./examples/gcn -scale=1000000,2000000 -python python3
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/examples/internal/device"
)

type options struct {
	graph   sizes
	epochs  int
	rate    float64
	cpu     bool
	device  int
	blas    bool
	managed bool
	budget  float64
	plan    bool
	inPlace bool
	panel   int
	chunk   int
	scale   scale
	output
	library
}

// output is what is written, and where to.
type output struct {
	write, json string
	verbose     bool
}

// library is what computes.
type library struct {
	python string // for a comparison
	sim    bool
	source cudart.Source // nil for the machine's CUDA
}

func main() {
	var o options
	flag.IntVar(&o.graph.Nodes, "nodes", 1_000_000, "number of nodes")
	flag.IntVar(&o.graph.EdgesPerNode, "edges_per_node", 10, "edges a node, of random direction; each node has one to itself as well")
	flag.IntVar(&o.graph.Features, "features", 128, "features of a node")
	flag.IntVar(&o.graph.Hidden, "hidden", 256, "width of the hidden layer")
	flag.IntVar(&o.graph.Classes, "classes", 10, "classes, at most as many as features")
	flag.IntVar(&o.epochs, "epochs", 3, "number of epochs")
	flag.Float64Var(&o.rate, "rate", 0.5, "rate of learning")
	flag.Uint64Var(&o.graph.Seed, "seed", 1, "seed of the graph and of the first weights")
	flag.BoolVar(&o.cpu, "cpu", false, "use no GPU but one goroutine, slowly: a reference")
	flag.BoolVar(&o.sim, "sim", false, "use a simulated GPU, slowly")
	flag.IntVar(&o.device, "device", 0, "CUDA's number of the device")
	flag.BoolVar(&o.blas, "blas", true, "multiply matrices with cuBLAS if it is installed")
	flag.BoolVar(&o.managed, "managed", false, "use unified memory")
	flag.Float64Var(&o.budget, "budget", 0, "share of the graph's memory that may be in device memory at a time, such as 0.25; 0 is no limit")
	flag.BoolVar(&o.plan, "plan", true, "with a budget, move memory ahead of the work")
	flag.BoolVar(&o.inPlace, "in_place", true, "with a plan, leave the means on the host, which are written once and read twice; else they move, too")
	flag.IntVar(&o.chunk, "chunk", 0, "MiB that a plan moves at a time; 0 chooses")
	flag.IntVar(&o.panel, "panel", 0, "columns of the features that are in memory at a time; 0 chooses")
	flag.StringVar(&o.write, "write", "", "write the graph and the first weights to this file, for gcn.py")
	flag.StringVar(&o.json, "json", "", "write losses and times to this file")
	flag.Var(&o.scale, "scale", "print a table over these numbers of nodes (-scale=1000000,2000000); alone over 1, 2, 3 and 10 million")
	flag.StringVar(&o.python, "python", "", "with -scale, a Python with PyTorch, such as python3, whose rows the table has, too")
	flag.BoolVar(&o.verbose, "v", false, "log allocations")
	flag.Parse()
	log.SetPrefix("gcn: ")
	device.Main(func(ctx context.Context) error { return run(ctx, o, os.Stdout) })
}

// An outcome is what -json writes.
type outcome struct {
	Losses  []float64 `json:"losses"`
	Seconds []float64 `json:"seconds"` // of each epoch
}

func run(ctx context.Context, o options, out io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	if len(o.scale) > 0 {
		return runScale(ctx, o, out)
	}
	began := time.Now()
	g := newGraph(o.graph)
	fmt.Fprintf(out, "graph: %d nodes, %d edges, %d features, hidden %d, %d classes (%v)\n",
		g.Nodes, len(g.from), g.Features, g.Hidden, g.Classes, time.Since(began).Round(time.Millisecond))
	if o.write != "" {
		if err := g.write(o.write); err != nil {
			return err
		}
	}
	b, err := newBackend(ctx, o, out)
	if err != nil {
		return err
	}
	result, err := train(ctx, o, g, b, out)
	if err := errors.Join(err, b.close()); err != nil {
		return err
	}
	if o.json == "" {
		return nil
	}
	text, err := json.MarshalIndent(result, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(o.json, append(text, '\n'), 0o666)
}

func (o *options) check() error {
	g := o.graph
	for _, n := range o.scale {
		g.Nodes = max(g.Nodes, n)
	}
	switch {
	case min(o.graph.Nodes, g.Features, g.Hidden, g.Classes) < 1 || g.EdgesPerNode < 0 || o.epochs < 1:
		return errors.New("nodes, features, hidden, classes and epochs must be positive")
	case g.Nodes > 1<<31 || g.Classes > g.Features:
		return errors.New("at most 2^31 nodes, and as many classes as features")
	case max(g.EdgesPerNode, g.Features, g.Hidden, o.epochs) > 1<<20: // the bytes of it all are an int then
		return errors.New("at most 2^20 edges a node, features, hidden, and epochs")
	case !(o.budget >= 0 && o.budget <= 1): // NaN too
		return errors.New("-budget is a share, from 0 to 1")
	case o.panel < 0 || o.panel > 0 && g.Features%o.panel != 0:
		return fmt.Errorf("-panel must divide the %d features", g.Features)
	case o.chunk < 0 || o.chunk > 1<<20 || o.chunk%2 != 0:
		return errors.New("-chunk must be a multiple of 2, at most 2^20")
	}
	return o.checkMemory()
}

// checkMemory checks the options that choose where the data is.
func (o *options) checkMemory() error {
	switch {
	case len(o.scale) > 0 && (o.cpu || o.managed || o.write != "" || o.json != ""):
		return errors.New("-scale chooses the memory, and excludes -cpu, -managed, -write and -json")
	case len(o.scale) == 0 && o.python != "":
		return errors.New("-python needs -scale")
	case o.budget > 0 && !o.managed && len(o.scale) == 0:
		return errors.New("-budget needs -managed: plain device memory stays where it is")
	case o.cpu && (o.managed || o.sim):
		return errors.New("-cpu uses no unified memory, and no simulated GPU")
	}
	return nil
}

// newBackend makes what computes.
func newBackend(ctx context.Context, o options, out io.Writer) (backend, error) {
	if o.cpu {
		return &cpu{}, nil
	}
	return newGPU(ctx, o, out)
}

// train runs all epochs.
func train(ctx context.Context, o options, g *graph, b backend, out io.Writer) (outcome, error) {
	m, err := newModel(ctx, g, b, o.panelWidth(), o.staged())
	if err != nil {
		return outcome{}, err
	}
	r, err := b.runner(ctx, m, o.epochs)
	if err != nil {
		return outcome{}, err
	}
	var result outcome
	epoch := func(n int, loss, seconds float64) {
		result.Losses, result.Seconds = append(result.Losses, loss), append(result.Seconds, seconds)
		fmt.Fprintf(out, "epoch %d: loss %.6f, %.3f s\n", n+1, loss, seconds)
	}
	if err := r.run(ctx, m, float32(o.rate), epoch); err != nil {
		return outcome{}, err
	}
	return result, b.stats(out)
}

// staged reports whether the means stay on the host: they do where they are moved otherwise.
func (o *options) staged() bool { return o.budget > 0 && o.budget < 1 && o.plan && o.inPlace }

// panelWidth is the number of feature columns that a mean processes at a time. Narrow panels need
// less memory at a time, and read the edges more often.
func (o *options) panelWidth() int {
	width := o.graph.Features
	switch {
	case o.panel > 0:
		return o.panel
	case o.budget == 0:
		return width
	}
	// A mean accesses all rows of two panels, and some edges. There must be room beside that for
	// what the steps before and after access.
	edges := min(stepBytes, 12*o.graph.edges())
	for width%2 == 0 && width > 4 && float64(2*o.graph.panelBytes(width)+3*edges) > o.budget*float64(o.graph.bytes()) {
		width /= 2
	}
	return width
}
