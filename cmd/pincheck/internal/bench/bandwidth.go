// The experiment bandwidth times rows of copies of one size: between host memory of each kind and each
// device, in each direction, within a device's memory, and with all devices at once.
//
//   - Clock: two events on the copies' stream. Where the calling thread copies or stages, the host's clock,
//     until the stream is synchronized.
//   - A rate is all bytes of a sample by its time: of both directions together for "both", read and written
//     for copies within a device.
//   - With all devices, a device's rate is by its own events, and the sum is by one clock, from the first copy
//     to the end of the last.

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/hostmem"
	"github.com/gopinned/pinned/internal/units"
)

// The series of Bandwidth and Link.
const (
	seriesBandwidth    = "bandwidth"
	seriesTogether     = "bandwidth_all_devices" // of one of them, or with allDevices the sum
	seriesDeviceMemory = "device_memory"         // read and written by a copy within it
)

// allDevices is the value of the label device of a sum.
const allDevices = "all"

// Bandwidth measures copies between host and device: by size, direction and kind of host
// memory, and with all devices at once.
func Bandwidth() measure.Experiment {
	return measure.Experiment{
		Name:     "bandwidth",
		Group:    "Copies:",
		Question: "How fast are copies, by size, direction and kind of host memory?",
		Long: `Measures copies to GPU, from GPU and both ways at once, of 1 B to 1 GiB, from
pinned, write-combined, managed, staged and pageable memory, on each GPU alone
and on all GPUs at once.`,
		Related: "pincheck bench latency, pincheck explain slow_copies",
		Views: []result.View{
			{Title: "Pinned memory", Series: seriesBandwidth, Where: labelled(result.Memory, memoryRegistered), X: result.Size, Lines: []string{result.Direction, result.Device}, Main: true},
			{Title: "To GPU, by kind of memory", Series: seriesBandwidth, Where: labelled(result.Direction, result.HostToDevice),
				X: result.Size, Lines: []string{result.Device, result.Memory}},
			{Title: "From GPU, by kind of memory", Series: seriesBandwidth, Where: labelled(result.Direction, result.DeviceToHost),
				X: result.Size, Lines: []string{result.Device, result.Memory}},
			{Title: "Both ways at once", Series: seriesBandwidth, Where: labelled(result.Direction, result.Both), X: result.Size, Lines: []string{result.Device, result.Memory}},
			{Title: "All GPUs at once", Series: seriesTogether, X: result.Device, Lines: []string{result.Direction}},
			{Title: "GPU memory, read and written by a copy", Series: seriesDeviceMemory, X: result.Device, Lines: []string{result.Size}},
			{Title: "GPU memory, filled and checked by kernels", Series: seriesChecked, X: result.Device, Lines: []string{result.Method}},
		},
		Plan:    onDevices(planBandwidth),
		Explain: explainBandwidth,
	}
}

var (
	allSizes   = []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30, 4 << 30}
	quickSizes = []int{16 << 10, 256 << 10, 4 << 20, 64 << 20}
)

const (
	// largestOther is the largest copy with kinds of memory other than registered: a
	// larger one is not faster, and cudaMemcpy of it could not be interrupted.
	largestOther = 256 << 20
	// sampleBytes is the sum of the bytes of the copies of a sample, unless that
	// is more than maxCopies of them, or less than one.
	sampleBytes = 256 << 20
	maxCopies   = 256
	// On a simulated device copies cost the host's time, and its memory is the host's.
	simulatedLargest = 16 << 20
	simulatedSample  = 8 << 20
)

// A sizing says which sizes are copied, and how often in a sample.
type sizing struct {
	sizes       []int // ascending
	chosen      bool  // by the user
	sampleBytes int
	truncated   bool // larger sizes, for want of memory
}

func newSizing(env measure.Env) sizing {
	z := sizing{sampleBytes: sampleBytes}
	simulated := slices.ContainsFunc(env.Devices, func(d *cudart.Device) bool { return d.Runtime().Library().Simulated })
	if simulated {
		z.sampleBytes = simulatedSample
	}
	if z.sizes = slices.Compact(slices.Sorted(slices.Values(env.Sizes))); len(z.sizes) > 0 {
		z.chosen = true
		return z
	}
	all, largest := allSizes, math.MaxInt
	if env.Quick {
		all = quickSizes
	}
	if available, ok := hostmem.Available(); ok {
		largest = min(largest, available/16)
	}
	for _, d := range env.Devices {
		if free, _, err := d.MemInfo(); err == nil {
			largest = min(largest, free/4)
		}
	}
	if simulated {
		largest = min(largest, simulatedLargest)
	}
	for _, n := range all {
		if n <= largest {
			z.sizes = append(z.sizes, n)
		}
	}
	z.truncated = len(z.sizes) < len(all) && !simulated
	return z
}

// upTo returns the sizes up to n, unless the user chose them: all then.
func (z sizing) upTo(n int) []int {
	if z.chosen {
		return z.sizes
	}
	return slices.DeleteFunc(slices.Clone(z.sizes), func(size int) bool { return size > n })
}

// count returns how many copies of n bytes a sample has.
func (z sizing) count(n int) int { return min(max(z.sampleBytes/n, 1), maxCopies) }

func planBandwidth(env measure.Env) ([]measure.Group, error) {
	z := newSizing(env)
	if len(z.sizes) == 0 {
		return nil, errors.New("there is not memory enough for a copy of any size")
	}
	directions := []string{result.HostToDevice, result.DeviceToHost, result.Both}
	var groups []measure.Group
	for i, dev := range env.Devices {
		for _, kind := range hostKinds() {
			sizes, directions := z.sizes, directions
			if kind.name != memoryRegistered {
				if i > 0 { // the kinds differ by the host, not by the device
					continue
				}
				sizes = z.upTo(largestOther)
				if env.Quick && kind.name != memoryPageable && kind.name != memoryStaged {
					sizes, directions = sizes[len(sizes)-1:], directions[:2]
				}
			}
			fixture := &copyFixture{resources: resources{dev: dev}, kind: kind, n: slices.Max(sizes)}
			var cases []measure.Case
			for _, n := range sizes {
				for _, direction := range directions {
					count := z.count(n)
					if kind.moves {
						count = 1 // it moves once
					}
					cases = append(cases, fixture.bandwidth(seriesBandwidth, direction, n, count))
				}
			}
			groups = append(groups, fixture.group(kind.name+" memory", cases))
		}
		groups = append(groups, deviceMemory(dev, z), mappedMemory(dev, z), checkedMemory(dev))
	}
	if len(env.Devices) > 1 {
		sizes := z.upTo(64 << 20)
		n := sizes[len(sizes)-1]
		count := min(4*z.count(n), maxCopies) // long enough for the devices not to start at once
		groups = append(groups, together(env.Devices, n, count, directions))
	}
	if z.truncated {
		groups = append(groups, notMeasured("larger copies", "they would take too much of the memory that is available: choose the sizes to measure them nevertheless"))
	}
	return groups, nil
}

// notMeasured is a group that only says why something was not measured.
func notMeasured(what, why string) measure.Group {
	return measure.Group{Name: what,
		Open:  func(context.Context) error { return fmt.Errorf("%s: %w", why, errors.ErrUnsupported) },
		Close: func() error { return nil },
	}
}

// group has the cases of one rig.
func (r *copyFixture) group(name string, cases []measure.Case) measure.Group {
	return measure.Group{
		Name:      fmt.Sprintf("GPU %d, %s", r.dev.Ordinal(), name),
		Footprint: r.footprint(), Setup: r.setup(cases), Open: r.open, Close: r.close, Cases: cases,
	}
}

// A copy that is expected to take longer than tooLong is not made, unless it is small.
// Samples of copies that are not small have as many as take no longer than maxSample:
// who interrupts a run waits for those that are queued. Samples that take less than minSample,
// or less than manySteps steps of the device's clock, have up to maxCopies. The times of
// cudaEventElapsedTime have steps of about half a microsecond.
const (
	tooLong   = 2 * time.Second
	small     = 64 << 20
	maxSample = 250 * time.Millisecond
	minSample = 20 * time.Microsecond
	manySteps = 64
)

// fit returns how many copies of n bytes a sample has so that it is neither too long nor too
// short, from count on.
func (r *copyFixture) fit(ctx context.Context, direction string, n, count int) (int, error) {
	if r.kind.moves { // once
		return count, nil
	}
	if n >= small {
		one, err := r.take(ctx, direction, n, 1)
		if err != nil {
			return 0, err
		}
		return min(count, max(1, int(maxSample/one))), nil
	}
	enough := 0
	for ; count < maxCopies; count = min(2*count, maxCopies) {
		took, err := r.take(ctx, direction, n, count)
		switch {
		case errors.Is(err, measure.ErrNoTime): // a step of this clock is longer than that
			enough = manySteps * count
		case err != nil:
			return 0, err
		case took >= minSample && count >= enough:
			return count, nil
		}
	}
	return count, nil
}

// bandwidth is the case of count copies of n bytes a sample.
func (r *copyFixture) bandwidth(series, direction string, n, count int) measure.Case {
	perCopy := n
	if direction == result.Both || direction == onDevice { // there and back, or read and written
		perCopy *= 2
	}
	prepare := func(ctx context.Context) (err error) {
		if expected := float64(perCopy*count) / r.rate; r.rate > 0 && n > small && expected > float64(tooLong) {
			return fmt.Errorf("a sample would take %s: %w", units.Seconds(expected/1e9), errors.ErrUnsupported)
		}
		if err = r.prepare(ctx, direction, n); err == nil {
			count, err = r.fit(ctx, direction, n, count)
		}
		return err
	}
	labels := labelsOf(r.dev, result.Memory, r.kind.name, result.Direction, direction, result.Size, strconv.Itoa(n))
	c := measure.Case{
		Series: result.Series{Name: series, Unit: result.GBPerSecond, Better: result.Higher, BytesPerSample: perCopy * count, Labels: labels},
		WarmUp: 1,
		Sample: after(prepare, func(ctx context.Context) (float64, error) {
			took, err := r.take(ctx, direction, n, count)
			if err != nil {
				return 0, err
			}
			r.rate = float64(perCopy*count) / float64(took.Nanoseconds())
			return r.rate, nil
		}),
		Bytes:  func() int { return perCopy * count },
		Verify: func(ctx context.Context) error { return r.verify(ctx, direction, n) },
		Node:   r.node,
	}
	if r.kind.moves { // and moves back, which is not timed
		c.CPU = r.watch.CPU
	}
	return c
}

// deviceMemory copies within the device's memory, of which host and link have no part.
func deviceMemory(dev *cudart.Device, z sizing) measure.Group {
	sizes := z.upTo(largestOther)
	n := sizes[len(sizes)-1]
	fixture := &copyFixture{resources: resources{dev: dev}, kind: registered, n: n}
	c := fixture.bandwidth(seriesDeviceMemory, onDevice, n, min(max(16*z.sampleBytes/n, 1), maxCopies))
	c.Labels = slices.DeleteFunc(c.Labels, func(l result.Label) bool { return l.Key == result.Memory })
	c.Node = nil
	return fixture.group("its own memory", []measure.Case{c})
}

// together copies between the host and all devices at once, count times n bytes a sample.
func together(devices []*cudart.Device, n, count int, directions []string) measure.Group {
	g := measure.Group{Name: "all devices at once"}
	var fixtures []*copyFixture
	for _, dev := range devices {
		r := &copyFixture{resources: resources{dev: dev}, kind: registered, n: n}
		footprint := r.footprint()
		g.Footprint.Pinned += footprint.Pinned
		g.Footprint.Device = footprint.Device
		g.Setup += r.setup(nil)
		fixtures = append(fixtures, r)
	}
	g.Open = func(ctx context.Context) error {
		return each(fixtures, func(r *copyFixture) error { return r.open(ctx) })
	}
	g.Close = func() error { return each(fixtures, (*copyFixture).close) }
	for _, direction := range directions {
		g.Cases = append(g.Cases, allAtOnce(fixtures, direction, n, count))
	}
	return g
}

// each calls do for all at once: eight devices would take eight times as long otherwise.
func each(fixtures []*copyFixture, do func(*copyFixture) error) error {
	errs := make([]error, len(fixtures))
	var all sync.WaitGroup
	for i, r := range fixtures {
		all.Go(func() { errs[i] = do(r) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// allAtOnce returns the case of the sum of all devices, whose samples measure those of the
// devices as well.
func allAtOnce(fixtures []*copyFixture, direction string, n, count int) measure.Case {
	var last []time.Duration // of each device, by its own clock
	others := fixtures[1:]
	forEach := func(fixtures []*copyFixture, do func(*copyFixture) error) func() error {
		return func() error {
			for _, r := range fixtures {
				if err := do(r); err != nil {
					return err
				}
			}
			return nil
		}
	}
	// round copies on all devices, and returns the time from before the first copy of any until
	// the last of all has ended, by the clock of the first device: it begins when all
	// streams are idle, and the streams of the others begin after it and end before it.
	round := func(ctx context.Context) (took time.Duration, err error) {
		first, span := fixtures[0].main(direction), fixtures[0].all
		var began cudart.Point
		after := func(r *copyFixture) error { return first.WaitPoint(r.main(direction).Point()) }
		queue := forEach(fixtures, func(r *copyFixture) error { return r.queue(ctx, direction, n, 1) })
		last = last[:0]
		err = inTurn(
			forEach(others, after),
			func() error { return span.Begin(first) },
			func() error { began = first.Point(); return nil },
			forEach(others, func(r *copyFixture) error { return r.main(direction).WaitPoint(began) }),
			forEach(fixtures, func(r *copyFixture) error { return r.begin(direction) }),
			func() error { return inTurn(slices.Repeat([]func() error{queue}, count)...) },
			forEach(fixtures, func(r *copyFixture) error { return r.end(direction) }),
			forEach(others, after),
			func() (err error) { took, err = span.End(ctx, first); return err },
			forEach(fixtures, func(r *copyFixture) error {
				one, err := r.took(ctx, direction)
				last = append(last, one)
				return err
			}),
		)
		return took, err
	}

	var devices []measure.Also
	sum := 0
	for i, r := range fixtures {
		one := r.bandwidth(seriesTogether, direction, n, count).Series
		sum += one.BytesPerSample
		devices = append(devices, measure.Also{Series: one, Last: func() (float64, bool) {
			return float64(one.BytesPerSample) / float64(last[i].Nanoseconds()), true
		}})
	}

	all := fixtures[0].bandwidth(seriesTogether, direction, n, count)
	all.Labels[0].Value = allDevices
	all.WarmUp, all.Node, all.Bytes, all.BytesPerSample, all.Also = 0, nil, nil, sum, devices
	all.Sample = after(func(ctx context.Context) error {
		err := each(fixtures, func(r *copyFixture) error { return r.prepare(ctx, direction, n) })
		if err == nil {
			_, err = round(ctx) // to warm up
		}
		return err
	}, func(ctx context.Context) (float64, error) {
		took, err := round(ctx)
		return float64(sum) / float64(took.Nanoseconds()), err
	})
	all.Verify = func(ctx context.Context) error {
		return each(fixtures, func(r *copyFixture) error { return r.verify(ctx, direction, n) })
	}
	return all
}
