package report

import (
	"io"
	"regexp"
	"strings"
)

var (
	markdownLink   = regexp.MustCompile(`\[([^\]]*)\]\(([^)]*)\)`)
	markdownItalic = regexp.MustCompile(`\*([^*\s]+)\*`)
	markdownItem   = regexp.MustCompile(`^(?:- |\d+\. )`)
)

// WriteMarkdown writes a page for a terminal: headings, paragraphs, lists and blocks of code, in lines of the
// style's width. Words in italics stand for what is found on a host, and are written in angle brackets.
func WriteMarkdown(w io.Writer, text string, s Style) error {
	var b strings.Builder
	var paragraph []string
	flush := func() {
		if len(paragraph) == 0 {
			return
		}
		text := strings.Join(paragraph, " ")
		paragraph = nil
		first := markdownItem.FindString(text)
		indent := strings.Repeat(" ", len(first))
		text = markdownLink.ReplaceAllString(text[len(first):], "$1 ($2)")
		text = strings.ReplaceAll(markdownItalic.ReplaceAllString(text, "<$1>"), "`", "")
		for _, line := range wrap(plain(text), s.width()-len(indent)) {
			b.WriteString(first + line + "\n")
			first = indent
		}
	}
	code := false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "```"):
			flush()
			code = !code
		case code:
			b.WriteString("    " + plain(line) + "\n")
		case strings.HasPrefix(line, "#"):
			flush()
			b.WriteString(s.paint(bold, plain(strings.TrimLeft(line, "# "))) + "\n")
		case strings.TrimSpace(line) == "":
			flush()
			b.WriteByte('\n')
		default:
			if markdownItem.MatchString(line) {
				flush()
			}
			paragraph = append(paragraph, strings.TrimSpace(line))
		}
	}
	flush()
	_, err := io.WriteString(w, b.String())
	return err
}
