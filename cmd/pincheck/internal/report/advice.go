package report

import "strings"

// A step is a piece of advice: prose, code in it, or a command to copy.
type step struct{ Text, Code, Command string }

// stepsOf divides advice at its code quotes. Code with a space in it is a command, which stands alone.
func stepsOf(text string) (out []step) {
	parts := strings.Split(plain(text), "`")
	if len(parts)%2 == 0 { // one quote has no other
		return []step{{Text: capital(prose(text))}}
	}
	command := func(i int) bool { return i%2 == 1 && i < len(parts) && strings.Contains(parts[i], " ") }
	for i, part := range parts {
		if command(i) {
			out = append(out, step{Command: part})
		} else if i%2 == 1 {
			out = append(out, step{Code: part})
		} else if part = between(part, i == 0, i > 0 && command(i-1), command(i+1)); part != "" {
			out = append(out, step{Text: numberUnit.ReplaceAllString(part, "$1\u00a0$2")})
		}
	}
	return out
}

// between makes prose of what is between code. A command has taken what ends its sentence, and begins a new one.
func between(text string, first, after, before bool) string {
	if after {
		text = strings.TrimLeft(text, " ,;.):")
	}
	if before {
		text = strings.TrimRight(text, " (")
	}
	if first || after {
		text = capital(text)
	}
	if before && text != "" && !strings.HasSuffix(text, ":") {
		text += ":"
	}
	return text
}

// sentence gives a clause a capital and a full stop.
func sentence(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	s = capital(s)
	if strings.ContainsAny(s[len(s)-1:], ".!?:") {
		return s
	}
	return s + "."
}

// sentences are texts as sentences.
func sentences(texts []string) (out []string) {
	for _, text := range texts {
		out = append(out, sentence(text))
	}
	return out
}

// capital gives a text a capital, unless its first word has one inside it or is a name with digits or signs.
func capital(s string) string {
	word, _, _ := strings.Cut(s, " ")
	if word == "" || strings.ToLower(word) != word || strings.ContainsAny(word, "_./()0123456789") ||
		strings.HasPrefix(word, "cuda") || strings.HasPrefix(word, "lib") || strings.HasPrefix(word, "nvidia") {
		return s
	}
	first := []rune(s)
	return strings.ToUpper(string(first[:1])) + string(first[1:])
}

// stepLines lays out advice. A command has a line of its own, and is not wrapped, so that it can be copied.
func stepLines(text string, width int) []string { return codeLines(stepsOf(text), width) }

// wrapCode lays out text with code in code quotes, which it removes: code that fits in a line stays in one.
func wrapCode(text string, width int) []string {
	parts := strings.Split(text, "`")
	if len(parts)%2 == 0 {
		return wrap(text, width)
	}
	var steps []step
	for i, part := range parts {
		steps = append(steps, []step{{Text: part}, {Code: part}}[i%2])
	}
	return codeLines(steps, width)
}

// codeLines wraps text around commands, and around code that fits in a line.
func codeLines(steps []step, width int) (lines []string) {
	const blank = "\x00" // of code; printable text has none
	flow := ""
	flush := func() {
		if strings.TrimSpace(flow) != "" {
			for _, line := range wrap(flow, width) {
				lines = append(lines, strings.ReplaceAll(line, blank, " "))
			}
		}
		flow = ""
	}
	for _, s := range steps {
		if s.Command != "" {
			flush()
			lines = append(lines, "  "+s.Command)
			continue
		}
		if len([]rune(s.Code))+2 <= width { // with what stands around it
			s.Code = strings.ReplaceAll(s.Code, " ", blank)
		}
		flow += s.Text + s.Code
	}
	flush()
	return lines
}
