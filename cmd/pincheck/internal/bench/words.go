package bench

import (
	"errors"
	"slices"
	"strconv"
	"strings"

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

// devicesOf returns the values of the label device among series of a name, in their order.
func devicesOf(b *result.Bench, name string) []string {
	var all []string
	for _, s := range b.Select(result.View{Series: name}) {
		if d := s.Labels.Get(result.Device); !slices.Contains(all, d) {
			all = append(all, d)
		}
	}
	return all
}
