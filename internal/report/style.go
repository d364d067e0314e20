package report

import (
	"io"
	"os"
)

// Style is the style of text.
type Style struct {
	Color bool
}

// StyleFor returns a style with colour for terminals only. NO_COLOR, set to anything,
// and TERM=dumb switch colour off; CLICOLOR_FORCE, set to anything but 0, switches it on
// unless NO_COLOR is set. getenv is as os.Getenv.
func StyleFor(w io.Writer, getenv func(string) string) Style {
	if getenv("NO_COLOR") != "" {
		return Style{}
	}
	if force := getenv("CLICOLOR_FORCE"); force != "" && force != "0" {
		return Style{Color: true}
	}
	return Style{Color: getenv("TERM") != "dumb" && IsTerminal(w)}
}

// IsTerminal reports whether w is a terminal (or another character device).
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

type color string

const (
	bold   color = "1"
	dim    color = "2"
	red    color = "1;31"
	green  color = "1;32"
	yellow color = "1;33"
)

func (s Style) paint(c color, text string) string {
	if !s.Color || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}
