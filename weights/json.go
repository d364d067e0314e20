package weights

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// readJSON reads a JSON object (RFC 8259) of size bytes at an offset. encoding/json checks it,
// but would replace invalid UTF-8 and half a surrogate pair, and so make equal names of
// different ones: both are refused. The functions below rely on these checks. They show every
// key, where decoding into a map would keep the last of two equal ones.
func (s source) readJSON(what string, off, size int64) (object []byte, err error) {
	text := make([]byte, size)
	if err := s.readHeader(text, off); err != nil {
		return nil, err
	}
	if !utf8.Valid(text) {
		return nil, s.invalid("", "%s is not UTF-8", what)
	}
	if !json.Valid(text) {
		return nil, s.invalid("", "%s is not JSON: %s", what, syntaxError(text))
	}
	if at := halfSurrogate(text); at >= 0 {
		return nil, s.invalid("", "%s has half of a surrogate pair at byte %d", what, at)
	}
	text = bytes.TrimLeft(text, jsonSpace)
	return text, s.wantList("", what, text, '{')
}

const jsonSpace = " \t\r\n"

// syntaxError returns the reason and the position of the first error in JSON.
func syntaxError(text []byte) string {
	err := json.Unmarshal(text, new(json.RawMessage))
	if at, ok := err.(*json.SyntaxError); ok {
		return fmt.Sprintf("%v at byte %d", at, max(at.Offset-1, 0))
	}
	return err.Error()
}

// halfSurrogate returns the offset of an escape sequence for half of a surrogate pair, or -1.
func halfSurrogate(text []byte) int {
	for at := 0; ; {
		next := bytes.IndexByte(text[at:], '\\')
		if next < 0 {
			return -1
		}
		at += next
		switch unit := codeUnit(text[at:]); {
		case !utf16.IsSurrogate(unit):
			at += 2
		case utf16.DecodeRune(unit, codeUnit(text[at+6:])) == utf8.RuneError:
			return at
		default:
			at += 12
		}
	}
}

// codeUnit returns the UTF-16 code unit of an escape sequence \uXXXX, 0 for other text.
func codeUnit(text []byte) rune {
	if !bytes.HasPrefix(text, []byte(`\u`)) {
		return 0
	}
	unit, _ := strconv.ParseUint(string(text[2:6]), 16, 16)
	return rune(unit)
}

// wantList returns an error for a value that is not the object or array that open begins.
func (s source) wantList(tensor, what string, value []byte, open byte) error {
	switch {
	case value[0] == open:
		return nil
	case open == '[':
		return s.invalid(tensor, "%s is %s, want an array", what, describe(value))
	}
	return s.invalid(tensor, "%s is %s, want an object", what, describe(value))
}

// A jsonScanner goes through the values of an array, or the keys and values of an object.
type jsonScanner struct{ rest []byte }

func scan(list []byte) jsonScanner { return jsonScanner{list[1:]} }

// next returns the next value, or the next key. It is empty at the end.
func (j *jsonScanner) next() []byte {
	text := j.rest
	for len(text) > 0 && (text[0] <= ' ' || text[0] == ',' || text[0] == ':') {
		text = text[1:]
	}
	n := extent(text)
	j.rest = text[n:]
	return text[:n]
}

// extent returns the length of the value that text begins with, 0 at the end of a list.
func extent(text []byte) int {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
			if depth == 0 {
				return i + 1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return i
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case ' ', '\t', '\r', '\n', ',':
			if depth == 0 {
				return i
			}
		}
	}
	return len(text)
}

// unquote returns the text of a string, which may share the memory of value.
func unquote(value []byte) []byte {
	if bytes.IndexByte(value, '\\') < 0 {
		return value[1 : len(value)-1]
	}
	var text string
	_ = json.Unmarshal(value, &text) // which is valid
	return []byte(text)
}

// appendString appends a text as a JSON string.
func appendString(b []byte, text string) []byte {
	for i := range len(text) {
		if c := text[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return appendJSON(b, text)
		}
	}
	return append(append(append(b, '"'), text...), '"')
}

// appendJSON appends strings of valid UTF-8 as JSON, without the escapes for HTML.
func appendJSON(b []byte, strings any) []byte {
	text := bytes.NewBuffer(b)
	e := json.NewEncoder(text)
	e.SetEscapeHTML(false)
	_ = e.Encode(strings) // which cannot fail
	return bytes.TrimSuffix(text.Bytes(), []byte("\n"))
}

// appendInts appends numbers with commas between them.
func appendInts(b []byte, numbers ...int) []byte {
	for i, n := range numbers {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(n), 10)
	}
	return b
}

// counts appends the numbers of an array to list, which holds at most limit.
func (s source) counts(tensor, what string, value []byte, list []int, limit int) ([]int, error) {
	if err := s.wantList(tensor, what, value, '['); err != nil {
		return nil, err
	}
	j := scan(value)
	for item := j.next(); len(item) > 0; item = j.next() {
		n, err := strconv.ParseUint(string(item), 10, 63)
		if err != nil {
			return nil, s.invalid(tensor, "%s has %s, want whole numbers from 0 to %d", what, describe(item), math.MaxInt)
		}
		if len(list) == limit {
			return nil, s.invalid(tensor, "%s has more than %d numbers", what, limit)
		}
		list = append(list, int(n))
	}
	return list, nil
}

// describe returns what a value is, for an error.
func describe(value []byte) string {
	switch value[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "the string " + quote(string(unquote(value)))
	case 't', 'f', 'n':
		return string(value)
	}
	return "the number " + string(value[:min(len(value), maxQuoted)])
}
