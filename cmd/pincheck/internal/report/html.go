package report

import (
	_ "embed"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/doctor"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

var (
	//go:embed page.html
	pageText string
	//go:embed style.css
	styleText string
)

// WriteHTML writes one HTML file about results, which needs nothing else: no network and no script. One result is
// shown in full, several as a fleet. It follows the reader's light or dark colors, fits a phone, and prints. The error
// is that of w. Data of odd shapes is no error: the page shows as much of it as it can.
func WriteHTML(w io.Writer, all ...*Result) error {
	finites := make([]*Result, len(all))
	for i, r := range all {
		finites[i] = finite(r)
	}
	var d webPage
	if len(all) == 1 {
		d = hostPage(finites[0])
	} else {
		d = fleetPage(finites)
	}
	return d.write(w)
}

// A webPage is a page: the verdict, and sections below it. Its method html renders it.
type webPage struct {
	Title    string   // of the window
	Over     []string // above the verdict: the host and the time
	Verdict  verdict
	Groups   []group // of a fleet, in the order of their severity
	Sections []block
	Foot     string
}

// add adds the sections that have something to show.
func (d *webPage) add(sections ...block) {
	for _, b := range sections {
		if len(b.Findings)+len(b.Tiles)+len(b.Figures)+len(b.Folds)+len(b.Tables)+len(b.Facts)+len(b.Texts)+len(b.Refs) > 0 {
			d.Sections = append(d.Sections, b)
		}
	}
}

// write writes the page by one call of w.Write.
func (d *webPage) write(w io.Writer) error {
	page := strings.NewReplacer("<!--title-->", string(tag("%v", d.Title)), "<!--style-->", styleText, "<!--page-->", string(d.html())).Replace(pageText)
	_, err := io.WriteString(w, page)
	return err
}

// A verdict is what a page or a fold says first.
type verdict struct {
	Tone      tone
	Word      string // such as Healthy
	Title     string // one clause
	Lede      string
	Simulated bool
}

// A tone is how good something is. A page shows it by an icon and a word, and by a color.
type tone string

// The tones, the worst first. Unclear is for runs that are incomplete, and for what was not evaluated.
const (
	bad     tone = "bad"
	warn    tone = "warn"
	unclear tone = "none"
	okay    tone = "ok"
	remark  tone = "note"
)

// toneOf returns the tone of a severity.
func toneOf(s doctor.Severity) tone {
	switch s {
	case doctor.Problem:
		return bad
	case doctor.Warning:
		return warn
	}
	return remark
}

// Word returns what a finding of this tone is.
func (t tone) Word() string {
	return map[tone]string{bad: "Problem", warn: "Warning", unclear: "Inconclusive", okay: "Healthy", remark: "Note"}[t]
}

// A block is a section of the page, or what a fold holds. Only what is set is shown, in this order.
type block struct {
	ID, Title, Sub string
	Quiet          bool // the title is for screen readers
	Deep           bool // inside a fold: its headings are one level lower
	Keep           bool // folds are printed while they are closed, too
	Tiles          []tile
	Findings       []card
	Figures        []figure
	Hosts          []group
	Tables         []sheet
	Facts          []field
	Texts          []string
	Folds          []fold
	Refs           []string
}

// A fold is closed until somebody opens it. Its answer is in its summary.
type fold struct {
	Tone          tone // shown with Word, if any
	Word          string
	Title, Answer string
	block
}

// A tile is a key figure.
type tile struct {
	Tone              tone // bad or warn, or none
	Label, Fig, Unit  string
	Meter, Tick       string // in percent; empty without a reference
	Against, More, At string // At is the number of a reference
}

// A card is a finding.
type card struct {
	ID, Name, Title   string
	Tone              tone
	Wide              bool     // the fix has a command: it takes the whole width
	Seen, More, Or    []string // More is folded
	Why, Settle, Cost string
	Do                string
}

// A figure is a plot, and the same as a table.
type figure struct {
	ID, Title, What, Desc string
	Plot                  *plot
	Table                 sheet
}

// A sheet is a table. The first Text columns are text, the others numbers.
type sheet struct {
	Caption string
	Text    int
	Head    []string
	Rows    [][]cell
}

// A cell may have more behind its text, which is muted, and links to hosts of the page.
type cell struct {
	Text, More string
	Tone       tone
	Lead       string // before the links
	Links      []link
}

type link struct{ To, Text string }

// A field is a line about the machine.
type field struct{ Name, Value string }

// prose makes a sentence of text from outside printable. No line ends between a number and its unit.
func prose(s string) string {
	return numberUnit.ReplaceAllString(strings.ReplaceAll(plain(s), " %", "%"), "$1\u00a0$2")
}

var numberUnit = regexp.MustCompile(`(\d) ([kKMGT]i?B\b|B\b|GB/s|[nµm]?s\b|min\b)`)

// words is result.Words for text from outside.
func words(s string) string { return result.Words(plain(s)) }

// labelKey formats the key of a label.
func labelKey(key string) string { return words(strings.TrimSuffix(key, "_bytes")) }

// stamp formats a time in UTC, "" for the zero time.
func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}

// percentOf formats a part of a whole in whole percent: 99%.
func percentOf(part float64) string { return units.Number(100*part, 2) + "%" }
