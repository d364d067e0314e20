// Conclusions of bandwidth: sentences from its series.

package bench

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// copiesOf returns the series of bandwidth of a device, a kind of memory and a direction.
func copiesOf(b *result.Bench, device, memory, direction string) []*result.Series {
	return b.Select(result.View{Series: seriesBandwidth, Where: result.Labels{
		{Key: result.Device, Value: device}, {Key: result.Memory, Value: memory}, {Key: result.Direction, Value: direction}}})
}

// bothDirections are the directions one after the other.
var bothDirections = []string{result.HostToDevice, result.DeviceToHost}

func explainBandwidth(_ measure.Env, b *result.Bench) []string {
	var out []string
	conclude := func(sentence string) {
		if sentence != "" {
			out = append(out, sentence)
		}
	}
	devices := devicesOf(b, seriesBandwidth)
	for _, d := range devices {
		conclude(reached(b, d))
	}
	for _, d := range devices {
		conclude(pinnedGain(b, d))
		conclude(stagedGain(b, d))
		conclude(otherKinds(b, d))
	}
	if len(devices) > 0 {
		conclude(whereSizeMatters(b, devices[0]))
	}
	for _, d := range devices {
		conclude(bothAtOnce(b, d))
	}
	for _, direction := range append(slices.Clone(bothDirections), result.Both) {
		conclude(sharedUplink(b, direction))
	}
	for _, d := range devicesOf(b, seriesDeviceMemory) {
		conclude(notTheCardsMemory(b, d))
	}
	return out
}

// reached says how fast registered memory is, and how near to the reference.
func reached(b *result.Bench, device string) string {
	var parts []string
	for _, direction := range bothDirections {
		all, ok := sameSize(copiesOf(b, device, memoryRegistered, direction))
		if !ok {
			continue
		}
		s := all[0]
		part := fmt.Sprintf("%s %s in copies of %s", units.Rate(s.Median), directionText(direction), units.Bytes(sizeOf(s.Labels)))
		if e := s.Expected; e != nil && e.Value > 0 {
			part += fmt.Sprintf(" (%s of %s, %s)", units.Share(s.Median/e.Value), units.Rate(e.Value), e.Source)
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return ""
	}
	return fmt.Sprintf("GPU %s: registered memory reaches %s.", device, list(parts))
}

// against returns what registered memory reaches and what another kind does, in copies of
// one size, as "55.4 GB/s against 9.30 GB/s", and how many times as fast registered memory is.
func against(b *result.Bench, device, memory, direction string) (text string, size int, times float64, ok bool) {
	pair, ok := sameSize(copiesOf(b, device, memoryRegistered, direction), copiesOf(b, device, memory, direction))
	if !ok || pair[1].Median <= 0 {
		return "", 0, 0, false
	}
	return fmt.Sprintf("%s against %s", units.Rate(pair[0].Median), units.Rate(pair[1].Median)), sizeOf(pair[0].Labels), pair[0].Median / pair[1].Median, true
}

func pinnedGain(b *result.Bench, device string) string {
	var parts []string
	for _, direction := range bothDirections {
		if text, size, times, ok := against(b, device, memoryPageable, direction); ok {
			parts = append(parts, fmt.Sprintf("%s as fast %s (%s, copies of %s)", units.Times(times), directionText(direction), text, units.Bytes(size)))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "Beside pageable memory and cudaMemcpy, pinned memory is " + list(parts) + "."
}

func stagedGain(b *result.Bench, device string) string {
	var parts []string
	for _, direction := range bothDirections {
		pair, ok := sameSize(copiesOf(b, device, memoryStaged, direction), copiesOf(b, device, memoryRegistered, direction))
		if ok && pair[1].Median > 0 {
			parts = append(parts, fmt.Sprintf("%s %s (%s of registered memory)", units.Rate(pair[0].Median), directionText(direction), units.Share(pair[0].Median/pair[1].Median)))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "Pageable memory that package transfer stages through pinned memory reaches " + list(parts) + "."
}

func otherKinds(b *result.Bench, device string) string {
	var parts []string
	for _, memory := range []string{memoryHostAlloc, memoryWriteCombined, memoryManaged} {
		for _, direction := range bothDirections {
			pair, ok := sameSize(copiesOf(b, device, memory, direction), copiesOf(b, device, memoryRegistered, direction))
			if ok && pair[1].Median > 0 {
				parts = append(parts, fmt.Sprintf("%s %s %s", strings.ReplaceAll(memory, "_", " "), units.Share(pair[0].Median/pair[1].Median), directionText(direction)))
			}
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "Beside registered memory, other kinds reach: " + list(parts) + "."
}

func whereSizeMatters(b *result.Bench, device string) string {
	all := copiesOf(b, device, memoryRegistered, result.HostToDevice)
	if len(all) < 3 {
		return ""
	}
	slices.SortFunc(all, func(x, y *result.Series) int { return cmp.Compare(sizeOf(x.Labels), sizeOf(y.Labels)) })
	best := 0.0
	for _, s := range all {
		best = max(best, s.Median)
	}
	from := func(share float64) *result.Series {
		return all[slices.IndexFunc(all, func(s *result.Series) bool { return s.Median >= share*best })]
	}
	half, nearly := from(0.5), from(0.9)
	if nearly == all[0] {
		return fmt.Sprintf("Size does not matter from %s on: such copies reach 90%% of the highest rate.", units.Bytes(sizeOf(nearly.Labels)))
	}
	return fmt.Sprintf("Size matters below %s: of the sizes measured it is the first that reaches 90%% of the highest rate, and %s the first that reaches half; copies of %s reach %s. Join small copies.",
		units.Bytes(sizeOf(nearly.Labels)), units.Bytes(sizeOf(half.Labels)), units.Bytes(sizeOf(all[0].Labels)), units.Rate(all[0].Median))
}

// addUp is the share of a sum from which on things are said to add up.
const addUp = 0.95

func bothAtOnce(b *result.Bench, device string) string {
	three, ok := sameSize(copiesOf(b, device, memoryRegistered, result.Both),
		copiesOf(b, device, memoryRegistered, result.HostToDevice), copiesOf(b, device, memoryRegistered, result.DeviceToHost))
	if !ok || three[1].Median+three[2].Median <= 0 {
		return ""
	}
	share := three[0].Median / (three[1].Median + three[2].Median)
	verdict := "the directions add up"
	switch {
	case share < 0.6:
		verdict = "together they are hardly faster than one alone"
	case share < addUp:
		verdict = "they slow each other down"
	}
	return fmt.Sprintf("GPU %s, both directions at once: %s together, %s of the sum of each alone: %s.", device, units.Rate(three[0].Median), units.Share(share), verdict)
}

func sharedUplink(b *result.Bench, direction string) string {
	var sum *result.Series
	alone, smallest, slowest := 0.0, 0.0, ""
	count := 0
	for _, s := range b.Select(result.View{Series: seriesTogether, Where: result.Labels{{Key: result.Direction, Value: direction}}}) {
		d := s.Labels.Get(result.Device)
		if d == allDevices {
			sum = s
			continue
		}
		pair, ok := sameSize([]*result.Series{s}, copiesOf(b, d, memoryRegistered, direction))
		if !ok || pair[1].Median <= 0 {
			return ""
		}
		count++
		alone += pair[1].Median
		if share := s.Median / pair[1].Median; slowest == "" || share < smallest {
			smallest, slowest = share, d
		}
	}
	if sum == nil || count < 2 {
		return ""
	}
	share := sum.Median / alone
	verdict := "no shared uplink shows"
	if share < addUp {
		verdict = fmt.Sprintf("they share an uplink, or the host's memory is too slow for all (GPU %s keeps the least, %s)", slowest, units.Share(smallest))
	}
	return fmt.Sprintf("All %d devices at once, %s: %s, %s of the sum of each alone: %s.", count, directionText(direction), units.Rate(sum.Median), units.Share(share), verdict)
}

func notTheCardsMemory(b *result.Bench, device string) string {
	own := b.Find(seriesDeviceMemory, result.Label{Key: result.Device, Value: device})
	all, ok := sameSize(copiesOf(b, device, memoryRegistered, result.HostToDevice))
	if own == nil || !ok || all[0].Median <= 0 {
		return ""
	}
	times := own.Median / all[0].Median
	if times < 2 {
		return fmt.Sprintf("A copy within GPU %s reads and writes %s of its memory.", device, units.Rate(own.Median))
	}
	return fmt.Sprintf("This is not the bandwidth of the card's memory: a copy within GPU %s reads and writes %s, %s as much. Copies from and to the host are bound by the link.", device, units.Rate(own.Median), units.Times(times))
}
