// Package licenses has the licences of the code that is linked into pincheck, which must go
// with the binary. scripts/licenses.sh writes them.
package licenses

import _ "embed" // for Text

// Text is all of them, one after the other.
//
//go:embed licenses.txt
var Text string
