package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

func renderPage(t testing.TB, runs ...pageRun) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, writePage(&b, runs...))
	return b.String()
}

// example is a run with all kinds of views. It is no measurement, and says so.
func example(t testing.TB) []pageRun {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "example.json"))
	require.NoError(t, err)
	var runs []pageRun
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&runs))
	return runs
}

const markup = `<script>alert(1)</script><img src=x onerror="alert('2')">&amp;</svg></style>{{.}}`

// long is a name of 200 characters with markup in it.
func long() string {
	return (markup + strings.Repeat("wide-name-without-any-space", 8))[:200]
}

func sampled(name string, unit result.Unit, labels result.Labels, samples ...float64) result.Series {
	return result.Series{Name: name, Unit: unit, Labels: labels, Samples: samples, Stats: result.Summarize(samples)}
}

// oddRuns are results of odd shapes.
func oddRuns() []pageRun {
	cpu, node := math.NaN(), -1
	x := func(v string) result.Labels { return result.Labels{{Key: "x", Value: v}} }
	all := result.View{Title: "t", Series: "s", X: "x"}
	one := func(name string, v result.View, series ...result.Series) result.Bench {
		return result.Bench{Name: name, Series: series, Views: []result.View{v}}
	}
	everything := sampled(long(), result.Unit(long()), result.Labels{{Key: long(), Value: long()}, {Key: "x", Value: "1"}}, 1, 2)
	everything.Expected = &result.Expected{Value: math.Inf(1), Source: long()}
	everything.CPUSecondsPerGB, everything.NUMANode = &cpu, &node
	markedUp := one(long(), result.View{Title: long(), Series: long(), X: long(), Lines: []string{long()}}, everything, everything)
	markedUp.Question, markedUp.Answers, markedUp.Notes, markedUp.Errors = long(), []string{long(), long()}, []string{long()}, []string{long()}
	markedUp.Seconds = math.NaN()
	expectation := sampled("s", result.GBPerSecond, x("a"), 5)
	expectation.Expected = &result.Expected{Value: 7, Source: long()}
	benches := []result.Bench{
		markedUp,
		{Name: "nothing"},
		{Name: "no views", Series: []result.Series{sampled("s", result.Seconds, nil, 1e-3, 2e-3)}},
		one("one sample", all, sampled("s", result.Seconds, x("4096"), 1e-6)),
		one("no samples", all, sampled("s", result.Seconds, x("4096")), sampled("s", result.Seconds, x("8192"))),
		one("not finite", all, sampled("s", result.Seconds, x("1"), math.NaN(), math.Inf(1)), sampled("s", result.Seconds, x("2"), math.NaN(), 3, math.Inf(-1))),
		one("odd axis", all, sampled("s", result.Ratio, x("NaN"), 1), sampled("s", result.Ratio, x("Inf"), 2), sampled("s", result.Ratio, x("1e400"), 3)),
		one("same place", all, sampled("s", result.Count, x("1"), 1), sampled("s", result.Count, x("1"), 2), sampled("s", result.Count, x("2"), 2)),
		one("zeros", all, sampled("s", result.PerSecond, x("0"), 0, 0), sampled("s", result.PerSecond, x("8"), 0)),
		one("below zero", all, sampled("s", result.Bytes, x("-1"), -5, -6), sampled("s", result.Bytes, x("8"), 7)),
		one("bars below zero", all, sampled("s", result.Bytes, x("a"), -5, -6), sampled("s", result.Bytes, x("b"), 7)),
		one("huge and tiny", all, sampled("s", result.Seconds, x("1"), 1e300), sampled("s", result.Seconds, x("2"), 1e-300), sampled("s", result.Seconds, x("3"), 1e17), sampled("s", result.Seconds, x("100000000000000000"), 1e-17)),
		one("far away", all, sampled("s", result.Seconds, x("100000000000000000"), 1), sampled("s", result.Seconds, x("100000000000000016"), 1)),
		one("mixed units", all, sampled("s", result.Seconds, x("1"), 1), sampled("s", result.Bytes, x("1"), 1)),
		one("expected bar", all, expectation, sampled("s", result.GBPerSecond, x(long()), 9)),
		one("no such series", result.View{Title: "t", Series: "none", X: "x"}, sampled("s", result.Seconds, x("1"), 1)),
	}
	many := result.Bench{Name: "many lines", Views: []result.View{{Title: "many", Series: "s", X: "x", Lines: []string{"a"}}, {Title: "divided", Series: "s", X: "x", Lines: []string{"a", "b"}}}}
	for i := range 40 {
		for _, at := range []string{"1", "2", "64"} {
			many.Series = append(many.Series, sampled("s", result.GBPerSecond, x(at).With("a", string(rune('a'+i%20))).With("b", string(rune('A'+i/20))), float64(i)))
		}
	}
	benches = append(benches, many)
	return []pageRun{
		{Host: long(), Tool: long(), Warning: long(), Verdict: long(), Started: time.Unix(0, 0),
			Facts: []pageFact{{long(), long()}, {"\x00\x1b[31m", "\xff\xfe"}}, Findings: []pageFinding{{long(), long(), long(), []string{long(), long()}, long(), long(), long(), long()}}, Benches: benches},
		{},
	}
}

// The page of the example is what a browser has shown to people. The page of odd results is
// not nice, but whole.
func TestGoldenPages(t *testing.T) {
	t.Parallel()
	golden(t, "golden/page-example.html", renderPage(t, example(t)...))
	golden(t, "golden/page-odd.html", renderPage(t, oddRuns()...))
}

// What comes from results is text: it opens no element, and closes none.
func TestEverythingIsEscaped(t *testing.T) {
	t.Parallel()
	for _, runs := range [][]pageRun{oddRuns(), nil, {{}}} {
		wellFormed(t, renderPage(t, runs...))
	}
	page := renderPage(t, oddRuns()...)
	assert.Contains(t, page, "&lt;script&gt;alert(1)", "the name is there, as text")
	assert.NotContains(t, page, "<script>alert")
	assert.NotContains(t, page, "<img")
}

// wellFormed fails unless the elements of a page nest as the template has them: markup from
// results would show as one that it does not have.
func wellFormed(t testing.TB, page string) {
	t.Helper()
	known := strings.Fields("html head meta link title style body div nav p a ul li main pre code article header h1 h2 h3 h4 dl dt dd section span b figure figcaption svg g path text details summary table thead tbody tr th td footer")
	d := xml.NewDecoder(strings.NewReader(asXML(page)))
	d.Entity = xml.HTMLEntity
	var open []string
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		switch e := token.(type) {
		case xml.StartElement:
			require.Contains(t, known, e.Name.Local)
			for _, a := range e.Attr {
				require.False(t, strings.HasPrefix(a.Name.Local, "on"), "attribute %s", a.Name.Local)
				if a.Name.Local == "href" {
					require.Regexp(t, `^(#run[0-9-]+|data:,)$`, a.Value)
				}
			}
			open = append(open, e.Name.Local)
		case xml.EndElement:
			open = open[:len(open)-1]
		}
	}
	require.Empty(t, open)
	require.NotContains(t, page, "<script", "a page is read without one")
	require.Equal(t, 1, strings.Count(page, "<style"), "the page's own style")
}

// asXML makes XML of a page as far as the template goes beyond it: style holds text that is none, and attributes without a value have one.
func asXML(page string) string {
	for _, name := range []string{"style"} {
		before, rest, _ := strings.Cut(page, "<"+name+">")
		_, after, _ := strings.Cut(rest, "</"+name+">")
		page = before + "<" + name + "></" + name + ">" + after
	}
	return strings.NewReplacer("<details open>", `<details open="">`).Replace(page)
}

func TestWriteFails(t *testing.T) {
	t.Parallel()
	assert.ErrorContains(t, writePage(failing{}, pageRun{}), "no space")
}

// A page needs nothing else: no address in it leads anywhere.
func TestNothingIsFetched(t *testing.T) {
	t.Parallel()
	page := renderPage(t, example(t)...)
	for _, s := range []string{"http:", "https:", "src=", "url(", "@import", "xlink"} {
		assert.NotContains(t, page, s)
	}
}

func figureOf(t *testing.T, b result.Bench) figure {
	t.Helper()
	all := figures(&b)
	require.Len(t, all, 1)
	return all[0]
}

func texts(f figure) string {
	s := ""
	for _, p := range f.Panels {
		var b strings.Builder
		_ = pageTemplate.ExecuteTemplate(&b, "plot", p.Narrow) // a Builder takes everything
		s += b.String()
	}
	return s
}

func TestLinesOverNumbersAndBarsElse(t *testing.T) {
	t.Parallel()
	bench := func(xs ...string) result.Bench {
		b := result.Bench{Views: []result.View{{Title: "t", Series: "bandwidth", X: result.Size, Lines: []string{result.Memory}}}}
		for i, x := range xs {
			for j, memory := range []string{"pageable", "registered"} {
				b.Series = append(b.Series, sampled("bandwidth", result.GBPerSecond, result.Labels{{Key: result.Size, Value: x}, {Key: result.Memory, Value: memory}}, float64(10*(i+1)+j)))
			}
		}
		return b
	}
	lines := figureOf(t, bench("4096", "1048576", "67108864"))
	require.Len(t, lines.Panels, 1)
	assert.Contains(t, texts(lines), ">4\u00a0KiB<", "a mark of the axis")
	assert.Contains(t, texts(lines), ">size, bytes (log scale)<")
	assert.Contains(t, texts(lines), ">bandwidth, GB/s<")
	assert.Equal(t, []string{"pageable", "registered"}, []string{lines.Legend[0].Text, lines.Legend[1].Text})
	bars := figureOf(t, bench("small", "large"))
	assert.Contains(t, texts(bars), ">small<")
	assert.Contains(t, texts(bars), ">21.0<", "the value at its bar")
	assert.NotContains(t, texts(bars), "log scale")
	assert.Contains(t, texts(figureOf(t, bench("4096"))), ">4\u00a0KiB<", "one size alone is a bar")
	devices := result.Bench{Views: []result.View{{Title: "t", Series: "s", X: result.Device}}}
	for _, d := range []string{"0", "1"} {
		devices.Series = append(devices.Series, sampled("s", result.GBPerSecond, result.Labels{{Key: result.Device, Value: d}}, 5))
	}
	assert.Contains(t, texts(figureOf(t, devices)), ">GPU 1<", "a device's number is no quantity")
}

// Many lines go into several plots, by the label with the fewest values that suffices.
func TestManyLinesAreDivided(t *testing.T) {
	t.Parallel()
	b := result.Bench{Views: []result.View{{Title: "t", Series: "s", X: "x", Lines: []string{"a", "b"}}}}
	for _, x := range []string{"1", "2"} {
		for _, a := range []string{"p", "q", "r"} {
			for _, v := range []string{"1", "2", "3", "4"} {
				b.Series = append(b.Series, sampled("s", result.Ratio, result.Labels{{Key: "x", Value: x}, {Key: "a", Value: a}, {Key: "b", Value: v}}, 1))
			}
		}
	}
	f := figureOf(t, b)
	require.Len(t, f.Panels, 3)
	assert.Equal(t, "p", f.Panels[0].Title)
	assert.Len(t, f.Legend, 4)
	assert.Len(t, f.Table.Rows, 24)
}

// Labels that the view does not name tell lines apart all the same, if they have to.
func TestLinesThatTheViewMixes(t *testing.T) {
	t.Parallel()
	b := result.Bench{Views: []result.View{{Title: "t", Series: "s", X: "x"}}}
	for _, x := range []string{"1", "2"} {
		for _, device := range []string{"0", "1"} {
			b.Series = append(b.Series, sampled("s", result.Ratio, result.Labels{{Key: "x", Value: x}, {Key: result.Device, Value: device}}, 1))
		}
	}
	f := figureOf(t, b)
	require.Len(t, f.Legend, 2)
	assert.Equal(t, "GPU 1", f.Legend[1].Text)
	assert.Equal(t, []string{"x", "device"}, f.Table.Keys)
}

func TestYardsticks(t *testing.T) {
	t.Parallel()
	b := result.Bench{Views: []result.View{{Title: "t", Series: "s", X: "x", Lines: []string{"m"}}}}
	for i, x := range []string{"1", "2"} {
		for j, m := range []string{"a", "b", "c"} {
			s := sampled("s", result.GBPerSecond, result.Labels{{Key: "x", Value: x}, {Key: "m", Value: m}}, 50)
			switch j {
			case 0, 1: // the same for both lines
				s.Expected = &result.Expected{Value: 55, Source: "the <link>"}
			case 2:
				s.Expected = &result.Expected{Value: float64(10 + i), Source: "by size"}
			}
			b.Series = append(b.Series, s)
		}
	}
	f := figureOf(t, b)
	var entries []string
	for _, e := range f.Legend {
		entries = append(entries, e.Text)
	}
	assert.Equal(t, []string{"a", "b", "c", "expected 55\u00a0GB/s: the <link>", "expected: by size"}, entries)
	assert.Equal(t, 2, strings.Count(texts(f), "stroke-dasharray"), "one for both lines, one for the third")
	assert.Equal(t, "91%", f.Table.Rows[0].Share)
	assert.Equal(t, "the <link>", f.Table.Rows[0].Source)
	b.Series[0].Expected.Value = math.NaN()
	assert.NotContains(t, texts(figureOf(t, b)), "NaN")
}

// Series that no view shows are in tables.
func TestNothingIsLeftOut(t *testing.T) {
	t.Parallel()
	b := result.Bench{Views: []result.View{{Title: "t", Series: "s", X: "x"}}, Series: []result.Series{
		sampled("s", result.Ratio, result.Labels{{Key: "x", Value: "1"}}, 1),
		sampled("other_s", result.Seconds, result.Labels{{Key: "x", Value: "1"}}, 2e-6, 4e-6),
	}}
	all := figures(&b)
	require.Len(t, all, 2)
	assert.Equal(t, "other s: further series", all[1].Title)
	assert.Equal(t, "3.000\u00a0µs", all[1].Table.Rows[0].Median)
	assert.True(t, all[1].ExpandTable())
	assert.False(t, all[0].ExpandTable())
}

func TestSamplesAroundTheirMedian(t *testing.T) {
	t.Parallel()
	assert.Empty(t, strip([]float64{1}, 1, 0.5))
	assert.Empty(t, strip([]float64{0, 0}, 0, 0.5))
	assert.Equal(t, "M4 6h0M50 6h0M73 6h0M96 6h0", strip([]float64{10, 12.5, -3, math.NaN(), 1000}, 10, 0.5))
	many := make([]float64, 1001)
	for i := range many {
		many[i] = 90 + float64(i)/50
	}
	dots := strip(many, 100, 0.1)
	assert.LessOrEqual(t, strings.Count(dots, "M"), maxMarks)
	assert.True(t, strings.HasPrefix(dots, "M4 ") && strings.HasSuffix(dots, "M96 6h0"), "the outermost are there: %s", dots)
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"55.41":                           number(55.4123, 4),
		"101.7":                           number(101.68, 4),
		"0.4663":                          number(0.46634, 4),
		"27\u202f336\u202f821":            number(27336821, 4),
		"9\u202f999":                      number(9999.4, 4),
		"−5.0":                            number(-5, 2),
		"1.2e−07":                         number(1.23e-7, 2),
		"1e+300":                          number(1e300, 3),
		"0\u00a0s":                        quantity(0, result.Seconds, 3),
		"8.20\u00a0µs":                    quantity(8.2e-6, result.Seconds, 3),
		"62\u00a0ns":                      quantity(62e-9, result.Seconds, 2),
		"10.9\u00a0M/s":                   quantity(10858926, result.PerSecond, 3),
		"1.334":                           quantity(1.334, result.Ratio, 4),
		"512\u00a0MiB":                    labelValue(result.Size, "536870912"),
		"4\u00a0GiB":                      labelValue(result.Size, "4294967296"),
		"64\u00a0KiB":                     round(65536, result.Bytes),
		"0":                               round(0, result.Bytes),
		"–":                               quantity(math.Inf(1), result.GBPerSecond, 4),
		"12\u00a0round-trips, all":        quantity(12, "round-trips, all", 2),
		"1\u00a0GiB\u00a0+\u00a01\u00a0B": labelValue(result.Size, "1073741825"),
		"1.000\u00a0GiB":                  quantity(1<<30-1, result.Bytes, 4),
		"−25%":                            typesetShare(-0.25),
		"1m40s":                           duration(100),
		"host to device":                  labelValue(result.Direction, result.HostToDevice),
		"O_DIRECT":                        labelValue("method", "O_DIRECT"),
		"workers 8":                       condition("workers", "8"),
		"no GPU work":                     condition("gpu_work", "false"),
		"0.5%":                            typesetShare(0.005),
		"12%":                             typesetShare(0.12),
		"a b? c":                          clean("a\n\tb\x1b c"),
		"abcd…":                           shorten("abcdefgh", 5),
	} {
		assert.Equal(t, want, got)
	}
	assert.Empty(t, duration(math.NaN()))
	assert.Empty(t, stamp(time.Time{}))
}

func TestScales(t *testing.T) {
	t.Parallel()
	s := linearScale([]float64{0.3, 57}, result.GBPerSecond)
	assert.Equal(t, []float64{0, 10, 20, 30, 40, 50, 60}, s.marks)
	assert.InDelta(t, 0.5, s.at(30), 1e-12)
	assert.Equal(t, 1.0, s.at(1e9), "nothing is drawn outside")
	s = linearScale([]float64{2e-6, 7e-6}, result.Seconds)
	assert.Equal(t, "µs", s.unitName(result.Seconds))
	assert.Equal(t, "7", s.text(s.marks[len(s.marks)-1], result.Seconds))
	s = linearScale([]float64{-3, 4}, result.Ratio)
	assert.LessOrEqual(t, s.min, -3.0)
	assert.Contains(t, s.every(3), 0.0)
	assert.Zero(t, linearScale([]float64{-1e-4, 1}, result.Ratio).min, "noise around 0")
	s = logScale(4096, 1<<30, 2, false)
	assert.InDelta(t, 0, s.at(4096), 1e-12)
	assert.InDelta(t, 1, s.at(1<<30), 1e-12)
	assert.Equal(t, []float64{4096, 1 << 17, 1 << 22, 1 << 27}, s.every(4))
	s = logScale(3e-6, 2e-3, 10, true)
	assert.InDelta(t, 1e-6, s.min, 1e-18)
	assert.InDelta(t, 1e-2, s.max, 1e-12)
	s = linearRange([]float64{1e17, 1e17 + 16})
	assert.LessOrEqual(t, len(s.marks), 21)
	assert.Equal(t, []float64{1, 2, 4, 8}, linearRange([]float64{1, 2, 4, 8}).marks, "a mark where something was measured")
	assert.Equal(t, []float64{1, 2, 3}, linearScale([]float64{1, 2, 3}, result.Count).marks[1:], "there are no half workers")
	assert.True(t, isWhole(linearRange([]float64{1, 2, 3, 4, 5, 6, 7, 8, 9}).marks))
	assert.Equal(t, []float64{0, 1, 2}, linearScale([]float64{0, 2}, result.Count).marks)
}

// Any document that is JSON gives a page that is whole, with nothing in it that a result
// opened.
func FuzzWrite(f *testing.F) {
	for _, runs := range [][]pageRun{example(f)[:1], {{Host: long()}}} {
		for i := range runs {
			for _, b := range runs[i].Benches {
				text, err := json.Marshal(pageRun{Host: "h", Benches: []result.Bench{trimmed(b)}})
				require.NoError(f, err)
				f.Add(text, 1.0)
			}
		}
	}
	f.Add([]byte(`{"host":"<b>","benches":[{"bench":"x","series":[{"name":"s","labels":{"a":"1"},"samples":[1,2]},{"name":"s","labels":{"a":"2"},"samples":[3]}],"views":[{"series":"s","x":"a","lines":["a","b"]}]}]}`), math.Inf(1))
	f.Fuzz(func(t *testing.T, text []byte, v float64) {
		var r pageRun
		if len(text) > 1<<14 || json.Unmarshal(text, &r) != nil {
			return
		}
		for i := range r.Benches {
			for j := range r.Benches[i].Series { // what JSON cannot hold
				s := &r.Benches[i].Series[j]
				s.Samples = append(s.Samples, v)
				if j%2 == 1 {
					s.Expected = &result.Expected{Value: v * 2, Source: r.Host}
				}
			}
		}
		wellFormed(t, renderPage(t, r))
	})
}

// trimmed is a small part of an experiment.
func trimmed(b result.Bench) result.Bench {
	b.Series = b.Series[:min(len(b.Series), 12)]
	return b
}

// A page of several hosts, two of one name among them, has no landmark twice.
func TestLandmarksHaveNamesOfTheirOwn(t *testing.T) {
	t.Parallel()
	one := pageRun{Host: "node-1", Benches: append(checkedBenches(results(t)["healthy"]), checkedBenches(results(t)["healthy"])...)}
	other := one
	other.Host = "node-2"
	for _, runs := range [][]pageRun{{one}, {one, other}, {one, one, other}, {{Benches: one.Benches}, {Benches: one.Benches}}} {
		var b strings.Builder
		require.NoError(t, writePage(&b, runs...))
		seen := map[string]bool{}
		labels := regexp.MustCompile(`role="region" aria-label="([^"]*)"`).FindAllStringSubmatch(b.String(), -1)
		assert.GreaterOrEqual(t, len(labels), 2*len(runs))
		for _, m := range labels {
			assert.False(t, seen[m[1]], m[1])
			seen[m[1]] = true
		}
	}
}
