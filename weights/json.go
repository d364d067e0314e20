package weights

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"strconv"
	"unicode/utf8"
)

// A jsonReader reads JSON of a known structure, token by token. Decoding it
// into maps would keep one of two equal keys and not report the other.
type jsonReader struct {
	source
	dec    *json.Decoder
	length int    // of the text in bytes
	tensor string // whose entry is being read, "" outside of one
}

// newJSONReader refuses text that is not UTF-8: encoding/json would replace the
// bytes at fault, and make equal names of different ones.
func newJSONReader(s source, text []byte) (*jsonReader, error) {
	if !utf8.Valid(text) {
		return nil, s.refuse("", "the JSON is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	return &jsonReader{source: s, dec: dec, length: len(text)}, nil
}

func (j *jsonReader) fail(reason string, args ...any) error {
	return j.refuse(j.tensor, reason, args...)
}

// token returns the next token. Commas and colons are checked and left out.
func (j *jsonReader) token() (json.Token, error) {
	tok, err := j.dec.Token()
	switch err {
	case nil:
		return tok, nil
	case io.EOF, io.ErrUnexpectedEOF:
		return nil, j.fail("the JSON has %d bytes and ends within a value", j.length)
	}
	return nil, j.fail("not JSON at byte %d: %v", j.dec.InputOffset(), err)
}

// end checks that nothing but white space follows.
func (j *jsonReader) end() error {
	if _, err := j.dec.Token(); err != io.EOF {
		return j.fail("the JSON goes on at byte %d, after the value that it is", j.dec.InputOffset())
	}
	return nil
}

// object reads an object, of which member reads each value. A key that appears
// twice is refused.
func (j *jsonReader) object(what string, member func(key string) error) error {
	if err := j.open(what, '{', "an object"); err != nil {
		return err
	}
	return j.members(what, member)
}

// objectOrNull is object for a value that may be null, which has no members.
func (j *jsonReader) objectOrNull(what string, member func(key string) error) error {
	tok, err := j.token()
	switch {
	case err != nil || tok == nil:
		return err
	case tok != json.Delim('{'):
		return j.fail("%s is %s, want an object", what, describe(tok))
	}
	return j.members(what, member)
}

// members reads an object after its brace.
func (j *jsonReader) members(what string, member func(key string) error) error {
	seen := map[string]struct{}{}
	for j.dec.More() {
		tok, err := j.token()
		if err != nil {
			return err
		}
		key, _ := tok.(string) // the Decoder refuses all others
		if _, twice := seen[key]; twice {
			return j.fail("%s has the key %s twice", what, quote(key))
		}
		seen[key] = struct{}{}
		if err := member(key); err != nil {
			return err
		}
	}
	_, err := j.token()
	return err
}

// array reads an array, of which item reads each value.
func (j *jsonReader) array(what string, item func() error) error {
	if err := j.open(what, '[', "an array"); err != nil {
		return err
	}
	for j.dec.More() {
		if err := item(); err != nil {
			return err
		}
	}
	_, err := j.token()
	return err
}

func (j *jsonReader) open(what string, delim json.Delim, want string) error {
	tok, err := j.token()
	if err == nil && tok != delim {
		err = j.fail("%s is %s, want %s", what, describe(tok), want)
	}
	return err
}

func (j *jsonReader) str(what string) (string, error) {
	tok, err := j.token()
	if err != nil {
		return "", err
	}
	s, ok := tok.(string)
	if !ok {
		return "", j.fail("%s is %s, want a string", what, describe(tok))
	}
	return s, nil
}

// count reads a whole number from 0 to the largest int, a value of what.
func (j *jsonReader) count(what string) (int, error) {
	tok, err := j.token()
	if err != nil {
		return 0, err
	}
	if text, ok := tok.(json.Number); ok {
		if n, err := strconv.ParseUint(text.String(), 10, 64); err == nil && n <= math.MaxInt {
			return int(n), nil
		}
	}
	return 0, j.fail("%s has %s, want whole numbers from 0 to %d", what, describe(tok), math.MaxInt)
}

// describe says what a token is, for errors.
func describe(tok json.Token) string {
	switch tok := tok.(type) {
	case json.Delim:
		if tok == '{' {
			return "an object"
		}
		return "an array"
	case string:
		return "the string " + quote(tok)
	case json.Number:
		return "the number " + tok.String()[:min(len(tok), mostQuoted)]
	case bool:
		return strconv.FormatBool(tok)
	}
	return "null"
}
