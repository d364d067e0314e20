// Link and Together are short plans of bandwidth, for a check of each device's link, and of all at once. They have
// its clocks and its denominators.

package bench

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A LinkPlan shapes [Link] and [Together]. Zero fields take the values that suit a check,
// which takes about a quarter of a second a device on a fast link, and of all at once half a
// second. Negative values are errors.
type LinkPlan struct {
	SizeBytes int           // of one copy; 0 means 64 MiB, and larger ones are not faster
	Copies    int           // of a sample; 0 means 8
	Samples   int           // of each direction; 0 means 9
	Budget    time.Duration // of each direction; 0 means half a second
}

// validate returns an error for what cannot be.
func (p LinkPlan) validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{{"size", p.SizeBytes}, {"copies", p.Copies}, {"samples", p.Samples}, {"budget", int(p.Budget)}} {
		if f.value < 0 {
			return fmt.Errorf("%s %d: must not be negative", f.name, f.value)
		}
	}
	return nil
}

// or returns the plan with those of another for zero fields.
func (p LinkPlan) or(q LinkPlan) LinkPlan {
	return LinkPlan{cmp.Or(p.SizeBytes, q.SizeBytes), cmp.Or(p.Copies, q.Copies), cmp.Or(p.Samples, q.Samples), cmp.Or(p.Budget, q.Budget)}
}

// Link is [Bandwidth] with one size and registered memory, for a quick check of each
// device's link.
func Link(p LinkPlan) measure.Experiment {
	e := Bandwidth()
	e.Name, e.Explain, e.Views = "link", nil, e.Views[:1]
	e.Question = "How fast are large copies between pinned memory and the device?"
	e.Plan = func(env measure.Env) ([]measure.Group, error) {
		if err := p.validate(); err != nil {
			return nil, err
		}
		p := p.or(LinkPlan{SizeBytes: 64 << 20, Copies: 8, Samples: 9, Budget: 500 * time.Millisecond})
		n, copies := p.SizeBytes, p.Copies
		var groups []measure.Group
		for _, dev := range env.Devices {
			fixture := &copyFixture{resources: resources{dev: dev}, kind: registered, n: n}
			var cases []measure.Case
			for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
				c := fixture.bandwidth(seriesBandwidth, direction, n, copies)
				c.Samples, c.Budget = p.Samples, p.Budget
				cases = append(cases, c)
			}
			groups = append(groups, fixture.group("registered memory", cases))
		}
		return groups, nil
	}
	return e
}

// togetherSample is about how long a sample of Together takes, if none slows another down.
const togetherSample = 10 * time.Millisecond

// Together measures large copies between pinned memory and all devices of Env at once, one
// direction after the other: of each, and the sum. Rate is what the slowest device reaches
// alone, in GB/s: on slow links samples have fewer copies than 8. 0 is unknown. Copies are of
// 32 MiB, and there are at most 5 samples of a direction in 100 ms, and 3 at least.
func Together(p LinkPlan, rate float64) measure.Experiment {
	e := Bandwidth()
	e.Name, e.Explain, e.Views = "together", nil, slices.DeleteFunc(e.Views, func(v result.View) bool { return v.Series != seriesTogether })
	e.Question = "How fast are large copies between pinned memory and all devices at once?"
	e.Plan = func(env measure.Env) ([]measure.Group, error) {
		if err := p.validate(); err != nil {
			return nil, err
		}
		if len(env.Devices) < 2 {
			return nil, fmt.Errorf("%d devices: want two at least", len(env.Devices))
		}
		p := p.or(LinkPlan{SizeBytes: 32 << 20, Copies: 8, Samples: 5, Budget: 100 * time.Millisecond})
		if rate > 0 {
			p.Copies = min(p.Copies, max(1, int(rate*float64(togetherSample)/float64(p.SizeBytes))))
		}
		g := together(env.Devices, p.SizeBytes, p.Copies, bothDirections)
		for i := range g.Cases {
			g.Cases[i].Samples, g.Cases[i].Budget = p.Samples, p.Budget
		}
		return []measure.Group{g}, nil
	}
	return e
}

// Trials are the short measurements that a diagnosis needs beside the link. They have the clocks and the
// denominators of latency, bandwidth and alloc, with fewer and shorter samples.

const (
	trialPin     = 64 << 20
	trialCopy    = 64 << 20
	trialLatency = 64
	trialBudget  = 100 * time.Millisecond
)

// Trials measures shortly what a diagnosis asks for beside the link: the time of a small
// copy, copies from and to memory that is not pinned, on hosts with several NUMA nodes (by
// Env.Host) copies from and to the device's own node and a far one, and, with pin, the rates
// of pinning by cudaHostAlloc and by hostmem.Alloc. It takes about half a second on a fast
// host, and a quarter more for the nodes. Pinning is the host's work, so that one device is
// enough for it.
func Trials(pin bool) measure.Experiment { return trials(pin, nodeBytes, onNode) }

// trials is Trials with n bytes of memory of a node.
func trials(pin bool, n int, memory func(node int) hostKind) measure.Experiment {
	return measure.Experiment{
		Name:     "trials",
		Question: "What do small copies, memory that is not pinned, and pinning cost?",
		Plan: onDevices(func(env measure.Env) ([]measure.Group, error) {
			var groups []measure.Group
			for _, dev := range env.Devices {
				small := &copyFixture{resources: resources{dev: dev}, kind: registered, n: trialLatency}
				one := small.latency(result.HostToDevice, awaited, trialLatency)
				one.Samples, one.MinSamples, one.Budget = quickLatencies, 20, quickLatency
				groups = append(groups, small.group("small copies", []measure.Case{one}))

				ordinary := &copyFixture{resources: resources{dev: dev}, kind: unpinned, n: trialCopy}
				var cases []measure.Case
				for _, direction := range bothDirections {
					c := ordinary.bandwidth(seriesBandwidth, direction, trialCopy, 1)
					c.Samples, c.MinSamples, c.Budget = 5, 3, trialBudget
					cases = append(cases, c)
				}
				groups = append(groups, ordinary.group("memory that is not pinned", cases))
				groups = append(groups, byNode(env.Host, dev, n, memory)...)
			}
			if !pin {
				return groups, nil
			}
			for _, m := range pinMethods {
				if m.name != ours && m.name != cudas {
					continue
				}
				p := &pinner{dev: env.Devices[0], method: m}
				c := p.sized(trialPin)
				c.Samples, c.MinSamples, c.Budget = 5, 3, trialBudget
				groups = append(groups, measure.Group{Name: m.name, Footprint: measure.Footprint{Pinned: trialPin},
					Setup: secondsAt(warmUpBytes, slowPin), Open: p.open, Close: p.close, Cases: []measure.Case{c}})
			}
			return groups, nil
		}),
	}
}
