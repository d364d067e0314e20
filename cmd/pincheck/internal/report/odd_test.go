package report

import (
	"encoding/csv"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
	"github.com/gopinned/pinned/verify"
)

// oddities makes results of odd shapes.
type oddities struct{ *rand.Rand }

func (o oddities) text() string {
	long := strings.Repeat("<b>&\"'\\{x}", 20)
	return []string{"", "x", long[:200], "a\nb\tc\r\x1b[31m\x00\u202e", "\xff\xfe", "日本語の名前", "a,b;c=d", "=1+1", strings.Repeat("x", 200), "no such \"thing\"", "__name__", "9", "size_bytes"}[o.IntN(13)]
}

func (o oddities) number() float64 {
	return []float64{0, 1, -1, 55.4, math.NaN(), math.Inf(1), math.Inf(-1), 1e300, -1e300, math.MaxFloat64, 5e-324, 1e-9, 4096, math.Copysign(0, -1)}[o.IntN(14)]
}

func (o oddities) list(largest int, f func()) {
	for range o.IntN(largest + 1) {
		f()
	}
}

func (o oddities) labels() (l result.Labels) {
	o.list(4, func() {
		key := []string{result.Size, result.Device, result.Direction, o.text()}[o.IntN(4)]
		l = append(l, result.Label{Key: key, Value: []string{"4096", "0", "65536", "-7", "99999999999999999999", o.text()}[o.IntN(6)]})
	})
	return l
}

func (o oddities) series() result.Series {
	s := result.Series{Name: []string{"bandwidth", o.text()}[o.IntN(2)], Labels: o.labels(), Unit: []result.Unit{result.GBPerSecond, result.Seconds, result.Bytes, result.Ratio, result.PerSecond, result.Count, result.Unit(o.text())}[o.IntN(7)]}
	o.list(5, func() { s.Samples = append(s.Samples, o.number()) })
	s.Stats = result.Summarize(s.Samples)
	if o.IntN(4) == 0 { // statistics that are not those of the samples
		s.Stats = result.Stats{Median: o.number(), Min: o.number(), Max: o.number(), Mean: o.number(), Spread: o.number(), CV: o.number(), P99: o.number()}
	}
	if o.IntN(2) == 0 {
		v, n := o.number(), o.IntN(3)-1
		s.CPUSecondsPerGB, s.NUMANode = &v, &n
		s.Expected = &result.Expected{Value: o.number(), Source: o.text()}
	}
	s.BytesPerSample, s.Verified = o.IntN(3)*4096-4096, o.IntN(2) == 0
	return s
}

func (o oddities) bench() result.Bench {
	b := result.Bench{Name: o.text(), Question: o.text(), Complete: o.IntN(2) == 0, Seconds: o.number()}
	o.list(12, func() { b.Series = append(b.Series, o.series()) })
	o.list(2, func() { b.Answers = append(b.Answers, o.text()) })
	o.list(2, func() { b.Notes = append(b.Notes, o.text()) })
	o.list(2, func() { b.Errors = append(b.Errors, o.text()) })
	o.list(3, func() {
		v := result.View{Title: o.text(), Series: "bandwidth", X: []string{result.Size, result.Direction, o.text()}[o.IntN(3)]}
		o.list(2, func() { v.Lines = append(v.Lines, []string{result.Device, o.text()}[o.IntN(2)]) })
		v.Main = o.IntN(2) == 0
		b.Views = append(b.Views, v)
	})
	o.list(3, func() { b.Figures = append(b.Figures, o.table()) })
	return b
}

func (o oddities) table() result.Table {
	t := result.Table{Title: o.text(), Only: []string{"", result.Summary, result.Alone}[o.IntN(3)]}
	o.list(4, func() { t.Columns = append(t.Columns, o.text()) })
	o.list(5, func() {
		r := result.Row{Name: o.text(), Note: o.text()}
		for range o.IntN(5) { // a file may have another number than of columns
			r.Cells = append(r.Cells, []*result.Quantity{nil, {Value: o.number(), Unit: []result.Unit{result.GBPerSecond, result.Share, result.Seconds}[o.IntN(3)]}}[o.IntN(2)])
		}
		t.Rows = append(t.Rows, r)
	})
	return t
}

func (o oddities) result() *Result {
	r := &Result{Command: o.text(), HostName: o.text(), Tool: Tool{Name: "pincheck", Version: o.text()}, Seconds: o.number(), Complete: o.IntN(2) == 0, Stopped: o.text()}
	if o.IntN(2) == 0 {
		r.Started = time.Unix(int64(o.IntN(1<<31)), 0).UTC()
	}
	o.list(2, func() { r.Errors = append(r.Errors, o.text()) })
	o.list(3, func() { r.Benches = append(r.Benches, o.bench()) })
	if o.IntN(4) > 0 {
		r.Facts = &doctor.Facts{Simulated: o.IntN(2) == 0, Devices: []doctor.Device{}}
		if o.IntN(2) == 0 {
			r.Host = &hostinfo.Host{Distro: hostinfo.Distro{Name: o.text()}, CPU: hostinfo.CPU{Model: o.text(), Threads: o.IntN(3)}}
			r.Library = &doctor.Library{Path: o.text(), Found: o.text()}
			r.Search = &doctor.Search{Attempts: []doctor.Attempt{{Path: o.text(), Error: o.text()}}, Searched: []string{o.text()}}
			r.Requirements = []doctor.Requirement{{Name: o.text(), State: doctor.Missing, Detail: o.text()}}
		}
		o.list(3, func() {
			d := doctor.Device{Ordinal: o.IntN(3), Name: o.text(), UUID: o.text(), PCIBusID: o.text(), DeviceMemory: doctor.DeviceMemory{MemoryTotal: o.IntN(2) * 1 << 37}}
			if o.IntN(2) == 0 {
				d.Link = &doctor.Link{Speed: o.number(), Rate: o.number(), MaxRate: o.number(), Width: o.IntN(17)}
				d.Bandwidth = &result.Bench{Series: []result.Series{{Labels: result.Labels{{Key: result.Direction, Value: o.text()}}, Samples: []float64{o.number()}, Stats: result.Stats{Median: o.number()}}}}
				d.Verify = &verify.Report{Cases: o.IntN(2), CasesPlanned: 2, VerifiedGBPerS: o.number(), Paths: []verify.PathReport{{Path: verify.Path(o.text())}}}
			}
			o.list(2, func() { d.Errors = append(d.Errors, o.text()) })
			r.Devices = append(r.Devices, d)
		})
		o.list(2, func() {
			r.Findings = append(r.Findings, doctor.Finding{ID: o.text(), Severity: doctor.Problem, Summary: o.text(), Cause: o.text(), Remedy: o.text()})
		})
	}
	r.Conclude(false)
	return r
}

var (
	metricLine = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (-?[0-9.]+(?:e[+-][0-9]+)?)$`)
	labelPart  = regexp.MustCompile(`^([a-zA-Z][a-zA-Z0-9_]*)="((?:[^"\\]|\\\\|\\"|\\n)*)"(,|$)`)
)

// checkPrometheus holds text against the exposition format, as far as it is used.
func checkPrometheus(t *testing.T, text string) {
	t.Helper()
	require.True(t, strings.HasSuffix(text, "\n"))
	family, families, series := "", map[string]bool{}, map[string]bool{}
	for line := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\n") {
		if help, ok := strings.CutPrefix(line, "# HELP "); ok {
			family, _, _ = strings.Cut(help, " ")
			require.False(t, families[family], "a family of %s in two places", family)
			families[family] = true
			continue
		}
		if strings.HasPrefix(line, "#") {
			require.Equal(t, "# TYPE "+family+" gauge", line)
			continue
		}
		m := metricLine.FindStringSubmatch(line)
		require.NotNil(t, m, "%q", line)
		require.Equal(t, family, m[1])
		var labels []string
		for rest := strings.Trim(m[2], "{}"); m[2] != "" && rest != ""; {
			part := labelPart.FindStringSubmatch(m[2][len(m[2])-1-len(rest) : len(m[2])-1])
			require.NotNil(t, part, "%q", line)
			require.False(t, slices.ContainsFunc(labels, func(l string) bool { return strings.HasPrefix(l, part[1]+"=") }), "a label twice: %q", line)
			labels = append(labels, strings.TrimSuffix(part[0], ","))
			rest = rest[len(part[0]):]
		}
		slices.Sort(labels)
		id := m[1] + strings.Join(labels, ",")
		require.False(t, series[id], "a series twice: %q", line)
		series[id] = true
	}
}

// checkRendered holds all renderings of a result against their formats.
func checkRendered(t *testing.T, r *Result) {
	t.Helper()
	for _, width := range []int{40, 80, 120} {
		text := render(t, r, Text, Style{Width: width})
		require.True(t, utf8.ValidString(text))
		for line := range strings.Lines(text) {
			line = strings.TrimSuffix(line, "\n")
			if !isCommand(line) {
				require.LessOrEqual(t, len([]rune(line)), width, "%q", line)
			}
			require.NotContains(t, strings.ToLower(line), "nan")
			require.Negative(t, strings.IndexFunc(line, func(r rune) bool { return !unicode.IsPrint(r) }), "%q", line)
		}
	}
	text := render(t, r, JSON, Style{})
	again, err := Read([]byte(text))
	require.NoError(t, err)
	twice := render(t, again, JSON, Style{})
	require.True(t, text == twice, "what is read and written again differs:\n%s", firstDifference(text, twice))
	require.Equal(t, 1, strings.Count(render(t, r, JSONLines, Style{}), "\n"))
	checkPrometheus(t, render(t, r, Prometheus, Style{}))
	rows, err := csv.NewReader(strings.NewReader(render(t, r, CSV, Style{}))).ReadAll()
	require.NoError(t, err) // all rows have as many cells
	if r.Command == "devices" || r.Command == "version" {
		require.NotEmpty(t, rows)
		return
	}
	require.Len(t, rows, 1+len(r.series()))
}

func firstDifference(a, b string) string {
	other := strings.Split(b, "\n")
	for i, line := range strings.Split(a, "\n") {
		if i >= len(other) || line != other[i] {
			return fmt.Sprintf("line %d: %.100q, then %.100q", i, line, other[min(i, len(other)-1)])
		}
	}
	return "at the end"
}

func TestOddResults(t *testing.T) {
	t.Parallel()
	for seed := range uint64(400 / hosttest.Stride() / hosttest.Stride()) {
		r := oddities{rand.New(rand.NewPCG(seed, 1))}.result()
		before := fmt.Sprintf("%+v", r.Benches)
		checkRendered(t, r)
		require.True(t, before == fmt.Sprintf("%+v", r.Benches), "rendering changes the result")
	}
	checkRendered(t, &Result{})
	checkRendered(t, &Result{Facts: &doctor.Facts{}})
	for _, r := range results(t) {
		checkRendered(t, r)
	}
}

func FuzzRender(f *testing.F) {
	f.Add(uint64(1), "name")
	f.Fuzz(func(t *testing.T, seed uint64, text string) {
		r := oddities{rand.New(rand.NewPCG(seed, 2))}.result()
		r.HostName, r.Tool.Version = text, text
		r.Benches = append(r.Benches, result.Bench{Name: text, Answers: []string{text}, Series: []result.Series{
			{Name: text, Unit: result.Unit(text), Labels: result.Labels{{Key: text, Value: text}, {Key: "x", Value: text}}, Samples: []float64{1}},
		}, Views: []result.View{{Title: text, Series: text, X: text, Lines: []string{"x", text}}}})
		checkRendered(t, r)
	})
}

func TestNumbersThatAreNotFinite(t *testing.T) {
	t.Parallel()
	nan := math.NaN()
	r := benched(h200(host(t, "h200-vm")))
	s := &r.Benches[0].Series[0]
	s.Samples = []float64{1, nan, math.Inf(1), 3}
	s.CPUSecondsPerGB, s.Expected = &nan, &result.Expected{Value: nan, Source: "x"}
	out := finite(r)
	got := out.Benches[0].Series[0]
	assert.Equal(t, []float64{1, 3}, got.Samples)
	assert.Nil(t, got.CPUSecondsPerGB)
	assert.Nil(t, got.Expected)
	assert.Equal(t, []string{"4 numbers were not finite and left out"}, out.Errors)
	assert.Len(t, s.Samples, 4, "the result itself does not change")
	assert.Empty(t, finite(benched(h200(host(t, "h200-vm")))).Errors)
}
