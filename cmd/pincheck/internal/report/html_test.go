package report

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/hosttest"
)

func renderPage(t testing.TB, all ...*Result) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, WriteHTML(&b, all...))
	return b.String()
}

// kept is a result of a real machine that is in testdata.
func kept(t testing.TB, name string) *Result {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(testdata, "results", name+".json"))
	require.NoError(t, err)
	r, err := Read(text)
	require.NoError(t, err)
	return r
}

// captured is the check of a host in testdata.
func captured(t testing.TB, name string) *Result {
	t.Helper()
	c, err := hosttest.LoadCase(filepath.Join(testdata, "hosts", name+".txtar"))
	require.NoError(t, err)
	f, err := doctor.FromCapture(hostinfo.Read(c.Host, c.Environ), c.Facts)
	require.NoError(t, err)
	r := &Result{Command: "check", Tool: testTool, HostName: name, Started: started, Seconds: 1.5, Complete: true, Facts: f}
	r.Conclude(true)
	return r
}

func capturedNames(t testing.TB) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(testdata, "hosts", "*.txtar"))
	require.NoError(t, err)
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".txtar"))
	}
	require.Greater(t, len(names), 60)
	return names
}

// fleet is n hosts: captured ones with what is wrong, and healthy ones.
func fleet(t testing.TB, n int) (all []*Result) {
	t.Helper()
	for i, name := range []string{"h200-vm-x8", "far-cpus", "driver-too-old", "eight-gpus-starved", "healthy-mig-container"} {
		r := captured(t, name)
		r.HostName = fmt.Sprintf("r1-%02d", i+1)
		all = append(all, r)
	}
	half := captured(t, "healthy-two-h200")
	half.Complete, half.Stopped, half.HostName = false, "--timeout 30s", "r1-06"
	half.Conclude(true)
	for all = append(all, half); len(all) < n; {
		r := captured(t, "healthy-two-h200")
		r.HostName = fmt.Sprintf("r2-%02d", len(all))
		all = append(all, r)
	}
	return all
}

// The pages of a measured host, of one with a fault, and of a fleet.
func TestGoldenPages(t *testing.T) {
	t.Parallel()
	golden(t, "golden/page-two-h200.html", renderPage(t, kept(t, "report-two-h200-2026-11-22")))
	golden(t, "golden/page-fault.html", renderPage(t, captured(t, "h200-vm-x8")))
	golden(t, "golden/page-fleet.html", renderPage(t, fleet(t, 8)...))
}

// Pages of all hosts and results of testdata are whole, and small enough to be sent around.
func TestPagesOfEverything(t *testing.T) {
	t.Parallel()
	var all []*Result
	for _, name := range hosttest.Sample(capturedNames(t)) {
		r := captured(t, name)
		page := renderPage(t, r)
		checkPage(t, page)
		assert.Less(t, len(page), 150<<10, name)
		for i := range r.Devices {
			assert.Contains(t, page, fmt.Sprintf(`<th scope="row">%d `, r.Devices[i].Ordinal), "%s: each GPU has a row", name)
		}
		all = append(all, r)
	}
	for _, name := range hosttest.Sample([]string{"report-two-h200-2026-11-22", "report-h200-2026-11-22", "bench-h200-2026-11-22", "h200-2026-11-21", "two-h200-2026-11-21"}) {
		page := renderPage(t, kept(t, name))
		checkPage(t, page)
		assert.Less(t, len(page), 150<<10, name)
		all = append(all, kept(t, name))
	}
	for _, r := range results(t) {
		checkPage(t, renderPage(t, r))
		all = append(all, r)
	}
	checkPage(t, renderPage(t, all...))
	checkPage(t, renderPage(t))
	checkPage(t, renderPage(t, &Result{}))
	checkPage(t, renderPage(t, &Result{}, &Result{}))
	forty := renderPage(t, fleet(t, 40)...)
	checkPage(t, forty)
	assert.Less(t, len(forty), 300<<10)
}

const foreignMarkup = `<script>alert(1)</script><img src=x onerror="alert('2')">&amp;</svg></style>{{.}}`

// What comes from results is text: it opens no element, and closes none, whatever shape the result has.
func TestEverythingIsEscaped(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100 / hosttest.Stride()) {
		r := oddities{rand.New(rand.NewPCG(seed, 3))}.result()
		checkPage(t, renderPage(t, r))
		checkPage(t, renderPage(t, r, r))
	}
	s := sampled(foreignMarkup, result.Unit(foreignMarkup), result.Labels{{Key: foreignMarkup, Value: foreignMarkup}, {Key: "x", Value: "1"}}, 1, 2)
	s.Expected = &result.Expected{Value: 3, Source: foreignMarkup}
	r := &Result{Command: foreignMarkup, HostName: foreignMarkup, Tool: Tool{Name: foreignMarkup}, Verdict: doctor.Problems, Errors: []string{foreignMarkup}, Stopped: foreignMarkup,
		Findings: []doctor.Finding{{ID: foreignMarkup, Severity: doctor.Problem, Summary: foreignMarkup, Evidence: []string{foreignMarkup}, Cause: foreignMarkup, Cost: foreignMarkup,
			Remedy: foreignMarkup + " `" + foreignMarkup + " x`", Settle: "`" + foreignMarkup + "`", Alternatives: []string{foreignMarkup}}},
		Benches: []result.Bench{{Name: foreignMarkup, Question: foreignMarkup, Answers: []string{foreignMarkup}, Notes: []string{foreignMarkup}, Errors: []string{foreignMarkup}, Series: []result.Series{s, s},
			Views: []result.View{{Title: foreignMarkup, Series: foreignMarkup, X: foreignMarkup, Lines: []string{foreignMarkup}}}}}}
	for _, page := range []string{renderPage(t, r), renderPage(t, r, r)} {
		checkPage(t, page)
		assert.Contains(t, page, "&lt;script&gt;alert(1)", "the name is there, as text")
		assert.NotContains(t, page, "<script")
		assert.NotContains(t, page, "<img")
	}
}

func sampled(name string, unit result.Unit, labels result.Labels, samples ...float64) result.Series {
	return result.Series{Name: name, Unit: unit, Labels: labels, Samples: samples, Stats: result.Summarize(samples)}
}

var (
	headingLevel = regexp.MustCompile(`^h[1-6]$`)
	innerLink    = regexp.MustCompile(`^#[a-z0-9-]+$`)
	noValue      = regexp.MustCompile(`\bNaN\b|[+-]Inf\b|%!|ZgotmplZ`) // what is no text for people
)

// checkPage fails unless a page nests as the template has it, has one h1 and no heading that skips a level, ids and
// landmarks of their own, links that lead somewhere in it, figures with a name and their values, and nothing from
// outside.
func checkPage(t testing.TB, page string) {
	t.Helper()
	known := strings.Fields("html head meta title style body a div header p span b main h1 h2 h3 h4 ul li nav section dl dt dd small article code pre figure figcaption svg symbol use rect line circle path polyline text tspan desc details summary table caption thead tbody tr th td i ol footer")
	style := page[strings.Index(page, "<style>")+7 : strings.Index(page, "</style>")]
	d := xml.NewDecoder(strings.NewReader(strings.Replace(page, style, "", 1)))
	d.Entity = xml.HTMLEntity
	var open, refs, labels []string
	ids, level, h1, words := map[string]bool{}, 0, 0, strings.Builder{}
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		switch e := token.(type) {
		case xml.CharData:
			words.Write(e)
		case xml.StartElement:
			name := e.Name.Local
			require.True(t, slices.Contains(known, name), name)
			if headingLevel.MatchString(name) {
				at := int(name[1] - '0')
				require.LessOrEqual(t, at, level+1, "a heading skips a level")
				level = at
				if at == 1 {
					h1++
				}
			}
			attributes := map[string]string{}
			for _, a := range e.Attr {
				attributes[a.Name.Local] = a.Value
				require.False(t, strings.HasPrefix(a.Name.Local, "on") || a.Name.Local == "src", "attribute %s", a.Name.Local)
				require.False(t, noValue.MatchString(a.Value), "%s=%q", a.Name.Local, a.Value)
				switch a.Name.Local {
				case "href":
					require.True(t, innerLink.MatchString(a.Value), a.Value)
					refs = append(refs, a.Value[1:])
				case "aria-labelledby", "aria-describedby":
					refs = append(refs, a.Value)
				case "id":
					require.False(t, ids[a.Value], "id %s twice", a.Value)
					ids[a.Value] = true
				}
			}
			if name == "section" || name == "nav" || name == "svg" && attributes["role"] == "img" || name == "article" {
				label := attributes["aria-labelledby"] + attributes["aria-label"]
				require.NotEmpty(t, label, name)
				require.NotContains(t, labels, label, "a landmark twice")
				labels = append(labels, label)
			}
			require.True(t, name != "svg" || attributes["role"] == "img" || attributes["aria-hidden"] == "true" || slices.Contains(open, "svg"), "an svg without a name")
			open = append(open, name)
		case xml.EndElement:
			open = open[:len(open)-1]
		}
	}
	require.Empty(t, open)
	require.Equal(t, 1, h1)
	for _, id := range refs {
		require.True(t, ids[id], "#%s leads nowhere", id)
	}
	require.Empty(t, noValue.FindString(words.String()))
	require.True(t, strings.HasSuffix(page, "</html>\n"))
	for _, s := range []string{"http:", "https:", "url(", "@import", "xlink"} {
		require.NotContains(t, style, s)
	}
}

// Verdict, findings, figures and machine are in this order, and each part says what it has.
func TestPageOfACheck(t *testing.T) {
	t.Parallel()
	all := results(t)
	for name, wants := range map[string][]string{
		"healthy": {"<b>host-7</b>", "Healthy: GPU 0 copies at full speed, and 318.9 MB came back intact (33 round trips skipped)", "Pinned copies reach 101% of the reference.", ">To GPU<", "55.4 <small>",
			">Machine<", "NVIDIA H200", "PCIe 5.0 x16", ">Verification<"},
		"unhealthy": {"<title>host-7: Problem", "#i-bad", "Problem on GPU 0: ", "3 round trips came back wrong. 1 round trip failed.", "<h2 id=\"findings\">", `class="finding f-bad`, ">Seen<", ">Why<", ">Do<", ">Machine<"},
		"simulated": {"Simulated GPU: nothing here was measured on hardware."},
		"no-gpu":    {"No usable GPU: ", ">Seen<", ">Do<"},
		"stopped":   {"Incomplete: stopped: "},
		"failed":    {"Failed: nothing was examined", "must be at least 1 byte"},
		"version":   {"Not evaluated"},
		"bench":     {"Measured: "},
	} {
		page := strings.ReplaceAll(renderPage(t, all[name]), "\u00a0", " ")
		at := strings.Index(page, "<body>")
		if strings.HasPrefix(wants[0], "<title>") {
			at = 0
		}
		for _, want := range wants {
			next := regexp.MustCompile(strings.ReplaceAll(regexp.QuoteMeta(want), `\|`, "|")).FindStringIndex(page[at:])
			if assert.NotNil(t, next, "%s: %s, in this order", name, want) {
				at += next[0]
			}
		}
	}
	assert.NotContains(t, strings.ToLower(renderPage(t, all["healthy"])[strings.Index(renderPage(t, all["healthy"]), "<body>"):]), "simulated")
}

// Commands are in blocks of their own, to be copied; other code is not, nor what has no second quote.
func TestSteps(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]step{
		"run `echo 1 | tee <F>`, and `nvidia-smi -L`.": {{Text: "Run:"}, {Command: "echo 1 | tee <F>"}, {Text: "And:"}, {Command: "nvidia-smi -L"}},
		"set `A`, then restart":                        {{Text: "Set "}, {Code: "A"}, {Text: ", then restart"}},
		"a ` alone":                                    {{Text: "A ` alone"}},
		"compare (`pincheck compare A B`)":             {{Text: "Compare:"}, {Command: "pincheck compare A B"}},
		"":                                             {},
	} {
		assert.ElementsMatch(t, want, stepsOf(text), text)
	}
	r := &Result{Command: "check", Complete: true, Verdict: doctor.Problems, Findings: []doctor.Finding{{ID: "x", Severity: doctor.Problem, Summary: "s", Remedy: "run `echo 1 | sudo tee <FILE>`"}}}
	assert.Contains(t, renderPage(t, r), `<p>Run:</p><pre tabindex="0" role="group" aria-label="Command"><code>echo 1 | sudo tee &lt;FILE&gt;</code></pre>`)
}

// Findings that are the same of several GPUs are one, with what was seen of each.
func TestFindingsOfSeveralGPUsAreOne(t *testing.T) {
	t.Parallel()
	r := &Result{Command: "check", Complete: true, Findings: found(doctor.Problem, "0 x bad", "1 x bad", "3 x bad", "1 y worse")}
	for i := range r.Findings {
		r.Findings[i].Evidence = []string{"xyz"[:i%3+1]}
	}
	page := renderPage(t, r)
	assert.Contains(t, page, ">GPUs 0, 1, 3: bad</h3>")
	assert.Contains(t, page, "<p>GPU 0: x.</p><p>GPU 1: xy.</p><p>GPU 3: xyz.</p>")
	assert.Contains(t, page, ">GPU 1: worse</h3>")
	assert.Equal(t, 1, strings.Count(page, "<p>X.</p>"), "of one GPU it needs no number")
}

// Titles of plots are answers, computed from what is drawn.
func TestTitlesAreAnswers(t *testing.T) {
	t.Parallel()
	r := kept(t, "report-two-h200-2026-11-22")
	var titles []string
	for _, f := range figures(r.Benches, nil) {
		titles = append(titles, f.Title)
		assert.NotEmpty(t, f.Table.Rows, f.Title)
		assert.NotEmpty(t, f.Desc, f.Title)
	}
	assert.Equal(t, []string{
		"Copies reach full speed from 4\u00a0MiB up, and 9.7% of it at 16\u00a0KiB",
		"Pinned memory uploads 6.3 times as fast as pageable memory",
		"hostmem.Alloc pins 7.0 times as fast as cudaHostAlloc",
		"Staging uploads a cached file 6.9 times as fast as mmap",
		"Pinned memory feeds the GPU 1.4 times as fast as pageable memory",
		"Reused pinned buffers move frames 26 times as fast as new pageable ones",
	}, titles)
	for i := range r.Benches[0].Series { // GPU 1 at half the speed
		if s := &r.Benches[0].Series[i]; s.Labels.Get(result.Device) == "1" {
			for j := range s.Samples {
				s.Samples[j] /= 2
			}
			s.Stats = result.Summarize(s.Samples)
		}
	}
	slow := figures(r.Benches, []string{"narrow_link"})
	require.NotEmpty(t, slow)
	assert.Equal(t, "Copies to GPU 1 run at 50% of the speed of those to GPU 0", slow[0].Title)
	assert.Empty(t, figures(r.Benches, []string{"persistence_off"}), "no plot supports it")
	assert.Equal(t, "at 50% of the speed of", faster(1, 2))
	assert.Equal(t, "as fast as", faster(1, 1))
}

// An experiment that no plan knows has its first view as a plot, and its answer as the title.
func TestUnknownExperimentsAreDrawn(t *testing.T) {
	t.Parallel()
	bench := func(answer string, xs ...string) []result.Bench {
		b := result.Bench{Name: "new", Answers: []string{answer}, Views: []result.View{{Title: "a view", Series: "s", X: "depth", Lines: []string{"m"}}}}
		for i, x := range xs {
			for j, m := range []string{"first", "second"} {
				b.Series = append(b.Series, sampled("s", result.Seconds, result.Labels{{Key: "depth", Value: x}, {Key: "m", Value: m}}, float64(i+1)*1e-6, float64(i+j+1)*1e-6))
			}
		}
		return []result.Bench{b}
	}
	kinds := func(f figure) (kinds string) {
		for _, s := range f.Plot.Shapes {
			kinds += s.Kind + " "
		}
		return kinds
	}
	lines := figures(bench("Deep is slow.", "1", "2", "4"), nil)
	require.Len(t, lines, 1)
	assert.Equal(t, "Deep is slow", lines[0].Title)
	assert.Contains(t, kinds(lines[0]), "path")
	assert.NotContains(t, kinds(lines[0]), "rect")
	bars := figures(bench(strings.Repeat("long ", 40), "shallow", "deep"), nil)
	require.Len(t, bars, 1)
	assert.Equal(t, "a view", bars[0].Title)
	assert.Equal(t, 4, strings.Count(kinds(bars[0]), "rect"))
	assert.Empty(t, figures([]result.Bench{{Name: "new", Views: []result.View{{Series: "none"}}}}, nil))
}

// All that was measured is in a table, also what no view shows.
func TestNothingIsLeftOut(t *testing.T) {
	t.Parallel()
	b := result.Bench{Views: []result.View{{Title: "t", Series: "s", X: "x"}}, Series: []result.Series{
		sampled("s", result.Ratio, result.Labels{{Key: "x", Value: "1"}}, 1),
		sampled("other_s", result.Seconds, result.Labels{{Key: "x", Value: "1"}}, 2e-6, 4e-6),
	}}
	all := tablesOf(&b)
	require.Len(t, all, 2)
	assert.Equal(t, "further series", all[1].Caption)
	assert.Equal(t, cell{Text: "3.00\u00a0µs", More: "2.00\u00a0µs to 4.00\u00a0µs"}, all[1].Rows[0][1])
}

// Hosts are in the order of severity and then of loss; healthy ones share a fold, and what differs is named.
func TestFleet(t *testing.T) {
	t.Parallel()
	all := fleet(t, 12)
	page := renderPage(t, all...)
	checkPage(t, page)
	table := page[strings.Index(page, `class="fleet"`):strings.Index(page, `id="across"`)]
	at := 0
	for _, host := range []string{"with problems", ">r1-0", "with warnings", "incomplete or inconclusive", "r1-06", "healthy"} {
		next := strings.Index(table[at:], host)
		require.NotEqual(t, -1, next, "%s, in this order", host)
		at += next
	}
	assert.Contains(t, table, "▼")
	assert.Contains(t, table, "not measured")
	assert.Contains(t, page, "more than 5% slower than the median")
	assert.Contains(t, page, "Settings that differ from most hosts")
	assert.Regexp(t, `of 12 hosts (has|have) problems`, page)
	assert.Equal(t, len(all), strings.Count(page, `<div class="in" id="h`), "each host has a fold")
	same := renderPage(t, fleet(t, 9)[6:]...)
	assert.Contains(t, same, "All 3 hosts are healthy")
	assert.Contains(t, same, "No setting that pincheck reads differs")
	assert.Contains(t, renderPage(t), "No results")
}

func TestWriteFails(t *testing.T) {
	t.Parallel()
	assert.ErrorContains(t, WriteHTML(failing{}, &Result{}), "no space")
}

// Numbers on axes are round, and places do not depend on how a processor rounds.
func TestPlaces(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"12.3": px(12.34), "0": px(0), "33.33%": inPercent(1.0 / 3), "100%": inPercent(1),
		"0.6": tidy(0.2 * 3), "12,000": tidy(12000), "Run": capital("run"), "cudaMalloc": capital("cudaMalloc"),
		"A fact.": sentence("a fact"), "99%": percentOf(0.988), "1 GB/s, 2 s, 3%": strings.ReplaceAll(prose("1 GB/s, 2 s, 3 %"), "\u00a0", " "),
	} {
		assert.Equal(t, want, got)
	}
	for in, want := range map[float64]float64{0.9: 1, 1.1: 2, 2.1: 2.5, 26: 50, 0: 1, 7e9: 1e10} {
		assert.InDelta(t, want, roundStep(in), 1e-9*want)
	}
	c := chart{Traces: []trace{{Name: "a", Class: "to", Points: []point{{1, 5, 5, 5}, {2, 6, 6, 6}}}, {Name: "b", Class: "frm", Points: []point{{1, 5, 5, 5}, {2, 6, 6, 6}}}},
		XText: tidy}
	c.Unit.Factor = 1
	var ys []float64
	for _, s := range drawLines(c).Shapes {
		if s.Kind == "text" && strings.HasPrefix(s.Class, "s c") {
			y, err := strconv.ParseFloat(s.Y, 64)
			require.NoError(t, err)
			ys = append(ys, y)
			slices.Sort(ys)
		}
	}
	require.Len(t, ys, 2)
	assert.GreaterOrEqual(t, ys[1]-ys[0], float64(minLabels), "labels of equal values stand apart")
}

func FuzzWrite(f *testing.F) {
	f.Add(uint64(1), `<b>"`, 1.0)
	f.Fuzz(func(t *testing.T, seed uint64, text string, v float64) {
		r := oddities{rand.New(rand.NewPCG(seed, 4))}.result()
		r.HostName = text
		s := sampled("s", result.Unit(text), result.Labels{{Key: "x", Value: text}}, v, 1)
		s.Expected = &result.Expected{Value: v, Source: text}
		r.Benches = append(r.Benches, result.Bench{Name: text, Series: []result.Series{s}, Views: []result.View{{Series: "s", X: "x"}}})
		checkPage(t, renderPage(t, r))
		checkPage(t, renderPage(t, r, r))
	})
}
