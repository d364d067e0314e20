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
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/compare"
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

// measureLayout is what the page says about itself. Text of plots counts only where it is shown.
const measureLayout = `(() => {
	const shown = (e) => e.getClientRects().length > 0 && !e.closest(".hide, thead");
	const width = document.scrollingElement.clientWidth;
	const box = (e) => e.getBoundingClientRect();
	const wide = [...document.querySelectorAll("main *")].filter((e) => shown(e) && !e.closest(".scroll, pre") && (box(e).right > width + 1 || box(e).left < -1));
	const plots = [...document.querySelectorAll("svg.plot")].filter(shown);
	const texts = plots.flatMap((p) => [...p.querySelectorAll("text")]);
	const over = plots.flatMap((p) => {
		const all = [...p.querySelectorAll("text")].map((e) => ({text: e.textContent, box: box(e)}));
		return all.flatMap((a, i) => all.slice(i + 1).filter((b) => a.box.left < b.box.right - 1 && b.box.left < a.box.right - 1 && a.box.top < b.box.bottom - 4 && b.box.top < a.box.bottom - 4).map((b) => a.text + " over " + b.text));
	});
	return {
		scroll: document.scrollingElement.scrollWidth, inner: window.innerWidth,
		wide: wide.slice(0, 5).map((e) => e.tagName + "." + e.getAttribute("class") + " " + e.textContent.slice(0, 40)),
		plots: plots.length,
		unlabelled: plots.filter((p) => !p.querySelector("title") || !p.querySelector("desc") || p.querySelectorAll("text").length < 3).length,
		over: over.slice(0, 5), sizes: [...new Set(texts.map((t) => getComputedStyle(t).fontSize))],
		paper: getComputedStyle(document.body).backgroundColor,
		fills: [...new Set(texts.map((t) => getComputedStyle(t).fill))],
	};
})()`

type shownLayout struct {
	Scroll, Inner, Plots, Unlabelled int
	Wide, Over, Fills, Sizes         []string
	Paper                            string
}

// browserPages are one page of each kind.
func browserPages(t *testing.T) map[string]string {
	pages := map[string]string{}
	for name, all := range map[string][]*Result{"two-h200": {kept(t, "report-two-h200-2026-11-22")}, "fault": {captured(t, "h200-vm-x8")}, "eight": {captured(t, "eight-gpus-starved")},
		"mig": {captured(t, "healthy-mig-container")}, "no-gpu": {captured(t, "container-without-gpu")}, "stopped": {results(t)["stopped"]}, "fleet": fleet(t, 40)} {
		pages[name] = renderPage(t, all...)
	}
	for name, c := range map[string]*compare.Comparison{"compare": madeUp(t, 55.4, 41.5), "compare-fleet": madeUp(t, 55.4, 55.3, 41.5, 55.5)} {
		pages[name] = comparisonHTML(t, c)
	}
	return pages
}

// The page in a real browser: no overflow, no error, no request, no text of a plot over another, at the widths of a
// phone, a tablet and a desk, light and dark, and on paper.
func TestInABrowser(t *testing.T) {
	b := newBrowser(t)
	dir := t.TempDir()
	for name, page := range browserPages(t) {
		file := filepath.Join(dir, name+".html")
		require.NoError(t, os.WriteFile(file, []byte(page), 0o644))
		for _, width := range []int{320, 800, 1200} {
			for _, scheme := range []string{"light", "dark"} {
				what := fmt.Sprintf("%s-%d-%s", name, width, scheme)
				b.open(file, width, scheme, "screen")
				var l shownLayout
				b.eval(measureLayout, &l)
				checkLayout(t, what, l)
				dark := l.Paper != "rgb(255, 255, 255)"
				assert.Equal(t, scheme == "dark", dark, "%s: paper is %s", what, l.Paper)
				b.eval(openFolds, new(int))
				b.eval(measureLayout, &l)
				checkLayout(t, what+", folds open", l)
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
	assert.Empty(t, l.Wide, "%s: elements beyond an edge", what)
	assert.Empty(t, l.Over, "%s: texts of a plot over each other", what)
	assert.Zero(t, l.Unlabelled, "%s: plots without a name or labels", what)
	for _, size := range l.Sizes {
		assert.Equal(t, "12px", size, "%s: text of plots has one size at every width", what)
	}
	for _, fill := range l.Fills {
		assert.NotEqual(t, l.Paper, fill, "%s: text as the paper", what)
		assert.NotEqual(t, "rgb(0, 0, 0)", map[bool]string{true: fill}[l.Paper != "rgb(255, 255, 255)"], "%s: black text on dark paper", what)
	}
}
