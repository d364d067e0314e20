package linux

import (
	"io/fs"
	"strconv"
	"strings"
)

// A Release is the version of a kernel as far as features depend on it. The zero
// Release is an unknown one, and earlier than every other.
type Release struct{ Major, Minor int }

// ReadRelease reads the release of the running kernel.
func ReadRelease(fsys fs.FS) (Release, error) {
	return read(fsys, "proc/sys/kernel/osrelease", ParseRelease)
}

// ParseRelease parses a release as uname -r prints it: "6.8.0-45-generic".
func ParseRelease(text string) (Release, error) {
	text = strings.TrimSpace(text)
	bad := &SyntaxError{Line: 1, Text: text, Want: "a kernel release, such as 6.8.0-45-generic"}
	high, rest, ok := strings.Cut(text, ".")
	if !ok {
		return Release{}, bad
	}
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(rest)
	}
	major, err := strconv.ParseUint(high, 10, 31)
	if err != nil {
		return Release{}, bad
	}
	minor, err := strconv.ParseUint(rest[:end], 10, 31)
	if err != nil {
		return Release{}, bad
	}
	return Release{int(major), int(minor)}, nil
}

// AtLeast reports whether r is major.minor or later.
func (r Release) AtLeast(major, minor int) bool {
	return r.Major > major || r.Major == major && r.Minor >= minor
}
