package bench

import (
	"context"
	"errors"
	"fmt"
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
	byPlan     = "plan"
	byInPlace  = "plan_in_place" // which leaves the memory on the host
	byFaults   = "faults"
	byExplicit = "explicit_pinned"
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
	Short:    "managed memory: prefetch, page faults, advice, and work over more than a budget",
	Question: "How fast does managed memory move, by prefetch and by page faults, and does work over more than fits on the card run at the speed of copies?",
	Views: []result.View{
		{Title: "Managed memory, by size", Series: seriesManaged, Where: result.Labels{{Key: adviceLabel, Value: noAdvice}}, X: result.Size, Lines: []string{result.Device, result.Method}},
		{Title: "The GPU reads the same managed memory twice, by size", Series: seriesManaged, Where: result.Labels{{Key: result.Method, Value: gpuReads}},
			X: result.Size, Lines: []string{result.Device, adviceLabel}},
		{Title: "Time of a page that moves by a fault", Series: seriesManagedPages, X: result.Method, Lines: []string{result.Device, orderLabel}},
		{Title: "CPU and GPU write the same page in turn", Series: seriesManagedPingPong, X: adviceLabel, Lines: []string{result.Device}},
		{Title: "Work over eight times its budget", Series: seriesManagedBudget, X: result.Method, Lines: []string{result.Device, accessLabel}},
	},
	Plan:    planManaged,
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
	if len(env.Devices) == 0 {
		return nil, errNoDevice
	}
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
				groups = append(groups, r.group(fmt.Sprintf("managed memory, %s", units.Bytes(n)), measure.Need{Pageable: n, Device: 2 * n}, n, r.bySize(n)))
			}
		}
		page := pagesTouched * gpuPage
		groups = append(groups, r.group("managed pages", measure.Need{Pageable: page, Device: page}, page, r.byPage(page)))
		budget := min(total, fits) / timesBudget &^ (minBudget - 1)
		if n := budget * timesBudget; n > 0 {
			groups = append(groups, r.group(fmt.Sprintf("a budget of %s", units.Bytes(budget)), measure.Need{Pageable: n, Pinned: n, Device: 2 * budget}, n, r.budgeted(n)))
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
	host *hostmem.Buffer
	two  [2]*cudart.Stream // of explicit copies
	size int

	watch measure.Stopwatch // of what is timed, without the way to where it begins
}

const sinkBytes = 2 * managed.DefaultChunk

func (r *managedFixture) group(name string, need measure.Need, n int, cases []measure.Case) measure.Group {
	need.Device += sinkBytes
	return measure.Group{Name: fmt.Sprintf("%s on GPU %d", name, r.dev.Ordinal()), Need: need, Setup: time.Duration(float64(n) / 2),
		Open: func(ctx context.Context) error { return r.open(ctx, n) }, Close: r.shut, Cases: cases, Notes: r.notes}
}

// open allocates n bytes, which lie on the host.
func (r *managedFixture) open(ctx context.Context, n int) (err error) {
	if r.a, err = managed.New(ctx, r.dev, managed.Options{}); err != nil {
		return err
	}
	r.onClose(r.a.Close)
	if r.s, err = r.stream(); err != nil {
		return err
	}
	if r.sink, err = r.device(sinkBytes); err != nil {
		return err
	}
	if r.m, err = r.a.Alloc(ctx, n); err != nil {
		return err
	}
	r.onClose(r.m.Close)
	for at := 0; at < n; at += piece {
		if err := bounded.Ended(ctx); err != nil {
			return err
		}
		touch(r.m.Bytes()[at:min(at+piece, n)])
	}
	r.size = n
	return nil
}

func (r *managedFixture) shut() error {
	err := r.close()
	*r = managedFixture{resources: resources{dev: r.dev}}
	return err
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
	return append(notes, fmt.Sprintf("managed memory of the group on GPU %d: %s at the peak, %d allocations, %d freed", r.dev.Ordinal(), units.Bytes(s.Peak), s.Allocs, s.Frees))
}

// moved moves all of the memory to a place, which no sample counts.
func (r *managedFixture) moved(ctx context.Context, to cudart.Location) error {
	if err := r.m.All().Prefetch(ctx, r.s, to); err != nil {
		return err
	}
	return r.s.Synchronize(ctx)
}

// rate stops the watch, and returns the GB/s of n bytes.
func (r *managedFixture) rate(n int) float64 { return float64(n) / float64(r.watch.Stop()) }

// bySize are the cases of n bytes.
func (r *managedFixture) bySize(n int) []measure.Case {
	here := r.dev.Location()
	fresh := func(touch func(m *managed.Memory) error) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			m, err := r.a.Alloc(ctx, n)
			if err != nil {
				return 0, err
			}
			r.watch.Start()
			err = touch(m)
			rate := r.rate(n)
			return rate, errors.Join(err, m.Close())
		}
	}
	from := func(start cudart.Location, do func(ctx context.Context) error) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			if err := r.moved(ctx, start); err != nil {
				return 0, err
			}
			r.watch.Start()
			err := do(ctx)
			return r.rate(n), err
		}
	}
	set := func(ctx context.Context, p cudart.DevPtr) error {
		if err := r.s.Memset(p, 1, n); err != nil {
			return err
		}
		return r.s.Synchronize(ctx)
	}
	var cases []measure.Case
	add := func(method, advice string, sample func(context.Context) (float64, error)) {
		cases = append(cases, measure.Case{
			Series: result.Series{Name: seriesManaged, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: n,
				Labels: append(labelsOf(r.dev), result.Label{Key: result.Method, Value: method}, result.Label{Key: adviceLabel, Value: advice},
					result.Label{Key: result.Size, Value: strconv.Itoa(n)})},
			WarmUp: 1, Samples: 7, Sample: sample, CPU: r.watch.CPU,
		})
	}
	add(cpuFirstTouch, noAdvice, fresh(func(m *managed.Memory) error { touch(m.Bytes()); return nil }))
	add(gpuFirstTouch, noAdvice, fresh(func(m *managed.Memory) error { return set(context.Background(), m.DevPtr()) }))
	add(prefetchToDevice, noAdvice, from(managed.Host(), func(ctx context.Context) error { return r.moved(ctx, here) }))
	add(prefetchToHost, noAdvice, from(here, func(ctx context.Context) error { return r.moved(ctx, managed.Host()) }))
	add(moveToDevice, noAdvice, from(managed.Host(), func(ctx context.Context) error { return r.a.Move(ctx, here, r.m.All()) }))
	add(moveToHost, noAdvice, from(here, func(ctx context.Context) error { return r.a.Move(ctx, managed.Host(), r.m.All()) }))
	add(gpuFaults, noAdvice, from(managed.Host(), func(ctx context.Context) error { return set(ctx, r.m.DevPtr()) }))
	add(cpuFaults, noAdvice, from(here, func(context.Context) error { touch(r.m.Bytes()); return nil }))
	for _, advice := range []string{noAdvice, adviseRead, adviseFromAfar} {
		add(gpuReads, advice, func(ctx context.Context) (float64, error) {
			if err := r.moved(ctx, managed.Host()); err != nil {
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
		})
	}
	return cases
}

// read queues reads of a range by the GPU: copies within its memory.
func (r *managedFixture) read(off, n int) error {
	for end := off + n; off < end; off += sinkBytes {
		if err := r.s.CopyOnDevice(r.sink, r.m.DevPtr()+cudart.DevPtr(off), min(sinkBytes, end-off)); err != nil {
			return err
		}
	}
	return nil
}

// advised runs f under advice.
func (r *managedFixture) advised(ctx context.Context, advice string, f func() error) error {
	var all []managed.Advice
	switch advice {
	case adviseRead:
		all = []managed.Advice{managed.ReadMostly()}
	case adviseFromAfar:
		all = []managed.Advice{managed.PreferredLocation(managed.Host()), managed.AccessedBy(r.dev.Location())}
	}
	for i, a := range all {
		if err := r.m.All().Advise(ctx, a); err != nil {
			for _, done := range all[:i] {
				err = errors.Join(err, r.m.All().Unadvise(ctx, done))
			}
			return err
		}
	}
	err := f()
	for _, a := range all {
		err = errors.Join(err, r.m.All().Unadvise(ctx, a))
	}
	return err
}

// byPage are the cases of single pages of the n bytes.
func (r *managedFixture) byPage(n int) []measure.Case {
	var cases []measure.Case
	add := func(series, method, key, value string, sample func(context.Context) (float64, error)) {
		labels := labelsOf(r.dev)
		if method != "" {
			labels = append(labels, result.Label{Key: result.Method, Value: method})
		}
		cases = append(cases, measure.Case{
			Series: result.Series{Name: series, Unit: result.Seconds, Better: result.Lower, Labels: append(labels, result.Label{Key: key, Value: value})},
			WarmUp: 1, Samples: 9, Sample: sample,
		})
	}
	for _, order := range []string{sequentialPages, randomPages} {
		pages := make([]int, n/gpuPage)
		for i := range pages {
			pages[i] = i * gpuPage
		}
		if order == randomPages {
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(pages), func(i, j int) { pages[i], pages[j] = pages[j], pages[i] })
		}
		add(seriesManagedPages, gpuFaults, orderLabel, order, func(ctx context.Context) (float64, error) {
			if err := r.moved(ctx, managed.Host()); err != nil {
				return 0, err
			}
			r.watch.Start()
			for _, at := range pages {
				if err := r.s.Memset(r.m.DevPtr()+cudart.DevPtr(at), 1, hostPage); err != nil {
					return 0, err
				}
			}
			err := r.s.Synchronize(ctx)
			return r.watch.Stop().Seconds() / float64(len(pages)), err
		})
		add(seriesManagedPages, cpuFaults, orderLabel, order, func(ctx context.Context) (float64, error) {
			if err := r.moved(ctx, r.dev.Location()); err != nil {
				return 0, err
			}
			b := r.m.Bytes()
			r.watch.Start()
			for _, at := range pages {
				b[at]++
			}
			return r.watch.Stop().Seconds() / float64(len(pages)), nil
		})
	}
	for _, advice := range []string{noAdvice, adviseFromAfar} {
		add(seriesManagedPingPong, "", adviceLabel, advice, func(ctx context.Context) (float64, error) {
			const turns = 20
			var took time.Duration
			err := r.advised(ctx, advice, func() error {
				if err := r.moved(ctx, managed.Host()); err != nil {
					return err
				}
				r.watch.Start()
				for i := range turns {
					r.m.Bytes()[0] = byte(i)
					if err := r.s.Memset(r.m.DevPtr(), byte(i+1), hostPage); err != nil {
						return err
					}
					if err := r.s.Synchronize(ctx); err != nil {
						return err
					}
					if got := r.m.Bytes()[hostPage-1]; got != byte(i+1) {
						return fmt.Errorf("the CPU reads %#x where the GPU wrote %#x: %w", got, byte(i+1), measure.ErrWrongBytes)
					}
				}
				took = r.watch.Stop()
				return nil
			})
			return took.Seconds() / turns, err
		})
	}
	return cases
}

// budgeted are the cases of work over n bytes with an eighth of them on the card.
func (r *managedFixture) budgeted(n int) []measure.Case {
	budget := n / timesBudget
	chunk := min(managed.DefaultChunk, budget/4)
	var cases []measure.Case
	for _, write := range []bool{false, true} {
		access := "read"
		if write {
			access = "write"
		}
		for _, method := range []string{byExplicit, byPlan, byInPlace, byFaults} {
			cases = append(cases, measure.Case{
				Series: result.Series{Name: seriesManagedBudget, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: n,
					Labels: append(labelsOf(r.dev), result.Label{Key: result.Method, Value: method}, result.Label{Key: accessLabel, Value: access},
						result.Label{Key: result.Size, Value: strconv.Itoa(n)})},
				WarmUp: 1, Samples: 5, CPU: r.watch.CPU,
				Sample: func(ctx context.Context) (float64, error) {
					run := map[string]func(context.Context, int, int, bool) (time.Duration, error){byExplicit: r.explicit, byPlan: r.planned, byInPlace: r.inPlace, byFaults: r.faulting}[method]
					took, err := run(ctx, budget, chunk, write)
					return float64(n) / float64(took), err
				},
			})
		}
	}
	return cases
}

// work queues what a step does with n bytes at an address of the card.
func (r *managedFixture) work(s *cudart.Stream, at cudart.DevPtr, n int, write bool) error {
	if write {
		return s.Memset(at, 1, n)
	}
	return s.CopyOnDevice(r.sink, at, n)
}

// home moves the memory to the host, where each run begins, and starts the watch.
func (r *managedFixture) home(ctx context.Context) error {
	err := r.moved(ctx, managed.Host())
	r.watch.Start()
	return err
}

// plan plans the work in steps of a chunk each.
func (r *managedFixture) plan(budget, chunk int, use func(managed.Range) managed.Use) (*managed.Plan, error) {
	var steps []managed.Step
	for off := 0; off < r.size; off += chunk {
		steps = append(steps, managed.Step{use(r.m.Range(off, min(chunk, r.size-off)))})
	}
	// Chunks lie on a grid of addresses, so that a step may access two.
	return r.a.NewPlan(steps, managed.PlanOptions{Budget: budget, Chunk: chunk})
}

// runPlan runs the work by a plan.
func (r *managedFixture) runPlan(ctx context.Context, p *managed.Plan, chunk int, write bool) error {
	return p.Run(ctx, r.s, func(i int) error {
		off := i * chunk
		return r.work(r.s, r.m.DevPtr()+cudart.DevPtr(off), min(chunk, r.size-off), write)
	})
}

func (r *managedFixture) planned(ctx context.Context, budget, chunk int, write bool) (time.Duration, error) {
	use := managed.Range.Read
	if write {
		use = managed.Range.Write
	}
	p, err := r.plan(budget, chunk, use)
	if err != nil {
		return 0, err
	}
	if err := r.home(ctx); err != nil {
		return 0, err
	}
	err = r.runPlan(ctx, p, chunk, write)
	return r.watch.Stop(), err
}

// inPlace measures the second run of a plan, as the first one gives advice. It takes the
// advice back, with which there are no page faults.
func (r *managedFixture) inPlace(ctx context.Context, budget, chunk int, write bool) (took time.Duration, err error) {
	p, err := r.plan(budget, chunk, managed.Range.InPlace)
	if err != nil {
		return 0, err
	}
	if err := r.home(ctx); err != nil {
		return 0, err
	}
	defer func() {
		for _, advice := range []managed.Advice{managed.PreferredLocation(managed.Host()), managed.AccessedBy(r.dev.Location())} {
			err = errors.Join(err, r.m.All().Unadvise(ctx, advice))
		}
	}()
	if err := r.runPlan(ctx, p, chunk, write); err != nil {
		return 0, err
	}
	r.watch.Start()
	err = r.runPlan(ctx, p, chunk, write)
	return r.watch.Stop(), err
}

func (r *managedFixture) faulting(ctx context.Context, _, chunk int, write bool) (time.Duration, error) {
	err := r.home(ctx)
	for off := 0; off < r.size && err == nil; off += chunk {
		n := min(chunk, r.size-off)
		if err = r.work(r.s, r.m.DevPtr()+cudart.DevPtr(off), n, write); err == nil {
			err = r.m.Range(off, n).Prefetch(ctx, r.s, managed.Host())
		}
	}
	if err != nil {
		return 0, err
	}
	err = r.s.Synchronize(ctx)
	return r.watch.Stop(), err
}

// explicit copies the same bytes from pinned memory to two buffers on the card in turn.
func (r *managedFixture) explicit(ctx context.Context, _, chunk int, write bool) (took time.Duration, err error) {
	if r.host == nil {
		if r.host, err = r.pinned(ctx, r.size); err != nil {
			return 0, err
		}
		for i := range r.two {
			if r.two[i], err = r.stream(); err != nil {
				return 0, err
			}
		}
	}
	r.watch.Start()
	for i := 0; i*chunk < r.size; i++ {
		off, s, at := i*chunk, r.two[i%2], r.sink+cudart.DevPtr(i%2*(sinkBytes/2))
		n := min(chunk, r.size-off)
		if err := r.host.CopyToDevice(s, at, off, n); err != nil {
			return 0, err
		}
		if !write {
			continue // the copy is the read that there is to be
		}
		if err := s.Memset(at, 1, n); err != nil {
			return 0, err
		}
		if err := r.host.CopyFromDevice(s, at, off, n); err != nil {
			return 0, err
		}
	}
	for _, s := range r.two {
		if err := s.Synchronize(ctx); err != nil {
			return 0, err
		}
	}
	return r.watch.Stop(), nil
}

func explainManaged(_ measure.Env, b *result.Bench) []string {
	var answers []string
	for _, device := range devicesOf(b, seriesManaged) {
		on := result.Label{Key: result.Device, Value: device}
		up := largestOf(b, seriesManaged, on, result.Label{Key: result.Method, Value: prefetchToDevice})
		faults := other(b, up, seriesManaged, result.Method, gpuFaults)
		down := other(b, up, seriesManaged, result.Method, prefetchToHost)
		cpu := other(b, up, seriesManaged, result.Method, cpuFaults)
		moved := other(b, up, seriesManaged, result.Method, moveToHost)
		if faults != nil && down != nil && cpu != nil && moved != nil {
			answers = append(answers, fmt.Sprintf("GPU %s: %s of managed memory move to the card at %s when prefetched and %s by page faults, and back at %s and %s, or %s when several threads prefetch.", device,
				units.Bytes(sizeOf(up.Labels)), units.Rate(up.Median), units.Rate(faults.Median), units.Rate(down.Median), units.Rate(cpu.Median), units.Rate(moved.Median)))
		}
	}
	for _, device := range devicesOf(b, seriesManagedBudget) {
		for _, access := range []string{"read", "write"} {
			plan := b.Find(seriesManagedBudget, result.Label{Key: result.Device, Value: device}, result.Label{Key: result.Method, Value: byPlan}, result.Label{Key: accessLabel, Value: access})
			explicit := other(b, plan, seriesManagedBudget, result.Method, byExplicit)
			inPlace := other(b, plan, seriesManagedBudget, result.Method, byInPlace)
			faults := other(b, plan, seriesManagedBudget, result.Method, byFaults)
			if plan == nil || explicit == nil || inPlace == nil || faults == nil {
				continue
			}
			answers = append(answers, fmt.Sprintf("GPU %s: work that %ss %s with an eighth of them on the card runs at %s by a plan that moves them, %s of what explicit copies of pinned memory reach, at %s, %s, by one that leaves them on the host, and at %s by page faults.",
				device, access, units.Bytes(sizeOf(plan.Labels)), units.Rate(plan.Median), units.Share(plan.Median/explicit.Median),
				units.Rate(inPlace.Median), units.Share(inPlace.Median/explicit.Median), units.Rate(faults.Median)))
		}
	}
	return answers
}
