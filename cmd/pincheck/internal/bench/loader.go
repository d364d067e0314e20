// The experiment loader times a training loop that consumes batches of samples, for sources in memory, that compute, and
// that wait as well. Series differ in one factor: workers, pinned or pageable memory, package loader or a plain reader,
// copies that block, do not, or are left out, work of the GPU, and batches filled ahead.
//
//   - Clock: the host's, from the first batch of a window until the stream has completed the last one.
//   - samples: samples of all batches by that time. waited_share: time in which the loop waited for a batch on the
//     device, by that time.
//   - cpu_per_million_samples: CPU seconds of the process in the window by the samples, times 1e6.

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
	"unsafe"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/hostkind"
	"github.com/gopinned/pinned/internal/hostos"
	"github.com/gopinned/pinned/internal/units"
	"github.com/gopinned/pinned/loader"
)

// Names of the series of loader.
const (
	samplesRate   = "samples"
	waitedShare   = "waited_share" // of the loop's time, for a batch on the device
	cpuPerMillion = "cpu_per_million_samples"
	boundBy       = "bound_by" // share of the time for which the stage accounts
	prefetchRate  = "samples_by_prefetch"
)

// Keys and values of the labels of loader.
const (
	sourceKey    = "source"
	readerKey    = "reader"
	prefetchKey  = "prefetch"
	workersKey   = "workers"
	copiesKey    = "copies"
	gpuWorkKey   = "gpu_work"
	batchKey     = "batch_samples"
	stageKey     = "stage"
	blockingText = "blocking"
	nonBlocking  = "non_blocking"
	noCopies     = "none" // the batches stay in host memory

	byLoader = "loader" // package loader
	byPlain  = "plain"

	fromMemory = "memory"
	fromCPU    = "cpu"
	fromBoth   = "io_and_cpu"
)

// A grid has the settings that are measured, and their times.
type grid struct {
	workers        []int // 0: the loop reads for itself
	prefetch       []int // batches ahead of the loop
	sources        []string
	dataBytes      int
	batch, ioBatch int           // samples; ioBatch of those that wait
	delay          time.Duration // of a sample that waits
	window         time.Duration // of a sample of the measurement, or a batch of each worker
	budget         time.Duration // of a setting
}

var (
	fullGrid = grid{
		workers: []int{0, 2, 4, 8}, prefetch: []int{1, 4, 16, 64}, sources: []string{fromMemory, fromCPU, fromBoth}, dataBytes: 256 << 20,
		batch: 256, ioBatch: 256, delay: 2 * time.Millisecond, window: 20 * time.Millisecond, budget: 160 * time.Millisecond,
	}
	quickGrid = grid{
		workers: []int{0, 4}, prefetch: []int{1, 64}, sources: []string{fromMemory, fromBoth}, dataBytes: 64 << 20,
		batch: 256, ioBatch: 16, delay: 2 * time.Millisecond, window: 10 * time.Millisecond, budget: 100 * time.Millisecond,
	}
)

// A setting is a point of the grid.
type setting struct {
	workers        int
	reader, memory string
	copies         string
	gpuWork        bool
	prefetch       int // of package loader
}

// kind returns the kind of a plain reader's memory.
func (s setting) kind() hostKind {
	switch {
	case s.memory == inPinned:
		return registered
	case s.copies == blockingText:
		return unpinned
	}
	return unpinnedAsync
}

// loading measures batches of samples on their way to the GPU, in settings of PyTorch's DataLoader.
// With 0 workers the loop itself reads, which package loader has no counterpart of.
func loading(full, quick grid) measure.Experiment {
	var views []result.View
	for _, q := range []struct{ title, series string }{
		{"Samples a second", samplesRate}, {"Share of the time for which the loop waits", waitedShare},
		{"CPU seconds a million samples", cpuPerMillion}, {"What limits, and its share of the time", boundBy},
	} {
		for _, source := range full.sources {
			v := result.View{Title: q.title + ", " + sourceTexts[source], Series: q.series, Where: labelled(sourceKey, source),
				X: workersKey, Lines: []string{readerKey, result.Memory, copiesKey, gpuWorkKey}}
			if q.series == boundBy {
				v.Lines = append(v.Lines, stageKey)
			}
			views = append(views, v)
		}
	}
	views = append(views, result.View{Title: "Samples a second by batches ahead of the loop, " + sourceTexts[fromMemory], Series: prefetchRate, X: prefetchKey})
	return measure.Experiment{
		Name:     "loader",
		Group:    "Applications:",
		Question: "How many samples a second reach the GPU, and what limits them?",
		Long: `Measures batches of samples from simulated storage through workers to the GPU:
by number of workers, pinned and pageable memory, blocking and non-blocking
copies, with GPU work, prefetch, I/O and CPU work.`,
		Related: "pincheck bench overlap",
		Views:   views,
		Plan: onDevices(func(env measure.Env) ([]measure.Group, error) {
			g := full
			if env.Quick {
				g = quick
			}
			var groups []measure.Group
			for _, source := range g.sources {
				groups = append(groups, g.group(env.Devices[0], source))
			}
			noted(&groups[0], append(onFirst(env, "a loader feeds one GPU, and others are no different"),
				"persistent workers are no factor: those of package loader are goroutines that live as long as the loader, and an epoch starts none")...)
			return groups, nil
		}),
		Explain: explainLoading,
	}
}

var sourceTexts = map[string]string{
	fromMemory: "samples in memory", fromCPU: "samples that are computed", fromBoth: "samples that wait for I/O and are computed",
}

// waits reports whether a source's samples wait, and computes whether they are computed.
func waits(source string) bool    { return source == fromBoth }
func computes(source string) bool { return source != fromMemory }

// batchOf returns the samples of a source's batches.
func (g *grid) batchOf(source string) int {
	if waits(source) {
		return g.ioBatch
	}
	return g.batch
}

// settings returns the settings for a source: those of samples in memory differ in every factor, since it
// is there that they matter.
func (g *grid) settings(source string) (all []setting) {
	add := func(reader, memory, copies string, gpuWork bool) {
		for _, workers := range g.workers {
			if workers > 0 || reader == byPlain {
				all = append(all, setting{workers, reader, memory, copies, gpuWork, defaultPrefetch})
			}
		}
	}
	if source != fromMemory {
		add(byPlain, inPinned, nonBlocking, false)
		add(byLoader, inPinned, nonBlocking, false)
		add(byLoader, inPageable, noCopies, false)
		return all
	}
	for _, gpuWork := range []bool{false, true} {
		for _, copies := range []string{blockingText, nonBlocking} {
			add(byPlain, inPageable, copies, gpuWork)
			add(byPlain, inPinned, copies, gpuWork)
			add(byLoader, inPinned, copies, gpuWork)
		}
	}
	add(byPlain, inPageable, noCopies, false)
	add(byLoader, inPageable, noCopies, false)
	return all
}

// A loop consumes batches of one source, in one setting at a time.
type loop struct {
	resources
	grid   *grid
	source string
	batch  int

	data   *samples
	stream *cudart.Stream
	load   load

	setting setting
	feed    feed            // of the setting, or nil
	queued  [2]cudart.Point // after the work on the last batches
	steps   int

	waited, cpu float64 // of the last sample of the measurement
	stage       loader.Stage
	share       float64
}

func (l *loop) open(ctx context.Context) (err error) {
	data, err := l.pageable(l.grid.dataBytes)
	if err != nil {
		return err
	}
	l.data = &samples{data: floats(data)}
	if waits(l.source) {
		l.data.delay = l.grid.delay
	}
	err = pieces(ctx, len(data), func(off, n int) error {
		for i := range l.data.data[off/4 : (off+n)/4] {
			l.data.data[off/4+i] = float32((off/4+i)%9973) / 9973
		}
		return nil
	})
	if err != nil {
		return err
	}
	if l.stream, err = l.resources.stream(); err != nil {
		return err
	}
	return l.fit(ctx)
}

// fit makes the GPU's work on a batch take as long as the copy of a batch from pageable
// memory, so that there is something to hide.
func (l *loop) fit(ctx context.Context) error {
	span, err := l.span()
	if err != nil {
		return err
	}
	n := l.batch * oneSample
	if l.load, err = l.newLoad(ctx); err != nil {
		return err
	}
	target, err := l.device(n)
	if err != nil {
		return err
	}
	from := hostkind.Direct(unsafe.Slice((*byte)(unsafe.Pointer(&l.data.data[0])), n))
	var took time.Duration
	for range 2 { // the first is a warm-up
		if took, err = span.Time(ctx, l.stream, func() error { return from.CopyToDevice(ctx, l.stream, target, 0, n) }); err != nil {
			return err
		}
	}
	return l.load.fit(ctx, span, l.stream, took)
}

// transform returns what computes the samples, or nil.
func (l *loop) transform() transform {
	if computes(l.source) {
		return normalise
	}
	return nil
}

// set starts the feed of a setting, instead of the one before.
func (l *loop) set(ctx context.Context, s setting) error {
	if l.feed != nil && l.setting == s {
		return nil
	}
	if err := l.stop(); err != nil {
		return err
	}
	create := newPlainFeed
	if s.reader == byLoader {
		create = newLoaderFeed
	}
	l.setting, l.queued = s, [2]cudart.Point{}
	var err error
	l.feed, err = create(ctx, &l.resources, l.data, l.transform(), l.stream, s, l.batch)
	return err
}

// stop ends the feed.
func (l *loop) stop() error {
	if l.feed == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	err := l.stream.Synchronize(ctx)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("batches stay allocated, the GPU may be using them: %w", err)
	}
	err = errors.Join(err, l.feed.close(ctx))
	l.feed = nil
	return err
}

func (l *loop) close() error {
	err := l.stop()
	if l.feed != nil {
		return err
	}
	return errors.Join(err, l.resources.close())
}

// sample consumes batches for a while, and returns the samples a second. The loop is at
// most two batches ahead of the GPU.
func (l *loop) sample(ctx context.Context, s setting) (float64, error) {
	if err := l.set(ctx, s); err != nil {
		return 0, err
	}
	began := l.now()
	cpu := hostos.CPUTime()
	var waited time.Duration
	batches := 0
	for ; batches < max(1, s.workers) || l.now()-began < l.grid.window; batches++ {
		d, err := l.turn(ctx)
		if err != nil {
			return 0, err
		}
		waited += d
	}
	if err := l.stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	took := l.now() - began
	count := float64(batches * l.batch)
	l.cpu = -1
	if cpu >= 0 {
		l.cpu = (hostos.CPUTime() - cpu).Seconds() / count * 1e6
	}
	l.waited = waited.Seconds() / took.Seconds()
	l.stage, l.share = l.feed.bound()
	return count / took.Seconds(), nil
}

// turn gets a batch, and queues the work on it. It returns how long it waited for the
// batch, or for the copies of earlier ones.
func (l *loop) turn(ctx context.Context) (waited time.Duration, err error) {
	point := &l.queued[l.steps%2]
	waitingSince := l.now()
	if err := point.Wait(ctx); err != nil {
		return 0, err
	}
	if !l.setting.gpuWork {
		waited = l.now() - waitingSince
		l.feed.waited(waited)
	}
	d, err := l.feed.next(ctx)
	if err != nil {
		return 0, err
	}
	if l.setting.gpuWork {
		if err := l.load.queue(l.stream); err != nil {
			return 0, err
		}
	}
	*point = l.stream.Point()
	l.steps++
	return waited + d, nil
}

// verify compares a batch on the device with its samples.
func (l *loop) verify(ctx context.Context) error {
	if _, err := l.turn(ctx); err != nil {
		return err
	}
	if err := l.stream.Synchronize(ctx); err != nil {
		return err
	}
	got, want := make([]byte, l.batch*oneSample), make([]byte, oneSample)
	indices, err := l.feed.read(got)
	if err != nil {
		return err
	}
	for at, i := range indices {
		l.data.copy(i, want)
		if compute := l.transform(); compute != nil {
			if err := compute(ctx, i, [][]byte{want}); err != nil {
				return err
			}
		}
		if !bytes.Equal(want, got[at*oneSample:(at+1)*oneSample]) {
			return fmt.Errorf("%w: sample %d, in place %d of a batch, has not arrived", measure.ErrMismatch, i, at)
		}
	}
	return nil
}

// labels are the conditions of a setting's series.
func (l *loop) labels(s setting) result.Labels {
	work := "no"
	if s.gpuWork {
		work = "yes"
	}
	return labelsOf(l.dev, sourceKey, l.source, gpuWorkKey, work, readerKey, s.reader, result.Memory, s.memory, copiesKey, s.copies,
		workersKey, strconv.Itoa(s.workers), batchKey, strconv.Itoa(l.batch))
}

// group is the settings for one source.
func (g grid) group(dev *cudart.Device, source string) measure.Group {
	l := &loop{resources: resources{dev: dev, now: wall()}, grid: &g, source: source, batch: g.batchOf(source)}
	size := l.batch * oneSample
	warmUp := g.window
	if waits(source) { // the fewest samples take longer than the budget: a batch by each worker, for each
		warmUp += 3 * time.Duration(l.batch) * g.delay
	}
	out := measure.Group{
		Name: fmt.Sprintf("%s, on device %d", sourceTexts[source], dev.Ordinal()),
		Footprint: measure.Footprint{
			Pinned: (defaultPrefetch + 1) * size, Pageable: g.dataBytes + (defaultPrefetch+1)*size,
			Device: (defaultPrefetch+1)*size + size,
		},
		Setup: setupTime(g.dataBytes), Open: l.open, Close: l.close,
	}
	for _, s := range g.settings(source) {
		labels := l.labels(s)
		c := measure.Case{
			Series: result.Series{Name: samplesRate, Labels: labels, Unit: result.PerSecond, Better: result.Higher},
			WarmUp: 1, MinSamples: 2, Budget: g.budget,
			Sample: func(ctx context.Context) (float64, error) { return l.sample(ctx, s) },
			Verify: l.verify,
			Also: []measure.Also{
				{Series: result.Series{Name: waitedShare, Labels: labels, Unit: result.Ratio, Better: result.Lower}, Last: func() (float64, bool) { return l.waited, true }},
				{Series: result.Series{Name: cpuPerMillion, Labels: labels, Unit: result.Seconds, Better: result.Lower}, Last: func() (float64, bool) { return l.cpu, l.cpu >= 0 }},
			},
		}
		for _, stage := range []loader.Stage{loader.StageSource, loader.StageTransform, loader.StageCopy, loader.StageConsumer} {
			c.Also = append(c.Also, measure.Also{
				Series: result.Series{Name: boundBy, Labels: labels.With(stageKey, string(stage)), Unit: result.Ratio},
				Last:   func() (float64, bool) { return l.share, l.stage == stage },
			})
		}
		out.Setup += warmUp
		out.Cases = append(out.Cases, c)
	}
	if source == fromMemory {
		out.Cases = append(out.Cases, l.prefetches()...)
	}
	return out
}

// prefetches are the cases of batches ahead of the loop, with the most workers.
func (l *loop) prefetches() (cases []measure.Case) {
	for _, n := range l.grid.prefetch {
		s := setting{slices.Max(l.grid.workers), byLoader, inPinned, nonBlocking, false, n}
		cases = append(cases, measure.Case{
			Series: result.Series{Name: prefetchRate, Labels: l.labels(s).With(prefetchKey, strconv.Itoa(n)), Unit: result.PerSecond, Better: result.Higher},
			WarmUp: 1, MinSamples: 2, Budget: l.grid.budget,
			Sample: func(ctx context.Context) (float64, error) { return l.sample(ctx, s) },
			Verify: l.verify,
		})
	}
	return cases
}

// limits are the stages that can bound, in words.
var limits = map[string]string{
	string(loader.StageSource): "limited by the source", string(loader.StageTransform): "limited by computing",
	string(loader.StageCopy): "limited by copying", string(loader.StageConsumer): "limited by GPU work",
}

// sourceNames are the sources in a table.
var sourceNames = []struct{ source, name string }{{fromMemory, "in memory"}, {fromCPU, "computed"}, {fromBoth, "with I/O"}}

func explainLoading(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	none := func(*answers) *result.Series { return nil }
	return explained(b, none, (*answers).loaded, func(a *answers) {
		is := func(key, value string) result.Label { return result.Label{Key: key, Value: value} }
		inMemory := is(sourceKey, fromMemory)
		compare := func(format, one, other, name, key, before, after string, where ...result.Label) {
			if gain, n := gainOf(a.Bench, name, key, before, after, where...); n > 0 && before != after && gain > 0 {
				a.ratio(format, one, other, gain)
			}
		}
		compare("A plain reader is %[2]s as fast %[1]s as %[3]s.", "with pinned memory", "with pageable memory", samplesRate, result.Memory, inPageable, inPinned, inMemory, is(readerKey, byPlain))
		compare("With pinned memory %[1]s is %[2]s as fast as %[3]s.", "package loader", "a plain reader", samplesRate, readerKey, byPlain, byLoader, inMemory, is(result.Memory, inPinned))
		compare("From pinned memory, %s are %s as fast as %s.", "non-blocking copies", "blocking copies", samplesRate, copiesKey, blockingText, nonBlocking, inMemory, is(result.Memory, inPinned))
		first, last := endsOf(a.Bench, samplesRate, workersKey)
		for _, s := range sourceNames {
			compare("Samples "+s.name+" load %[2]s as fast with %[1]s as with %[3]s.", workersText(last), workersText(first), samplesRate, workersKey, first, last, is(sourceKey, s.source))
		}
		first, last = endsOf(a.Bench, prefetchRate, prefetchKey)
		compare("Samples in memory load %[2]s as fast with %[1]s ahead as with %[3]s.", last+" batches", first, prefetchRate, prefetchKey, first, last)
	})
}

func workersText(count string) string {
	if count == "1" {
		return "1 worker"
	}
	return count + " workers"
}

// loaded is the fastest setting for each source.
func (a *answers) loaded() {
	t := result.Table{Columns: []string{"samples", "workers", "loop waits"}}
	for _, s := range sourceNames {
		best := fastest(a.Bench, func(l result.Labels) bool { return l.Get(sourceKey) == s.source && l.Get(copiesKey) != noCopies })
		if best == nil {
			continue
		}
		limit := limits[boundOf(a.Bench, best)]
		if len(a.said) == 0 {
			text := fmt.Sprintf("%s samples a second reach the GPU with %s and %s memory", units.Number(best.Median, 3), workersText(best.Labels.Get(workersKey)), best.Labels.Get(result.Memory))
			if limit != "" {
				text += ", " + limit
			}
			a.say("%s.", text)
		}
		workers, _ := strconv.ParseFloat(best.Labels.Get(workersKey), 64)
		t.Add(s.name, limit, best.Quantity(), &result.Quantity{Value: workers, Unit: result.Count}, share(a.other(best, waitedShare)))
	}
	a.table(t)
}

// fastest returns the series of samples with the highest median of those that are chosen, or nil.
func fastest(b *result.Bench, chosen func(result.Labels) bool) (best *result.Series) {
	for _, s := range b.Select(result.View{Series: samplesRate}) {
		if chosen(s.Labels) && (best == nil || s.Median > best.Median) {
			best = s
		}
	}
	return best
}

// gainOf returns the median of how many times a value is that of another, between
// settings that differ in one label only, and how many there are.
func gainOf(b *result.Bench, name, key, before, after string, where ...result.Label) (float64, int) {
	var gains []float64
	for _, s := range b.Select(result.View{Series: name, Where: append(where, result.Label{Key: key, Value: before})}) {
		if to := other(b, s, name, key, after); to != nil && s.Median > 0 {
			gains = append(gains, to.Median/s.Median)
		}
	}
	return result.Summarize(gains).Median, len(gains)
}

// endsOf returns the lowest and the highest number of a label among the series of a name, "0" if there are none.
func endsOf(b *result.Bench, name, key string) (lowest, highest string) {
	var all []int
	for _, s := range b.Select(result.View{Series: name}) {
		n, _ := strconv.Atoi(s.Labels.Get(key))
		all = append(all, n)
	}
	if len(all) == 0 {
		return "0", "0"
	}
	return strconv.Itoa(slices.Min(all)), strconv.Itoa(slices.Max(all))
}

// boundOf returns the stage that bounded most samples of a setting, "" if it is not known.
func boundOf(b *result.Bench, s *result.Series) string {
	stage, largest := "", 0
	for _, bound := range b.Select(result.View{Series: boundBy, Where: s.Labels}) {
		if n := len(bound.Samples); n > largest {
			stage, largest = bound.Labels.Get(stageKey), n
		}
	}
	return stage
}
