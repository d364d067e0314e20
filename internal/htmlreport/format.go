package htmlreport

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gopinned/pinned/internal/result"
)

// clean makes one printable line of text from outside.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
	return strings.Join(strings.Fields(s), " ")
}

// shorten cuts text to n runes.
func shorten(s string, n int) string {
	runes := []rune(s)
	if len(runes) <= n {
		return s
	}
	return strings.TrimSpace(string(runes[:max(n-1, 1)])) + "…"
}

// words makes a text of a name in snake_case. O_DIRECT is none.
func words(s string) string {
	if strings.ToLower(s) != s {
		return clean(s)
	}
	fields := strings.Fields(clean(strings.ReplaceAll(s, "_", " ")))
	for i, f := range fields {
		switch f {
		case "cpu", "gpu", "numa":
			fields[i] = strings.ToUpper(f)
		}
	}
	return strings.Join(fields, " ")
}

const allDigits = 0

// number formats a value with so many significant digits, or all that it has.
func number(v float64, digits int) string {
	switch abs := math.Abs(v); {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "–"
	case v == 0:
		return "0"
	case abs >= 1e15 || abs < 1e-4:
		return strings.ReplaceAll(strconv.FormatFloat(v, 'g', cmp.Or(digits, -1), 64), "-", "−")
	default:
		decimals := max(0, digits-1-int(math.Floor(math.Log10(abs))))
		if digits == allDigits {
			decimals = -1
		}
		return strings.ReplaceAll(grouped(strconv.FormatFloat(v, 'f', decimals, 64)), "-", "−")
	}
}

// grouped puts a thin space between groups of three digits before the decimal point.
func grouped(s string) string {
	whole, fraction, _ := strings.Cut(s, ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "-", whole[1:]
	}
	if len(whole) > 4 {
		for i := len(whole) - 3; i > 0; i -= 3 {
			whole = whole[:i] + "\u202f" + whole[i:]
		}
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return sign + whole
}

// A multiple is a multiple of a unit.
type multiple struct {
	factor float64
	name   string
}

var (
	binary  = []multiple{{1, "B"}, {1 << 10, "KiB"}, {1 << 20, "MiB"}, {1 << 30, "GiB"}, {1 << 40, "TiB"}}
	times   = []multiple{{1e-9, "ns"}, {1e-6, "µs"}, {1e-3, "ms"}, {1, "s"}}
	perTime = []multiple{{1, "/s"}, {1e3, "k/s"}, {1e6, "M/s"}, {1e9, "G/s"}}
)

// multiples returns the multiples in which values of a unit are written, the smallest
// first.
func multiples(u result.Unit) []multiple {
	switch u {
	case result.Bytes:
		return binary
	case result.Seconds:
		return times
	case result.PerSecond:
		return perTime
	case result.GBPerSecond:
		return []multiple{{1, "GB/s"}}
	case result.Ratio, result.Count:
		return []multiple{{1, ""}}
	}
	return []multiple{{1, shorten(words(string(u)), 24)}}
}

// multipleFor returns the one in which v is at least 1, if there is one.
func multipleFor(u result.Unit, v float64) multiple {
	all := multiples(u)
	m := all[0]
	for _, next := range all[1:] {
		if math.Abs(v) >= next.factor*(1-1e-9) {
			m = next
		}
	}
	return m
}

// quantity formats a value with its unit.
func quantity(v float64, u result.Unit, digits int) string {
	if u == result.Count && v == math.Trunc(v) && math.Abs(v) < 1e15 {
		return number(v, allDigits)
	}
	m := multipleFor(u, v)
	text := number(v/m.factor, digits)
	switch {
	case text == "–" || m.name == "":
		return text
	case v == 0 && len(multiples(u)) > 1:
		return "0"
	}
	return text + "\u00a0" + m.name
}

// round is quantity without zeros at the end, for ticks and sizes.
func round(v float64, u result.Unit) string {
	m := multipleFor(u, v)
	text := strconv.FormatFloat(v/m.factor, 'g', 4, 64)
	if f, err := strconv.ParseFloat(text, 64); err == nil && math.Abs(f) >= 1e4 && math.Abs(f) < 1e15 {
		text = grouped(strconv.FormatFloat(f, 'f', -1, 64))
	}
	if text = strings.ReplaceAll(text, "-", "−"); m.name == "" || v == 0 {
		return text
	}
	return text + "\u00a0" + m.name
}

func percent(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "–"
	}
	digits := 1
	if math.Abs(v) >= 0.0995 {
		digits = 0
	}
	if math.Abs(v) > 100 {
		return "×\u00a0" + number(v, 3)
	}
	return strconv.FormatFloat(100*v, 'f', digits, 64) + "\u00a0%"
}

func duration(s float64) string {
	switch {
	case math.IsNaN(s) || math.IsInf(s, 0) || s <= 0 || s > 1e9:
		return ""
	case s >= 90:
		return (time.Duration(s) * time.Second).String()
	}
	return quantity(s, result.Seconds, 2)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}

// labelValue formats the value of a label.
func labelValue(key, value string) string {
	if n, err := strconv.ParseFloat(value, 64); err == nil && strings.HasSuffix(key, "_bytes") && n >= 0 && n < 1e18 {
		return round(n, result.Bytes)
	}
	switch value {
	case "":
		return "–"
	case "true":
		return "yes"
	case "false":
		return "no"
	}
	return words(value)
}

// labelKey formats the key of a label.
func labelKey(key string) string { return words(strings.TrimSuffix(key, "_bytes")) }

// condition formats a label so that it is understood alone: "8 workers" needs its key,
// "host to device" does not.
func condition(key, value string) string {
	_, err := strconv.ParseFloat(value, 64)
	switch {
	case value == "true":
		return labelKey(key)
	case value == "false":
		return "not " + labelKey(key)
	case key == result.Device && err == nil:
		return "GPU " + clean(value)
	case err == nil && !strings.HasSuffix(key, "_bytes"):
		return fmt.Sprintf("%s %s", labelKey(key), clean(value))
	}
	return labelValue(key, value)
}
