package units

import (
	"cmp"
	"math"
	"strconv"
	"strings"
)

// none is the text of NaN and of infinity.
const none = "–"

// AllDigits lets Number write all digits of a value.
const AllDigits = 0

// Number formats a value with the given number of digits, and at least with all before the
// point: 55.4, 0.466, 393, 27,336,821. Below 0.0001 and from 1e15 on it has an exponent:
// 1.23e-07.
func Number(v float64, digits int) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return none
	case v == 0:
		return "0"
	case a >= 1e15 || a < 1e-4:
		return strconv.FormatFloat(v, 'g', cmp.Or(digits, -1), 64)
	case digits == AllDigits:
		return grouped(strconv.FormatFloat(v, 'f', -1, 64))
	}
	return grouped(strconv.FormatFloat(v, 'f', max(0, digits-1-exponent(v, digits)), 64))
}

// exponent returns the power of ten of the first digit of v, rounded: 1 for 9.96 if there
// are two digits.
func exponent(v float64, digits int) int {
	_, e, _ := strings.Cut(strconv.FormatFloat(v, 'e', digits-1, 64), "e")
	n, _ := strconv.Atoi(e) // it is one
	return n
}

// grouped puts commas between groups of three digits before the point.
func grouped(s string) string {
	whole, fraction, _ := strings.Cut(s, ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "-", whole[1:]
	}
	if len(whole) > 3 {
		for i := len(whole) - 3; i > 0; i -= 3 {
			whole = whole[:i] + "," + whole[i:]
		}
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return sign + whole
}

// A Unit is one in which values are written: values of Factor are 1 of it. Name may be
// empty.
type Unit struct {
	Factor float64
	Name   string
}

// A Scale is the units in which values of a kind are written, the smallest first. One has
// the factor 1.
type Scale []Unit

var (
	Time   = Scale{{1e-9, "ns"}, {1e-6, "µs"}, {1e-3, "ms"}, {1, "s"}}
	Memory = Scale{{1, "B"}, {1 << 10, "KiB"}, {1 << 20, "MiB"}, {1 << 30, "GiB"}, {1 << 40, "TiB"}, {1 << 50, "PiB"}, {1 << 60, "EiB"}}
)

// Unit returns the largest unit of which v, rounded to digits, is at least 1. For 0 it is
// the unit of factor 1, and for values below the smallest unit the smallest.
func (s Scale) Unit(v float64, digits int) Unit {
	for i := len(s) - 1; i >= 0; i-- {
		if a := math.Abs(v) / s[i].Factor; a >= 1 || a > 0.1 && exponent(a, digits) >= 0 || v == 0 && s[i].Factor == 1 {
			return s[i]
		}
	}
	return s[0]
}
