// Trials are the short measurements that a diagnosis needs beside the link. They have the clocks and the
// denominators of latency, bandwidth and alloc, with fewer and shorter samples.

package bench

import (
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

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
