package hostinfo

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/gopinned/pinned/internal/linux"
)

// Limit is a number of bytes (or pages, where a field says so) that may be
// unknown or unlimited. Its JSON is null, "unlimited" or the number.
type Limit struct {
	Known     bool
	Unlimited bool
	N         int // meaningful when Known and not Unlimited
}

// limitOf is a known limit of n; linux.NoLimit is a known absence of one.
func limitOf(n int) Limit {
	if n == linux.NoLimit {
		return unlimited()
	}
	return Limit{Known: true, N: n}
}

// unlimited is a known absence of a limit.
func unlimited() Limit { return Limit{Known: true, Unlimited: true} }

// Finite reports the number, and whether there is one.
func (l Limit) Finite() (int, bool) { return l.N, l.Known && !l.Unlimited }

// MarshalJSON writes null, "unlimited" or the number.
func (l Limit) MarshalJSON() ([]byte, error) {
	switch {
	case !l.Known:
		return []byte("null"), nil
	case l.Unlimited:
		return []byte(`"unlimited"`), nil
	}
	return strconv.AppendInt(nil, int64(l.N), 10), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (l *Limit) UnmarshalJSON(b []byte) error {
	switch b = bytes.TrimSpace(b); {
	case bytes.Equal(b, []byte("null")):
		*l = Limit{}
		return nil
	case bytes.Equal(b, []byte(`"unlimited"`)):
		*l = unlimited()
		return nil
	}
	var n int
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	*l = limitOf(n)
	return nil
}

// parseLimit reads a number or "unlimited", as /proc/PID/limits has it.
func parseLimit(s string) Limit {
	if s == "unlimited" {
		return unlimited()
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return Limit{}
	}
	return limitOf(int(min(n, linux.NoLimit))) // what this process could not address is no limit
}
