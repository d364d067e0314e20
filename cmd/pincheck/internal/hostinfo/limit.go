package hostinfo

import (
	"encoding/json"
	"strconv"

	"github.com/gopinned/pinned/internal/linux"
)

// Limit is a number of bytes (or pages, if the field says so) that may be unknown or
// unlimited. Its JSON is the number, -1 for unlimited, null for unknown.
type Limit struct {
	Known     bool
	Unlimited bool
	N         int // if Known and not Unlimited
}

// limitOf returns a known limit of n, or no limit for linux.NoLimit.
func limitOf(n int) Limit {
	if n == linux.NoLimit {
		return unlimited()
	}
	return Limit{Known: true, N: n}
}

// unlimited returns that there is known to be no limit.
func unlimited() Limit { return Limit{Known: true, Unlimited: true} }

// Finite returns the number, and whether there is one.
func (l Limit) Finite() (int, bool) { return l.N, l.Known && !l.Unlimited }

// MarshalJSON writes the number, -1 for unlimited or null for unknown.
func (l Limit) MarshalJSON() ([]byte, error) {
	switch {
	case !l.Known:
		return []byte("null"), nil
	case l.Unlimited:
		return []byte("-1"), nil
	}
	return strconv.AppendInt(nil, int64(l.N), 10), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (l *Limit) UnmarshalJSON(b []byte) error {
	var n *int
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	switch {
	case n == nil:
		*l = Limit{}
	case *n == -1:
		*l = unlimited()
	default:
		*l = limitOf(*n)
	}
	return nil
}

// parseLimit parses a number or "unlimited", as in /proc/PID/limits.
func parseLimit(s string) Limit {
	if s == "unlimited" {
		return unlimited()
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return Limit{}
	}
	return limitOf(int(min(n, linux.NoLimit))) // more than an address space is no limit
}
