package weights

import (
	"fmt"
	"strconv"
)

// A FormatError reports a file that was refused: its header contradicts itself,
// the format's rules, or the size of the file. A failure to read is an error of
// the reader and no FormatError.
type FormatError struct {
	File   string // as named to OpenFile, OpenModel or Parse
	Tensor string // the tensor at fault, "" where it is none
	Reason string // what was found, and what was expected
}

// Error names the file, the tensor if there is one, and the reason.
func (e *FormatError) Error() string {
	switch {
	case e == nil:
		return "<nil>"
	case e.Tensor == "":
		return fmt.Sprintf("weights: read %s: %s", e.File, e.Reason)
	}
	return fmt.Sprintf("weights: read %s: tensor %s: %s", e.File, quote(e.Tensor), e.Reason)
}

// quote shortens and quotes a string of a file for an error: the string may have any length,
// and control characters.
func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.Quote(s[:maxQuoted]) + "..."
	}
	return strconv.Quote(s)
}

const maxQuoted = 120
