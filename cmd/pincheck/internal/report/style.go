package report

import (
	"cmp"
	"io"
	"os"
	"strings"
	"unicode"

	"golang.org/x/term"
)

// Style is the style of text.
type Style struct {
	Color   bool
	Width   int  // in columns; 0 means 80
	Verbose bool // all that there is, not only the answer and a table of each thing
	ASCII   bool // no other characters: bars of # and us for microseconds
}

const (
	defaultWidth = 80
	narrowest    = 40  // below this lines are longer than the width
	widest       = 120 // longer lines are hard to read
)

// StyleFor returns a style with colour for terminals only, and of the terminal's width.
// NO_COLOR, set to anything, and TERM=dumb switch colour off; CLICOLOR_FORCE, set to
// anything but 0, switches it on unless NO_COLOR is set. getenv is as os.Getenv.
func StyleFor(w io.Writer, getenv func(string) string) Style {
	s := Style{Width: Width(w), ASCII: !hasUTF8(getenv)}
	if getenv("NO_COLOR") != "" {
		return s
	}
	force := getenv("CLICOLOR_FORCE")
	s.Color = force != "" && force != "0" || getenv("TERM") != "dumb" && IsTerminal(w)
	return s
}

// hasUTF8 reports whether the locale has UTF-8. Without a locale it is taken to, as containers have none.
func hasUTF8(getenv func(string) string) bool {
	locale := cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG"))
	charset := strings.ReplaceAll(strings.ToLower(locale), "-", "")
	return locale == "" || strings.Contains(charset, "utf8")
}

// asciiForms are one character each, so that columns stay.
var asciiForms = strings.NewReplacer("µ", "u", "…", "~", "–", "-", "×", "x", "·", ".", "±", "+", "\u00a0", " ",
	"█", "#", "▉", "#", "▊", "#", "▋", "#", "▌", "#", "▍", " ", "▎", " ", "▏", " ", "▇", "#", "▆", "#", "▅", "=", "▄", "=", "▃", "-", "▂", "-", "▁", "_")

// characters returns text in the characters of the style.
func (s Style) characters(text string) string {
	if !s.ASCII {
		return text
	}
	return strings.Map(func(r rune) rune {
		if r > unicode.MaxASCII {
			return '?'
		}
		return r
	}, asciiForms.Replace(text))
}

// write writes text in the characters of the style.
func (s Style) write(w io.Writer, text string) error {
	_, err := io.WriteString(w, s.characters(text))
	return err
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Width returns the width of a terminal in columns, 80 for anything else.
func Width(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			return width
		}
	}
	return defaultWidth
}

// width returns the width of the text in columns.
func (s Style) width() int {
	if s.Width == 0 {
		return defaultWidth
	}
	return min(max(s.Width, narrowest), widest)
}

// An ansiColor is the parameters of an SGR escape sequence.
type ansiColor string

const (
	bold   ansiColor = "1"
	dim    ansiColor = "2"
	red    ansiColor = "1;31"
	green  ansiColor = "1;32"
	yellow ansiColor = "1;33"
)

// paint puts text between escape sequences of a color, if it is one and colors are on.
func (s Style) paint(c ansiColor, text string) string {
	if !s.Color || text == "" || c == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}
