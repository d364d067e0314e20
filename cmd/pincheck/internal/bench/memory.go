// The experiment memory compares the bytes that allocators retain with the bytes that were requested. Each
// sample allocates in a child process, copies bytes to the device and back, and reads the kernel's figures of that process.
//
//   - kept_per_byte: growth of the process's resident memory, by the number of allocated blocks times
//     their size. Small blocks are allocated until 64 MiB are requested. There is no clock.

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/probe/child"
	"github.com/gopinned/pinned/cmd/pincheck/internal/procmem"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/lifetime"
	"github.com/gopinned/pinned/internal/linux"
	"github.com/gopinned/pinned/internal/units"
)

// The methods of allocating pinned memory, as values of the label.
const (
	ours       = "hostmem"
	pooled     = "pool"
	cudas      = "cuda_host_alloc"
	powerOfTwo = "power_of_two" // cudaHostAlloc of the size rounded up to a power of two
)

var allocators = []string{ours, pooled, cudas, powerOfTwo}

const (
	memoryName   = "memory"
	retainedName = "kept_per_byte"
)

var memory = measure.Experiment{
	Name:     memoryName,
	Group:    "Memory:",
	Question: "How much memory does an allocator keep for each byte requested?",
	Long: `Measures the host memory that is kept for requests of several sizes, by
allocator: exact, pooled, rounded up to a power of two, cudaHostAlloc and, with
--python, PyTorch. With --pid it reads a running process instead.`,
	Related: "pincheck bench alloc, pincheck explain rounded_pins",
	Views: []result.View{
		{Title: "Bytes kept for each byte requested", Series: retainedName, X: result.Size, Lines: []string{result.Method}, Main: true},
	},
	Plan:    onDevices(planMemory),
	Explain: explainMemory,
}

var (
	memorySizes      = []int{4 << 10, 64 << 10, 1 << 20, 1<<20 + 1, 3 << 20, 16<<20 + 1, 100 << 20, 256<<20 + 1, 1 << 30, 1<<30 + 1}
	quickMemorySizes = []int{1<<20 + 1, 100 << 20, 256<<20 + 1}
	// The simulated GPU has the memory of the host that tests share.
	simulatedMemorySizes = []int{64 << 10, 1<<20 + 1, 3 << 20, 16<<20 + 1}
)

// Small sizes are allocated several times, until minRequested bytes are requested, so that
// what a process takes by the way is little of it.
const (
	minRequested = 64 << 20
	maxBlocks    = 16384 // each may be a mapping, of which Linux allows 65,530
)

func blocksOf(n int) int { return min(max(minRequested/n, 1), maxBlocks) }

// roundedUp returns the next power of two.
func roundedUp(n int) int { return 1 << bits.Len(uint(n-1)) }

// takes returns the bytes that an allocator pins for a request, about.
func takes(allocator string, n int) int {
	switch allocator {
	case powerOfTwo, byTorch, byDeepSpeed:
		return roundedUp(n)
	case pooled:
		return n + n/8
	}
	return n
}

func planMemory(env measure.Env) ([]measure.Group, error) {
	dev := env.Devices[0] // host memory is the same for all
	sizes := sizesOf(env, simulatedMemorySizes, quickMemorySizes, memorySizes)
	var groups []measure.Group
	ways := allocators
	if env.Python != "" {
		ways = append(slices.Clone(ways), byTorch, byDeepSpeed)
	}
	for _, allocator := range ways {
		k := &keeper{dev: dev, allocator: allocator, sizes: sizes, run: inChild, startTime: processTime, samples: maxProcesses}
		if env.Quick {
			k.samples = 1
		}
		if allocator == byTorch || allocator == byDeepSpeed {
			k.run, k.startTime, k.samples = inPython(env.Python), pythonTime, 1
			if len(env.Sizes) == 0 {
				k.sizes = quickMemorySizes
			}
		}
		g := measure.Group{Name: allocator, Open: k.open, Close: func() error { return nil }, Notes: func() []string { return k.notes }}
		for _, n := range k.sizes {
			g.Cases = append(g.Cases, k.retained(n))
			g.Footprint.Pinned = max(g.Footprint.Pinned, blocksOf(n)*takes(allocator, n))
			g.Footprint.Device = max(g.Footprint.Device, min(n, piece))
		}
		groups = append(groups, g)
	}
	noted(&groups[0], onFirst(env, "what is kept is host memory")...)
	noted(&groups[0], "kept is what the kernel counts as resident of a fresh process (smaps_rollup); tables that the driver has in the kernel, such as the addresses of registered pages, are not in it")
	if dev.Runtime().Library().Simulated {
		noted(&groups[0], "the simulated driver is a part of the process, and its tables count: hundreds of bytes a block")
	}
	return groups, nil
}

// A keeper measures what an allocator keeps, each time in a fresh process.
type keeper struct {
	dev       *cudart.Device
	allocator string
	sizes     []int
	run       func(ctx context.Context, limit time.Duration, r keepRequest) (keepReply, error)
	startTime time.Duration // of a process
	samples   int
	notes     []string
}

// inChild keeps memory in a child of this program.
func inChild(ctx context.Context, limit time.Duration, r keepRequest) (keepReply, error) {
	return child.Run[keepReply](ctx, limit, keepChild, r)
}

func (k *keeper) open(ctx context.Context) error {
	if _, err := linux.ReadSMapsRollup(os.DirFS("/")); err != nil {
		return fmt.Errorf("the kernel does not report what a process keeps: %w: %w", err, errors.ErrUnsupported)
	}
	if k.allocator != byTorch && k.allocator != byDeepSpeed {
		return nil
	}
	_, err := k.run(ctx, processLimit, k.request(0, 0)) // whether it has them
	return err
}

// request asks for so many blocks of n bytes.
func (k *keeper) request(n, count int) keepRequest {
	library := k.dev.Runtime().Library()
	return keepRequest{Library: library.Path, Simulated: library.Simulated, Device: k.dev.Ordinal(), Allocator: k.allocator, Size: n, Count: count}
}

// What a process takes to start and to open CUDA, and the least rate of pinning, for
// estimates and for the time limit.
const (
	processTime  = 500 * time.Millisecond
	slowPin      = 2.5 // GB/s
	processLimit = time.Minute
	slowestRate  = 0.1 // GB/s
	maxProcesses = 3   // for a case
)

func secondsAt(bytes int, rate float64) time.Duration { return time.Duration(float64(bytes) / rate) }

// retained is the case of one size. A second process hardly ever differs.
func (k *keeper) retained(n int) measure.Case {
	count := blocksOf(n)
	pinned := count * takes(k.allocator, n)
	mismatch := ""
	return measure.Case{
		Series: result.Series{Name: retainedName, Unit: result.Ratio, Better: result.Lower,
			Labels: labelled(result.Method, k.allocator, result.Size, strconv.Itoa(n))},
		MinSamples: 1, Samples: k.samples, Budget: k.startTime + secondsAt(pinned, slowPin),
		Sample: func(ctx context.Context) (float64, error) {
			reply, err := k.run(ctx, processLimit+secondsAt(pinned, slowestRate), k.request(n, count))
			if err != nil {
				return 0, err
			}
			for _, note := range reply.Notes {
				if !slices.Contains(k.notes, note) {
					k.notes = append(k.notes, note)
				}
			}
			mismatch = cmp.Or(mismatch, reply.Mismatch)
			return float64(reply.Retained) / (float64(n) * float64(count)), nil
		},
		Verify: func(context.Context) error { // the process has compared
			if mismatch == "" {
				return nil
			}
			return fmt.Errorf("%w: %s", measure.ErrMismatch, mismatch)
		},
	}
}

// Children are the functions that experiments run in processes of their own: see
// [child.Serve].
func Children() map[string]child.Func { return map[string]child.Func{keepChild: child.Handle(keep)} }

const keepChild = "keep"

type keepRequest struct {
	Library   string // path, if it is not simulated
	Simulated bool
	Device    int
	Allocator string
	Size      int
	Count     int // of blocks of this size
}

type keepReply struct {
	Retained int // bytes
	Notes    []string
	// Mismatch describes the bytes of the first or last block that differ after a round trip; empty
	// for right ones.
	Mismatch string
}

// keep allocates pinned memory, and returns what the process has become larger by. It is
// for a process that ends then.
func keep(ctx context.Context, r keepRequest) (reply keepReply, err error) {
	var opened lifetime.Stack
	defer func() { err = errors.Join(err, opened.Run(context.WithoutCancel(ctx))) }()
	dev, err := r.open(ctx, &opened)
	if err != nil {
		return reply, err
	}
	method := slices.IndexFunc(pinMethods, func(m pinMethod) bool {
		return m.name == r.Allocator || m.name == poolFirst && r.Allocator == pooled
	})
	if method < 0 {
		return reply, fmt.Errorf("there is no allocator %q", r.Allocator)
	}
	p := &pinner{dev: dev, method: pinMethods[method]}
	opened.PushClose(p.reset)
	before, err := resident()
	if err != nil {
		return reply, err
	}
	blocks, err := r.pin(ctx, p, &opened)
	if err != nil {
		return reply, err
	}
	after, err := resident()
	if err != nil {
		return reply, err
	}
	if r.unpopulated() {
		p.notes = append(p.notes, r.Allocator+": the simulated cudaHostAlloc leaves its memory unpopulated, so it was written to here")
	}
	reply = keepReply{Retained: after - before, Notes: p.notes}
	for _, block := range blocks {
		switch err := prove(ctx, dev, block, r.Size); {
		case errors.Is(err, measure.ErrMismatch):
			reply.Mismatch = err.Error()
		case err != nil:
			return reply, err
		}
	}
	return reply, nil
}

// open opens the library and the device. The first memory makes the context, and brings the driver's code into memory.
func (r *keepRequest) open(ctx context.Context, opened *lifetime.Stack) (*cudart.Device, error) {
	open := func() (*cudart.Runtime, error) { return cudart.Open(ctx, cudart.Options{Library: r.Library}) }
	if r.Simulated {
		open = func() (*cudart.Runtime, error) { return cudasim.Open(ctx, cudasim.Config{}) }
		r.Device = 0
	}
	rt, err := open()
	if err != nil {
		return nil, err
	}
	opened.PushClose(rt.Close)
	dev, err := rt.Device(r.Device)
	if err != nil {
		return nil, err
	}
	first, err := hostmem.Alloc(ctx, dev, 4096, hostmem.Options{})
	if err == nil {
		opened.PushClose(first.Close)
	}
	return dev, err
}

// unpopulated reports whether the allocator leaves memory unpopulated that a driver would populate.
func (r *keepRequest) unpopulated() bool {
	return r.Simulated && (r.Allocator == cudas || r.Allocator == powerOfTwo)
}

// pin allocates the blocks, and returns the first and the last.
func (r *keepRequest) pin(ctx context.Context, p *pinner, opened *lifetime.Stack) ([]hostkind.Memory, error) {
	if err := p.prepare(r.Size); err != nil {
		return nil, err
	}
	var blocks [2]hostkind.Memory
	for i := range r.Count {
		block, release, err := p.method.pin(ctx, p, r.Size)
		if err != nil {
			return nil, err
		}
		if r.unpopulated() {
			touch(block.Bytes())
		}
		opened.PushClose(release)
		blocks[min(i, 1)] = block
	}
	return blocks[:min(r.Count, 2)], nil
}

// touch writes to each page.
func touch(b []byte) {
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
}

// resident returns the bytes that the kernel counts as resident of this process, without
// what Go keeps for its heap to grow again.
func resident() (int, error) {
	debug.FreeOSMemory()
	s, err := linux.ReadSMapsRollup(os.DirFS("/"))
	return s.Rss + s.Hugetlb, err
}

// allocatorNames are the names of allocators in sentences and tables.
var allocatorNames = []struct{ method, name string }{
	{ours, "hostmem.Alloc"}, {pooled, "pool"}, {cudas, "cudaHostAlloc"}, {powerOfTwo, "power of two"}, {byTorch, "PyTorch"}, {byDeepSpeed, "DeepSpeed"},
}

func explainMemory(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	none := func(*answers) *result.Series { return nil }
	return explained(b, none, func(a *answers) {
		var worst *result.Series // of the allocator that keeps the most
		for _, n := range allocatorNames {
			s := maxMedianOf(a.Bench, retainedName, n.method)
			if s == nil {
				continue
			}
			if len(a.said) == 0 { // of the first, which is hostmem.Alloc unless it failed
				a.say("%s keeps at most %s bytes for each byte requested.", n.name, units.Number(s.Median, 3))
			}
			if worst == nil || s.Median > worst.Median {
				worst = s
			}
		}
		if worst == nil {
			return
		}
		var cells []named
		for _, n := range allocatorNames {
			cells = append(cells, named{n.name, a.other(worst, retainedName, result.Method, n.method)})
		}
		a.row("at "+units.Bytes(worst.Labels.Size()), cells...)
		if s := maxMedianOf(a.Bench, retainedName, powerOfTwo); s != nil && s.Median >= 1.25 {
			a.say("An allocator that rounds up to powers of two, as PyTorch does by default, wastes %s at %s. To avoid this in PyTorch: %s",
				units.Bytes(int((s.Median-1)*float64(s.Labels.Size()))), units.Bytes(s.Labels.Size()), procmem.PyTorchSetting)
		}
	}, nothingMore)
}

// maxMedianOf returns the series of a name and a method with the largest median, or nil.
func maxMedianOf(b *result.Bench, name, method string) *result.Series {
	var largest *result.Series
	for _, s := range b.Select(result.View{Series: name, Where: labelled(result.Method, method)}) {
		if largest == nil || s.Median > largest.Median {
			largest = s
		}
	}
	return largest
}
