// The experiment latency times one small copy between registered memory and a device, on an idle stream.
//
//   - Clock of issued, synchronize and synchronize_blocking: the host's, from before the call that queues the
//     copy to its return, or to the end of the wait.
//   - Clock of device: two events around 64 copies in a row, divided by 64.
//   - Percentiles are of single samples: there are 200 at least.

package bench

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

// The series of Latency.
const seriesLatency = "latency"

// The values of the label method of Latency: what a sample takes the time of.
const (
	issued         = "issued"               // the call that queues the copy
	awaited        = "synchronize"          // and Stream.Synchronize
	awaitedBlocked = "synchronize_blocking" // and Stream.SynchronizeBlocking
	byDevice       = "device"               // one of many copies in a row, by the device
)

// Latency measures small copies between registered memory and the device, one at a time.
func Latency() measure.Experiment {
	e := measure.Experiment{
		Name:     "latency",
		Group:    "Copies:",
		Question: "How long does a small copy take?",
		Long: `Measures how long a copy takes to issue, until it is done for its caller, and on
the GPU, by size, with percentiles.`,
		Related: "pincheck bench calls, pincheck explain slow_small_copies",
		Plan:    planLatency,
		Explain: explainLatency,
	}
	for _, direction := range bothDirections {
		e.Views = append(e.Views, result.View{Title: "One copy " + directionText(direction) + ", by size", Series: seriesLatency,
			Where: result.Labels{{Key: result.Direction, Value: direction}}, X: result.Size, Lines: []string{result.Device, result.Method}})
	}
	e.Views = append(e.Views, result.View{Title: "One load by a thread of the device, each after the one before", Series: seriesLoad, X: result.Device, Lines: []string{result.Memory}})
	return e
}

const (
	latencySamples = 1000
	quickLatencies = 300
	// minLatencies is the number of samples that percentiles need.
	minLatencies  = 200
	latencyBudget = 100 * time.Millisecond
	quickLatency  = 20 * time.Millisecond
	copiesInARow  = 64
)

func planLatency(env measure.Env) ([]measure.Group, error) {
	if len(env.Devices) == 0 {
		return nil, errNoDevice
	}
	sizes := slices.Compact(slices.Sorted(slices.Values(env.Sizes)))
	if len(sizes) == 0 {
		sizes = []int{1, 64, 512, 4 << 10, 16 << 10, 64 << 10}
		if env.Quick {
			sizes = []int{1, 4 << 10, 64 << 10}
		}
	}
	var groups []measure.Group
	for _, dev := range env.Devices {
		fixture := &copyFixture{resources: resources{dev: dev}, kind: registered, n: slices.Max(sizes)}
		var cases []measure.Case
		for _, n := range sizes {
			for _, direction := range bothDirections {
				for _, method := range []string{issued, awaited, awaitedBlocked, byDevice} {
					c := fixture.latency(direction, method, n)
					c.Samples, c.MinSamples, c.Budget = latencySamples, minLatencies, latencyBudget
					if env.Quick {
						c.Samples, c.Budget = quickLatencies, quickLatency
					}
					if method == byDevice {
						c.Samples, c.MinSamples = 50, 0
					}
					cases = append(cases, c)
				}
			}
		}
		groups = append(groups, fixture.group("small copies", cases), loads(dev))
	}
	return groups, nil
}

// latency is the case of single copies of n bytes. Each begins on an idle stream.
func (r *copyFixture) latency(direction, method string, n int) measure.Case {
	prepared := false
	copies := 1
	if method == byDevice {
		copies = copiesInARow
	}
	return measure.Case{
		Series: result.Series{Name: seriesLatency, Unit: result.Seconds, Better: result.Lower,
			Labels: result.Labels{{Key: result.Device, Value: strconv.Itoa(r.dev.Ordinal())}, {Key: result.Direction, Value: direction},
				{Key: result.Method, Value: method}, {Key: result.Size, Value: strconv.Itoa(n)}}},
		WarmUp: 10,
		Sample: func(ctx context.Context) (float64, error) {
			if !prepared {
				if err := r.prepare(ctx, direction, n); err != nil {
					return 0, err
				}
				prepared = true
				if method == byDevice {
					var err error
					if copies, err = r.fit(ctx, direction, n, copies); err != nil {
						return 0, err
					}
				}
			}
			if method == byDevice {
				took, err := r.take(ctx, direction, n, copies)
				return took.Seconds() / float64(copies), err
			}
			return r.one(ctx, direction, method, n)
		},
		Verify: func(ctx context.Context) error { return r.verify(ctx, direction, n) },
		Node:   r.node,
	}
}

// one returns the time of one copy, by the clock.
func (r *copyFixture) one(ctx context.Context, direction, method string, n int) (float64, error) {
	stream := r.main(direction)
	began := time.Now()
	if err := r.copy(ctx, direction, n); err != nil {
		return 0, err
	}
	var err error
	switch method {
	case awaited:
		err = stream.Synchronize(ctx)
	case awaitedBlocked:
		err = stream.SynchronizeBlocking()
	}
	took := time.Since(began)
	if method == issued {
		err = stream.Synchronize(ctx)
	}
	return took.Seconds(), cmp.Or(err, bounded.Ended(ctx))
}

func explainLatency(_ measure.Env, b *result.Bench) []string {
	var out []string
	for _, device := range devicesOf(b, seriesLatency) {
		for _, direction := range bothDirections {
			out = append(out, explainCopies(b, device, direction)...)
		}
	}
	return out
}

func explainCopies(b *result.Bench, device, direction string) []string {
	of := func(method string) []*result.Series {
		all := b.Select(result.View{Series: seriesLatency, Where: result.Labels{{Key: result.Device, Value: device}, {Key: result.Direction, Value: direction}, {Key: result.Method, Value: method}}})
		slices.SortFunc(all, func(x, y *result.Series) int { return cmp.Compare(sizeOf(x.Labels), sizeOf(y.Labels)) })
		return all
	}
	smallest := func(method string) *result.Series {
		if all := of(method); len(all) > 0 {
			return all[0]
		}
		return nil
	}
	var parts []string
	add := func(s *result.Series, text string) {
		if s != nil {
			parts = append(parts, fmt.Sprintf(text, units.Seconds(s.Median), units.Seconds(s.P99)))
		}
	}
	add(smallest(issued), "%s to issue (99%% within %s)")
	add(smallest(awaited), "%s with Synchronize (99%% within %s)")
	add(smallest(awaitedBlocked), "%s with SynchronizeBlocking (99%% within %s)")
	if s := smallest(byDevice); s != nil {
		parts = append(parts, units.Seconds(s.Median)+" of the device's time if many are queued in a row")
	}
	if len(parts) == 0 {
		return nil
	}
	var size int
	for _, method := range []string{issued, awaited, awaitedBlocked, byDevice} {
		if s := smallest(method); s != nil {
			size = sizeOf(s.Labels)
			break
		}
	}
	out := []string{fmt.Sprintf("GPU %s: a copy of %s %s takes %s.", device, units.Bytes(size), directionText(direction), list(parts))}
	if all := of(byDevice); len(all) > 1 && all[0].Median > 0 {
		last := all[0]
		for _, s := range all {
			if s.Median > 1.25*all[0].Median {
				break
			}
			last = s
		}
		largest := all[len(all)-1]
		if last != all[0] {
			out = append(out, fmt.Sprintf("Up to %s the size hardly matters to the device; a copy of %s takes %s.", units.Bytes(sizeOf(last.Labels)), units.Bytes(sizeOf(largest.Labels)), units.Seconds(largest.Median)))
		}
	}
	return out
}
