// What the experiment blocks answers: from which size on engines are quicker, rates and latencies.

package bench

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// enginesFrom returns for each direction and number of blocks from which size on the engines are quicker, where
// that is so of any.
func enginesFrom(b *result.Bench) (out []result.Series) {
	for _, kernels := range rowsBySize(b) {
		from := 0
		for _, s := range kernels {
			switch engine := other(b, s, seriesBlocks, result.Method, byEngine); {
			case engine == nil:
			case engine.Median <= s.Median:
				from = 0
			case from == 0:
				from = sizeOf(s.Labels)
			}
		}
		if from > 0 {
			out = append(out, result.Series{Name: seriesEnginesFrom, Unit: result.Bytes, Labels: conditionsOf(kernels[0]), Samples: []float64{float64(from)}})
		}
	}
	return out
}

// rowsBySize returns the kernel's series of each device, direction and number of blocks, by size.
func rowsBySize(b *result.Bench) (rows [][]*result.Series) {
	for _, s := range b.Select(result.View{Series: seriesBlocks, Where: result.Labels{{Key: result.Method, Value: byKernel}}}) {
		i := slices.IndexFunc(rows, func(row []*result.Series) bool { return slices.Equal(conditionsOf(row[0]), conditionsOf(s)) })
		switch {
		case s.Labels.Get(result.Direction) == result.Both:
		case i < 0:
			rows = append(rows, []*result.Series{s})
		default:
			rows[i] = append(rows[i], s)
		}
	}
	for _, row := range rows {
		slices.SortFunc(row, func(x, y *result.Series) int { return cmp.Compare(sizeOf(x.Labels), sizeOf(y.Labels)) })
	}
	return rows
}

// conditionsOf returns the labels of a row of sizes.
func conditionsOf(s *result.Series) result.Labels {
	var out result.Labels
	for _, key := range []string{result.Device, result.Direction, result.Blocks} {
		out = append(out, result.Label{Key: key, Value: s.Labels.Get(key)})
	}
	return out
}

func explainBlocks(env measure.Env, b *result.Bench) []string {
	return eachDevice(b, "", func(b *result.Bench) (out []string) {
		all := []string{explainCrossovers(b), explainBlockRates(b, result.HostToDevice), explainBlockRates(b, result.DeviceToHost),
			explainBlockRates(b, result.Both), explainBlockLatencies(b)}
		if !isSimulated(env) { // of which NewBlocks measures the host's time
			all = append(all, explainChoice(b))
		}
		return slices.DeleteFunc(all, func(text string) bool { return text == "" })
	})
}

// explainCrossovers says from which size on engines are quicker, in one line.
func explainCrossovers(b *result.Bench) string {
	var parts []string
	for _, direction := range bothDirections {
		var counts []string
		for _, row := range rowsBySize(b) {
			if row[0].Labels.Get(result.Direction) != direction || other(b, row[0], seriesBlocks, result.Method, byEngine) == nil {
				continue
			}
			text := "at no size up to " + units.Bytes(sizeOf(row[len(row)-1].Labels))
			if s := b.Find(seriesEnginesFrom, conditionsOf(row[0])...); s != nil {
				text = "from " + units.Bytes(int(s.Median)) + " on"
			}
			counts = append(counts, text+" ("+result.Label{Key: result.Blocks, Value: row[0].Labels.Get(result.Blocks)}.Text()+")")
		}
		if len(counts) > 0 {
			parts = append(parts, directionText(direction)+" "+strings.Join(counts, ", "))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "Copy engines are quicker than the kernel: " + strings.Join(parts, "; ") + "."
}

// methodTexts are the methods in sentences, in their order.
var methodTexts = []struct{ method, text string }{
	{byQuickest, "by the method that is chosen"}, {byKernel, "by the kernel"}, {byEngine, "by engines"}, {engineKernel, "by engines up and the kernel down"},
	{kernelEngine, "by the kernel up and engines down"}, {byCopies, "by a copy each"}, {byOneCopy, "in one copy"},
}

// explainBlockRates says how fast the largest number of blocks of the usual size is, or of the smallest one.
func explainBlockRates(b *result.Bench, direction string) string {
	var at *result.Series
	distance := func(s *result.Series) float64 { return math.Abs(math.Log2(float64(sizeOf(s.Labels)) / usualBlock)) }
	for _, s := range b.Select(result.View{Series: seriesBlocks, Where: result.Labels{{Key: result.Direction, Value: direction}, {Key: result.Method, Value: byQuickest}}}) {
		if at == nil || distance(s) < distance(at) || distance(s) == distance(at) && blocksOfSeries(s) > blocksOfSeries(at) {
			at = s
		}
	}
	if at == nil {
		return ""
	}
	var parts []string
	for _, m := range methodTexts {
		s := other(b, at, seriesBlocks, result.Method, m.method)
		if s == nil {
			continue
		}
		text := units.Rate(s.Median) + " " + m.text
		if s.CPUSecondsPerGB != nil {
			text += fmt.Sprintf(" (%s CPU s/GB)", units.Number(*s.CPUSecondsPerGB, 3))
		}
		parts = append(parts, text)
	}
	each := ""
	if direction == result.Both {
		each = " each way"
	}
	return fmt.Sprintf("%s of %s%s, %s: %s.", at.Labels[len(at.Labels)-1].Text(), units.Bytes(sizeOf(at.Labels)), each, directionText(direction), list(parts))
}

func blocksOfSeries(s *result.Series) int {
	n, _ := strconv.Atoi(s.Labels.Get(result.Blocks))
	return n
}

// explainBlockLatencies says how long few blocks and many take.
func explainBlockLatencies(b *result.Bench) string {
	var parts []string
	size := 0
	for _, s := range b.Select(result.View{Series: seriesBlockLatency, Where: result.Labels{{Key: result.Direction, Value: result.HostToDevice}, {Key: result.Method, Value: byQuickest}}}) {
		size = sizeOf(s.Labels)
		text := s.Labels[len(s.Labels)-1].Text() + " take " + units.Seconds(s.Median)
		if each := other(b, s, seriesBlockLatency, result.Method, byCopies); each != nil {
			text += " (a copy each " + units.Seconds(each.Median) + ")"
		}
		parts = append(parts, text)
	}
	if len(parts) == 0 {
		return ""
	}
	return fmt.Sprintf("From the call to the end, blocks of %s host to device: %s.", units.Bytes(size), list(parts))
}

// explainChoice compares the method that is chosen with the best of the others.
func explainChoice(b *result.Bench) string {
	var worst *result.Series
	share := math.Inf(1)
	for _, s := range b.Select(result.View{Series: seriesBlocks, Where: result.Labels{{Key: result.Method, Value: byQuickest}}}) {
		best := 0.0
		for _, method := range []string{byKernel, byEngine, byCopies} {
			if o := other(b, s, seriesBlocks, result.Method, method); o != nil {
				best = max(best, o.Median)
			}
		}
		if best > 0 && s.Median/best < share && s.Labels.Get(result.Direction) != result.Both {
			worst, share = s, s.Median/best
		}
	}
	if worst == nil {
		return ""
	}
	return fmt.Sprintf("The method that is chosen reaches %s of the best of kernel, engines and a copy each, or more: least with %s of %s, %s.",
		units.Share(share), worst.Labels[len(worst.Labels)-1].Text(), units.Bytes(sizeOf(worst.Labels)), directionText(worst.Labels.Get(result.Direction)))
}
