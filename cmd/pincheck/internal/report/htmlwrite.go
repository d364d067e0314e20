package report

import (
	"fmt"
	"html"
	"strings"
)

// A markup is HTML that is whole: what tag wrote.
type markup string

// tag writes HTML with values in it. Values are escaped, for text and for attributes in double quotes, unless they are
// markup.
func tag(format string, values ...any) markup {
	for i, v := range values {
		if m, ok := v.(markup); ok {
			values[i] = string(m)
		} else {
			values[i] = html.EscapeString(strings.ReplaceAll(fmt.Sprint(v), "\x00", "\ufffd"))
		}
	}
	return markup(fmt.Sprintf(format, values...))
}

// opt is tag with one value, and nothing for the empty one.
func opt[T ~string](format string, value T) markup {
	if value == "" {
		return ""
	}
	return tag(format, value)
}

// when is markup on a condition.
func when(condition bool, m markup) markup {
	if condition {
		return m
	}
	return ""
}

// each writes the elements of a list one after the other.
func each[T any](all []T, write func(i int, v *T) markup) markup {
	var b strings.Builder
	for i := range all {
		b.WriteString(string(write(i, &all[i])))
	}
	return markup(b.String())
}

// in writes a list inside an element, and nothing for an empty list.
func in[T any](format string, all []T, write func(i int, v *T) markup) markup {
	return opt(format, each(all, write))
}

func icon(t tone) markup {
	return tag(`<svg class="ico %v" aria-hidden="true"><use href="#i-%v"/></svg>`, t, t)
}

// html is what is between the head and the foot of the file.
func (d *webPage) html() markup {
	over := each(d.Over, func(i int, e *string) markup {
		if i == 0 {
			return tag(`<span><b>%v</b></span>`, *e)
		}
		return tag(`<span>%v</span>`, *e)
	})
	v := &d.Verdict
	return tag("<header><p class=\"over\">%v</p></header>\n<main id=\"main\">\n<h1>%v<span>%v</span></h1>", over, icon(v.Tone), v.Title) +
		when(v.Simulated, "\n<p class=\"sim\">"+icon(warn)+" Simulated GPU: nothing here was measured on hardware.</p>") +
		opt("\n<p class=\"lede\">%v</p>", v.Lede) +
		in("\n<ul class=\"chips\">%v</ul>", d.Groups, func(_ int, g *group) markup {
			return tag(`<li><a href="#%v">%v %v</a></li>`, g.ID, icon(g.Tone), g.Count)
		}) +
		tag("\n<nav aria-label=\"Sections\"><ul>%v</ul></nav>", each(d.Sections, func(_ int, b *block) markup {
			return when(!b.Quiet, tag(`<li><a href="#%v">%v</a></li>`, b.ID, b.Title))
		})) +
		each(d.Sections, func(_ int, b *block) markup {
			return tag("\n<section aria-labelledby=\"%v\"%v>\n<h2 id=\"%v\"%v>%v</h2>%v%v\n</section>", b.ID, when(len(b.Folds) > 0 && !b.Keep, ` class="foldsec"`),
				b.ID, when(b.Quiet, ` class="hide"`), b.Title, opt("\n<p class=\"sub\">%v</p>", b.Sub), b.html())
		}) +
		"\n</main>\n<footer>" + opt(`<span>%v</span>`, d.Foot) + `<span class="ponly">Folds that were closed are not printed.</span></footer>`
}

func (b *block) html() markup {
	level := 3 + b2i(b.Deep) // of headings
	return tilesHTML(b.Tiles) +
		in("\n<div class=\"findings\">%v\n</div>", b.Findings, func(_ int, c *card) markup { return c.html(level) }) +
		in("\n<div class=\"plots\">%v\n</div>", b.Figures, func(_ int, f *figure) markup { return f.html() }) +
		hostsHTML(b.Hosts) +
		each(b.Tables, func(_ int, t *sheet) markup { return t.html() }) +
		in("\n<dl class=\"kv\">%v</dl>", b.Facts, func(_ int, f *field) markup { return tag(`<div><dt>%v</dt><dd>%v</dd></div>`, f.Name, f.Value) }) +
		each(b.Texts, func(_ int, t *string) markup { return tag("\n<p>%v</p>", *t) }) +
		in("\n<div class=\"folds"+string(when(b.Keep, " keep"))+"\">%v\n</div>", b.Folds, func(_ int, f *fold) markup {
			return tag("\n<details><summary><h%v>%v%v</h%v><span class=\"a\">%v</span></summary><div class=\"in\"%v>%v</div></details>", level, f.Title,
				when(f.Tone != "", tag(` <span class="%v">%v</span> <span class="mx">%v</span>`, f.Tone, icon(f.Tone), f.Word)), level, f.Answer, opt(` id="%v"`, f.ID), f.html())
		}) +
		in("\n<ol class=\"refs\">%v</ol>", b.Refs, func(i int, r *string) markup { return tag(`<li id="ref-%v">%v</li>`, i+1, *r) })
}

// shade is the classes of what a tone marks.
func shade(t tone) markup { return when(t != "", " low") + when(t == warn, " w") }

func tilesHTML(all []tile) markup {
	columns := map[int]string{4: " four", 6: " six"}[len(all)]
	return in("\n<dl class=\"tiles"+columns+"\">%v\n</dl>", all, func(_ int, t *tile) markup {
		return tag("\n<div class=\"tile%v\"><dt>%v%v</dt><dd class=\"fig\">%v%v</dd>", shade(t.Tone),
			when(t.Tone != "", tag(`%v <span class="hide">%v: </span>`, icon(t.Tone), t.Tone.Word())), t.Label, t.Fig, opt(` <small>%v</small>`, t.Unit)) +
			when(t.Meter != "", "<dd>"+t.meterHTML()+"</dd>") + opt(`<dd class="ref"><b>%v</b></dd>`, t.Against) +
			opt(`<dd class="each">%v</dd>`, opt(`%v`, t.More)+when(t.At != "", tag(` <a href="#ref-%v">[%v]</a>`, t.At, t.At))) + "</div>"
	})
}

func (t *tile) meterHTML() markup {
	return tag(`<svg class="meter" aria-hidden="true"><rect class="track" y="3" width="100%%" height="6" rx="2"/><rect class="val" y="3" width="%v" height="6" rx="2"/>%v</svg>`,
		t.Meter, when(t.Tick != "", tag(`<line class="tick" x1="%v" x2="%v" y1="0" y2="12"/>`, t.Tick, t.Tick)))
}

func (c *card) html(level int) markup {
	paragraph := func(_ int, text *string) markup { return tag(`<p>%v</p>`, prose(*text)) }
	more := in(fmt.Sprintf(`<details><summary>%d more</summary>%%v</details>`, len(c.More)), c.More, paragraph)
	confirm := in(`<p>To confirm: %v</p>`, stepsOf(c.Settle), func(_ int, s *step) markup { return opt(`%v`, s.Text) + opt(`<code>%v</code>`, s.Code+s.Command) })
	why := opt(`<p>%v</p>`, c.Why) + each(c.Or, func(_ int, or *string) markup { return tag(`<p>Or: %v</p>`, prose(*or)) }) + confirm
	return tag("\n<article class=\"finding f-%v%v\" aria-labelledby=\"%v\">\n<header><span class=\"tag %v\">%v %v</span><h%v id=\"%v\">%v</h%v>%v</header>\n<dl>",
		c.Tone, when(c.Wide, " wide"), c.ID, c.Tone, icon(c.Tone), c.Tone.Word(), level, c.ID, c.Title, level, opt(`<code class="id">%v</code>`, c.Name)) +
		opt(`<div><dt>Seen</dt><dd>%v</dd></div>`, each(c.Seen, paragraph)+more) + opt(`<div><dt>Why</dt><dd>%v</dd></div>`, why) +
		opt(`<div class="cost"><dt>Cost</dt><dd><p><b>%v</b></p></dd></div>`, c.Cost) + opt(`<div class="do"><dt>Do</dt><dd>%v</dd></div>`, adviceHTML(c.Do)) + "\n</dl></article>"
}

// adviceHTML writes paragraphs, and between them the commands.
func adviceHTML(text string) (all markup) {
	var flow markup
	for _, s := range stepsOf(text) {
		flow += opt(`%v`, s.Text) + opt(`<code>%v</code>`, s.Code)
		if s.Command != "" {
			all += opt(`<p>%v</p>`, flow) + tag(`<pre tabindex="0" role="group" aria-label="Command"><code>%v</code></pre>`, s.Command)
			flow = ""
		}
	}
	return all + opt(`<p>%v</p>`, flow)
}

func (f *figure) html() markup {
	plot, n := markup(""), len(f.Table.Rows)
	if p := f.Plot; p != nil {
		plot = tag("\n<svg class=\"plot\" style=\"--l:%vpx;--r:%vpx\" height=\"%v\" role=\"img\" aria-labelledby=\"%v-t\" aria-describedby=\"%v-d\"><title id=\"%v-t\">%v</title><desc id=\"%v-d\">%v</desc>%v</svg>",
			p.Left, p.Right, p.Height, f.ID, f.ID, f.ID, f.Title, f.ID, f.Desc, each(p.Shapes, func(_ int, s *shape) markup { return s.html() }))
	}
	table := when(n > 0, tag(`<details><summary>Table, %v row%v</summary>%v</details>`, n, when(n > 1, "s"), f.Table.html()))
	return tag("\n<figure id=\"%v\"><figcaption><h3>%v</h3><p class=\"what\">%v</p></figcaption>%v\n%v</figure>", f.ID, f.Title, f.What, plot, table)
}

// marks are the forms of the marks that are no circles.
var marks = map[string]string{"square": "M-3.6-3.6h7.2v7.2h-7.2z", "diamond": "M0-5L5 0 0 5-5 0z", "triangle": "M0-4.6L4.6 3.6H-4.6z"}

func (s *shape) html() markup {
	switch s.Kind {
	case "line":
		return tag(`<line class="%v" x1="%v" x2="%v" y1="%v" y2="%v"/>`, s.Class, s.X, s.X2, s.Y, s.Y2)
	case "text":
		return tag(`<text%v x="%v"%v y="%v"%v>%v%v</text>`, opt(` class="%v"`, s.Class), s.X, when(s.DX != "0", opt(` dx="%v"`, s.DX)), s.Y,
			opt(` text-anchor="%v"`, s.Anchor), s.Text, opt(`<tspan class="m">%v</tspan>`, s.More))
	case "rect":
		return tag(`<rect class="br %v" y="%v" width="%v" height="%v" rx="1.5"/>`, s.Class, s.Y, s.X2, s.Y2)
	case "path":
		return tag(`<svg viewBox="0 0 100 %v" preserveAspectRatio="none" width="100%%" height="%v" overflow="visible" class="%v"><polyline class="ln" vector-effect="non-scaling-stroke" points="%v"/></svg>`, s.Y, s.Y, s.Class, s.Text)
	case "circle":
		return tag(`<circle class="%v %v" cx="%v" cy="%v" r="4"/>`, s.Text, s.Class, s.X, s.Y)
	}
	return tag(`<svg class="%v" x="%v" y="%v" overflow="visible"><path class="%v" d="%v"/></svg>`, s.Class, s.X, s.Y, s.Text, marks[s.Kind])
}

func (t *sheet) html() markup {
	heads := each(t.Head, func(i int, head *string) markup {
		return tag(`<th scope="col"%v>%v</th>`, when(i < t.Text, ` class="l"`), *head)
	})
	rows := each(t.Rows, func(_ int, row *[]cell) markup {
		return "<tr>" + each(*row, func(i int, c *cell) markup {
			if i == 0 {
				return `<th scope="row">` + c.html() + "</th>"
			}
			return tag(`<td%v>%v</td>`, when(i < t.Text, ` class="l wrap"`), c.html())
		}) + "</tr>"
	})
	return tag("\n<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"Table: %v\"><table><caption>%v</caption><thead><tr>%v</tr></thead><tbody>%v</tbody></table></div>", t.Caption, t.Caption, heads, rows)
}

func (c *cell) html() markup {
	text := opt(`%v`, c.Text)
	if c.Tone != "" {
		text = tag(`<span class="%v">%v %v</span>`, c.Tone, icon(c.Tone), c.Text)
	}
	return text + opt(` <span class="mx">%v</span>`, c.More) + opt(`%v`, c.Lead) + each(c.Links, func(i int, l *link) markup {
		return tag(`%v<a href="#%v">%v</a>`, when(i > 0, ", "), l.To, l.Text)
	})
}

// hostsHTML writes the table of a fleet. Its roles are written out, because narrow pages make blocks of its rows.
func hostsHTML(groups []group) markup {
	heads := each([]string{"Host", "Verdict", "Worst finding", "To GPU, GB/s", "From GPU, GB/s"}, func(_ int, head *string) markup {
		return tag(`<th role="columnheader" scope="col" class="l">%v</th>`, *head)
	})
	return in("\n<table class=\"fleet\" role=\"table\"><thead role=\"rowgroup\"><tr role=\"row\">"+string(heads)+"</tr></thead>%v\n</table>", groups, func(_ int, g *group) markup {
		return tag("\n<tbody role=\"rowgroup\"><tr class=\"grp\" role=\"row\"><th role=\"rowheader\" colspan=\"5\" scope=\"rowgroup\" id=\"%v\"><span class=\"%v\">%v</span> %v</th></tr>%v\n</tbody>",
			g.ID, g.Tone, icon(g.Tone), g.Count, each(g.Rows, func(_ int, h *hostRow) markup { return h.html() }))
	})
}

func (h *hostRow) html() markup {
	rates := each(h.Rates[:], func(_ int, t *tile) markup {
		rate := markup(`<span class="mx">not measured</span>`)
		if t.Fig != "" {
			rate = tag(`<div class="cell%v"><b>%v</b>%v<i%v>%v</i></div>`, shade(t.Tone), t.Fig, t.meterHTML(), opt(` class="%v"`, t.Tone), t.More)
		}
		return tag(`<td role="cell" class="r" data-l="%v">%v</td>`, t.Label, rate)
	})
	return tag("\n<tr role=\"row\"%v><th role=\"rowheader\" scope=\"row\" class=\"host\"><a href=\"#%v\">%v</a></th><td role=\"cell\" class=\"l v %v\">%v %v</td><td role=\"cell\" class=\"l f\">%v%v</td>%v</tr>",
		when(h.Finding == "", ` class="quiet"`), h.ID, h.Host, h.Tone, icon(h.Tone), h.Word, h.Finding, opt(` <code>%v</code>`, h.Name), rates)
}
