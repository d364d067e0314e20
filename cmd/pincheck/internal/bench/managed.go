// The experiment managed times managed memory: first touches, prefetches, page faults, advice, and work over
// eight times its budget by plans, by page faults and by explicit copies of pinned memory.
//
//   - Clock: the host's, until the stream has completed the work or the CPU its accesses. Moving the memory to
//     where a sample starts is not timed.
//   - managed_bandwidth, managed_budget: the bytes that are accessed by that time, once each, also where they
//     move in both directions.
//   - managed_page, managed_ping_pong: seconds by the number of pages, or of rounds.

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/managed"
)

// The series of the experiment managed.
const (
	seriesManaged         = "managed_bandwidth"
	seriesManagedPages    = "managed_page" // time of one page that moves by a fault
	seriesManagedPingPong = "managed_ping_pong"
	seriesManagedBudget   = "managed_budget"
)

// Labels of these series.
const (
	orderLabel  = "order"  // of pages
	adviceLabel = "advice" // given for the memory
	accessLabel = "access" // by the work of a budgeted run
)

// The values of the label method of seriesManaged: how the bytes come to where they are
// accessed.
const (
	cpuFirstTouch    = "cpu_first_touch"
	gpuFirstTouch    = "gpu_first_touch"
	prefetchToDevice = "prefetch_to_device"
	prefetchToHost   = "prefetch_to_host"
	moveToDevice     = "move_to_device" // prefetches by several threads
	moveToHost       = "move_to_host"
	gpuFaults        = "gpu_faults"
	cpuFaults        = "cpu_faults"
	gpuReads         = "gpu_reads" // with advice: twice the same bytes
)

// The values of the label method of seriesManagedBudget.
const (
	byPlan        = "plan"
	byPlanInPlace = "plan_in_place" // which leaves the memory on the host
	byFaults      = "faults"
	byExplicit    = "explicit_pinned"
)

// Values of adviceLabel.
const (
	noAdvice        = "none"
	adviseRead      = "read_mostly"
	adviseFromAfar  = "accessed_by" // and the preferred location is the host
	sequentialPages = "sequential"
	randomPages     = "random"
)

// managedMemory measures managed memory.
var managedMemory = measure.Experiment{
	Name:     "managed",
	Group:    "Memory:",
	Question: "What does managed memory cost, with and without prefetch?",
	Long: `Measures how fast managed memory moves by prefetch and by page faults, what
advice changes, and work over more memory than a budget allows on the GPU.`,
	Related: "pincheck bench bandwidth",
	Views: []result.View{
		{Title: "Managed memory", Series: seriesManaged, Where: labelled(adviceLabel, noAdvice), X: result.Size, Lines: []string{result.Device, result.Method}},
		{Title: "The GPU reads managed memory twice", Series: seriesManaged, Where: labelled(result.Method, gpuReads), X: result.Size, Lines: []string{result.Device, adviceLabel}},
		{Title: "Time to move a page by a fault", Series: seriesManagedPages, X: result.Method, Lines: []string{result.Device, orderLabel}},
		{Title: "CPU and GPU write one page in turn", Series: seriesManagedPingPong, X: adviceLabel, Lines: []string{result.Device}},
		{Title: "Work over eight times its budget", Series: seriesManagedBudget, X: result.Method, Lines: []string{result.Device, accessLabel}},
	},
	Plan:    onDevices(planManaged),
	Explain: explainManaged,
}

const (
	managedShare = 4 // managed memory takes at most so large a part of what the card has free
	hostPage     = 4 << 10
	gpuPage      = 64 << 10
	pagesTouched = 256
	timesBudget  = 8
	minBudget    = 8 << 20
)

func planManaged(env measure.Env) ([]measure.Group, error) {
	sizes := sizesOr(env, []int{64 << 20}, []int{64 << 20, 256 << 20, 1 << 30})
	total := 2 << 30
	if env.Quick {
		total = 512 << 20
	}
	if isSimulated(env) || len(env.Sizes) > 0 {
		total = max(slices.Max(sizes), timesBudget*minBudget)
	}
	var groups []measure.Group
	for _, dev := range env.Devices {
		free, _, err := dev.MemInfo()
		if err != nil {
			return nil, err
		}
		fits := free / managedShare
		if available, ok := hostmem.Available(); ok {
			fits = min(fits, available/managedShare)
		}
		r := &managedFixture{resources: resources{dev: dev}}
		for _, n := range sizes {
			if n <= fits {
				groups = append(groups, r.group(fmt.Sprintf("managed memory, %s", units.Bytes(n)), measure.Footprint{Pageable: n, Device: 2 * n}, n, r.bySize(n)))
			}
		}
		page := pagesTouched * gpuPage
		groups = append(groups, r.group("managed pages", measure.Footprint{Pageable: page, Device: page}, page, r.byPage(page)))
		budget := min(total, fits) / timesBudget &^ (minBudget - 1)
		if n := budget * timesBudget; n > 0 {
			groups = append(groups, r.group(fmt.Sprintf("a budget of %s", units.Bytes(budget)), measure.Footprint{Pageable: n, Pinned: n, Device: 2 * budget}, n, r.budgeted(n)))
		}
	}
	return groups, nil
}

// A managedFixture is what a group needs.
type managedFixture struct {
	resources
	a    *managed.Allocator
	s    *cudart.Stream
	m    *managed.Memory
	sink cudart.DevPtr // of sinkBytes: the target of the GPU's reads
	size int

	// Of explicit copies.
	host *hostmem.Buffer
	two  [2]struct {
		s  *cudart.Stream
		at cudart.DevPtr
	}

	fresh *managed.Memory   // of the last sample that allocated some
	clean bool              // the memory holds the pattern, as no case has begun since it was compared
	watch measure.Stopwatch // of what is timed, without the way to where it begins
}

const (
	planChunk = 32 << 20 // the default of managed.PlanOptions
	sinkBytes = 2 * planChunk
)

func (r *managedFixture) group(name string, footprint measure.Footprint, n int, cases []measure.Case) measure.Group {
	footprint.Device += sinkBytes
	return measure.Group{Name: fmt.Sprintf("%s on GPU %d", name, r.dev.Ordinal()), Footprint: footprint, Setup: secondsAt(n, 2) + time.Duration(len(cases))*secondsAt(n, 3), // to fill, and to compare
		Open: func(ctx context.Context) error { return r.open(ctx, n) }, Close: r.shut, Cases: cases, Notes: r.notes}
}

// open allocates n bytes, which lie on the host.
func (r *managedFixture) open(ctx context.Context, n int) (err error) {
	if r.a, err = managed.New(ctx, r.dev, managed.Options{}); err != nil {
		return err
	}
	r.undo.PushClose(r.a.Close)
	memory := func() (*managed.Memory, error) { return r.a.Alloc(ctx, n, managed.AllocOptions{}) }
	if err = inTurn(made(r.stream, &r.s), r.allocated(sinkBytes, &r.sink), made(memory, &r.m)); err != nil {
		return err
	}
	r.undo.PushClose(r.m.Close)
	r.undo.PushClose(r.closeFresh)
	r.size, r.watch.Now = n, r.time
	return r.begin(ctx)
}

// begin makes the memory hold the pattern, on the host, unless it does.
func (r *managedFixture) begin(ctx context.Context) error {
	if r.clean {
		return nil
	}
	err := r.moved(ctx, cudart.HostLocation())
	if err == nil {
		err = uploaded.fill(ctx, r.m.Bytes())
	}
	r.clean = err == nil
	return err
}

// withPattern returns a case whose first sample begins with the pattern in memory. verify compares
// the memory after the samples.
func (r *managedFixture) withPattern(c measure.Case, verify func(context.Context) error) measure.Case {
	c.Sample = after(func(ctx context.Context) error {
		err := r.begin(ctx)
		r.clean = r.clean && err != nil
		return err
	}, c.Sample)
	c.Verify = verify
	return c
}

func (r *managedFixture) shut() error {
	err := r.close()
	*r = managedFixture{resources: resources{dev: r.dev, now: r.now}}
	return err
}

// closeFresh frees the memory of the last sample that allocated some.
func (r *managedFixture) closeFresh() error {
	if r.fresh == nil {
		return nil
	}
	err := r.fresh.Close()
	if err == nil {
		r.fresh = nil
	}
	return err
}

// The memory of a group holds the pattern uploaded, except where work of the GPU or the CPU wrote
// written. What a case did to it is compared after its samples, and undone.
const written = 1

// writes are what a case writes: the first bytes of each unit.
type writes struct{ unit, bytes int }

var (
	nothing    = writes{1, 0}
	everything = writes{1, 1}
	eachPage   = writes{hostPage, 1} // as touch does
)

// in returns what memory holds that had these bytes, from off on, before the writes.
func (w writes) in(before []byte, off int) []byte {
	switch w {
	case nothing:
		return before
	case everything:
		return bytes.Repeat([]byte{written}, len(before))
	}
	b := bytes.Clone(before)
	for at := off / w.unit * w.unit; at < off+len(b); at += w.unit {
		for i := max(at, off); i < min(at+w.bytes, off+len(b)); i++ {
			b[i-off] = written
		}
	}
	return b
}

// verify compares the memory with the pattern and the writes, and writes the pattern again.
// Before, the memory is moved to the host.
func (r *managedFixture) verify(ctx context.Context, w writes) error {
	if err := r.moved(ctx, cudart.HostLocation()); err != nil {
		return err
	}
	err := w.undone(ctx, r.m.Bytes())
	r.clean = err == nil
	return err
}

// undone compares memory with the pattern and the writes, and writes the pattern again.
func (w writes) undone(ctx context.Context, memory []byte) error {
	return uploaded.each(ctx, memory, 0, func(b, want []byte, off int) error {
		err := firstDifference(b, w.in(want, off), off)
		copy(b, want)
		return err
	})
}

// verifyFresh compares what was written to memory that a sample allocated, after it was on the
// device, and frees it.
func (r *managedFixture) verifyFresh(ctx context.Context, w writes) error {
	for _, to := range []cudart.Location{r.dev.Location(), cudart.HostLocation()} {
		if err := errors.Join(r.fresh.Whole().Prefetch(ctx, r.s, to), r.s.Synchronize(ctx)); err != nil {
			return err
		}
	}
	err := uploaded.each(ctx, r.fresh.Bytes(), 0, func(b, _ []byte, off int) error { return firstDifference(b, w.in(b, off), off) })
	return errors.Join(err, r.closeFresh())
}

// verifyRead compares what the GPU's last read of the memory, of a unit of bytes at most, brought
// to the sink from a byte of it on.
func (r *managedFixture) verifyRead(ctx context.Context, unit, at int) error {
	off := (r.size - 1) / unit * unit
	n := r.size - off
	got := make([]byte, n)
	if err := r.dev.CopyToHost(unsafe.Pointer(&got[0]), r.sink+cudart.DevPtr(at), n); err != nil {
		return err
	}
	return uploaded.compare(ctx, got, off)
}

// notes returns the statistics of the allocator, and what is special here.
func (r *managedFixture) notes() []string {
	if r.a == nil {
		return nil
	}
	s := r.a.Stats()
	notes := slices.Clone(r.a.Notes())
	if r.dev.Runtime().Library().Simulated {
		notes = append(notes, "the library is simulated: it does not see what the CPU touches, so that nothing moves then")
	}
	return append(notes, fmt.Sprintf("managed memory of the group on GPU %d: %s at the peak, %s, %d freed", r.dev.Ordinal(), units.Bytes(s.Peak), units.Things(s.Allocs, "allocation", "allocations"), s.Frees))
}

// moved moves all of the memory to a place, which no sample counts.
func (r *managedFixture) moved(ctx context.Context, to cudart.Location) error {
	if err := r.m.Whole().Prefetch(ctx, r.s, to); err != nil {
		return err
	}
	return r.s.Synchronize(ctx)
}

// startAt moves the memory to where a sample begins, and starts the watch.
func (r *managedFixture) startAt(ctx context.Context, at cudart.Location) error {
	err := r.moved(ctx, at)
	r.watch.Start()
	return err
}

// rate stops the watch, and returns the GB/s of n bytes.
func (r *managedFixture) rate(n int) float64 { return float64(n) / float64(r.watch.Stop()) }

// bySize are the cases of n bytes.
func (r *managedFixture) bySize(n int) []measure.Case {
	here := r.dev.Location()
	fresh := func(write func(m *managed.Memory) error) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			err := r.closeFresh()
			if err == nil {
				r.fresh, err = r.a.Alloc(ctx, n, managed.AllocOptions{})
			}
			if err != nil {
				return 0, err
			}
			r.watch.Start()
			err = write(r.fresh)
			return r.rate(n), err
		}
	}
	from := func(start cudart.Location, do func(ctx context.Context) error) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			if err := r.startAt(ctx, start); err != nil {
				return 0, err
			}
			err := do(ctx)
			return r.rate(n), err
		}
	}
	set := func(ctx context.Context, p cudart.DevPtr) error {
		if err := r.s.Memset(p, written, n); err != nil {
			return err
		}
		return r.s.Synchronize(ctx)
	}
	var cases []measure.Case
	add := func(method, advice string, bytes int, sample func(context.Context) (float64, error), verify func(context.Context) error) {
		cases = append(cases, r.withPattern(measure.Case{
			Series: result.Series{Name: seriesManaged, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: bytes,
				Labels: labelsOf(r.dev, result.Method, method, adviceLabel, advice, result.Size, strconv.Itoa(n))},
			WarmUp: 1, Samples: 7, Sample: sample, CPU: r.watch.CPU,
		}, verify))
	}
	holds := func(w writes) func(context.Context) error {
		return func(ctx context.Context) error { return r.verify(ctx, w) }
	}
	freshHolds := func(w writes) func(context.Context) error {
		return func(ctx context.Context) error { return r.verifyFresh(ctx, w) }
	}
	add(cpuFirstTouch, noAdvice, n, fresh(func(m *managed.Memory) error { touch(m.Bytes()); return nil }), freshHolds(eachPage))
	add(gpuFirstTouch, noAdvice, n, fresh(func(m *managed.Memory) error { return set(context.Background(), m.Ptr()) }), freshHolds(everything))
	add(prefetchToDevice, noAdvice, n, from(cudart.HostLocation(), func(ctx context.Context) error { return r.moved(ctx, here) }), holds(nothing))
	add(prefetchToHost, noAdvice, n, from(here, func(ctx context.Context) error { return r.moved(ctx, cudart.HostLocation()) }), holds(nothing))
	add(moveToDevice, noAdvice, n, from(cudart.HostLocation(), func(ctx context.Context) error { return r.a.Move(ctx, here, r.m.Whole()) }), holds(nothing))
	add(moveToHost, noAdvice, n, from(here, func(ctx context.Context) error { return r.a.Move(ctx, cudart.HostLocation(), r.m.Whole()) }), holds(nothing))
	add(gpuFaults, noAdvice, n, from(cudart.HostLocation(), func(ctx context.Context) error { return set(ctx, r.m.Ptr()) }), holds(everything))
	add(cpuFaults, noAdvice, n, from(here, func(context.Context) error { touch(r.m.Bytes()); return nil }), holds(eachPage))
	for _, advice := range []string{noAdvice, adviseRead, adviseFromAfar} {
		add(gpuReads, advice, 2*n, func(ctx context.Context) (float64, error) {
			if err := r.moved(ctx, cudart.HostLocation()); err != nil {
				return 0, err
			}
			var rate float64
			err := r.advised(ctx, advice, func() error {
				r.watch.Start()
				for range 2 {
					if err := r.read(0, n); err != nil {
						return err
					}
				}
				err := r.s.Synchronize(ctx)
				rate = r.rate(2 * n)
				return err
			})
			return rate, err
		}, func(ctx context.Context) error {
			return errors.Join(r.verifyRead(ctx, sinkBytes, 0), r.verify(ctx, nothing))
		})
	}
	return cases
}

// read queues reads of a range by the GPU: copies within its memory.
func (r *managedFixture) read(off, n int) error {
	for end := off + n; off < end; off += sinkBytes {
		if err := r.s.CopyOnDevice(r.sink, r.m.Ptr()+cudart.DevPtr(off), min(sinkBytes, end-off)); err != nil {
			return err
		}
	}
	return nil
}

// An advice is set with a location, and unset.
type advice struct {
	set, unset cudart.Advice
	at         cudart.Location
}

func (r *managedFixture) adviceOf(label string) []advice {
	switch label {
	case adviseRead:
		return []advice{{cudart.AdviseReadMostly, cudart.AdviseUnsetReadMostly, cudart.HostLocation()}}
	case adviseFromAfar:
		return []advice{
			{cudart.AdvisePreferredLocation, cudart.AdviseUnsetPreferredLocation, cudart.HostLocation()},
			{cudart.AdviseAccessedBy, cudart.AdviseUnsetAccessedBy, r.dev.Location()},
		}
	}
	return nil
}

// advised runs f under advice.
func (r *managedFixture) advised(ctx context.Context, label string, f func() error) error {
	var err error
	var set []advice
	for _, a := range r.adviceOf(label) {
		if err == nil {
			err, set = r.m.Whole().Advise(ctx, a.set, a.at), append(set, a)
		}
	}
	if err == nil {
		err = f()
	}
	return errors.Join(err, r.unadvise(ctx, set))
}

func (r *managedFixture) unadvise(ctx context.Context, list []advice) (err error) {
	for _, a := range list {
		err = errors.Join(err, r.m.Whole().Advise(ctx, a.unset, a.at))
	}
	return err
}

// byPage are the cases of single pages of the n bytes.
func (r *managedFixture) byPage(n int) []measure.Case {
	var cases []measure.Case
	add := func(series string, labels result.Labels, sample func(context.Context) (float64, error), w writes) {
		cases = append(cases, r.withPattern(measure.Case{
			Series: result.Series{Name: series, Unit: result.Seconds, Better: result.Lower, Labels: labels},
			WarmUp: 1, Samples: 9, Sample: sample,
		}, func(ctx context.Context) error { return r.verify(ctx, w) }))
	}
	for _, order := range []string{sequentialPages, randomPages} {
		pages := make([]int, n/gpuPage)
		for i := range pages {
			pages[i] = i * gpuPage
		}
		if order == randomPages {
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(pages), func(i, j int) { pages[i], pages[j] = pages[j], pages[i] })
		}
		add(seriesManagedPages, labelsOf(r.dev, result.Method, gpuFaults, orderLabel, order), func(ctx context.Context) (float64, error) {
			if err := r.startAt(ctx, cudart.HostLocation()); err != nil {
				return 0, err
			}
			for _, at := range pages {
				if err := r.s.Memset(r.m.Ptr()+cudart.DevPtr(at), written, hostPage); err != nil {
					return 0, err
				}
			}
			err := r.s.Synchronize(ctx)
			return r.watch.Stop().Seconds() / float64(len(pages)), err
		}, writes{gpuPage, hostPage})
		add(seriesManagedPages, labelsOf(r.dev, result.Method, cpuFaults, orderLabel, order), func(ctx context.Context) (float64, error) {
			b := r.m.Bytes()
			if err := r.startAt(ctx, r.dev.Location()); err != nil {
				return 0, err
			}
			for _, at := range pages {
				b[at] = written
			}
			return r.watch.Stop().Seconds() / float64(len(pages)), nil
		}, writes{gpuPage, 1})
	}
	for _, advice := range []string{noAdvice, adviseFromAfar} {
		add(seriesManagedPingPong, labelsOf(r.dev, adviceLabel, advice), func(ctx context.Context) (float64, error) {
			var took time.Duration
			err := r.advised(ctx, advice, func() (err error) {
				took, err = r.pingPong(ctx)
				return err
			})
			return took.Seconds() / pingPongs, err
		}, writes{n, hostPage})
	}
	return cases
}

const pingPongs = 20

// pingPong has CPU and GPU write to one page in turn.
func (r *managedFixture) pingPong(ctx context.Context) (time.Duration, error) {
	if err := r.startAt(ctx, cudart.HostLocation()); err != nil {
		return 0, err
	}
	for i := range pingPongs {
		wrote := byte(pingPongs - i) // the last one is written
		r.m.Bytes()[0] = 0
		if err := r.s.Memset(r.m.Ptr(), wrote, hostPage); err != nil {
			return 0, err
		}
		if err := r.s.Synchronize(ctx); err != nil {
			return 0, err
		}
		if got := r.m.Bytes()[0]; got != wrote {
			return 0, fmt.Errorf("the CPU reads %#x where the GPU wrote %#x: %w", got, wrote, measure.ErrMismatch)
		}
	}
	return r.watch.Stop(), nil
}

// budgeted are the cases of work over n bytes with an eighth of them on the card.
func (r *managedFixture) budgeted(n int) []measure.Case {
	budget := n / timesBudget
	chunk := min(planChunk, budget/4)
	var cases []measure.Case
	for _, write := range []bool{false, true} {
		access := "read"
		if write {
			access = "write"
		}
		for _, method := range []string{byExplicit, byPlan, byPlanInPlace, byFaults} {
			c := measure.Case{
				Series: result.Series{Name: seriesManagedBudget, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: n,
					Labels: labelsOf(r.dev, result.Method, method, accessLabel, access, result.Size, strconv.Itoa(n))},
				WarmUp: 1, Samples: 5, CPU: r.watch.CPU,
				Sample: func(ctx context.Context) (float64, error) {
					run := map[string]func(context.Context, int, int, bool) (time.Duration, error){byExplicit: r.explicit, byPlan: r.planned, byPlanInPlace: r.inPlace, byFaults: r.faulting}[method]
					took, err := run(ctx, budget, chunk, write)
					return float64(n) / float64(took), err
				},
			}
			w := nothing
			if write {
				w = everything
			}
			cases = append(cases, r.withPattern(c, func(ctx context.Context) (err error) {
				switch {
				case write:
				case method == byExplicit:
					err = r.verifyRead(ctx, chunk, sinkOf((n-1)/chunk))
				default:
					err = r.verifyRead(ctx, chunk, 0)
				}
				if method != byExplicit {
					return errors.Join(err, r.verify(ctx, w))
				}
				return errors.Join(err, w.undone(ctx, r.host.Bytes()))
			}))
		}
	}
	return cases
}

// work queues what a step does with n bytes at an address of the card: it writes them, or reads
// them to a place in the sink.
func (r *managedFixture) work(s *cudart.Stream, at cudart.DevPtr, n int, write bool, sink int) error {
	if write {
		return s.Memset(at, written, n)
	}
	return s.CopyOnDevice(r.sink+cudart.DevPtr(sink), at, n)
}

// sinkOf returns where in the sink an explicit copy's chunk is read to. Two are read at once.
func sinkOf(chunk int) int { return chunk % 2 * (sinkBytes / 2) }

// plan plans the work in steps of a chunk each.
func (r *managedFixture) plan(budget, chunk int, mode managed.Mode) (*managed.Plan, error) {
	var steps []managed.Step
	for off := 0; off < r.size; off += chunk {
		steps = append(steps, managed.Step{r.m.Range(off, min(chunk, r.size-off)).As(mode)})
	}
	// Chunks lie on a grid of addresses, so that a step may access two.
	return r.a.NewPlan(steps, managed.PlanOptions{Budget: budget, Chunk: chunk})
}

// runPlan runs the work by a plan.
func (r *managedFixture) runPlan(ctx context.Context, p *managed.Plan, chunk int, write bool) error {
	return p.Run(ctx, r.s, func(i int) error {
		off := i * chunk
		return r.work(r.s, r.m.Ptr()+cudart.DevPtr(off), min(chunk, r.size-off), write, 0)
	})
}

func (r *managedFixture) planned(ctx context.Context, budget, chunk int, write bool) (time.Duration, error) {
	mode := managed.ReadOnly
	if write {
		mode = managed.ReadWrite
	}
	p, err := r.plan(budget, chunk, mode)
	if err != nil {
		return 0, err
	}
	if err := r.startAt(ctx, cudart.HostLocation()); err != nil {
		return 0, err
	}
	err = r.runPlan(ctx, p, chunk, write)
	return r.watch.Stop(), err
}

// inPlace measures the second run of a plan, as the first one gives advice. It takes the
// advice back, with which there are no page faults.
func (r *managedFixture) inPlace(ctx context.Context, budget, chunk int, write bool) (took time.Duration, err error) {
	p, err := r.plan(budget, chunk, managed.InPlace)
	if err != nil {
		return 0, err
	}
	if err := r.startAt(ctx, cudart.HostLocation()); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.unadvise(ctx, r.adviceOf(adviseFromAfar))) }()
	if err := r.runPlan(ctx, p, chunk, write); err != nil {
		return 0, err
	}
	r.watch.Start()
	err = r.runPlan(ctx, p, chunk, write)
	return r.watch.Stop(), err
}

func (r *managedFixture) faulting(ctx context.Context, _, chunk int, write bool) (time.Duration, error) {
	err := r.startAt(ctx, cudart.HostLocation())
	for off := 0; off < r.size && err == nil; off += chunk {
		n := min(chunk, r.size-off)
		if err = r.work(r.s, r.m.Ptr()+cudart.DevPtr(off), n, write, 0); err == nil {
			err = r.m.Range(off, n).Prefetch(ctx, r.s, cudart.HostLocation())
		}
	}
	if err != nil {
		return 0, err
	}
	err = r.s.Synchronize(ctx)
	return r.watch.Stop(), err
}

// explicit does the work by copies of pinned memory to two buffers on the card in turn. It reads
// and writes what runs by a plan read and write, and ends with the bytes on the host, as they do.
func (r *managedFixture) explicit(ctx context.Context, _, chunk int, write bool) (took time.Duration, err error) {
	if r.host == nil {
		if r.host, err = r.pinned(ctx, r.size); err != nil {
			return 0, err
		}
		if err := uploaded.fill(ctx, r.host.Bytes()); err != nil {
			return 0, err
		}
		for i := range r.two {
			if r.two[i].s, err = r.stream(); err != nil {
				return 0, err
			}
			if r.two[i].at, err = r.device(chunk); err != nil {
				return 0, err
			}
		}
	}
	r.watch.Start()
	for i := 0; i*chunk < r.size; i++ {
		off, s, at := i*chunk, r.two[i%2].s, r.two[i%2].at
		n := min(chunk, r.size-off)
		if err := r.host.CopyToDevice(s, at, off, n); err != nil {
			return 0, err
		}
		if err := r.work(s, at, n, write, sinkOf(i)); err != nil {
			return 0, err
		}
		if !write {
			continue
		}
		if err := r.host.CopyFromDevice(s, at, off, n); err != nil {
			return 0, err
		}
	}
	for _, b := range r.two {
		if err := b.s.Synchronize(ctx); err != nil {
			return 0, err
		}
	}
	return r.watch.Stop(), nil
}

func explainManaged(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	prefetched := func(a *answers) *result.Series { return a.largest(seriesManaged, result.Method, prefetchToDevice) }
	return explained(b, prefetched, func(a *answers) {
		up := prefetched(a)
		a.faster("Managed memory moves %[2]s as fast %[1]s as %[3]s.", named{"by prefetch", up}, named{"by page faults", a.other(up, seriesManaged, result.Method, gpuFaults)})
	}, func(a *answers) {
		up := prefetched(a)
		of := func(method string) *result.Quantity {
			return a.other(up, seriesManaged, result.Method, method).Quantity()
		}
		if up != nil {
			t := result.Table{Title: "at " + units.Bytes(up.Labels.Size()), Columns: []string{"prefetched", "by threads", "faults", "first touch"}}
			t.Add("to GPU", "", of(prefetchToDevice), of(moveToDevice), of(gpuFaults), of(gpuFirstTouch))
			t.Add("from GPU", "", of(prefetchToHost), of(moveToHost), of(cpuFaults), of(cpuFirstTouch))
			a.table(t)
		}
		a.overBudget()
	})
}

// overBudget compares ways of working on more managed memory than the GPU may hold.
func (a *answers) overBudget() {
	t := result.Table{Columns: []string{"moved by a plan", "left on the host", "page faults", "explicit copies"}, Only: result.Alone}
	for _, access := range []struct{ label, name string }{{"read", "read"}, {"write", "written"}} {
		plan := a.largest(seriesManagedBudget, result.Method, byPlan, accessLabel, access.label)
		of := func(method string) *result.Quantity {
			return a.other(plan, seriesManagedBudget, result.Method, method).Quantity()
		}
		if plan == nil {
			continue
		}
		t.Title = fmt.Sprintf("%s, an eighth of it on the GPU", units.Bytes(plan.Labels.Size()))
		t.Add(access.name, "", of(byPlan), of(byPlanInPlace), of(byFaults), of(byExplicit))
	}
	a.table(t)
}
