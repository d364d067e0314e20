// Package printable renders text from outside: names, paths and errors of hosts, drivers, archives and
// users, which may contain anything. What it returns moves no cursor, changes no colour or title,
// writes no clipboard and turns no text around. All that pincheck shows of such text goes through it.
package printable

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// replacement stands for a character that is not printed.
const replacement = '?'

// Line makes one line: space of any kind becomes one space, and what is not printable "?". Not
// printable are control characters, those that set the direction of text, and other invisible ones.
func Line(s string) string {
	return strings.Join(strings.FieldsFunc(strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return ' '
		}
		return shown(r)
	}, s), func(r rune) bool { return r == ' ' }), " ")
}

// Text is Line for text of several lines: line feeds, tabs and runs of spaces stay.
func Text(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		return shown(r)
	}, s)
}

func shown(r rune) rune {
	if !unicode.IsPrint(r) {
		return replacement
	}
	return r
}

// JSON returns a JSON text in which strings have escapes instead of what is not printable: the
// values stay as they are. encoding/json escapes only some of it.
func JSON(text []byte) []byte {
	if bytes.IndexFunc(text, escaped) < 0 {
		return text
	}
	out := make([]byte, 0, len(text)+len(text)/8)
	for rest := text; len(rest) > 0; {
		r, size := utf8.DecodeRune(rest)
		switch high, low := utf16.EncodeRune(r); {
		case !escaped(r):
			out = append(out, rest[:size]...)
		case high != unicode.ReplacementChar:
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		rest = rest[size:]
	}
	return out
}

// escaped reports whether JSON has an escape instead of a character. Those up to the space are
// escaped already inside of strings, and outside they are layout.
func escaped(r rune) bool { return r > ' ' && !unicode.IsPrint(r) || r == utf8.RuneError }
