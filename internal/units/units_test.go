package units

import (
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

func TestBytes(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{
		0: "0 B", 1: "1 B", kib - 1: "1023 B", kib: "1 KiB", 64 * kib: "64 KiB", 1000 * mib: "1000 MiB", 5 * gib: "5 GiB",
		1 << 40: "1 TiB", 1 << 50: "1 PiB", 1 << 60: "1 EiB",
		// Halves and quarters are exact.
		3 << 9: "1.5 KiB", 5 << 8: "1.25 KiB", 3 << 29: "1.5 GiB", 7 << 28: "1.75 GiB", 25 << 19: "12.5 MiB", 201 << 19: "100.5 MiB",
		// Few bytes more than a round size are written as such.
		kib + 1: "1 KiB + 1 B", gib + 1: "1 GiB + 1 B", gib + 63: "1 GiB + 63 B", 3<<29 + 1: "1.5 GiB + 1 B", 1<<60 + 7: "1 EiB + 7 B",
		// All else is rounded, and shows it by its digits.
		gib + 64: "1.00 GiB", gib + kib: "1.00 GiB", 5000: "4.88 KiB", 10_000_000: "9.54 MiB", 2114 * mib: "2.06 GiB", 201<<18 + 1: "50.3 MiB",
		150109880320: "139.8 GiB", 49<<18 + 1: "12.3 MiB", 49 << 18: "12.2 MiB", math.MaxInt - 1: "8.00 EiB", math.MaxInt: "8.00 EiB",
		// What is rounded up to the next unit is written in that.
		mib - 1: "1.00 MiB", gib - 1: "1.00 GiB", 1<<40 - 1: "1.00 TiB", 1073689395: "1023.9 MiB", 1073689396: "1.00 GiB", 10*mib - 1: "10.0 MiB",
		-1: "-1 B", -64 * kib: "-64 KiB", -gib - 1: "-1.00 GiB", 1 - gib: "-1.00 GiB", math.MinInt: "-8 EiB",
	} {
		assert.Equal(t, want, Bytes(n), n)
	}
}

func TestExactBytes(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{
		0: "0 B", kib - 1: "1023 B", 64 * kib: "64 KiB", 3 << 29: "1.5 GiB", 4097: "4 KiB + 1 B", gib + 1: "1 GiB + 1 B",
		5000: "5000 B (4.88 KiB)", mib - 1: "1048575 B (1.00 MiB)", 150109880320: "150109880320 B (139.8 GiB)",
		math.MaxInt: "9223372036854775807 B (8.00 EiB)", -5000: "-5000 B (-4.88 KiB)", -64 * kib: "-64 KiB", -gib - 1: "-1073741825 B (-1.00 GiB)",
		math.MinInt: "-8 EiB",
	} {
		assert.Equal(t, want, ExactBytes(n), n)
	}
}

// sizeOf returns the bytes of a text of Bytes or Data.
func sizeOf(t *testing.T, text string, units map[string]float64) float64 {
	text, rest, more := strings.Cut(text, " + ")
	number, unit, _ := strings.Cut(text, " ")
	v, err := strconv.ParseFloat(number, 64)
	require.NoError(t, err, text)
	require.Contains(t, units, unit, text)
	if more {
		n, err := strconv.Atoi(strings.TrimSuffix(rest, " B"))
		require.NoError(t, err, rest)
		return v*units[unit] + float64(n)
	}
	return v * units[unit]
}

// TestEveryTextIsNearItsNumber draws numbers of all magnitudes, many of them near a unit.
func TestEveryTextIsNearItsNumber(t *testing.T) {
	t.Parallel()
	binary := map[string]float64{"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
	decimal := map[string]float64{"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}
	for range 5000 {
		n := int(rand.Uint64()>>1) >> rand.IntN(63)
		if rand.IntN(2) == 0 {
			n = n&^(1<<rand.IntN(60)-1) + rand.IntN(200) - 100
		}
		n = max(n, 0)
		text := Bytes(n)
		got := sizeOf(t, text, binary)
		assert.InDelta(t, n, got, float64(n)*0.0051, "%d: %s", n, text)
		if figure, _, _ := strings.Cut(text, " "); n < 1<<50 && (!strings.Contains(figure, ".") || strings.Contains(text, "+")) {
			assert.Equal(t, n, int(got), "%s has no digit after the point, so it is exact", text)
		}
		if exact := ExactBytes(n); !strings.HasPrefix(exact, strconv.Itoa(n)+" B") && n < 1<<50 {
			assert.Equal(t, n, int(sizeOf(t, exact, binary)), exact)
		}
		assert.InDelta(t, n, sizeOf(t, Data(n), decimal), float64(n)*0.0051, "%d: %s", n, Data(n))
	}
}

func TestData(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{
		0: "0 B", 1: "1 B", 999: "999 B", 1000: "1 kB", 1001: "1.00 kB", 1024: "1.02 kB", 1500: "1.5 kB", 318_900_000: "318.9 MB", 31_216_000_000: "31.2 GB",
		4_976_640_000: "4.98 GB", 999_949_999: "999.9 MB", 999_950_000: "1.00 GB", math.MaxInt: "9.22 EB", -1500: "-1.5 kB",
	} {
		assert.Equal(t, want, Data(n), n)
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{
		0: "0 GB/s", 55.44: "55.4 GB/s", 9.996: "10.0 GB/s", 9.3: "9.30 GB/s", 0.04661: "0.0466 GB/s", 393.4: "393 GB/s", 4175.2: "4,175 GB/s", -1: "-1.00 GB/s",
		math.Inf(1): "–", math.Inf(-1): "–",
	} {
		assert.Equal(t, want, Rate(v), v)
	}
	assert.Equal(t, "–", Rate(math.NaN()))
}

func TestSeconds(t *testing.T) {
	t.Parallel()
	for s, want := range map[float64]string{
		0: "0 s", 1e-12: "0.00100 ns", 1e-9: "1.00 ns", 62e-9: "62.0 ns", 999.6e-9: "1.00 µs", 6.42e-6: "6.42 µs", 999.4e-6: "999 µs", 0.9996: "1.00 s", 0.0125: "12.5 ms",
		1.5: "1.50 s", 59.94: "59.9 s", 59.96: "1 min 0 s", 100: "1 min 40 s", 119.6: "2 min 0 s", 3599.4: "59 min 59 s", 3599.6: "1 h 0 min", 7322: "2 h 2 min", 1e9: "1,000,000,000 s",
		-6.42e-6: "-6.42 µs", -150: "-2 min 30 s", math.Inf(1): "–", math.MaxFloat64: "1.8e+308 s",
	} {
		assert.Equal(t, want, Seconds(s), s)
	}
	assert.Equal(t, "–", Seconds(math.NaN()))
	for d, want := range map[time.Duration]string{
		0: "0 s", 1: "1.00 ns", 1500: "1.50 µs", 410 * time.Millisecond: "410 ms", 1900 * time.Millisecond: "1.90 s", 75 * time.Second: "1 min 15 s",
		135 * time.Second: "2 min 15 s", 26 * time.Hour: "26 h 0 min", -time.Second: "-1.00 s", math.MaxInt64: "9,223,372,037 s", math.MinInt64: "-9,223,372,037 s",
	} {
		assert.Equal(t, want, Duration(d), int64(d))
	}
}

func TestShare(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{
		0: "0%", 0.0004: "0%", -0.0004: "0%", 0.0005: "0.1%", 0.003: "0.3%", 0.05: "5.0%", 0.0994: "9.9%", 0.0996: "10%", 0.5: "50%", 0.976: "98%", 1: "100%",
		1.5: "150%", 58.66: "5,866%", -0.25: "-25%", -0.003: "-0.3%", math.Inf(1): "–",
	} {
		assert.Equal(t, want, Share(v), v)
	}
	assert.Equal(t, "–", Share(math.NaN()))
}

func TestTimes(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0 times", 0.5: "0.50 times", 1: "1.0 times", 8.14: "8.1 times", 9.96: "10 times", 12.3: "12 times", 1234: "1,234 times", math.Inf(1): "–"} {
		assert.Equal(t, want, Times(v), v)
	}
}

func TestCounts(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 27336821: "27,336,821", -5: "-5", -999: "-999", -1000: "-1,000", math.MaxInt: "9,223,372,036,854,775,807", math.MinInt: "-9,223,372,036,854,775,808"} {
		assert.Equal(t, want, Count(n))
	}
	for n, want := range map[int]string{0: "0 pages", 1: "1 page", 2: "2 pages", 1000: "1,000 pages", -1: "-1 pages"} {
		assert.Equal(t, want, Things(n, "page", "pages"))
	}
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		v      float64
		digits int
		want   string
	}{
		{55.4123, 4, "55.41"}, {101.68, 4, "101.7"}, {0.46634, 4, "0.4663"}, {27336821, 4, "27,336,821"}, {9999.4, 4, "9,999"},
		{9999.6, 4, "10,000"}, {9.9996, 4, "10.00"}, {99.96, 3, "100"}, {0.99951, 3, "1.00"}, {-5, 2, "-5.0"}, {-999.5, 3, "-1,000"},
		{0.000123, 2, "0.00012"}, {1.23e-7, 2, "1.2e-07"}, {1e15, 3, "1e+15"}, {1e300, 3, "1e+300"},
		{0, 3, "0"}, {math.Copysign(0, -1), 3, "0"}, {math.NaN(), 3, "–"}, {math.Inf(-1), 3, "–"},
		{1234.5678, AllDigits, "1,234.5678"}, {12, AllDigits, "12"}, {1e-5, AllDigits, "1e-05"},
	} {
		assert.Equal(t, c.want, Number(c.v, c.digits), "%v, %d digits", c.v, c.digits)
	}
}

func TestScales(t *testing.T) {
	t.Parallel()
	perSecond := Scale{{1, "/s"}, {1e3, "k/s"}, {1e6, "M/s"}}
	for _, c := range []struct {
		scale  Scale
		v      float64
		digits int
		want   string
	}{
		{Memory, 64 << 20, 4, "MiB"}, {Memory, 1<<30 - 1, 4, "GiB"}, {Memory, 1023 << 20, 4, "MiB"}, {Memory, 1023 << 20, 2, "GiB"}, {Memory, 0.25, 4, "B"}, {Memory, 0, 4, "B"},
		{Time, 0, 3, "s"}, {Time, 1e-10, 3, "ns"}, {Time, 0.9994, 3, "ms"}, {Time, 0.9996, 3, "s"}, {Time, -0.9996, 3, "s"}, {Time, 1e9, 3, "s"},
		{perSecond, 0.01, 3, "/s"}, {perSecond, 10858926, 3, "M/s"}, {perSecond, math.Inf(1), 3, "M/s"}, {perSecond, math.NaN(), 3, "/s"},
		{Scale{{1, ""}}, 1e6, 3, ""},
	} {
		assert.Equal(t, c.want, c.scale.Unit(c.v, c.digits).Name, "%v, %d digits", c.v, c.digits)
	}
}
