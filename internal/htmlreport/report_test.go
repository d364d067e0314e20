package htmlreport

import (
	"bytes"
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/result"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var testdata = filepath.Join("..", "..", "testdata")

// golden compares with a file below testdata, or writes it with -update.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join(testdata, name)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err, "run the test with -update to make it")
	assert.True(t, string(want) == got, "%s differs; run the test with -update if that is meant, and read the diff", name)
}

func render(t testing.TB, runs ...Run) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, Write(&b, runs...))
	return b.String()
}

// example is a run with all kinds of views. It is no measurement, and says so.
func example(t testing.TB) []Run {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(testdata, "htmlreport", "example.json"))
	require.NoError(t, err)
	var runs []Run
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
func oddRuns() []Run {
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
	yardstick := sampled("s", result.GBPerSecond, x("a"), 5)
	yardstick.Expected = &result.Expected{Value: 7, Source: long()}
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
		one("expected bar", all, yardstick, sampled("s", result.GBPerSecond, x(long()), 9)),
		one("no such series", result.View{Title: "t", Series: "none", X: "x"}, sampled("s", result.Seconds, x("1"), 1)),
	}
	many := result.Bench{Name: "many lines", Views: []result.View{{Title: "many", Series: "s", X: "x", Lines: []string{"a"}}, {Title: "divided", Series: "s", X: "x", Lines: []string{"a", "b"}}}}
	for i := range 40 {
		for _, at := range []string{"1", "2", "64"} {
			many.Series = append(many.Series, sampled("s", result.GBPerSecond, x(at).With("a", string(rune('a'+i%20))).With("b", string(rune('A'+i/20))), float64(i)))
		}
	}
	benches = append(benches, many)
	return []Run{
		{Host: long(), Tool: long(), Warning: long(), Verdict: long(), Started: time.Unix(0, 0),
			Facts: []Fact{{long(), long()}, {"\x00\x1b[31m", "\xff\xfe"}}, Findings: []Finding{{long(), long(), long(), long()}}, Benches: benches},
		{},
	}
}
