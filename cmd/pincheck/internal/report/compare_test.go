package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// madeUp is a comparison of made-up hosts. The GB/s at 1 GiB are those of each host, the
// other series are the same on all.
func madeUp(t *testing.T, rates ...float64) *compare.Comparison {
	t.Helper()
	var files []compare.File
	for i, rate := range rates {
		samples := func(center float64) []float64 {
			out := make([]float64, 9)
			for k := range out {
				out[k] = center * (1 + 0.001*float64(k-4))
			}
			return out
		}
		var b result.Bench
		b.Name, b.Complete = "bandwidth", true
		for _, d := range []string{result.HostToDevice, result.DeviceToHost} {
			for _, size := range []int{4096, 1 << 30} {
				v := rate
				if size == 4096 {
					v = 1.1
				}
				b.Series = append(b.Series, result.Series{Name: "bandwidth", Unit: result.GBPerSecond, Better: result.Higher, Samples: samples(v),
					Labels: result.Labels{{Key: result.Device, Value: "0"}, {Key: result.Direction, Value: d}, {Key: result.Size, Value: fmt.Sprint(size)}, {Key: result.Memory, Value: "registered"}}})
			}
		}
		latency := result.Bench{Name: "latency", Complete: true, Series: []result.Series{{Name: "round_trip", Unit: result.Seconds, Better: result.Lower,
			Samples: samples(6.4e-6), Labels: result.Labels{{Key: result.Size, Value: "64"}}}}}
		d := compare.Document{Tool: "pincheck", Host: fmt.Sprintf("made-up-%d", i+1), Complete: i != 1, Benches: []result.Bench{b, latency}}
		if i == 0 {
			d.Benches = append(d.Benches, result.Bench{Name: "alloc", Complete: true, Series: []result.Series{{Name: "pin", Unit: result.GBPerSecond, Samples: []float64{3}}}})
		}
		files = append(files, compare.File{Name: fmt.Sprintf("%d.json", i+1), Documents: []compare.Document{d}})
	}
	c, err := compare.Compare(compare.Runs(files), 0.03)
	require.NoError(t, err)
	return c
}

func TestComparisons(t *testing.T) {
	t.Parallel()
	schema := compiled(t)
	for name, c := range map[string]*compare.Comparison{
		"two": madeUp(t, 55.4, 41.5), "same": madeUp(t, 55.4, 55.3), "fleet": madeUp(t, 55.4, 55.3, 41.5, 55.5), "divided": madeUp(t, 55, 55, 40, 40),
	} {
		for _, width := range []int{40, 80, 100} {
			var b bytes.Buffer
			require.NoError(t, WriteComparison(&b, c, testTool, Text, Style{Width: width}, false))
			for line := range strings.Lines(b.String()) {
				assert.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), width, "%s: %s", name, line)
				assert.Equal(t, strings.TrimRight(line, " \n")+"\n", line, "no space at the end")
			}
			golden(t, fmt.Sprintf("golden/compare-%s-%d.txt", name, width), b.String())
		}
		var b bytes.Buffer
		require.NoError(t, WriteComparison(&b, c, testTool, JSON, Style{}, false))
		assert.NoError(t, valid(schema, b.Bytes()), "%s is of the schema", name)
	}
	var b bytes.Buffer
	require.NoError(t, WriteComparison(&b, madeUp(t, 55.4, 41.5), testTool, JSON, Style{Width: 80}, false))
	golden(t, "golden/compare-two.json", b.String())
	var back map[string]any
	require.NoError(t, json.Unmarshal(b.Bytes(), &back))
	assert.Equal(t, "compare", back["command"])
	assert.Equal(t, "worse", back["verdict"])
	assert.ErrorContains(t, WriteComparison(&b, madeUp(t, 1, 2), testTool, "csv", Style{Width: 80}, false), `no format "csv"`)
	assert.Error(t, WriteComparison(full{}, madeUp(t, 1, 2), testTool, Text, Style{Width: 80}, false))
}

// The first line has the verdict, and names what stands out.
func TestComparisonsBeginWithTheVerdict(t *testing.T) {
	t.Parallel()
	two := madeUp(t, 55.4, 41.5)
	for i := range two.Rows {
		if r := &two.Rows[i]; r.Verdict == compare.Same {
			r.Labels = r.Labels.With(result.Device, "1")
		}
	}
	unclear := madeUp(t, 55.4, 55.4)
	unclear.Rows[0].Verdict, unclear.Rows[1].Verdict = compare.Unclear, compare.Untested
	different := madeUp(t, 55.4, 55.4)
	different.Rows[0].Verdict = compare.Different
	mixed := madeUp(t, 55.4, 41.5)
	mixed.Rows[0].Verdict = compare.Better
	for want, c := range map[string]*compare.Comparison{
		"Worse: 2 of 5 series, all on GPU 0, by up to 25%.\n":                          two,
		"Worse: 2 of 5 series, by up to 25%; 1 better.\n":                              mixed,
		"Better: 2 of 5 series, and none is worse.\n":                                  madeUp(t, 41.5, 55.4),
		"Different: 1 of 5 series, in which neither direction is better.\n":            different,
		"No significant difference: 0 of 5 shared series are better or worse.\n":       unclear,
		"No significant difference: all 4 hosts are in line in 5 series.\n":            madeUp(t, 55.4, 55.3, 55.4, 55.5),
		"Worse: 2 of 9 hosts are out of line.\n":                                       madeUp(t, 55.4, 55.3, 55.4, 55.5, 55.4, 55.3, 55.2, 41.5, 30),
		"Different: a host is out of line in 2 of 5 series, and none for the worse.\n": madeUp(t, 55.4, 55.3, 55.4, 55.5, 70),
	} {
		var b bytes.Buffer
		require.NoError(t, WriteComparison(&b, c, testTool, Text, Style{}, false))
		line, _, _ := strings.Cut(b.String(), "\n")
		assert.Equal(t, want, line+"\n")
		assert.Equal(t, c == unclear, strings.Contains(b.String(), "To resolve unclear and untested series, add runs of each side to its file.\n"))
	}
}

func TestComparisonWithAReference(t *testing.T) {
	t.Parallel()
	c := madeUp(t, 55.4, 41.5)
	var err error
	c, err = compare.Judge(c.Runs[1], "reference/a.json", 0.1, func(s *result.Series) *result.Expected {
		if s.Labels.Get(result.Size) != fmt.Sprint(1<<30) {
			return nil
		}
		return &result.Expected{Value: 55.3, Source: "reference/a.json: NVIDIA X1 on PCIe 5.0 x16, 1 GiB, measured 2026-11-22: median of 9, 55.1 to 55.4 GB/s (a run)"}
	})
	require.NoError(t, err)
	for _, width := range []int{40, 80} {
		var b bytes.Buffer
		require.NoError(t, WriteComparison(&b, c, testTool, Text, Style{Width: width}, false))
		golden(t, fmt.Sprintf("golden/compare-reference-%d.txt", width), b.String())
	}
	var page bytes.Buffer
	require.NoError(t, WriteComparison(&page, c, testTool, HTML, Style{}, false))
	checkPage(t, page.String())
	assert.Contains(t, page.String(), `<li id="ref-1">reference/a.json: NVIDIA X1`)
	assert.Contains(t, page.String(), "worse below 90% of its reference, and better above 111%.")
	var b bytes.Buffer
	require.NoError(t, WriteComparison(&b, c, testTool, JSON, Style{}, false))
	golden(t, "golden/compare-reference.json", b.String())
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, fmt.Errorf("no space left on device") }

func TestComparisonOfManySeriesShowsWhatDiffers(t *testing.T) {
	t.Parallel()
	c := madeUp(t, 55.4, 41.5)
	for i := range 50 {
		row := c.Rows[0]
		row.Labels = row.Labels.With(result.Size, fmt.Sprint((i+1)<<12))
		c.Rows = append(c.Rows, row)
	}
	show := func(all bool) string {
		var b bytes.Buffer
		require.NoError(t, WriteComparison(&b, c, testTool, Text, Style{Color: true, Width: 100}, all))
		return b.String()
	}
	assert.NotContains(t, show(false), "168 KiB")
	assert.Contains(t, show(false), "1 GiB")
	assert.Contains(t, show(true), "168 KiB")
	assert.Contains(t, show(false), "\x1b[1;31mworse\x1b[0m")
}

func comparisonHTML(t *testing.T, c *compare.Comparison) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, WriteComparison(&b, c, testTool, HTML, Style{}, false))
	return b.String()
}

// The page of a comparison: whole whatever is compared, with the verdict first, and what is worse with both figures.
func TestPagesOfComparisons(t *testing.T) {
	t.Parallel()
	page := func(c *compare.Comparison) string {
		text := comparisonHTML(t, c)
		checkPage(t, text)
		return text
	}
	two := page(madeUp(t, 55.4, 41.5))
	golden(t, "golden/page-compare.html", two)
	rest := two
	for _, want := range []string{"<title>Worse", "Worse: 2 of 5 series, by up to 25%</span></h1>", ">2 series are worse</h2>", "<td>55.4</td><td>41.5</td><td>-25%</td>", ">Runs</h2>", "a: made-up-1", "b: made-up-2",
		">No significant difference</h2>", "Same: 3", ">All series</h2>", ">Method</h2>"} {
		_, after, found := strings.Cut(rest, want)
		if assert.True(t, found, "%s, in this order", want) {
			rest = after
		}
	}
	fleet := page(madeUp(t, 55.4, 55.3, 41.5, 55.5))
	assert.Contains(t, fleet, "made-up-3 41.5 (-25%)", "the host is named beside its figure")
	for want, c := range map[string]*compare.Comparison{
		"No significant difference: 0 of 5": madeUp(t, 55.4, 55.3), ">2 series differ otherwise</h2>": madeUp(t, 55, 55, 40, 40), "Better: 2 of 5 series": madeUp(t, 41.5, 55.4),
	} {
		assert.Contains(t, page(c), want)
	}
	simulated := madeUp(t, 55.4, 41.5)
	simulated.Verdict, simulated.Runs[0].Simulated = compare.Simulated, true
	for i := range simulated.Rows {
		if r := &simulated.Rows[i]; r.Verdict != compare.Missing {
			r.Verdict = compare.Simulated
		}
	}
	assert.Contains(t, page(simulated), "No verdict: a run is of the simulated GPU")
	assert.NotContains(t, page(simulated), "is worse")
	many := madeUp(t, slices.Repeat([]float64{55.4, 55.3, 55.5}, 13)...)
	assert.Less(t, len(page(many)), 300<<10)
	hostile := madeUp(t, 55.4, 41.5, 30)
	for i := range hostile.Runs {
		hostile.Runs[i].Name, hostile.Runs[i].Tool, hostile.Runs[i].Notes, hostile.Hosts[i].Name = foreignMarkup, foreignMarkup, []string{foreignMarkup}, foreignMarkup
	}
	for i := range hostile.Rows {
		r := &hostile.Rows[i]
		r.Bench, r.Name, r.Unit, r.Source, r.Labels = foreignMarkup, foreignMarkup, result.Unit(foreignMarkup), foreignMarkup, result.Labels{{Key: foreignMarkup, Value: foreignMarkup}}
	}
	assert.NotContains(t, page(hostile), "<script")
}

// What comes from files cannot write to the terminal.
func TestComparisonOfHostileNames(t *testing.T) {
	t.Parallel()
	hostile := "\x1b[2J<b>" + strings.Repeat("界", 200) + "\n"
	c := madeUp(t, 55.4, 41.5, 30)
	for i := range c.Runs {
		c.Runs[i].Name, c.Runs[i].Tool, c.Runs[i].Notes = hostile, hostile, []string{hostile}
		c.Hosts[i].Name = hostile
	}
	for i := range c.Rows {
		c.Rows[i].Bench, c.Rows[i].Name, c.Rows[i].Unit = hostile, hostile, result.Unit(hostile)
		c.Rows[i].Labels = result.Labels{{Key: hostile, Value: hostile}}
	}
	for _, width := range []int{-1, 0, 1, 40, 1 << 30} {
		var b bytes.Buffer
		require.NoError(t, WriteComparison(&b, c, testTool, Text, Style{Width: width}, true))
		assert.NotContains(t, b.String(), "\x1b")
	}
}
