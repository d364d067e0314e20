// What experiments conclude from their series: sentences, the headline first, and tables.

package bench

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

var errNoDevice = errors.New("no device")

// bothDirections are the directions one after the other, and allDirections at once as well.
var (
	bothDirections = []string{result.HostToDevice, result.DeviceToHost}
	allDirections  = []string{result.HostToDevice, result.DeviceToHost, result.Both}
)

// answers collects the conclusions of an experiment from the series of one device, and from those of none.
type answers struct {
	*result.Bench
	device  string
	whole   *result.Bench // of all devices
	said    []string
	figures []result.Table
}

// explained returns the answers of an experiment. The headline is of the device that is slowest by a series, so that
// a slow one shows; the rest is of the first, as many cases are measured on it alone.
func explained(b *result.Bench, key func(*answers) *result.Series, headline, rest func(*answers)) ([]string, []result.Table) {
	var devices []string
	for i := range b.Series {
		if d := b.Series[i].Labels.Get(result.Device); d != "" && d != allDevices && !slices.Contains(devices, d) {
			devices = append(devices, d)
		}
	}
	if len(devices) == 0 {
		devices = []string{""}
	}
	slowest := answersOf(b, devices[0])
	var slow, fast *result.Series
	for _, d := range devices {
		a := answersOf(b, d)
		s := key(a)
		switch {
		case s == nil:
		case slow == nil:
			slowest, slow, fast = a, s, s
		case speed(s) < speed(slow):
			slowest, slow = a, s
		case speed(s) > speed(fast):
			fast = s
		}
	}
	headline(slowest)
	const near = 1.03
	if len(slowest.said) > 0 && slow != nil && slow.Unit == result.GBPerSecond && fast.Median > near*slow.Median {
		slowest.said[0] += fmt.Sprintf(" That is GPU %s, the slowest; GPU %s reaches %s.", slowest.device, fast.Labels.Get(result.Device), units.Rate(fast.Median))
	}
	first := answersOf(b, devices[0])
	first.said, first.figures = slowest.said, slowest.figures
	rest(first)
	return first.said, first.figures
}

// answersOf returns answers without any yet, of a device, or of no device with "".
func answersOf(b *result.Bench, device string) *answers {
	one := *b
	one.Series = slices.DeleteFunc(slices.Clone(b.Series), func(s result.Series) bool {
		d := s.Labels.Get(result.Device)
		return d != "" && d != device && d != allDevices
	})
	return &answers{Bench: &one, device: device, whole: b}
}

// nothingMore is for experiments that conclude all from one device.
func nothingMore(*answers) {}

// say adds a sentence.
func (a *answers) say(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	first, rest, _ := strings.Cut(text, " ")
	if !strings.ContainsFunc(first, func(r rune) bool { return r == '.' || unicode.IsUpper(r) }) { // no name of a program
		first = strings.ToUpper(first[:min(1, len(first))]) + first[min(1, len(first)):]
	}
	a.said = append(a.said, strings.TrimSuffix(first+" "+rest, " "))
}

// named is a series with its name in a sentence.
type named struct {
	name string
	*result.Series
}

// faster adds how many times as fast one series is as another, if both were measured. The format has places for the
// name of the faster one, "8.1 times" or "about", and the name of the slower one.
func (a *answers) faster(format string, one, other named) {
	if one.Series == nil || other.Series == nil || speed(one.Series) <= 0 || speed(other.Series) <= 0 {
		return
	}
	a.ratio(format, one.name, other.name, speed(one.Series)/speed(other.Series))
}

// ratio is faster for a ratio of speeds.
func (a *answers) ratio(format, one, other string, by float64) {
	if by < 1 {
		one, other, by = other, one, 1/by
	}
	text := units.Times(by)
	if by < 1.05 { // within the noise of most measurements
		text = "about"
	}
	a.say(format, one, text, other)
}

// speed is the median of a series, or its inverse where less is better.
func speed(s *result.Series) float64 {
	if s.Better == result.Lower {
		return 1 / max(s.Median, math.SmallestNonzeroFloat64)
	}
	return s.Median
}

// table adds a table without empty rows and columns, unless nothing is left.
func (a *answers) table(t result.Table) {
	if t.Trim(); len(t.Rows) > 0 {
		a.figures = append(a.figures, t)
	}
}

// row adds a table of one row.
func (a *answers) row(title string, cells ...named) {
	t := result.Table{Title: title}
	var row []*result.Quantity
	for _, c := range cells {
		t.Columns = append(t.Columns, c.name)
		row = append(row, c.Quantity())
	}
	t.Add("", "", row...)
	a.table(t)
}

// share is the median of a series as a part of a whole, nil for no series.
func share(s *result.Series) *result.Quantity {
	if s == nil {
		return nil
	}
	return &result.Quantity{Value: s.Median, Unit: result.Share}
}

// labelled returns labels of keys and their values in turn.
func labelled(pairs ...string) (out result.Labels) {
	for pair := range slices.Chunk(pairs, 2) {
		out = append(out, result.Label{Key: pair[0], Value: pair[1]})
	}
	return out
}

// all returns the series of a name with labels, given as keys and their values in turn, by size.
func (a *answers) all(name string, pairs ...string) []*result.Series {
	all := a.Select(result.View{Series: name, Where: labelled(pairs...)})
	slices.SortStableFunc(all, func(x, y *result.Series) int { return cmp.Compare(x.Labels.Size(), y.Labels.Size()) })
	return all
}

// smallest returns the first of all, or nil.
func (a *answers) smallest(name string, pairs ...string) *result.Series {
	if all := a.all(name, pairs...); len(all) > 0 {
		return all[0]
	}
	return nil
}

// largest returns the last of all, or nil.
func (a *answers) largest(name string, pairs ...string) *result.Series {
	if all := a.all(name, pairs...); len(all) > 0 {
		return all[len(all)-1]
	}
	return nil
}

// other returns the series of a name under the conditions of s, but for the labels given as keys and values in turn;
// nil for no such series, and for a nil s.
func (a *answers) other(s *result.Series, name string, pairs ...string) *result.Series {
	return other(a.Bench, s, name, pairs...)
}

func other(b *result.Bench, s *result.Series, name string, pairs ...string) *result.Series {
	if s == nil {
		return nil
	}
	where := slices.Clone(s.Labels)
	for _, l := range labelled(pairs...) {
		for i := range where {
			if where[i].Key == l.Key {
				where[i].Value = l.Value
			}
		}
	}
	return b.Find(name, where...)
}

// directionText returns a direction in words.
func directionText(direction string) string {
	return result.Label{Key: result.Direction, Value: direction}.Text()
}

// onFirst returns a sentence about figures that were measured on the first of several devices only.
func onFirst(env measure.Env, why string) []string {
	if len(env.Devices) < 2 {
		return nil
	}
	return []string{fmt.Sprintf("measured on GPU %d alone: %s", env.Devices[0].Ordinal(), why)}
}

// noted puts sentences before the notes of a group.
func noted(g *measure.Group, texts ...string) {
	others := g.Notes
	g.Notes = func() []string {
		if others == nil {
			return texts
		}
		return slices.Concat(texts, others())
	}
}
