package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/findings"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/reference"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// The series of [Facts.Together], by [result.Device] and [result.Direction]. The device
// TogetherSum is their sum.
const (
	TogetherBandwidth = "bandwidth_all_devices"
	TogetherSum       = "all"
)

// An uplink is a link above several GPUs, which share it.
type uplink struct {
	hostinfo.Link
	gpus []*Device
}

// rate returns what it carries in GB/s each way, as it is trained under load if that is
// less than it could; 0 is unknown.
func (u *uplink) rate() float64 {
	for _, d := range u.gpus {
		if d.Link != nil && d.Link.Bottleneck != nil && d.Link.Bottleneck.Address == u.Address {
			return d.Link.Bottleneck.Rate
		}
	}
	return u.Best().Rate()
}

func (u *uplink) has(d *Device) bool { return slices.Contains(u.gpus, d) }

func (u *uplink) String() string {
	return fmt.Sprintf("GPUs %s are below bridge %s, %v", ordinals(u.gpus), u.Address, u.Best())
}

func ordinals(gpus []*Device) string {
	var texts []string
	for _, d := range gpus {
		texts = append(texts, strconv.Itoa(d.Ordinal))
	}
	return strings.Join(texts, ", ")
}

// uplinks returns the links above several GPUs: of those above the same ones the narrowest, and
// of equal ones the nearest.
func (f *Facts) uplinks() (shared []*uplink) {
	if f.Simulated {
		return nil
	}
	var all []*uplink
	for i := range f.Devices {
		d := &f.Devices[i]
		pci, ok := f.pci(d)
		if !ok {
			continue
		}
		for _, up := range pci.Upstream {
			j := slices.IndexFunc(all, func(u *uplink) bool { return u.Address == up.Address })
			if j < 0 {
				j = len(all)
				all = append(all, &uplink{Link: up})
			}
			all[j].gpus = append(all[j].gpus, d)
		}
	}
	for _, u := range all {
		i := slices.IndexFunc(shared, func(s *uplink) bool { return slices.Equal(s.gpus, u.gpus) })
		switch {
		case len(u.gpus) < 2:
		case i < 0:
			shared = append(shared, u)
		case u.rate() > 0 && (shared[i].rate() == 0 || u.rate() < shared[i].rate()):
			shared[i] = u
		}
	}
	return shared
}

// sharedSwitch finds uplinks that carry less than the GPUs below them could.
func sharedSwitch(f *Facts) (out []Finding) {
	for _, u := range f.uplinks() {
		sum := 0.0
		for _, d := range u.gpus {
			sum += f.made(d).Rate()
		}
		if u.Best().Rate() == 0 || u.Best().Rate() >= sum {
			continue
		}
		one := Finding{
			Summary:  fmt.Sprintf("GPUs %s share one link of %s", ordinals(u.gpus), units.Rate(u.Best().Rate())),
			Evidence: []string{fmt.Sprintf("They are below bridge %s, %v", u.Address, u.Best())},
			values:   findings.Values{"rate": units.Rate(u.Best().Rate() / float64(len(u.gpus)))},
		}
		for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
			if c := f.atOnce(direction); c.of(u.gpus) {
				one.Evidence = append(one.Evidence, fmt.Sprintf("%s, all GPUs at once: %s together; the sum of each alone is %s",
					capital(result.Words(direction)), units.Rate(sumOf(c.got, u.gpus)), units.Rate(sumOf(c.alone, u.gpus))))
			}
		}
		out = append(out, one)
	}
	return out
}

// Copies of all GPUs at once, one way: what each got, what it reaches alone, and what it can
// be expected to get, of the uplinks that are known. In GB/s.
type atOnce struct {
	direction        string
	got, alone, fair map[*Device]float64
	gpus             []*Device // of which all three are known
}

// of reports whether these GPUs are among those that were measured.
func (c atOnce) of(gpus []*Device) bool {
	return !slices.ContainsFunc(gpus, func(d *Device) bool { return !slices.Contains(c.gpus, d) })
}

func sumOf(rates map[*Device]float64, gpus []*Device) (sum float64) {
	for _, d := range gpus {
		sum += rates[d]
	}
	return sum
}

// atOnce returns what was measured of one direction.
func (f *Facts) atOnce(direction string) atOnce {
	c := atOnce{direction: direction, got: map[*Device]float64{}, alone: map[*Device]float64{}, fair: map[*Device]float64{}}
	if f.Together == nil {
		return c
	}
	for i := range f.Devices {
		d := &f.Devices[i]
		s := f.Together.Find(TogetherBandwidth, result.Label{Key: result.Device, Value: strconv.Itoa(d.Ordinal)}, result.Label{Key: result.Direction, Value: direction})
		j := slices.IndexFunc(d.copies(), func(s result.Series) bool { return s.Labels.Get(result.Direction) == direction })
		if s == nil || s.Median <= 0 || s.Spread > wild || j < 0 || d.copies()[j].Median <= 0 {
			continue
		}
		c.got[d], c.alone[d] = s.Median, d.copies()[j].Median
		c.fair[d] = c.alone[d]
		c.gpus = append(c.gpus, d)
	}
	for _, u := range f.uplinks() {
		carries, sum := payloadShare*u.rate(), sumOf(c.alone, u.gpus)
		for _, d := range c.gpus {
			if u.has(d) && carries > 0 && sum > carries {
				c.fair[d] = min(c.fair[d], c.alone[d]*carries/sum)
			}
		}
	}
	return c
}

const (
	// starved is the share of what a GPU can be expected to get beside the others, below
	// which it is starved: two H200s kept 96 % and more, and of eight H100s some kept 7 to
	// 45 % (NVIDIA/cuda-samples #357).
	starved = 0.5
	// lowTogether is the share below which all of them are noticeably slower at once.
	lowTogether = slowShare
)

// shown reports whether the host shows the links above a GPU as they are: virtual machines
// have none, or made-up ones, and NVLink-C2C is no link of that kind.
func (f *Facts) shown(d *Device) bool {
	if f.Host.Virt.VM || reference.Coherent(d.Name) {
		return false
	}
	pci, ok := f.pci(d)
	return ok && len(pci.Upstream) > 0
}

// busy reports whether other processes have memory on the GPU: what they copy meanwhile does
// not show.
func (d *Device) busy() bool { return d.Health != nil && len(d.Health.Processes) > 0 }

// slowTogether compares copies of all GPUs at once with those of each alone, and with what
// the uplinks that they share carry.
func slowTogether(f *Facts) []Finding {
	var grave, mild []string
	var slow []*Device
	smallest, lowest := 1.0, 1.0
	for _, direction := range []string{result.HostToDevice, result.DeviceToHost} {
		c := f.atOnce(direction)
		if len(c.gpus) < 2 {
			continue
		}
		for _, d := range c.gpus {
			if share := c.got[d] / c.fair[d]; share < starved && f.shown(d) && !d.busy() {
				text := fmt.Sprintf("GPU %d, %s: %s with the others, %s alone", d.Ordinal, result.Words(direction), units.Rate(c.got[d]), units.Rate(c.alone[d]))
				if c.fair[d] < c.alone[d] {
					text += fmt.Sprintf(", and its share of the uplink is %s", units.Rate(c.fair[d]))
				}
				grave = append(grave, text)
				smallest = min(smallest, share)
				if !slices.Contains(slow, d) {
					slow = append(slow, d)
				}
			}
		}
		got, fair := sumOf(c.got, c.gpus), sumOf(c.fair, c.gpus)
		if got < lowTogether*fair {
			text := fmt.Sprintf("%s: %s together; the sum of each alone is %s", capital(result.Words(direction)), units.Rate(got), units.Rate(sumOf(c.alone, c.gpus)))
			if sum := sumOf(c.alone, c.gpus); fair < sum {
				text += fmt.Sprintf(", and the shared links carry %s", units.Rate(fair))
			}
			mild = append(mild, text)
			lowest = min(lowest, got/fair)
		}
	}
	switch {
	case len(grave) > 0:
		slices.SortFunc(slow, func(a, b *Device) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
		who, share := "GPU %s gets", "its share"
		if len(slow) > 1 {
			who, share = "GPUs %s get as little as", "their share"
		}
		out := Finding{
			Summary:  fmt.Sprintf("when all GPUs copy at once, "+who+" %s of "+share, ordinals(slow), units.Share(smallest)),
			Evidence: append(grave, f.locations(slow)...),
			values:   findings.Values{"several times": units.Times(1 / max(smallest, 0.01))},
		}
		return finding(out)
	case len(mild) > 0:
		var gpus []*Device
		for i := range f.Devices {
			gpus = append(gpus, &f.Devices[i])
		}
		return finding(Finding{
			Severity: Note,
			Summary:  fmt.Sprintf("when all GPUs copy at once, they reach %s of their combined rate", units.Share(lowest)),
			Evidence: append(mild, f.locations(gpus)...),
			because:  "sum",
		})
	}
	return nil
}

// locations says where GPUs are: which bridges they share, or else their root ports, and their
// NUMA nodes.
func (f *Facts) locations(gpus []*Device) (texts []string) {
	var below []*Device
	for _, u := range f.uplinks() {
		if slices.ContainsFunc(gpus, u.has) {
			texts = append(texts, u.String())
			below = append(below, u.gpus...)
		}
	}
	for _, d := range gpus {
		pci, ok := f.pci(d)
		if !ok || slices.Contains(below, d) {
			continue
		}
		text := fmt.Sprintf("GPU %d is at %s", d.Ordinal, pci.Address)
		if n := len(pci.Upstream); n > 0 && f.shown(d) {
			text = fmt.Sprintf("GPU %d has its own root port %s", d.Ordinal, pci.Upstream[n-1].Address)
		}
		if d.NUMANode != nil {
			text += fmt.Sprintf(", on NUMA node %d", *d.NUMANode)
		}
		texts = append(texts, text)
	}
	return texts
}
