package report

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// measureAccess returns what a reader could not perceive or operate, each with a rule before it. Rules have the names of
// axe-core's where that has them; non-text-contrast, which it lacks, is of bars, lines and marks. Contrast is of the
// computed colours, with what lies behind each text.
const measureAccess = `(() => {
	const bad = new Set();
	const fail = (rule, e, more) => bad.add(rule + ": " + e.tagName.toLowerCase() + (e.getAttribute("class") ? "." + e.getAttribute("class") : "") + " " + (e.textContent || "").trim().slice(0, 40) + (more ? " " + more : ""));
	const all = (q) => [...document.querySelectorAll(q)];
	const shown = (e) => e.checkVisibility({visibilityProperty: true, opacityProperty: true}) && e.getClientRects().length > 0;
	const clipped = (e) => { for (; e; e = e.parentElement) { const s = getComputedStyle(e); if (s.clipPath !== "none" || parseFloat(s.left) < -999) return true; } return false; };
	const rgba = (s) => { const m = s.match(/[\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1]; };
	const mix = (f, b) => [0, 1, 2].map((i) => f[i] * f[3] + b[i] * (1 - f[3])).concat(1);
	const behind = (e) => e ? mix(rgba(getComputedStyle(e).backgroundColor), behind(e.parentElement)) : [255, 255, 255, 1];
	const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
	const contrast = (e, colour) => {
		const back = behind(e), front = rgba(colour);
		for (let a = e; a; a = a.parentElement) front[3] *= getComputedStyle(a).opacity;
		const [x, y] = [light(mix(front, back)), light(back)].sort((a, b) => b - a);
		return (x + 0.05) / (y + 0.05);
	};
	const named = (e) => {
		const ids = e.getAttribute("aria-labelledby");
		if (ids) return ids.split(" ").map((id) => document.getElementById(id)?.textContent || "").join("").trim();
		return (e.getAttribute("aria-label") || e.getAttribute("alt") || "").trim();
	};
	const spoken = (e) => { const c = e.cloneNode(true); c.querySelectorAll("[aria-hidden=true]").forEach((h) => h.remove()); return named(e) || c.textContent.trim(); };
	let texts = 0;
	const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
	for (let n = walker.nextNode(); n; n = walker.nextNode()) {
		const e = n.parentElement, range = document.createRange();
		range.selectNodeContents(n);
		if (!n.data.trim() || !shown(e) || range.getClientRects().length === 0 || clipped(e)) continue;
		texts++;
		const s = getComputedStyle(e), size = parseFloat(s.fontSize), large = size >= 24 || size >= 18.66 && s.fontWeight >= 700;
		const c = contrast(e, e.closest("svg") ? s.fill : s.color);
		if (c < (large ? 3 : 4.5)) fail("color-contrast", e, c.toFixed(2));
		if (!e.closest("header, main, footer, nav, a[href='#main']")) fail("region", e);
	}
	for (const e of all("svg .br, svg .pt, svg .ln, .meter .val").filter(shown)) {
		const s = getComputedStyle(e), c = contrast(e, s.fill === "none" ? s.stroke : s.fill);
		if (c < 3) fail("non-text-contrast", e, c.toFixed(2));
	}
	all("img, [role=img]").filter((e) => !named(e)).forEach((e) => fail("image-alt", e));
	all("svg").filter((e) => !e.parentElement.closest("svg") && e.getAttribute("role") !== "img" && e.getAttribute("aria-hidden") !== "true").forEach((e) => fail("svg-img-alt", e));
	all("a, button, summary").filter((e) => !spoken(e)).forEach((e) => fail({A: "link-name", BUTTON: "button-name", SUMMARY: "summary-name"}[e.tagName], e));
	all("p a, dd a, td a, li a").filter((e) => shown(e) && !getComputedStyle(e).textDecorationLine.includes("underline")).forEach((e) => fail("link-in-text-block", e));
	all("[aria-hidden=true] a, [aria-hidden=true] [tabindex]").forEach((e) => fail("aria-hidden-focus", e));
	all("summary a, summary button, a a, a button").forEach((e) => fail("nested-interactive", e));
	all("[tabindex]").filter((e) => e.tabIndex > 0).forEach((e) => fail("tabindex", e));
	let level = 0;
	for (const e of all("h1, h2, h3, h4, h5, h6")) {
		if (!spoken(e)) fail("empty-heading", e);
		if (+e.tagName[1] > level + 1) fail("heading-order", e);
		level = +e.tagName[1];
	}
	if (all("h1").length !== 1) fail("page-has-heading-one", document.body);
	if (all("main").length !== 1) fail("landmark-one-main", document.body);
	if (!document.title.trim()) fail("document-title", document.head);
	if (!document.documentElement.lang) fail("html-has-lang", document.documentElement);
	if (/maximum-scale|user-scalable=no/.test(document.querySelector("meta[name=viewport]")?.content || "maximum-scale")) fail("meta-viewport", document.head);
	const skip = document.querySelector("body > a[href^='#']");
	if (!skip || !document.querySelector(skip.getAttribute("href"))) fail("bypass", document.body);
	const count = (list) => list.reduce((m, v) => m.set(v, (m.get(v) || 0) + 1), new Map());
	for (const [id, n] of count(all("[id]").map((e) => e.id))) if (n > 1) fail("duplicate-id", document.body, id);
	for (const [label, n] of count(all("section, nav, article, [role=group], [role=region]").filter((e) => !e.matches("pre")).map((e) => e.tagName + " " + named(e)))) if (n > 1 || label.endsWith(" ")) fail("landmark-unique", document.body, label);
	for (const e of all("table")) {
		if (!e.caption && !e.matches(".fleet")) fail("table-name", e);
		if (!e.querySelector("th")) fail("td-has-header", e);
	}
	all("th").filter((e) => !e.scope).forEach((e) => fail("scope-attr-valid", e));
	all("th").filter((e) => !spoken(e)).forEach((e) => fail("empty-table-header", e));
	all("[role=row]").filter((e) => !e.parentElement.matches("[role=rowgroup]")).forEach((e) => fail("aria-required-parent", e));
	all("ul > :not(li), ol > :not(li)").forEach((e) => fail("list", e));
	all("dl > :not(dt, dd, div), dl > div > :not(dt, dd)").forEach((e) => fail("definition-list", e));
	for (const e of all("body *").filter(shown)) {
		if (!/auto|scroll/.test(getComputedStyle(e).overflowX) || e.scrollWidth <= e.clientWidth + 1) continue;
		if (e.tabIndex < 0 && !e.querySelector("a, button, [tabindex]")) fail("scrollable-region-focusable", e);
	}
	return {Texts: texts, Bad: [...bad]};
})()`

type access struct {
	Texts int
	Bad   []string
}

const openFolds = `document.querySelectorAll("details").forEach((d) => { d.open = true }), 1`

// Pages break no rule of accessibility that they could break, in light and dark, on a phone and at a desk, with folds
// closed and open.
func TestAccessInABrowser(t *testing.T) {
	b := newBrowser(t)
	dir := t.TempDir()
	for name, page := range browserPages(t) {
		file := filepath.Join(dir, name+".html")
		require.NoError(t, os.WriteFile(file, []byte(page), 0o644))
		for _, width := range []int{390, 1440} {
			for _, scheme := range []string{"light", "dark"} {
				what := fmt.Sprintf("%s at %d pixels, %s", name, width, scheme)
				b.open(file, width, scheme, "screen")
				var closed, open access
				b.eval(measureAccess, &closed)
				assert.Empty(t, closed.Bad, what)
				assert.Greater(t, closed.Texts, 5, what)
				b.eval(openFolds, new(int))
				b.eval(measureAccess, &open)
				assert.Empty(t, open.Bad, "%s, folds open", what)
				assert.GreaterOrEqual(t, open.Texts, closed.Texts, what)
				var l shownLayout
				b.eval(measureLayout, &l)
				assert.LessOrEqual(t, l.Scroll, l.Inner, "%s: it overflows: %q", what, l.Wide)
			}
		}
	}
	assert.Empty(t, b.bad, "what the pages logged, threw and requested")
}

// Each rule fails on a page that breaks it.
func TestAccessRulesFail(t *testing.T) {
	b := newBrowser(t)
	file := filepath.Join(t.TempDir(), "bad.html")
	require.NoError(t, os.WriteFile(file, []byte(`<!DOCTYPE html><html><head><meta name="viewport" content="maximum-scale=1"></head><body style="background:#fff">
<p style="color:#999">grey</p><svg width="9" height="9"><rect class="br" width="9" height="9" fill="#ddd"/></svg><svg role="img"></svg><img src="data:,">
<h1>a</h1><h3>b</h3><h3></h3><h1>c</h1><p><a href="#x"></a><a href="#x" style="text-decoration:none">link</a><button></button></p><details><summary></summary></details>
<details><summary>s <a href="#x">x</a></summary></details><div aria-hidden="true"><a href="#x">x</a></div><p tabindex="3">t</p><i id="d"></i><i id="d"></i>
<section></section><table><tr><th>x</th><th scope="col"></th></tr></table><table><tr><td>x</td></tr></table><div role="row"></div><ul><p>x</p></ul><dl><p>x</p></dl>
<div style="width:50px;overflow-x:auto"><p style="width:200px">wide</p></div></body></html>`), 0o644))
	b.open(file, 390, "light", "screen")
	var got access
	b.eval(measureAccess, &got)
	rules := map[string]bool{}
	for _, bad := range got.Bad {
		rule, _, _ := strings.Cut(bad, ":")
		rules[rule] = true
	}
	for _, rule := range strings.Fields(`color-contrast non-text-contrast region image-alt svg-img-alt link-name button-name summary-name link-in-text-block aria-hidden-focus
		nested-interactive tabindex empty-heading heading-order page-has-heading-one landmark-one-main document-title html-has-lang meta-viewport bypass duplicate-id landmark-unique table-name
		td-has-header scope-attr-valid empty-table-header aria-required-parent list definition-list scrollable-region-focusable`) {
		assert.True(t, rules[rule], rule)
		delete(rules, rule)
	}
	assert.Empty(t, rules, "rules that no fault is planted for")
}
