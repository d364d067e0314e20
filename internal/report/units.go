package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gopinned/pinned/internal/result"
)

// binary formats a size of memory: 139.8 GiB, 64 MiB, 17 B.
func binary(n int) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, u := float64(n), 0
	for v >= 1024 && u < len(units)-1 {
		v /= 1024
		u++
	}
	if v == float64(int(v)) {
		return fmt.Sprintf("%d %s", int(v), units[u])
	}
	return fmt.Sprintf("%.1f %s", v, units[u])
}

// decimal formats an amount of data that was copied: 31.2 GB.
func decimal(n int) string {
	switch v := float64(n); {
	case v >= 1e9:
		return fmt.Sprintf("%.1f GB", v/1e9)
	case v >= 1e6:
		return fmt.Sprintf("%.1f MB", v/1e6)
	case v >= 1e3:
		return fmt.Sprintf("%.1f kB", v/1e3)
	}
	return fmt.Sprintf("%d B", n)
}

// duration formats a time with as many digits as matter.
func duration(d time.Duration) string {
	switch {
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= time.Millisecond:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%d µs", d.Microseconds())
}

// seconds formats a time in seconds with three digits that matter, from nanoseconds on.
func seconds(s float64) string {
	units := []string{"s", "ms", "µs", "ns"}
	if math.Abs(s) >= 100 && math.Abs(s) < math.MaxInt64/1e9 {
		return duration(time.Duration(s * 1e9))
	}
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

// measured formats a value with its unit.
func measured(u result.Unit, v float64) string {
	if unit := unitText(u); unit != "" && u != result.Ratio {
		return value(u, v) + " " + unit
	}
	return value(u, v)
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

// clip shortens text to at most width runes.
func clip(text string, width int) string {
	if runes := []rune(text); len(runes) > width {
		return string(runes[:max(width-1, 0)]) + "…"
	}
	return text
}

// count formats a number with its digits in groups: 1,234,567.
func count(n int) string {
	s := fmt.Sprint(n)
	if n < 0 {
		return s
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func plural(n int, one, many string) string {
	if n == 1 {
		return fmt.Sprintf("%s %s", count(n), one)
	}
	return fmt.Sprintf("%s %s", count(n), many)
}

// plain makes one printable line of text from outside: paths, names and errors may
// contain anything, also escape sequences.
func plain(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
	return strings.Join(strings.Fields(s), " ")
}

// wrap breaks text into lines of at most width runes, at spaces, or inside a word that is
// longer.
func wrap(text string, width int) []string {
	width = max(width, 1)
	var lines []string
	var line []rune
	for word := range strings.FieldsSeq(text) {
		runes := []rune(word)
		if len(line) > 0 && len(line)+1+len(runes) <= width {
			line = append(append(line, ' '), runes...)
			continue
		}
		if len(line) > 0 {
			lines = append(lines, string(line))
		}
		for len(runes) > width {
			lines = append(lines, string(runes[:width]))
			runes = runes[width:]
		}
		line = runes
	}
	return append(lines, string(line))
}
