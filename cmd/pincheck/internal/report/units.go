package report

import (
	"math"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/printable"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// value formats a value of a series, with its unit where that is not in the head of a
// table.
func value(u result.Unit, v float64) string {
	switch u {
	case result.Seconds:
		return units.Seconds(v)
	case result.Share:
		return units.Share(v)
	case result.PerSecond:
		if v >= 1e6 {
			return units.Number(v/1e6, 3) + " M"
		}
	case result.Bytes:
		if math.Abs(v) < math.MaxInt64/2 {
			return units.Bytes(int(math.Round(v)))
		}
	case result.Count:
		if v == math.Trunc(v) && math.Abs(v) < 1e15 {
			return units.Count(int(v))
		}
	}
	return units.Number(v, 3)
}

// unitText names a unit in the head of a table, "" if values have theirs.
func unitText(u result.Unit) string {
	switch u {
	case result.GBPerSecond:
		return "GB/s"
	case result.PerSecond:
		return "/s"
	case result.Ratio, result.Share:
		return "ratio"
	case result.Seconds, result.Bytes, result.Count:
		return ""
	}
	return plain(string(u))
}

// measured formats a value with its unit.
func measured(u result.Unit, v float64) string {
	switch unit := unitText(u); {
	case u == result.PerSecond:
		return value(u, v) + unit
	case unit != "" && u != result.Ratio && u != result.Share:
		return value(u, v) + " " + unit
	}
	return value(u, v)
}

// labelText makes printable words of a label's value.
func labelText(l result.Label) string { return plain(l.Text()) }

// clip shortens text to at most width runes.
func clip(text string, width int) string {
	if runes := []rune(text); len(runes) > width {
		return string(runes[:max(width-1, 0)]) + "…"
	}
	return text
}

// plain makes one printable line of text from outside.
func plain(s string) string { return printable.Line(s) }

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
