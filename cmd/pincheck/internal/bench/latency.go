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
		Plan:    onDevices(planLatency),
		Explain: explainLatency,
	}
	for _, direction := range bothDirections {
		e.Views = append(e.Views, result.View{Title: "One copy " + directionText(direction), Series: seriesLatency,
			Where: labelled(result.Direction, direction), X: result.Size, Lines: []string{result.Device, result.Method}, Main: direction == result.HostToDevice})
	}
	e.Views = append(e.Views, result.View{Title: "One load by a GPU thread, each after the one before", Series: seriesLoad, X: result.Device, Lines: []string{result.Memory}})
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
	copies := 1
	if method == byDevice {
		copies = copiesInARow
	}
	return measure.Case{
		Series: result.Series{Name: seriesLatency, Unit: result.Seconds, Better: result.Lower,
			Labels: labelsOf(r.dev, result.Direction, direction, result.Method, method, result.Size, strconv.Itoa(n))},
		WarmUp: 10,
		Sample: after(func(ctx context.Context) error {
			err := r.prepare(ctx, direction, n)
			if err == nil && method == byDevice {
				copies, err = r.fit(ctx, direction, n, copies)
			}
			return err
		}, func(ctx context.Context) (float64, error) {
			if method == byDevice {
				took, err := r.take(ctx, direction, n, copies)
				return took.Seconds() / float64(copies), err
			}
			return r.one(ctx, direction, method, n)
		}),
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

func explainLatency(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	at := func(a *answers, direction, method string) *result.Series {
		return a.smallest(seriesLatency, result.Direction, direction, result.Method, method)
	}
	return explained(b, func(a *answers) *result.Series { return at(a, result.HostToDevice, awaited) }, func(a *answers) {
		queued, done := at(a, result.HostToDevice, issued), at(a, result.HostToDevice, awaited)
		if queued != nil && done != nil {
			a.say("A copy of %s takes %s to issue and %s until it is done.", units.Bytes(done.Labels.Size()), units.Seconds(queued.Median), units.Seconds(done.Median))
		}
	}, func(a *answers) {
		t := result.Table{Columns: []string{"issued", "done", "99% done", "blocking", "GPU time"}}
		for _, direction := range bothDirections {
			done := at(a, direction, awaited)
			if done == nil {
				continue
			}
			t.Title = units.Bytes(done.Labels.Size())
			t.Add(directionText(direction), "", at(a, direction, issued).Quantity(), done.Quantity(), &result.Quantity{Value: done.P99, Unit: result.Seconds},
				at(a, direction, awaitedBlocked).Quantity(), at(a, direction, byDevice).Quantity())
		}
		a.table(t)
		all := a.all(seriesLatency, result.Direction, result.HostToDevice, result.Method, byDevice)
		last := slices.IndexFunc(all, func(s *result.Series) bool { return s.Median > 1.25*all[0].Median }) - 1
		if last > 0 {
			a.say("Up to %s the size hardly matters to the GPU.", units.Bytes(all[last].Labels.Size()))
		}
	})
}
