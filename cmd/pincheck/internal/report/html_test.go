package report

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// The page has the machine, the verdict, the findings and what check and verify measured.
func TestHTML(t *testing.T) {
	t.Parallel()
	all := results(t)
	for name, wants := range map[string][]string{
		"healthy": {"<h1>host-7</h1>", `verdict good">Healthy`, "NVIDIA H200, 139.8 GiB, compute capability 9.0", "PCIe 5.0 x16", "CUDA", ">Bytes verified<", ">Copies of pinned memory<", "55.41",
			"GPU 0: 3,200 of 3,233 round trips, 318.9 MB: no byte was wrong.", "GPU 0: 55.4 GB/s host to device, 55.4 GB/s device to host."},
		"unhealthy": {`verdict bad">`, "3 mismatches, 1 failure.", ">mismatches: further series<", "GPU 0: ", `class="problem"`, "cudaMemGetInfo: cudaErrorUnknown (999)", "NVIDIA L40S?[31m"},
		"simulated": {"A simulated GPU: nothing here was measured on hardware.", "(simulated)"},
		"no-gpu":    {`verdict bad">Unusable`, "Nothing was measured."},
		"version":   {"Nothing was measured."},
	} {
		require.Contains(t, all, name)
		page := strings.ReplaceAll(render(t, all[name], HTML, Style{}), "\u00a0", " ")
		for _, want := range wants {
			assert.Contains(t, page, want, name)
		}
		assert.True(t, strings.HasSuffix(page, "</html>\n"), name)
	}
	assert.NotContains(t, strings.ToLower(render(t, all["healthy"], HTML, Style{})), "simulated")
}

func TestHTMLOfSeveralResults(t *testing.T) {
	t.Parallel()
	all := results(t)
	with := &Result{HostName: "host-9", Complete: true, Benches: []result.Bench{{Name: "latency", Answers: []string{"fast"},
		Series: []result.Series{{Name: "latency", Unit: result.Seconds, Samples: []float64{math.NaN(), 2e-6}}}}}}
	with.Conclude(false)
	var b bytes.Buffer
	require.NoError(t, WriteHTML(&b, all["healthy"], with))
	assert.Contains(t, b.String(), "<h1>host-7</h1>")
	assert.Contains(t, b.String(), "<h1>host-9</h1>")
	assert.Contains(t, b.String(), "2.000\u00a0µs")
	assert.Contains(t, b.String(), "1 number was not finite")
}

// Commands in code quotes are marked up, to be copied; other text is not, nor what has no second quote.
func TestCommandsOfARemedyAreCode(t *testing.T) {
	t.Parallel()
	r := &Result{Command: "check", Complete: true, Findings: []doctor.Finding{{ID: "x", Severity: doctor.Problem, Summary: "s",
		Remedy: "run `echo 1 | sudo tee <FILE>`, and `nvidia-smi -L`", Settle: "a ` alone"}}}
	page := render(t, r, HTML, Style{})
	assert.Contains(t, page, "<dd>run <code>echo 1 | sudo tee &lt;FILE&gt;</code>, and <code><span>nvidia-smi</span> <span>-L</span></code></dd>")
	assert.Contains(t, page, "<dd>a ` alone</dd>")
}

// Findings that are the same of several GPUs are one, with what was seen of each.
func TestHTMLMergesFindingsOfGPUs(t *testing.T) {
	t.Parallel()
	r := &Result{Command: "check", Complete: true, Findings: found(doctor.Problem, "0 x bad", "1 x bad", "3 x bad", "1 y worse")}
	for i := range r.Findings {
		r.Findings[i].Evidence = []string{"xyz"[:i%3+1]}
	}
	page := render(t, r, HTML, Style{})
	assert.Contains(t, page, "GPUs 0, 1, 3: bad <code")
	assert.Contains(t, page, "<dd>GPU 0: x</dd><dd>GPU 1: xy</dd><dd>GPU 3: xyz</dd>")
	assert.Contains(t, page, "GPU 1: worse <code")
	assert.Equal(t, 1, strings.Count(page, "<dd>x</dd>"), "of one GPU it needs no number")
}

// On a phone the verdict and the findings are what is seen first; the machine comes after what was measured.
func TestFindingsComeBeforeTheMachine(t *testing.T) {
	t.Parallel()
	page := render(t, results(t)["unhealthy"], HTML, Style{})
	at := 0
	for _, part := range []string{"<title>host-7: Problems", `class="verdict bad"`, "<h2>Findings</h2>", "<dt>seen</dt>", "<dt>why</dt>", "<dt>do</dt>", "<h2>In short</h2>", "<h2>The machine</h2>"} {
		next := strings.Index(page[at:], part)
		assert.Positive(t, next, "%s", part)
		at += max(next, 0)
	}
	assert.Contains(t, page, `<code class="id">`)
}
