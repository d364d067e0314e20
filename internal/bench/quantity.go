package bench

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// The units of memory, the largest first.
var sizeUnits = []struct {
	bytes int
	name  string
}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}, {1, "B"}}

// roundSize returns bytes in words, with three digits: "1.94 MiB".
func roundSize(n int) string {
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
			return fmt.Sprintf("%s + %d B", roundSize(n-rest), rest)
		}
		break
	}
	return roundSize(n)
}

// duration returns seconds in words, with three digits: "6.42 µs".
func duration(seconds float64) string {
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

var errNoDevice = errors.New("no device")
