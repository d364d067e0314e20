package report

import (
	"io"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
)

// manySeries returns a result of n series, which shape changes.
func manySeries(n int, shape func(i int, s *result.Series)) *Result {
	b := result.Bench{Name: "bandwidth", Complete: true, Answers: []string{"fast"}, Views: []result.View{
		{Title: "By size", Series: "bandwidth", X: result.Size, Lines: []string{result.Device, result.Method}},
		{Title: "By method", Series: "bandwidth", X: result.Method, Lines: []string{result.Device}},
	}}
	for i := range n {
		s := result.Single("bandwidth", result.Labels{{Key: result.Device, Value: strconv.Itoa(i % 8)}, {Key: result.Size, Value: strconv.Itoa(1 + i/16)},
			{Key: result.Method, Value: []string{"one", "other"}[i/8%2]}}, result.GBPerSecond, float64(1+i%50))
		s.Expected = &result.Expected{Value: 50, Source: "a table"}
		shape(i, &s)
		b.Series = append(b.Series, s)
	}
	return &Result{Command: "bench", Tool: testTool, Complete: true, Facts: &doctor.Facts{Devices: []doctor.Device{}}, Benches: []result.Bench{b}}
}

// Four times the series cost four times the memory, however they differ: a report of 100,000 takes seconds.
func TestReportsOfManySeriesAreLinear(t *testing.T) { // not parallel: it counts the bytes that the process allocates
	shapes := map[string]func(i int, s *result.Series){
		"grid":     func(int, *result.Series) {},
		"names":    func(i int, s *result.Series) { s.Name = "series " + strconv.Itoa(i) },
		"diagonal": func(i int, s *result.Series) { s.Labels[1].Value, s.Labels[2].Value = strconv.Itoa(i), strconv.Itoa(i) },
		"methods":  func(i int, s *result.Series) { s.Labels[2].Value = "method " + strconv.Itoa(i) },
		"units":    func(i int, s *result.Series) { s.Unit = result.Unit("unit " + strconv.Itoa(i)) },
		"sources": func(i int, s *result.Series) {
			s.Expected.Source, s.Expected.Value = "source "+strconv.Itoa(i), float64(i)
		},
		"keys": func(i int, s *result.Series) {
			s.Labels = append(s.Labels, result.Label{Key: "key" + strconv.Itoa(i), Value: "x"})
		},
	}
	for _, name := range hosttest.Sample(slices.Sorted(maps.Keys(shapes))) {
		shape := shapes[name]
		for _, f := range Formats() {
			for _, style := range []Style{{}, {Verbose: true}}[:map[bool]int{true: 2, false: 1}[f == Text]] {
				allocated := func(n int) float64 {
					r := manySeries(n, shape)
					var before, after runtime.MemStats
					runtime.ReadMemStats(&before)
					require.NoError(t, Write(io.Discard, r, f, style))
					runtime.ReadMemStats(&after)
					return float64(after.TotalAlloc - before.TotalAlloc)
				}
				const n = 250
				allocated(n) // what is made once
				one, four := allocated(n), allocated(4*n)
				assert.Less(t, four, 7*one, "%s, %s: %.0f B, and %.0f B of four times as many", name, f, one, four)
			}
		}
	}
}
