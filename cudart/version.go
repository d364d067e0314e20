package cudart

import (
	"fmt"

	"github.com/gopinned/pinned/internal/findlib"
)

// A Version is a CUDA version as its libraries report it: 1000 times the major
// version plus 10 times the minor one, so 13.0 is 13000 and 12.4 is 12040.
// Zero means unknown or, for a driver, absent.
type Version int

// Major returns 12 for 12.4.
func (v Version) Major() int { return int(v) / 1000 }

// Minor returns 4 for 12.4.
func (v Version) Minor() int { return int(v) % 1000 / 10 }

// String returns "12.4", or "unknown" for zero.
func (v Version) String() string {
	if v == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%d.%d", v.Major(), v.Minor())
}

// versionInName is the version of a libcudart as far as its file name contains
// it: 12.4 for libcudart.so.12.4.127, 12.0 for libcudart.so.12, 0 for
// libcudart.so. All of 11.x have the soname libcudart.so.11.0.
func versionInName(v findlib.Version) Version {
	if v.Minor > 99 {
		v.Minor = 0 // a Version has no place for it
	}
	return Version(1000*v.Major + 10*v.Minor)
}
