package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/internal/result"
)

// sizeText returns bytes in words: "64 KiB".
func sizeText(n int) string {
	for _, u := range []struct {
		bytes int
		name  string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.bytes {
			return fmt.Sprintf("%.4g %s", float64(n)/float64(u.bytes), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

// timeText returns seconds in words, with three digits: "6.42 µs".
func timeText(seconds float64) string {
	for _, u := range []struct {
		unit time.Duration
		name string
	}{{time.Second, "s"}, {time.Millisecond, "ms"}, {time.Microsecond, "µs"}} {
		if seconds >= u.unit.Seconds() {
			return fmt.Sprintf("%.3g %s", seconds/u.unit.Seconds(), u.name)
		}
	}
	return fmt.Sprintf("%.3g ns", seconds*1e9)
}

// directionText returns a direction in words.
func directionText(way string) string {
	if way == result.Both {
		return "both directions at once"
	}
	return strings.ReplaceAll(way, "_", " ")
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
