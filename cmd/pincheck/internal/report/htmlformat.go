package report

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// clean is plain, for the page's template.
func clean(s string) string { return plain(s) }

// prose is clean for sentences: no line ends between a number and its unit.
func prose(s string) string { return numberUnit.ReplaceAllString(clean(s), "$1\u00a0$2") }

var numberUnit = regexp.MustCompile(`(\d) (%|[kKMGT]i?B\b|B\b|GB/s|[nµm]?s\b)`)

// shorten cuts text to n runes.
func shorten(s string, n int) string {
	runes := []rune(s)
	if len(runes) <= n {
		return s
	}
	return strings.TrimSpace(string(runes[:max(n-1, 1)])) + "…"
}

// words is result.Words for text from outside.
func words(s string) string { return result.Words(clean(s)) }

// typeset makes text of package units ready for a page: no line breaks between a number
// and its unit, thin spaces between groups of digits, and real minus signs.
func typeset(text string) string { return typography.Replace(text) }

var typography = strings.NewReplacer(" ", "\u00a0", ",", "\u202f", "-", "−")

// number formats a value with so many digits.
func number(v float64, digits int) string { return typeset(units.Number(v, digits)) }

var perTime = units.Scale{{Factor: 1, Name: "/s"}, {Factor: 1e3, Name: "k/s"}, {Factor: 1e6, Name: "M/s"}, {Factor: 1e9, Name: "G/s"}}

// scaleOf returns the units in which values of a unit are written.
func scaleOf(u result.Unit) units.Scale {
	switch u {
	case result.Bytes:
		return units.Memory
	case result.Seconds:
		return units.Time
	case result.PerSecond:
		return perTime
	case result.GBPerSecond:
		return units.Scale{{Factor: 1, Name: "GB/s"}}
	case result.Ratio, result.Count:
		return units.Scale{{Factor: 1}}
	}
	return units.Scale{{Factor: 1, Name: shorten(words(string(u)), 24)}}
}

// quantity formats a value with its unit.
func quantity(v float64, u result.Unit, digits int) string {
	if u == result.Count && v == math.Trunc(v) && math.Abs(v) < 1e15 {
		return number(v, units.AllDigits)
	}
	unit := scaleOf(u).Unit(v, digits)
	return withUnit(number(v/unit.Factor, digits), unit)
}

// withUnit appends a unit to the text of a number, if it is one.
func withUnit(number string, u units.Unit) string {
	if u.Name == "" || number == "–" {
		return number
	}
	return number + "\u00a0" + u.Name
}

// rounded is how many digits round has at most.
const rounded = 4

// round is quantity without zeros at the end, for the marks of an axis.
func round(v float64, u result.Unit) string {
	unit := scaleOf(u).Unit(v, rounded)
	short, _ := strconv.ParseFloat(strconv.FormatFloat(v/unit.Factor, 'g', rounded, 64), 64)
	if v == 0 {
		return "0"
	}
	return withUnit(number(short, units.AllDigits), unit)
}

// typesetShare formats a share in per cent for the page.
func typesetShare(v float64) string { return typeset(units.Share(v)) }

// duration formats a time in seconds, "" for one that is none.
func duration(s float64) string {
	if math.IsNaN(s) || s <= 0 || s > 1e9 {
		return ""
	}
	return typeset(units.Seconds(s))
}

// stamp formats a time in UTC, "" for the zero time.
func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}

// labelValue formats the value of a label.
func labelValue(key, value string) string {
	if n, err := strconv.Atoi(value); err == nil && strings.HasSuffix(key, "_bytes") {
		return typeset(units.Bytes(n))
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
	case value == "true" || value == "yes":
		return labelKey(key)
	case value == "false" || value == "no":
		return "no " + labelKey(key)
	case key == result.Device && err == nil:
		return "GPU " + clean(value)
	case err == nil && !strings.HasSuffix(key, "_bytes"):
		return fmt.Sprintf("%s %s", labelKey(key), clean(value))
	}
	return labelValue(key, value)
}
