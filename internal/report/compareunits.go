package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/result"
)

// seconds formats a time with three digits that matter: 6.40 µs.
func seconds(s float64) string {
	units := []string{"s", "ms", "µs", "ns"}
	for i, unit := range units {
		if math.Abs(s) >= 0.9995 || i == len(units)-1 || s == 0 {
			return digits(s) + " " + unit
		}
		s *= 1000
	}
	return ""
}

// digits formats a number with three digits that matter, or all before the point.
func digits(v float64) string {
	switch a := math.Abs(v); {
	case a >= 1e15:
		return fmt.Sprintf("%.3g", v)
	case a >= 99.95:
		return count(int(math.Round(v)))
	case a >= 9.995:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.9995 || a == 0:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// value formats a value of a series, with its unit where that is not in the head of a
// table.
func value(u result.Unit, v float64) string {
	switch u {
	case result.Seconds:
		return seconds(v)
	case result.Bytes:
		if math.Abs(v) < math.MaxInt64/2 {
			return binary(int(math.Round(v)))
		}
	case result.Count:
		if v == math.Trunc(v) && math.Abs(v) < 1e15 {
			return count(int(v))
		}
	}
	return digits(v)
}

// unitText names a unit in the head of a table, "" if values have theirs.
func unitText(u result.Unit) string {
	switch u {
	case result.GBPerSecond:
		return "GB/s"
	case result.PerSecond:
		return "per second"
	case result.Ratio:
		return "ratio"
	case result.Seconds, result.Bytes, result.Count:
		return ""
	}
	return plain(string(u))
}

// labelText makes words of a label's value: sizes in bytes and snake_case.
func labelText(l result.Label) string {
	if strings.HasSuffix(l.Key, "_bytes") {
		if n, err := strconv.Atoi(l.Value); err == nil {
			return binary(n)
		}
	}
	text := plain(strings.ReplaceAll(l.Value, "_", " "))
	if l.Key == result.Device {
		if _, err := strconv.Atoi(l.Value); err == nil {
			return "GPU " + text
		}
	}
	return text
}
