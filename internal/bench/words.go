package bench

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/internal/result"
)

var errNoDevice = errors.New("no device")

// The units of memory, the largest first.
var sizeUnits = []struct {
	bytes int
	name  string
}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}, {1, "B"}}

// sizeText returns bytes in words, with three digits: "1.94 MiB".
func sizeText(n int) string {
	for _, u := range sizeUnits {
		if n >= u.bytes {
			return fmt.Sprintf("%.4g %s", math.Round(float64(n)/float64(u.bytes)*100)/100, u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

// exactSize returns bytes in words, and exactly where they are few above a round number:
// "1 GiB + 1 B".
func exactSize(n int) string {
	for _, u := range sizeUnits {
		if n < u.bytes {
			continue
		}
		if rest := n % u.bytes; rest > 0 && rest < 64 {
			return fmt.Sprintf("%s + %d B", sizeText(n-rest), rest)
		}
		break
	}
	return sizeText(n)
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

// gbPerSecond returns a rate in words, with three digits: "55.4 GB/s".
func gbPerSecond(rate float64) string {
	if rate >= 1000 {
		return fmt.Sprintf("%.0f GB/s", rate)
	}
	return fmt.Sprintf("%.3g GB/s", rate)
}

// factor returns how many times as much a is as b, in words: "8.1 times". Differences
// within the noise of most measurements are none: "about".
func factor(a, b float64) string {
	f := a / b
	switch {
	case f >= 10:
		return fmt.Sprintf("%.0f times", f)
	case f > 0.95 && f < 1.05:
		return "about"
	}
	return fmt.Sprintf("%.2g times", f)
}

// sentence returns text with a full stop.
func sentence(text string) string { return strings.TrimSuffix(text, ".") + "." }

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
