package cudart

import "fmt"

// A Version is a CUDA version as its libraries give it: 1000 times the major
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
