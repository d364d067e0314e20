// Sentences about series, for all experiments.

package bench

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/measure"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

var errNoDevice = errors.New("no device")

// factor returns how many times as much a is as b, in words: "8.1 times". Differences
// within the noise of most measurements are none: "about".
func factor(a, b float64) string {
	if f := a / b; f <= 0.95 || f >= 1.05 {
		return units.Times(f)
	}
	return "about"
}

// sentence returns text with a full stop.
func sentence(text string) string { return strings.TrimSuffix(text, ".") + "." }

// directionText returns a direction in words.
func directionText(direction string) string {
	if direction == result.Both {
		return "both directions at once"
	}
	return strings.ReplaceAll(direction, "_", " ")
}

// list joins words: "a, b and c".
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// sizeOf returns the size of a series' copies, 0 if it has none.
func sizeOf(l result.Labels) int {
	n, err := strconv.Atoi(l.Get(result.Size))
	if err != nil {
		return 0
	}
	return n
}

// sameSize returns the series of the largest size that every one of some sets of series
// has, one of each set, or false if there is no such size.
func sameSize(sets ...[]*result.Series) ([]*result.Series, bool) {
	var found []*result.Series
	for _, first := range sets[0] {
		n := sizeOf(first.Labels)
		row := []*result.Series{first}
		for _, other := range sets[1:] {
			if i := slices.IndexFunc(other, func(s *result.Series) bool { return sizeOf(s.Labels) == n }); i >= 0 {
				row = append(row, other[i])
			}
		}
		if len(row) == len(sets) && (found == nil || n > sizeOf(found[0].Labels)) {
			found = row
		}
	}
	return found, found != nil
}

// devicesOf returns the values of the label device among series of a name, or of any if it is empty, in
// their order.
func devicesOf(b *result.Bench, name string) []string {
	var all []string
	for i := range b.Series {
		s := &b.Series[i]
		if name != "" && s.Name != name {
			continue
		}
		if d := s.Labels.Get(result.Device); !slices.Contains(all, d) {
			all = append(all, d)
		}
	}
	return all
}

// eachDevice explains a series of each device in turn, with the device's name if there are several.
func eachDevice(b *result.Bench, name string, explain func(*result.Bench) []string) (out []string) {
	devices := devicesOf(b, name)
	for _, device := range devices {
		one := *b
		one.Series = slices.DeleteFunc(slices.Clone(b.Series), func(s result.Series) bool {
			d := s.Labels.Get(result.Device)
			return d != "" && d != device
		})
		for _, text := range explain(&one) {
			if len(devices) > 1 {
				text = "GPU " + device + ": " + text
			}
			out = append(out, text)
		}
	}
	return out
}

// onFirst is said of what was measured on the first of several devices alone.
func onFirst(env measure.Env, why string) func() []string {
	return func() []string {
		if len(env.Devices) < 2 {
			return nil
		}
		return []string{fmt.Sprintf("measured on GPU %d alone: %s", env.Devices[0].Ordinal(), why)}
	}
}
