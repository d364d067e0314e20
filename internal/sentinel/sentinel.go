// Package sentinel makes the packages' exported errors: values to compare with,
// which errors.Is also finds equal to the standard library's error of the same
// meaning, without taking over its text.
package sentinel

import "errors"

// New returns an error with the given text for which errors.Is reports true
// when asked for general, such as os.ErrClosed or errors.ErrUnsupported.
func New(text string, general error) error { return &sentinel{text, general} }

type sentinel struct {
	text    string
	general error
}

func (s *sentinel) Error() string { return s.text }

func (s *sentinel) Is(target error) bool { return errors.Is(s.general, target) }
