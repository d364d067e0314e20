package weights

import (
	"encoding/json"
	"math"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	// maxJSONDepth bounds the stack that nested values take.
	maxJSONDepth = 1000
	// jsonWindow is the size of a read. Most headers are smaller.
	jsonWindow = 1 << 20
)

// A jsonReader reads JSON (RFC 8259) of a known structure, value by value. encoding/json
// would replace what is not UTF-8, and so make equal names of different ones, and
// take several times the time and the memory: see RATIONALE.md.
//
// After a failure, which stays in err, all methods return zero values.
type jsonReader struct {
	window
	start   int64             // offset of the JSON
	depth   int               // of the value that is being read
	text    []byte            // of the last string or scalar, until the next one
	numbers []int             // of the last array of counts, until the next one
	strings map[string]string // see intern
	tensor  string            // whose entry is being read, "" outside of one
}

// newJSONReader returns a reader of size bytes at an offset of a file.
func newJSONReader(s source, start, size int64) *jsonReader {
	return &jsonReader{window: newWindow(s, start, start+size, jsonWindow), start: start, strings: map[string]string{}}
}

func (j *jsonReader) fail(reason string, args ...any) {
	if j.err == nil { // else each level of nested values would make an error
		j.stop(j.refuse(j.tensor, reason, args...))
	}
}

// space passes white space, and returns whether a byte follows.
func (j *jsonReader) space() bool {
	for j.more() {
		for i, c := range j.ahead {
			if c != ' ' && c != '\n' && c != '\t' && c != '\r' {
				j.advance(i)
				return true
			}
		}
		j.advance(len(j.ahead))
	}
	return false
}

// next returns the next byte that is no white space, and does not pass it.
func (j *jsonReader) next() byte {
	if !j.space() {
		j.cutOff()
		return 0
	}
	return j.ahead[0]
}

// raw passes the next byte, which may be white space.
func (j *jsonReader) raw() byte {
	if !j.more() {
		j.cutOff()
		return 0
	}
	return j.advance(1)[0]
}

func (j *jsonReader) cutOff() {
	j.fail("the JSON has %d bytes and ends within a value", j.limit-j.start)
}

// is passes the next byte if it is c, and returns whether it is.
func (j *jsonReader) is(c byte) bool {
	if j.next() != c {
		return false
	}
	j.advance(1)
	return true
}

// want passes the next byte, which must be c.
func (j *jsonReader) want(c byte) {
	if !j.is(c) {
		j.unexpected(string(c))
	}
}

func (j *jsonReader) unexpected(want string) {
	if j.space() {
		j.fail("not JSON at byte %d: %q, want %s", j.pos-j.start, j.ahead[0], want)
	}
}

// end checks that nothing but white space follows.
func (j *jsonReader) end() error {
	if j.space() {
		j.fail("the JSON goes on at byte %d, after the value that it is", j.pos-j.start)
	}
	return j.err
}

// object reads an object, of which member reads each value. The key is valid until member
// reads a string or a scalar.
func (j *jsonReader) object(what string, member func(key []byte)) {
	j.list(what, '{', "an object", func() {
		key := j.str()
		j.want(':')
		if j.err == nil {
			member(key)
		}
	})
}

// array reads an array, of which item reads each value.
func (j *jsonReader) array(what string, item func()) { j.list(what, '[', "an array", item) }

func (j *jsonReader) list(what string, open byte, kind string, item func()) {
	if j.next() != open {
		j.fail("%s is %s, want %s", what, j.found(), kind)
		return
	}
	j.advance(1)
	if j.depth++; j.depth > maxJSONDepth {
		j.fail("values are nested more than %d levels deep", maxJSONDepth)
	}
	if end := open + 2; !j.is(end) { // { and }, [ and ] are two apart in ASCII
		for item(); j.is(','); item() {
		}
		j.want(end)
	}
	j.depth--
}

// str reads a string, which is valid until the next string or scalar is read.
func (j *jsonReader) str() []byte {
	j.want('"')
	j.text = j.text[:0]
	for j.more() {
		n := 0
		for n < len(j.ahead) && j.ahead[n] != '"' && j.ahead[n] != '\\' && j.ahead[n] >= ' ' {
			n++
		}
		j.text = append(j.text, j.advance(n)...)
		if len(j.ahead) == 0 {
			continue
		}
		switch c := j.advance(1)[0]; c {
		case '"':
			if !utf8.Valid(j.text) {
				j.fail("the JSON is not UTF-8")
			}
			return j.text
		case '\\':
			j.escape()
		default:
			j.fail("not JSON at byte %d: %q in a string", j.pos-1-j.start, c)
		}
	}
	j.cutOff()
	return nil
}

// escape reads an escape sequence after its backslash.
func (j *jsonReader) escape() {
	switch c := j.raw(); c {
	case '"', '\\', '/':
		j.text = append(j.text, c)
	case 'b':
		j.text = append(j.text, '\b')
	case 'f':
		j.text = append(j.text, '\f')
	case 'n':
		j.text = append(j.text, '\n')
	case 'r':
		j.text = append(j.text, '\r')
	case 't':
		j.text = append(j.text, '\t')
	case 'u':
		r := j.hex()
		if utf16.IsSurrogate(r) {
			var low rune
			if j.raw() == '\\' && j.raw() == 'u' {
				low = j.hex()
			}
			if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
				j.fail("half of a surrogate pair before byte %d", j.pos-j.start)
			}
		}
		j.text = utf8.AppendRune(j.text, r)
	default:
		j.fail("not JSON at byte %d: the escape sequence \\%q", j.pos-1-j.start, c)
	}
}

// hex reads four hexadecimal digits.
func (j *jsonReader) hex() (r rune) {
	for range 4 {
		c := j.raw()
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			c = (c | 0x20) - 'a' + 10
		default:
			j.fail("not JSON at byte %d: %q, want a hexadecimal digit", j.pos-1-j.start, c)
		}
		r = r<<4 | rune(c)
	}
	return r
}

// strOf reads a string that is the value of something.
func (j *jsonReader) strOf(what func() string) []byte {
	if j.next() != '"' {
		j.fail("%s is %s, want a string", what(), j.found())
	}
	return j.str()
}

// intern returns a string of its own for text, the same for equal ones.
func (j *jsonReader) intern(text []byte) string {
	s, ok := j.strings[string(text)]
	if !ok {
		s = string(text)
		j.strings[s] = s
	}
	return s
}

// scalar reads a number, true, false or null, which is valid until the next string or
// scalar is read.
func (j *jsonReader) scalar() []byte {
	j.text = j.text[:0]
	count := true // digits alone, the first no zero that stands before others
	for j.more() {
		n := 0
		for ; n < len(j.ahead); n++ {
			c := j.ahead[n]
			digit := c >= '0' && c <= '9'
			if !digit && c != '+' && c != '-' && c != '.' && (c|0x20 < 'a' || c|0x20 > 'z') {
				break
			}
			count = count && digit
		}
		j.text = append(j.text, j.advance(n)...)
		if len(j.ahead) > 0 {
			break
		}
	}
	switch {
	case len(j.text) == 0:
		j.unexpected("a value")
	case (!count || len(j.text) > 1 && j.text[0] == '0') && !json.Valid(j.text):
		j.fail("not JSON at byte %d: %s", j.pos-j.start-int64(len(j.text)), cut(j.text))
	}
	return j.text
}

// counts reads an array of up to limit whole numbers from 0 to the largest int. They are
// valid until the next such array is read.
func (j *jsonReader) counts(what string, limit int) []int {
	j.numbers = j.numbers[:0]
	j.array(what, func() {
		if len(j.numbers) == limit {
			j.fail("%s has more than %d numbers", what, limit)
		}
		if c := j.next(); c >= '0' && c <= '9' {
			n, err := strconv.ParseUint(string(j.scalar()), 10, 63)
			if err == nil {
				j.numbers = append(j.numbers, int(n))
				return
			}
			j.fail("%s has %s, want whole numbers from 0 to %d", what, describe(j.text), math.MaxInt)
		}
		j.fail("%s has %s, want whole numbers from 0 to %d", what, j.found(), math.MaxInt)
	})
	return j.numbers
}

// found reads a value, of an object or an array nothing, and says what it is.
func (j *jsonReader) found() string {
	switch j.next() {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "the string " + quote(string(j.str()))
	}
	return describe(j.scalar())
}

// describe says what a scalar is.
func describe(scalar []byte) string {
	if len(scalar) > 0 && scalar[0] >= 'a' {
		return string(scalar)
	}
	return "the number " + cut(scalar)
}

// skip reads over a value.
func (j *jsonReader) skip() {
	switch j.next() {
	case '{':
		j.object("", func([]byte) { j.skip() })
	case '[':
		j.array("", j.skip)
	case '"':
		j.str()
	default:
		j.scalar()
	}
}

// cut shortens a scalar for an error.
func cut(scalar []byte) string { return string(scalar[:min(len(scalar), maxQuoted)]) }
