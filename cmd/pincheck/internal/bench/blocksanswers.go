// Conclusions of blocks, and the series that follows from its rates.

package bench

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// enginesFrom returns for each direction and number of blocks the size from which on the engines are faster, if
// there is one.
func enginesFrom(b *result.Bench) (out []result.Series) {
	for _, kernels := range rowsBySize(b) {
		from := 0
		for _, s := range kernels {
			switch engine := other(b, s, seriesBlocks, result.Method, byEngine); {
			case engine == nil:
			case engine.Median <= s.Median:
				from = 0
			case from == 0:
				from = s.Labels.Size()
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
	for _, s := range b.Select(result.View{Series: seriesBlocks, Where: labelled(result.Method, byKernel)}) {
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
		slices.SortFunc(row, func(x, y *result.Series) int { return cmp.Compare(x.Labels.Size(), y.Labels.Size()) })
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

func explainBlocks(env measure.Env, b *result.Bench) ([]string, []result.Table) {
	at := func(a *answers) *result.Series { return a.usualBlocks(result.HostToDevice) }
	return explained(b, at, func(a *answers) {
		s := at(a)
		if s == nil {
			return
		}
		a.faster(blocksText(s)+" upload %[2]s as fast %[1]s as %[3]s.", named{"in one batch", s}, named{"singly", a.other(s, seriesBlocks, result.Method, byCopies)})
	}, func(a *answers) {
		a.blockRates()
		a.crossovers()
		if !isSimulated(env) { // whose times NewBlocks does not choose by
			a.choice()
		}
	})
}

// blocksText names the blocks of a series: 10,000 blocks of 4 KiB.
func blocksText(s *result.Series) string {
	return result.Label{Key: result.Blocks, Value: s.Labels.Get(result.Blocks)}.Text() + " of " + units.Bytes(s.Labels.Size())
}

// usualBlocks returns the rate of the largest number of blocks whose size is closest to the usual one, by the method
// that is chosen.
func (a *answers) usualBlocks(direction string) (at *result.Series) {
	distance := func(s *result.Series) float64 { return math.Abs(math.Log2(float64(s.Labels.Size()) / usualBlock)) }
	count := func(s *result.Series) int {
		n, _ := strconv.Atoi(s.Labels.Get(result.Blocks))
		return n
	}
	for _, s := range a.all(seriesBlocks, result.Direction, direction, result.Method, byQuickest) {
		if at == nil || cmp.Or(cmp.Compare(distance(at), distance(s)), cmp.Compare(count(s), count(at))) > 0 {
			at = s
		}
	}
	return at
}

// blockMethods are the methods with their names in a table.
var blockMethods = []struct{ method, name string }{
	{byQuickest, "chosen"}, {byKernel, "kernel"}, {byEngine, "engines"}, {byCopies, "singly"}, {byOneCopy, "one copy"},
}

// blockRates are the rates and latencies of all methods.
func (a *answers) blockRates() {
	var rates, latencies result.Table
	for _, m := range blockMethods {
		rates.Columns = append(rates.Columns, m.name)
	}
	for _, direction := range allDirections {
		at := a.usualBlocks(direction)
		if at == nil {
			continue
		}
		var cells []*result.Quantity
		for _, m := range blockMethods {
			cells = append(cells, a.other(at, seriesBlocks, result.Method, m.method).Quantity())
		}
		if rates.Title == "" {
			rates.Title = "in blocks of " + units.Bytes(at.Labels.Size())
		}
		rates.Add(directionText(direction), "", cells...)
	}
	a.table(rates)
	latencies.Columns, latencies.Only = rates.Columns, result.Alone
	for _, s := range a.all(seriesBlockLatency, result.Direction, result.HostToDevice, result.Method, byQuickest) {
		var cells []*result.Quantity
		for _, m := range blockMethods {
			cells = append(cells, a.other(s, seriesBlockLatency, result.Method, m.method).Quantity())
		}
		latencies.Title = "Time to GPU, blocks of " + units.Bytes(s.Labels.Size())
		latencies.Add(result.Label{Key: result.Blocks, Value: s.Labels.Get(result.Blocks)}.Text(), "", cells...)
	}
	a.table(latencies)
}

// crossovers says from which size on engines are faster than the kernel.
func (a *answers) crossovers() {
	for _, direction := range bothDirections {
		var from []string
		measured := false
		for _, row := range rowsBySize(a.Bench) {
			if row[0].Labels.Get(result.Direction) != direction || a.other(row[0], seriesBlocks, result.Method, byEngine) == nil {
				continue
			}
			measured = true
			if s := a.Find(seriesEnginesFrom, conditionsOf(row[0])...); s != nil {
				from = append(from, units.Bytes(int(s.Median))+" ("+result.Label{Key: result.Blocks, Value: row[0].Labels.Get(result.Blocks)}.Text()+")")
			}
		}
		switch {
		case len(from) > 0:
			a.say("Copies %s are faster by copy engines than by the kernel from these sizes of a block up: %s.", directionText(direction), strings.Join(from, ", "))
		case measured:
			a.say("Copies %s are faster by the kernel than by copy engines at every size.", directionText(direction))
		}
	}
}

// choice compares the chosen method with the best of the others.
func (a *answers) choice() {
	var worst *result.Series
	least := math.Inf(1)
	for _, s := range a.all(seriesBlocks, result.Method, byQuickest) {
		best := 0.0
		for _, method := range []string{byKernel, byEngine, byCopies} {
			if o := a.other(s, seriesBlocks, result.Method, method); o != nil {
				best = max(best, o.Median)
			}
		}
		if best > 0 && s.Median/best < least && s.Labels.Get(result.Direction) != result.Both {
			worst, least = s, s.Median/best
		}
	}
	if worst != nil {
		a.say("The chosen method reaches at least %s of the fastest one (%s %s).", units.Share(least), blocksText(worst), directionText(worst.Labels.Get(result.Direction)))
	}
}
