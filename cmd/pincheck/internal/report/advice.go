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
	for i, part := range parts {
		code := i%2 == 1
		after := len(out) > 0 && out[len(out)-1].Command != ""
		switch {
		case code && strings.Contains(part, " "):
			out = append(out, step{Command: part})
		case code:
			out = append(out, step{Code: part})
		default:
			if after { // a command has taken what ends its sentence
				part = strings.TrimLeft(part, " ,;.):")
			}
			if i+1 < len(parts) && strings.Contains(parts[i+1], " ") {
				part = strings.TrimRight(part, " (")
			}
			if i == 0 || after {
				part = capital(part)
			}
			if i+1 < len(parts) && strings.Contains(parts[i+1], " ") && !strings.HasSuffix(part, ":") && part != "" {
				part += ":"
			}
			if part != "" {
				out = append(out, step{Text: numberUnit.ReplaceAllString(part, "$1\u00a0$2")})
			}
		}
	}
	return out
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
