// Package jsonlimit refuses JSON of strangers that would take far more memory than its text.
package jsonlimit

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Limits bound what a JSON text may become.
type Limits struct {
	Depth  int // of objects and lists in each other
	Nested int // objects and lists
	Values int // of any kind, but names of members
}

// Check counts the values of a JSON text without decoding it, and then returns whether it is JSON. Its time
// and memory do not depend on what is in the text.
func (l Limits) Check(text []byte) error {
	depth, nested, values := 0, 0, 0
	inString := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{', c == '[':
			depth++
			nested++
		case c == '}', c == ']':
			depth--
		case c == ',':
			values++
		}
		switch {
		case depth > l.Depth:
			return fmt.Errorf("is nested deeper than %d", l.Depth)
		case nested > l.Nested:
			return fmt.Errorf("has more than %d objects and lists", l.Nested)
		case values+nested > l.Values:
			return fmt.Errorf("has more than %d values", l.Values)
		}
	}
	if !json.Valid(text) {
		return errors.New("is no JSON")
	}
	return nil
}
