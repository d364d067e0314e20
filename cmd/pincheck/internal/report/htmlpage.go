package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
)

// A pageRun is what was found on one host.
type pageRun struct {
	Host    string    `json:"host"` // its name
	Tool    string    `json:"tool"`
	Started time.Time `json:"started"`
	// Warning is shown above everything, such as that the GPU was a simulated one.
	Warning  string         `json:"warning,omitempty"`
	Facts    []pageFact     `json:"facts"`             // about the machine, the most important first
	Verdict  string         `json:"verdict,omitempty"` // a word, or empty if nothing was judged
	Tone     tone           `json:"tone,omitempty"`    // of the verdict
	Reason   string         `json:"reason,omitempty"`  // of the verdict, a sentence
	Findings []pageFinding  `json:"findings"`
	Benches  []result.Bench `json:"benches"`
}

// A tone is how a verdict is shown.
type tone string

// The tones. A verdict may have none.
const (
	toneGood tone = "good"
	toneBad  tone = "bad"
)

// A pageFact is a line about the machine.
type pageFact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// A pageFinding is something that is wrong, or worth a note.
type pageFinding struct {
	ID       string   `json:"id,omitempty"`
	Severity string   `json:"severity"`
	Summary  string   `json:"summary"`
	Evidence []string `json:"evidence,omitempty"`
	Cause    string   `json:"cause,omitempty"`
	Settle   string   `json:"settle,omitempty"`
	Cost     string   `json:"cost,omitempty"`
	Remedy   string   `json:"remedy,omitempty"`
}

var (
	//go:embed page.html
	pageText string
	//go:embed style.css
	styleText string

	pageTemplate = template.Must(template.New("page").Funcs(template.FuncMap{
		"clean":    clean,
		"prose":    prose,
		"short":    func(s string) string { return shorten(clean(s), 40) },
		"duration": duration,
		"stamp":    stamp,
		"spans":    spans,
	}).Parse(pageText))
)

// writePage writes one HTML file about runs. It needs nothing else: no network and no script.
// It follows the reader's light or dark colours, fits a phone, and prints. An experiment is shown
// by its result's Views: values over a number as lines with their range, others as bars, and a
// table under each plot. Everything from results is escaped. The error is that of w; there is none
// for data of odd shapes, which is shown as far as it can be.
func writePage(w io.Writer, runs ...pageRun) error {
	p := pageData{Style: template.CSS(styleText)}
	labels := map[string]int{}
	for i, r := range runs {
		v := runView{pageRun: r, ID: fmt.Sprintf("run%d", i+1)}
		for j := range r.Benches {
			b := &r.Benches[j]
			s := section{Bench: b, ID: fmt.Sprintf("%s-%d", v.ID, j+1), Figures: figures(b)}
			for k := range s.Figures {
				s.Figures[k].TableLabel = tableLabel(labels, s.Figures[k].Title, r, len(runs) > 1)
			}
			v.Sections = append(v.Sections, s)
		}
		p.Runs = append(p.Runs, v)
	}
	var b bytes.Buffer
	if err := pageTemplate.Execute(&b, p); err != nil {
		return fmt.Errorf("report: html: %w", err)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// tableLabel names the table of a figure as a landmark, by which readers with a screen reader go through a page: each
// has a name of its own. given counts the names so far.
func tableLabel(given map[string]int, title string, r pageRun, several bool) string {
	label := "Table of " + title
	if host := shorten(clean(r.Host), 80); several && host != "" {
		label += ", " + host
	}
	given[label]++
	if n := given[label]; n > 1 {
		label += fmt.Sprintf(" (%d)", n)
	}
	return label
}

// pageData is what the template shows.
type pageData struct {
	Style template.CSS
	Runs  []runView
}

// Title is the title of the page.
func (p pageData) Title() string {
	switch {
	case len(p.Runs) == 1 && p.Runs[0].Host != "":
		title := shorten(clean(p.Runs[0].Host), 80)
		if v := clean(p.Runs[0].Verdict); v != "" {
			title += ": " + shorten(v, 80)
		}
		return title + " – pincheck"
	case len(p.Runs) > 1:
		return fmt.Sprintf("%d results – pincheck", len(p.Runs))
	}
	return "pincheck"
}

// A span is a piece of a text: prose, or the words of a command to be copied.
type span struct {
	Text string
	Code []codeWord // none for prose
}

// A codeWord is a word of a command with the blank before it.
type codeWord struct {
	Blank, Text string
	Whole       bool // may not be broken at its hyphens, and is short enough for it
}

// spans divides text at its code quotes.
func spans(text string) (out []span) {
	parts := strings.Split(clean(text), "`")
	if len(parts)%2 == 0 { // one quote has no other
		return []span{{Text: clean(text)}}
	}
	for i, part := range parts {
		switch {
		case part == "":
		case i%2 == 0:
			out = append(out, span{Text: part})
		default:
			out = append(out, span{Code: codeWords(part)})
		}
	}
	return out
}

const widestWhole = 26 // of the words of a command, so that one fits a phone

func codeWords(command string) (words []codeWord) {
	blank := ""
	for _, text := range strings.Fields(command) {
		words = append(words, codeWord{blank, text, strings.Contains(text, "-") && len(text) <= widestWhole})
		blank = " "
	}
	return words
}

// A runView is a run with what the template needs beside it.
type runView struct {
	pageRun
	ID       string
	Sections []section
}

// A section is one experiment.
type section struct {
	*result.Bench
	ID      string
	Figures []figure
}

// Lead is the first answer, and Rest are the others.
func (s section) Lead() string {
	if len(s.Answers) == 0 {
		return ""
	}
	return s.Answers[0]
}

// Rest returns the answers after the first one.
func (s section) Rest() []string {
	if len(s.Answers) < 2 {
		return nil
	}
	return s.Answers[1:]
}
