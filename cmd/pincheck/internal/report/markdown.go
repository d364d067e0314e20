package report

import (
	"io"
	"regexp"
	"strings"
)

var (
	markdownPage   = regexp.MustCompile(`\[(\w+)\]\(\w+\.md\)`) // of another finding
	markdownLink   = regexp.MustCompile(`\[([^\]]*)\]\(([^)]*)\)`)
	markdownItalic = regexp.MustCompile("`[^`]*`|\\*([^*]+)\\*") // or code, in which stars are stars
	markdownItem   = regexp.MustCompile(`^(?:- |\d+\. )`)
	markdownAdvice = regexp.MustCompile(`^(?:Do|Last resort|To confirm): `) // of a cause
)

// WriteMarkdown writes a page for a terminal: headings, paragraphs, lists and blocks of code, in lines of the
// style's width. A command of a remedy has a line of its own, another stays in one line if it fits. Words in italics
// stand for what is found on a host, and are written in angle brackets.
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
		text = markdownPage.ReplaceAllString(text[len(first):], "$1")
		text = markdownLink.ReplaceAllString(text, "$1 ($2)")
		text = markdownItalic.ReplaceAllStringFunc(text, func(marked string) string {
			if marked[0] == '*' {
				return "<" + marked[1:len(marked)-1] + ">"
			}
			return marked
		})
		lines := wrapCode(plain(text), s.width()-len(indent))
		if label := markdownAdvice.FindString(text); label != "" {
			lines = stepLines(text[len(label):], s.width()-len(indent)-len(label))
			lines[0] = label + lines[0]
		}
		for _, line := range lines {
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
	return s.write(w, b.String())
}
