// The experiment blocks times package transfer/blocks on random blocks of a pool of pinned memory: by size, number and
// direction, by the method that it chooses, by its kernel alone and by copy engines alone, beside one copy of as
// many bytes and a copy each.
//
//   - Clock of rates: two events around one call on an idle stream, so that what the call does before its copies
//     begin counts. Both directions begin at one event, each called from a goroutine of its own.
//   - blocks_bandwidth: bytes of all blocks by that time, of both directions together for "both". blocks: their
//     number by that time.
//   - blocks_latency: the host's clock, from before the call to the end of SynchronizeBlocking.
//   - engines_quicker_from: the smallest size that was measured from which on the engines' median rate is above the
//     kernel's, by direction and number of blocks.

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
	copyblocks "github.com/gopinned/pinned/transfer/blocks"
)

// The series of blocks.
const (
	seriesBlocks       = "blocks_bandwidth"
	seriesBlockRate    = "blocks" // a second
	seriesBlockLatency = "blocks_latency"
	seriesEnginesFrom  = "engines_quicker_from"
)

// Values of result.Method of blocks, beside the names of the package's methods.
const (
	byOneCopy    = "one_copy"  // of as many bytes, in a row on both sides
	byCopies     = "copy_each" // queued by one call a block
	engineKernel = "engine_up_kernel_down"
	kernelEngine = "kernel_up_engine_down"
)

var (
	byQuickest = copyblocks.Quickest.String()
	byKernel   = copyblocks.ByKernel.String()
	byEngine   = copyblocks.ByEngine.String()
)

// A blockPlan has the sizes and numbers of blocks that are measured, and the times.
type blockPlan struct {
	sizes, counts []int
	latencies     []int // numbers of blocks of which the latency is measured
	budget        time.Duration
}

var (
	fullBlocks = blockPlan{
		sizes:  []int{512, 1 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20},
		counts: []int{1, 16, 128, 1024, 10_000, 100_000}, latencies: []int{16, 1024, 10_000}, budget: 40 * time.Millisecond,
	}
	quickBlocks = blockPlan{
		sizes: []int{1 << 10, 4 << 10, 64 << 10}, counts: []int{16, 1024, 10_000}, latencies: []int{16, 1024, 10_000}, budget: 10 * time.Millisecond,
	}
)

const (
	blockPool      = 4 << 30   // pinned host memory of which blocks are taken
	blockWindow    = 640 << 20 // device memory of either direction: 10,000 blocks of 64 KiB
	simulatedPool  = 4 * maxSimulated
	usualBlock     = 4 << 10 // of latencies, and of both directions at once
	maxCopiesEach  = 10_000  // blocks that are copied by a call each: more take too long
	latenciesTaken = 200     // samples of a latency
)

// blocks measures package transfer/blocks.
func blocks() measure.Experiment {
	e := measure.Experiment{
		Name:     "blocks",
		Group:    "Copies:",
		Question: "What is the fastest way to copy many small blocks?",
		Long: `Measures random blocks of several sizes, to GPU and from GPU, copied one by one,
by the copy engines in batches, by a kernel, and by the method that
transfer/blocks chooses.`,
		Related: "pincheck bench latency",
		Views: []result.View{{Title: "Random blocks by the chosen method", Series: seriesBlocks,
			Where: labelled(result.Method, byQuickest), X: result.Size, Lines: []string{result.Device, result.Direction, result.Blocks}, Main: true}},
		Plan:    onDevices(planBlocks),
		Derive:  enginesFrom,
		Explain: explainBlocks,
	}
	for _, q := range []struct{ title, series string }{{"Random blocks", seriesBlocks}, {"Blocks a second", seriesBlockRate}} {
		for _, direction := range bothDirections {
			for _, count := range fullBlocks.counts {
				labels := labelled(result.Direction, direction, result.Blocks, strconv.Itoa(count))
				e.Views = append(e.Views, result.View{Title: fmt.Sprintf("%s %s, %s", q.title, directionText(direction), labels[1].Text()),
					Series: q.series, Where: labels, X: result.Size, Lines: []string{result.Device, result.Method}})
			}
		}
	}
	e.Views = append(e.Views, result.View{Title: "Both ways at once", Series: seriesBlocks, Where: labelled(result.Direction, result.Both),
		X: result.Method, Lines: []string{result.Device, result.Size, result.Blocks}})
	for _, direction := range bothDirections {
		e.Views = append(e.Views, result.View{Title: "Latency " + directionText(direction), Series: seriesBlockLatency,
			Where: labelled(result.Direction, direction), X: result.Blocks, Lines: []string{result.Device, result.Size, result.Method}})
	}
	e.Views = append(e.Views, result.View{Title: "Smallest size from which engines are faster than the kernel", Series: seriesEnginesFrom,
		X: result.Blocks, Lines: []string{result.Device, result.Direction}})
	return e
}

func planBlocks(env measure.Env) ([]measure.Group, error) {
	p := fullBlocks
	if env.Quick {
		p = quickBlocks
	}
	usual := usualBlock
	if len(env.Sizes) > 0 {
		p.sizes = slices.Compact(slices.Sorted(slices.Values(env.Sizes)))
		usual = p.sizes[0]
	}
	var groups []measure.Group
	for _, dev := range env.Devices {
		f := &blocksFixture{resources: resources{dev: dev}, pool: blockPool, window: blockWindow}
		if isSimulated(env) {
			f.pool, f.window = simulatedPool, maxSimulated
		}
		wanted := f.pool
		available, ok := hostmem.Available()
		if !ok {
			available = math.MaxInt
		}
		free, _, err := dev.MemInfo()
		if err != nil {
			free = math.MaxInt
		}
		f.fit(available, free)
		if largest := max(p.sizes[len(p.sizes)-1], usual); f.window < largest {
			return nil, fmt.Errorf("blocks of %s: the memory that is available admits %s at most", units.Bytes(largest), units.Bytes(f.window))
		}
		sameAddress, err := dev.Attribute(cudart.AttrCanUseHostPointerForRegisteredMem)
		if f.kernel = err != nil || sameAddress != 0; !f.kernel { // open reports an error
			groups = append(groups, notMeasured(fmt.Sprintf("GPU %d, blocks by the kernel", dev.Ordinal()), "the device cannot access host memory by its address"))
		}
		cases := f.cases(p, usual)
		g := measure.Group{
			Name:      fmt.Sprintf("GPU %d", dev.Ordinal()),
			Footprint: measure.Footprint{Pinned: f.pool + min(f.window, checkBytes), Device: 2 * f.window},
			Setup:     f.setup(cases), Open: f.open, Close: f.close, Cases: cases,
		}
		if got := f.pool; got < wanted {
			g.Notes = func() []string {
				return []string{fmt.Sprintf("blocks are of %s of pinned memory, not of %s: that is half of what is available", units.Bytes(got), units.Bytes(wanted))}
			}
		}
		groups = append(groups, g)
	}
	return groups, nil
}

// cases returns what is measured with a plan: both directions at once and latencies with blocks of one size.
func (f *blocksFixture) cases(p blockPlan, usual int) (cases []measure.Case) {
	methods, mixed := []string{byQuickest, byEngine, byOneCopy, byCopies}, []string(nil)
	if f.kernel {
		methods, mixed = slices.Insert(methods, 1, byKernel), []string{engineKernel, kernelEngine}
	}
	rate := func(direction, method string, size, count int) {
		if method != byCopies || count <= maxCopiesEach {
			cases = append(cases, f.rate(direction, method, size, count, p.budget))
		}
	}
	for _, size := range p.sizes {
		for _, count := range f.counts(size, p.counts) {
			for _, direction := range bothDirections {
				for _, method := range methods {
					rate(direction, method, size, count)
				}
			}
		}
	}
	counts := f.counts(usual, p.counts)
	for _, method := range slices.Concat(methods, mixed) {
		rate(result.Both, method, usual, counts[len(counts)-1])
	}
	for _, count := range f.counts(usual, p.latencies) {
		for _, direction := range bothDirections {
			for _, method := range methods {
				if method != byOneCopy {
					cases = append(cases, f.latency(direction, method, usual, count, p.budget))
				}
			}
		}
	}
	return cases
}

// fit reduces the memory to what half of the available host memory and a quarter of the device's admit for
// each direction.
func (f *blocksFixture) fit(available, free int) {
	f.pool = min(f.pool, available/2/piece*piece)
	f.window = min(f.window, free/4, f.pool/2)
}

// counts returns the numbers of blocks of a size that the device memory holds, or if it holds none of them as
// many as it holds.
func (f *blocksFixture) counts(size int, all []int) []int {
	held := slices.DeleteFunc(slices.Clone(all), func(count int) bool { return count > f.window/size })
	if len(held) == 0 {
		held = []int{f.window / size}
	}
	return held
}

// setup is about how long open takes, and what overwrites and compares blocks.
func (f *blocksFixture) setup(cases []measure.Case) time.Duration {
	const memory = 3.0 // GB/s, of blocks at random
	took := setupTime(f.pool)
	for i := range cases {
		took += secondsAt(2*cases[i].BytesPerSample, memory)
	}
	return took
}

// A blocksFixture has the memory on both sides, and what copies blocks. All of the host memory has the pattern
// uploaded, except where the last case copied to; in has whatever was uploaded last, out the pattern
// downloaded.
type blocksFixture struct {
	resources
	pool, window int  // bytes of the host memory, and of in and of out
	kernel       bool // can be used

	host     *hostmem.Buffer
	in, out  cudart.DevPtr // the target of uploads, the source of downloads
	up, down *cudart.Stream
	span     *measure.Span
	check    *hostmem.Buffer // the device's bytes, to compare
	by       map[string]*copyblocks.Copier
	lists    map[int][]uint32 // by size: numbers of blocks of the host memory, at random, none twice
	written  blockList        // what downloads wrote to, if anything
}

// A blockList is blocks of the host memory, which lie one after the other on the device.
type blockList struct {
	size, count int
	index       []uint32 // nil for blocks in a row, from byte base on
	base        int
}

// at returns where in the host memory block i lies.
func (l *blockList) at(i int) int {
	if l.index != nil {
		return int(l.index[i]) * l.size
	}
	return l.base + i*l.size
}

func (f *blocksFixture) open(ctx context.Context) (err error) {
	if err = inTurn(made(f.stream, &f.up, &f.down), made(f.resources.span, &f.span), f.allocated(f.window, &f.in, &f.out),
		f.pinnedAs(ctx, f.pool, &f.host), f.pinnedAs(ctx, min(f.window, checkBytes), &f.check)); err != nil {
		return err
	}
	for off := 0; off < f.window; off += f.check.Len() {
		b := f.check.Bytes()[:min(f.check.Len(), f.window-off)]
		err := inTurn(
			func() error { return downloaded.fillFrom(ctx, b, off) },
			func() error { return f.check.CopyToDevice(f.up, f.out+cudart.DevPtr(off), 0, len(b)) },
			func() error { return f.up.Synchronize(ctx) },
		)
		if err != nil {
			return err
		}
	}
	if err := uploaded.fill(ctx, f.host.Bytes()); err != nil {
		return err
	}
	f.by, f.lists = map[string]*copyblocks.Copier{}, map[int][]uint32{}
	for _, m := range []copyblocks.Method{copyblocks.Quickest, copyblocks.ByKernel, copyblocks.ByEngine} {
		if m == copyblocks.ByKernel && !f.kernel {
			continue
		}
		b, err := copyblocks.New(ctx, f.dev, copyblocks.Options{Method: m})
		if err != nil {
			return err
		}
		f.undo.Push(b.CloseContext)
		f.by[m.String()] = b
	}
	return nil
}

func (f *blocksFixture) close() error {
	err := f.resources.close()
	*f = blocksFixture{resources: resources{dev: f.dev, now: f.now}, pool: f.pool, window: f.window, kernel: f.kernel}
	return err
}

func (f *blocksFixture) node() (int, bool) { return nodeOfMemory(f.dev, f.host.Bytes()) }

// random returns count numbers of blocks for uploads, and as many others for downloads.
func (f *blocksFixture) random(size, count int) (up, down []uint32) {
	total := f.pool / size
	if list := f.lists[size]; len(list) < 2*count {
		r, moved := rand.New(rand.NewPCG(1, uint64(size))), map[int]uint32{}
		at := func(i int) uint32 {
			if v, ok := moved[i]; ok {
				return v
			}
			return uint32(i)
		}
		list = make([]uint32, 2*count)
		for i := range list { // of Fisher and Yates, for the first ones
			j := i + r.IntN(total-i)
			list[i], moved[j] = at(j), at(i)
		}
		f.lists[size] = list
	}
	return f.lists[size][:count], f.lists[size][count : 2*count]
}

// A blockCase copies blocks in one way.
type blockCase struct {
	*blocksFixture
	direction, method string
	upload, download  blockList
}

func (f *blocksFixture) newCase(direction, method string, size, count int) *blockCase {
	return &blockCase{blocksFixture: f, direction: direction, method: method, upload: blockList{size: size, count: count}, download: blockList{size: size, count: count}}
}

func (c *blockCase) labels() result.Labels {
	return labelsOf(c.dev, result.Direction, c.direction, result.Method, c.method, result.Size, strconv.Itoa(c.upload.size), result.Blocks, strconv.Itoa(c.upload.count))
}

// rate is the case of how many bytes, and blocks, are copied a second.
func (f *blocksFixture) rate(direction, method string, size, count int, budget time.Duration) measure.Case {
	c := f.newCase(direction, method, size, count)
	count *= len(directionsOf(direction))
	var watch measure.Stopwatch
	var blocks float64
	return measure.Case{
		Series: result.Series{Name: seriesBlocks, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: size * count, Labels: c.labels()},
		WarmUp: 1, Budget: budget, CPU: watch.CPU,
		Sample: after(c.prepare, func(ctx context.Context) (float64, error) {
			watch.Start()
			defer watch.Stop()
			took, err := c.time(ctx)
			blocks = float64(count) / took.Seconds()
			return float64(size*count) / float64(took.Nanoseconds()), err
		}),
		Also: []measure.Also{{Series: result.Series{Name: seriesBlockRate, Unit: result.PerSecond, Better: result.Higher, Labels: c.labels()},
			Last: func() (float64, bool) { return blocks, true }}},
		Verify: c.verify, Node: f.node,
	}
}

// latency is the case of the time from the call to the end of the copies.
func (f *blocksFixture) latency(direction, method string, size, count int, budget time.Duration) measure.Case {
	c := f.newCase(direction, method, size, count)
	return measure.Case{
		Series: result.Series{Name: seriesBlockLatency, Unit: result.Seconds, Better: result.Lower, Labels: c.labels()},
		WarmUp: 2, Budget: budget, Samples: latenciesTaken,
		Sample: after(c.prepare, func(ctx context.Context) (float64, error) {
			began := c.blocksFixture.time()
			if err := c.queue(ctx, direction); err != nil {
				return 0, err
			}
			err := c.main(direction).SynchronizeBlocking()
			return (c.blocksFixture.time() - began).Seconds(), cmp.Or(err, bounded.Ended(ctx))
		}),
		Verify: c.verify,
	}
}

func (f *blocksFixture) main(direction string) *cudart.Stream {
	if direction == result.DeviceToHost {
		return f.down
	}
	return f.up
}

// prepare chooses the blocks, and overwrites where they are copied to.
func (c *blockCase) prepare(ctx context.Context) error {
	if c.method == byOneCopy {
		c.download.base = c.pool / 2
	} else {
		c.upload.index, c.download.index = c.random(c.upload.size, c.upload.count)
	}
	if err := errors.Join(c.up.Synchronize(ctx), c.down.Synchronize(ctx)); err != nil {
		return err
	}
	written := c.written
	c.written = blockList{}
	err := written.each(ctx, func(i, at int) error { return uploaded.fillFrom(ctx, c.host.Bytes()[at:at+written.size], at) })
	if err != nil {
		return err
	}
	for _, direction := range directionsOf(c.direction) {
		if direction == result.HostToDevice {
			err = c.up.Memset(c.in, poison, c.upload.size*c.upload.count)
		} else {
			c.written = c.download
			err = c.written.each(ctx, func(_, at int) error {
				clear(c.host.Bytes()[at : at+c.written.size])
				return nil
			})
		}
		if err != nil {
			return err
		}
	}
	return c.up.Synchronize(ctx)
}

// each calls do with the blocks and where in the host memory they lie, until ctx ends.
func (l *blockList) each(ctx context.Context, do func(i, at int) error) error {
	for i := range l.count {
		if i%1024 == 0 {
			if err := bounded.Ended(ctx); err != nil {
				return err
			}
		}
		if err := do(i, l.at(i)); err != nil {
			return err
		}
	}
	return nil
}

// verify compares what arrived.
func (c *blockCase) verify(ctx context.Context) error {
	var errs []error
	for _, direction := range directionsOf(c.direction) {
		if direction == result.HostToDevice {
			errs = append(errs, c.compareUploaded(ctx))
			continue
		}
		errs = append(errs, c.download.each(ctx, func(i, at int) error {
			return downloaded.compare(ctx, c.host.Bytes()[at:at+c.download.size], i*c.download.size)
		}))
	}
	return errors.Join(errs...)
}

// compareUploaded compares the device's memory with the blocks of the host memory.
func (c *blockCase) compareUploaded(ctx context.Context) error {
	return fetched(ctx, c.check, c.up, c.in, c.upload.size*c.upload.count, func(got []byte, at int) error {
		for len(got) > 0 { // a block, or what of it is there
			in := at % c.upload.size
			m := min(c.upload.size-in, len(got))
			if err := uploaded.compare(ctx, got[:m], c.upload.at(at/c.upload.size)+in); err != nil {
				return err
			}
			got, at = got[m:], at+m
		}
		return nil
	})
}

// queue queues the copies of one direction.
func (c *blockCase) queue(ctx context.Context, direction string) error {
	s, p, l := c.up, c.in, &c.upload
	copied := c.host.CopyToDevice
	if direction == result.DeviceToHost {
		s, p, l, copied = c.down, c.out, &c.download, c.host.CopyFromDevice
	}
	switch c.method {
	case byOneCopy:
		return copied(s, p, l.base, l.size*l.count)
	case byCopies:
		return l.each(ctx, func(i, at int) error { return copied(s, p+cudart.DevPtr(i*l.size), at, l.size) })
	}
	method := c.method
	if method == engineKernel || method == kernelEngine {
		method = byKernel
		if (c.method == engineKernel) == (direction == result.HostToDevice) {
			method = byEngine
		}
	}
	blocks := copyblocks.Copy{Host: c.host.Bytes(), Device: p, DeviceLen: c.window, HostIndex: l.index, Size: l.size, Count: l.count}
	if direction == result.DeviceToHost {
		_, err := c.by[method].CopyToHost(ctx, s, blocks)
		return err
	}
	_, err := c.by[method].CopyToDevice(ctx, s, blocks)
	return err
}

// time returns the device's time of the copies, from the event after which they may begin.
func (c *blockCase) time(ctx context.Context) (time.Duration, error) {
	if c.direction != result.Both {
		return c.span.Time(ctx, c.main(c.direction), func() error { return c.queue(ctx, c.direction) })
	}
	return c.span.Time(ctx, c.up, func() error {
		if err := c.down.WaitPoint(c.up.Point()); err != nil {
			return err
		}
		queued := make(chan error, 1)
		go func() { queued <- c.queue(ctx, result.DeviceToHost) }()
		err := c.queue(ctx, result.HostToDevice)
		if err = errors.Join(err, <-queued); err != nil {
			return err
		}
		return c.up.WaitPoint(c.down.Point())
	})
}
