// Conclusions of bandwidth.

package bench

import (
	"slices"
	"strconv"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

func explainBandwidth(_ measure.Env, b *result.Bench) ([]string, []result.Table) {
	return explained(b, func(a *answers) *result.Series { return a.pinned(result.HostToDevice) }, (*answers).reached, func(a *answers) {
		a.kinds()
		a.whereSizeMatters()
		a.bothAtOnce()
		a.allAtOnce()
		a.deviceMemory()
	})
}

// pinned returns the largest copies of registered memory in a direction.
func (a *answers) pinned(direction string) *result.Series {
	return a.largest(seriesBandwidth, result.Memory, memoryRegistered, result.Direction, direction)
}

// reached is the rate of registered memory, beside the reference if there is one.
func (a *answers) reached() {
	up, down := a.pinned(result.HostToDevice), a.pinned(result.DeviceToHost)
	if up == nil || down == nil {
		return
	}
	text := units.Rate(up.Median) + " to GPU and " + units.Number(down.Median, 3) + " from GPU"
	least := 0.0
	for _, s := range []*result.Series{up, down} {
		if e := s.Expected; e != nil && e.Value > 0 && (least == 0 || s.Median/e.Value < least) {
			least = s.Median / e.Value
		}
	}
	if least > 0 {
		text += ", " + units.Share(least) + " of the reference"
	}
	a.say("Pinned copies reach %s.", text)
}

// kindNames are the kinds of memory, in the order of a table.
var kindNames = []struct{ memory, name string }{
	{memoryHostAlloc, "cudaHostAlloc"}, {memoryRegistered, "registered"}, {memoryWriteCombined, "write-combined"},
	{memoryManaged, "managed"}, {memoryStaged, "pageable, staged"}, {memoryPageable, "pageable"},
}

// kinds compares kinds of memory in copies of the largest size that pageable memory has.
func (a *answers) kinds() {
	pageable := a.largest(seriesBandwidth, result.Memory, memoryPageable, result.Direction, result.HostToDevice)
	if pageable == nil {
		pageable = a.pinned(result.HostToDevice)
	}
	if pageable == nil {
		return
	}
	of := func(memory, direction string) *result.Series {
		return a.other(pageable, seriesBandwidth, result.Memory, memory, result.Direction, direction)
	}
	a.faster("%s uploads %s as fast as %s.", named{"pinned memory", of(memoryRegistered, result.HostToDevice)}, named{"pageable memory", of(memoryPageable, result.HostToDevice)})
	smallest := a.smallest(seriesBandwidth, result.Memory, memoryRegistered, result.Direction, result.HostToDevice)
	size := units.Bytes(pageable.Labels.Size())
	brief := result.Table{Only: result.Summary, Title: "at " + size, Columns: []string{"pinned", "pageable", "staged"}}
	if smallest != nil && smallest.Labels.Size() < pageable.Labels.Size() {
		brief.Columns = append(brief.Columns, units.Bytes(smallest.Labels.Size())+" pinned")
	} else {
		smallest = nil
	}
	for _, d := range allDirections {
		cells := []*result.Quantity{of(memoryRegistered, d).Quantity(), of(memoryPageable, d).Quantity(), of(memoryStaged, d).Quantity()}
		if smallest != nil {
			cells = append(cells, a.other(smallest, seriesBandwidth, result.Direction, d).Quantity())
		}
		brief.Add(directionText(d), "", cells...)
	}
	a.table(brief)
	all := result.Table{Title: size + " by kind of memory", Columns: []string{"to GPU", "from GPU"}, Only: result.Alone}
	for _, k := range kindNames {
		all.Add(k.name, "", of(k.memory, result.HostToDevice).Quantity(), of(k.memory, result.DeviceToHost).Quantity())
	}
	if len(all.Rows) > 1 {
		a.table(all)
	}
}

func (a *answers) whereSizeMatters() {
	all := a.all(seriesBandwidth, result.Memory, memoryRegistered, result.Direction, result.HostToDevice)
	if len(all) < 3 {
		return
	}
	best := 0.0
	for _, s := range all {
		best = max(best, s.Median)
	}
	full := all[slices.IndexFunc(all, func(s *result.Series) bool { return s.Median >= 0.9*best })]
	from := units.Bytes(full.Labels.Size())
	if full == all[0] {
		a.say("Copies run at full speed from %s up, the smallest size measured.", from)
		return
	}
	a.say("Copies run at full speed from %s up; those of %s reach %s of it. Batch smaller ones.", from, units.Bytes(all[0].Labels.Size()), units.Share(all[0].Median/best))
}

// addUp is the share of a sum from which on rates add up.
const addUp = 0.95

func (a *answers) bothAtOnce() {
	both := a.pinned(result.Both)
	up, down := a.other(both, seriesBandwidth, result.Direction, result.HostToDevice), a.other(both, seriesBandwidth, result.Direction, result.DeviceToHost)
	if up == nil || down == nil || up.Median+down.Median <= 0 {
		return
	}
	if share := both.Median / (up.Median + down.Median); share < addUp {
		a.say("Both ways at once copies reach %s, %s of the sum of each way alone.", units.Rate(both.Median), units.Share(share))
	}
}

// allAtOnce compares all devices at once with each alone.
func (a *answers) allAtOnce() {
	t := result.Table{Columns: []string{"together", "of each alone"}, Only: result.Alone}
	for _, direction := range allDirections {
		var sum *result.Series
		alone, count := 0.0, 0
		for _, s := range a.whole.Select(result.View{Series: seriesTogether, Where: labelled(result.Direction, direction)}) {
			d := s.Labels.Get(result.Device)
			if d == allDevices {
				sum = s
			} else if one := a.whole.Find(seriesBandwidth, labelled(result.Device, d, result.Memory, memoryRegistered, result.Direction, direction, result.Size, s.Labels.Get(result.Size))...); one != nil {
				alone, count = alone+one.Median, count+1
			}
		}
		if sum == nil || count < 2 || alone <= 0 {
			continue
		}
		t.Title = "All " + strconv.Itoa(count) + " GPUs at once"
		if count == 2 {
			t.Title = "Both GPUs at once"
		}
		part, note := sum.Median/alone, ""
		if part < addUp {
			note = "limited by a shared uplink or host memory"
		}
		t.Add(directionText(direction), note, sum.Quantity(), &result.Quantity{Value: part, Unit: result.Share})
	}
	a.table(t)
}

func (a *answers) deviceMemory() {
	own, link := a.largest(seriesDeviceMemory), a.pinned(result.HostToDevice)
	if own != nil && link != nil && own.Median > 2*link.Median {
		a.say("A copy within GPU %s reads and writes %s: the link limits copies, not GPU memory.", own.Labels.Get(result.Device), units.Rate(own.Median))
	}
}
