package report

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A browser is a Chromium that is spoken to by the DevTools protocol over pipes: every
// message is JSON that ends with a zero byte.
type browser struct {
	t       *testing.T
	w       io.Writer
	r       *bufio.Reader
	id      int
	session string
	bad     []string // what the page logged, threw or requested
}

// newBrowser starts the program that PINNED_TEST_BROWSER names, with one page.
func newBrowser(t *testing.T) *browser {
	t.Helper()
	program := os.Getenv("PINNED_TEST_BROWSER")
	if program == "" {
		t.Skip("PINNED_TEST_BROWSER is not set: no test in a real browser")
	}
	if runtime.GOOS == "windows" {
		t.Fatal("PINNED_TEST_BROWSER is set, and this test needs pipes that a process inherits")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // t.Context ends before Cleanup
	t.Cleanup(cancel)
	home := t.TempDir()
	cmd := exec.CommandContext(ctx, program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
		"--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync", // no network of its own
		"--disable-dev-shm-usage", "--disable-extensions", "--remote-debugging-pipe", "--user-data-dir="+home, "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+home)
	theirIn, ourOut, err := os.Pipe()
	require.NoError(t, err)
	ourIn, theirOut, err := os.Pipe()
	require.NoError(t, err)
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // descriptors 3 and 4
	require.NoError(t, cmd.Start(), "PINNED_TEST_BROWSER=%s", program)
	require.NoError(t, theirIn.Close())
	require.NoError(t, theirOut.Close())
	b := &browser{t: t, w: ourOut, r: bufio.NewReaderSize(ourIn, 1<<20)}
	t.Cleanup(func() {
		_ = ourOut.Close() // which ends it
		if err := cmd.Wait(); err != nil && ctx.Err() != nil {
			t.Errorf("the browser did not end: %v", err)
		}
		_ = ourIn.Close()
	})
	var target struct{ TargetID, SessionID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	b.session = target.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

type message struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct{ Message string }
}

// call sends a command, and reads until its result.
func (b *browser) call(method string, params any, result any) {
	b.t.Helper()
	b.id++
	if params == nil {
		params = struct{}{}
	}
	m := map[string]any{"id": b.id, "method": method, "params": params}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	text, err := json.Marshal(m)
	require.NoError(b.t, err)
	_, err = b.w.Write(append(text, 0))
	require.NoError(b.t, err, method)
	id := b.id
	got := b.until(method, func(m message) bool { return m.ID == id })
	require.Nil(b.t, got.Error, "%s: %+v", method, got.Error)
	if result != nil {
		require.NoError(b.t, json.Unmarshal(got.Result, result))
	}
}

// until reads messages until one, and collects what is bad.
func (b *browser) until(what string, is func(message) bool) message {
	b.t.Helper()
	for {
		text, err := b.r.ReadBytes(0)
		require.NoError(b.t, err, "the browser ended, waiting for %s", what)
		var m message
		require.NoError(b.t, json.Unmarshal(text[:len(text)-1], &m))
		switch m.Method {
		case "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded":
			b.bad = append(b.bad, m.Method+" "+string(m.Params))
		case "Network.requestWillBeSent":
			var p struct{ Request struct{ URL string } }
			require.NoError(b.t, json.Unmarshal(m.Params, &p))
			if u := p.Request.URL; !strings.HasPrefix(u, "file:") && !strings.HasPrefix(u, "data:") && u != "about:blank" {
				b.bad = append(b.bad, "request of "+u)
			}
		}
		if is(m) {
			return m
		}
	}
}

// open loads a file with this width and these colours, for the screen or for print.
func (b *browser) open(file string, width int, scheme, media string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"media": media, "features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.call("Page.navigate", map[string]any{"url": (&url.URL{Scheme: "file", Path: file}).String()}, nil)
	b.until("load", func(m message) bool { return m.Method == "Page.loadEventFired" })
}

// eval runs a script and decodes its value.
func (b *browser) eval(script string, value any) {
	b.t.Helper()
	var got struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": script, "returnByValue": true}, &got)
	require.Empty(b.t, string(got.ExceptionDetails), script)
	require.NoError(b.t, json.Unmarshal(got.Result.Value, value))
}

// save keeps what a command returned as base64, if PINNED_TEST_BROWSER_OUT names a
// directory.
func (b *browser) save(name string, data string) []byte {
	b.t.Helper()
	raw, err := base64.StdEncoding.DecodeString(data)
	require.NoError(b.t, err)
	if out := os.Getenv("PINNED_TEST_BROWSER_OUT"); out != "" {
		require.NoError(b.t, os.WriteFile(filepath.Join(out, name), raw, 0o644))
	}
	return raw
}

// layout is what the page says about itself. Text of plots counts only where it is shown.
const measureLayout = `(() => {
	const shown = (e) => e.getClientRects().length > 0;
	const width = document.scrollingElement.clientWidth;
	const inScroller = (e) => e.closest(".scroll") !== null;
	const wide = [...document.querySelectorAll("main *")].filter((e) => shown(e) && !inScroller(e) && e.getBoundingClientRect().right > width + 1);
	const plots = [...document.querySelectorAll(".panel svg")].filter(shown);
	const texts = plots.flatMap((p) => [...p.querySelectorAll("text")]);
	const scale = (p) => p.getBoundingClientRect().width / p.viewBox.baseVal.width;
	const cut = plots.flatMap((p) => [...p.querySelectorAll("text")].filter((t) => {
		const a = p.getBoundingClientRect(), b = t.getBoundingClientRect();
		return b.left < a.left - 1 || b.right > a.right + 1 || b.top < a.top - 1 || b.bottom > a.bottom + 1;
	}));
	const contrast = (e) => getComputedStyle(e).fill;
	return {
		scroll: document.scrollingElement.scrollWidth, inner: window.innerWidth,
		wide: wide.slice(0, 5).map((e) => e.tagName + "." + e.className.toString() + " " + e.textContent.slice(0, 40)),
		plots: plots.length,
		unlabelled: plots.filter((p) => !p.getAttribute("aria-label") || p.querySelectorAll("text").length < 3).length,
		smallest: Math.min(...plots.map((p) => 12 * scale(p))),
		cut: cut.slice(0, 5).map((t) => t.textContent),
		paper: getComputedStyle(document.body).backgroundColor,
		fills: [...new Set(texts.map(contrast))],
		labels: texts.map((t) => t.textContent),
	};
})()`

type shownLayout struct {
	Scroll, Inner, Plots, Unlabelled int
	Wide, Cut, Fills, Labels         []string
	Smallest                         float64
	Paper                            string
}

// The page in a real browser: no overflow, no error, no request, axes with their units, text
// that can be read, at the widths of a phone, a tablet and a desk, light and dark, and on
// paper.
func TestInABrowser(t *testing.T) {
	b := newBrowser(t)
	dir := t.TempDir()
	for name, runs := range map[string][]pageRun{"example": example(t), "odd": oddRuns()} {
		file := filepath.Join(dir, name+".html")
		require.NoError(t, os.WriteFile(file, []byte(renderPage(t, runs...)), 0o644))
		for _, width := range []int{380, 800, 1400} {
			for _, scheme := range []string{"light", "dark"} {
				what := fmt.Sprintf("%s-%d-%s", name, width, scheme)
				b.open(file, width, scheme, "screen")
				var l shownLayout
				b.eval(measureLayout, &l)
				checkLayout(t, what, l)
				dark := l.Paper != "rgb(255, 255, 255)"
				assert.Equal(t, scheme == "dark", dark, "%s: paper is %s", what, l.Paper)
				if name == "example" {
					assert.Equal(t, 11, l.Plots, what)
					for _, label := range []string{"bandwidth, GB/s", "size, bytes (log scale)", "latency, seconds (log scale)", "kept per byte, ratio", "pin rate, GB/s", "throughput, k/s", "1\u00a0MiB", "10\u00a0µs"} {
						assert.True(t, slices.Contains(l.Labels, label), "%s: no label %q", what, label)
					}
				}
				b.eval(`document.querySelectorAll("details").forEach((d) => { d.open = true }), 1`, new(int))
				b.eval(measureLayout, &l)
				checkLayout(t, what+", tables open", l)
				b.open(file, width, scheme, "screen")
				if os.Getenv("PINNED_TEST_BROWSER_OUT") != "" {
					var shot struct{ Data string }
					b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}, &shot)
					b.save(what+".png", shot.Data)
				}
			}
		}
		b.open(file, 680, "dark", "print") // A4 without its margins
		var l shownLayout
		b.eval(measureLayout, &l)
		checkLayout(t, name+" on paper", l)
		assert.Equal(t, "rgb(255, 255, 255)", l.Paper, "paper is white")
		var pdf struct{ Data string }
		b.call("Page.printToPDF", map[string]any{"preferCSSPageSize": true, "paperWidth": 8.27, "paperHeight": 11.69}, &pdf)
		raw := b.save(name+".pdf", pdf.Data)
		assert.Equal(t, "%PDF-", string(raw[:5]))
	}
	assert.Empty(t, b.bad, "what the pages logged, threw and requested")
}

func checkLayout(t *testing.T, what string, l shownLayout) {
	t.Helper()
	assert.LessOrEqual(t, l.Scroll, l.Inner, "%s: it overflows: %q", what, l.Wide)
	assert.Empty(t, l.Wide, "%s: elements beyond the right edge", what)
	assert.Empty(t, l.Cut, "%s: texts cut off by their plot", what)
	assert.Zero(t, l.Unlabelled, "%s: plots without a name or labels", what)
	if l.Plots > 0 {
		assert.GreaterOrEqual(t, l.Smallest, 8.0, "%s: text of plots, in pixels", what)
		for _, fill := range l.Fills {
			assert.NotEqual(t, l.Paper, fill, "%s: text as the paper", what)
			assert.NotEqual(t, "rgb(0, 0, 0)", map[bool]string{true: fill}[l.Paper != "rgb(255, 255, 255)"], "%s: black text on dark paper", what)
		}
	}
}
