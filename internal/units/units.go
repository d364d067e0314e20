// Package units formats numbers for errors, reports and messages, with one rule for each
// kind of number:
//
//	Bytes       memory and files, of 1024    139.8 GiB, 64 KiB, 1 GiB + 1 B
//	ExactBytes  the same for errors          64 KiB, 150123454464 B (139.8 GiB)
//	Data        data that was copied         31.2 GB
//	Rate        GB/s, 1 GB = 1e9 B           55.4 GB/s
//	Seconds     a time, also as Duration     6.42 µs, 2.50 s, 1 min 40 s
//	Share       a part of a whole            98%, 0.3%
//	Times       a factor                     8.1 times
//	Count       a number of things           27,336,821
//
// The words are plain text. A space stands between a number and its unit, a comma between
// groups of three digits (bytes are in units instead), and a dash (–) for NaN and
// infinity.
package units

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// maxRemainder is the number of bytes below which a remainder above a round size is written
// out: 1 GiB + 1 B.
const maxRemainder = 64

// Bytes formats an amount of memory, or the size of a file, in multiples of 1024: 64 KiB,
// 1.5 GiB, 1 GiB + 1 B. Where that is not the exact number it is rounded to three digits,
// with one after the point at least, and has them also where they are 0: 1.94 MiB,
// 139.8 GiB, 2.00 GiB.
func Bytes(n int) string {
	text, _ := memory(n)
	return text
}

// ExactBytes is Bytes, but with the exact number where that is rounded:
// 150123454464 B (139.8 GiB).
func ExactBytes(n int) string {
	text, exact := memory(n)
	if exact {
		return text
	}
	return fmt.Sprintf("%d B (%s)", n, text)
}

// memory is the text of Bytes, and whether it is exact.
func memory(n int) (text string, exact bool) {
	text, exact = binary.format(n)
	if rest := n % maxRemainder; !exact && rest > 0 {
		if round, ok := binary.format(n - rest); ok {
			return fmt.Sprintf("%s + %d B", round, rest), true
		}
	}
	return text, exact
}

// Data formats an amount of data that was copied or compared, in multiples of 1000:
// 31.2 GB. It is rounded as by Bytes.
func Data(n int) string {
	text, _ := decimal.format(n)
	return text
}

// Rate formats a rate in GB/s, with three digits or all before the point: 55.4 GB/s.
func Rate(gbPerSecond float64) string { return joined(Number(gbPerSecond, 3), "GB/s") }

// Seconds formats a time in seconds with three digits, from nanoseconds on: 6.42 µs. From a
// minute on it is in whole seconds, and from an hour on in whole minutes: 1 min 40 s, 2 h 5 min.
func Seconds(s float64) string {
	const longest = 1e9
	if a := math.Abs(s); a >= 59.95 && a < longest {
		sign := ""
		if s < 0 {
			sign = "-"
		}
		if whole := int(math.Round(a)); whole < 3600 {
			return fmt.Sprintf("%s%d min %d s", sign, whole/60, whole%60)
		}
		minutes := int(math.Round(a / 60))
		return fmt.Sprintf("%s%d h %d min", sign, minutes/60, minutes%60)
	}
	u := Time.Unit(s, 3)
	return joined(Number(s/u.Factor, 3), u.Name)
}

// Duration is Seconds of a time.Duration.
func Duration(d time.Duration) string { return Seconds(d.Seconds()) }

// Share formats a part of a whole, where 1 is all: 98%. Below 10% it has a digit after
// the point: 0.3%.
func Share(part float64) string {
	percent := 100 * part
	switch a := math.Abs(percent); {
	case a < 0.05:
		return "0%"
	case a < 9.95:
		return fmt.Sprintf("%.1f%%", percent)
	}
	if text := Number(percent, 2); text != none {
		return text + "%"
	}
	return none
}

// Times formats how many times as much one is as another, with two digits or all before
// the point: 8.1 times, 0.50 times, 123 times.
func Times(factor float64) string { return joined(Number(factor, 2), "times") }

// Count formats a number of things: 27,336,821.
func Count(n int) string { return grouped(fmt.Sprint(n)) }

// Things formats a number of things with their name: 1 page, 2 pages.
func Things(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return Count(n) + " " + many
}

// joined appends a unit to a number, if both are some.
func joined(number, unit string) string {
	if number == none || unit == "" {
		return number
	}
	return number + " " + unit
}

// A multiples formats whole numbers of bytes in the largest multiple that they reach.
type multiples struct {
	base  uint64
	names []string
	parts [3]uint64 // by digits after the point: in how many parts a unit is divided that have no more of them
}

var (
	// A half is 0.5 and a quarter 0.25; no other part of 1024 has so maxRemainder digits.
	binary  = multiples{1 << 10, []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}, [3]uint64{1, 2, 4}}
	decimal = multiples{1e3, []string{"B", "kB", "MB", "GB", "TB", "PB", "EB"}, [3]uint64{1, 10, 100}}
)

// format returns also whether the text is exact.
func (m multiples) format(n int) (text string, exact bool) {
	sign, size := "", uint64(n)
	if n < 0 {
		sign, size = "-", -size
	}
	if size < m.base {
		return fmt.Sprintf("%d %s", n, m.names[0]), true
	}
	unit, name := uint64(1), 0
	for size/unit >= m.base {
		unit, name = unit*m.base, name+1
	}
	v := float64(size) / float64(unit)
	if v >= float64(m.base)-0.05 { // is rounded up to one of the next
		unit, name, v = unit*m.base, name+1, 1
	}
	digits := 1
	if v < 9.995 {
		digits = 2
	}
	figure := fmt.Sprintf("%s%.*f", sign, digits, v)
	if exact = size%(unit/m.parts[digits]) == 0; exact {
		figure = strings.TrimRight(strings.TrimRight(figure, "0"), ".")
	}
	return figure + " " + m.names[name], exact
}
