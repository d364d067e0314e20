package linux

import (
	"io/fs"
	"slices"
	"strconv"
	"strings"
)

// Credentials are what the kernel checks before a process may open a file.
type Credentials struct {
	UID, GID     int // those for files
	Groups       []int
	Capabilities uint64 // those in effect, a bit each
}

// Numbers of capabilities.
const (
	CapDACOverride = 1  // opens files whatever their mode
	CapSysNice     = 23 // moves pages and processes between NUMA nodes
)

// Has reports whether a capability is in effect.
func (c Credentials) Has(capability int) bool { return c.Capabilities>>capability&1 == 1 }

// MayOpen reports whether the mode and the owner of a file let a process of these
// credentials read and write it. Access control lists and security modules may say
// otherwise.
func (c Credentials) MayOpen(mode fs.FileMode, owner Owner) bool {
	const readWrite = 0o6
	if c.Has(CapDACOverride) {
		return true
	}
	bits := mode.Perm()
	switch {
	case owner.UID == c.UID:
		bits >>= 6
	case owner.GID == c.GID || slices.Contains(c.Groups, owner.GID):
		bits >>= 3
	}
	return bits&readWrite == readWrite
}

// ReadCredentials reads the credentials of this process.
func ReadCredentials(fsys fs.FS) (Credentials, error) {
	return read(fsys, "proc/self/status", ParseCredentials)
}

// ParseCredentials parses /proc/PID/status for the lines Uid, Gid, Groups and CapEff.
func ParseCredentials(text string) (Credentials, error) {
	status, err := ParseProcessStatus(text)
	if err != nil {
		return Credentials{}, err
	}
	bad := func(field, want string) error {
		return &SyntaxError{Text: field + ":\t" + status[field], Want: want}
	}
	var c Credentials
	for _, id := range []struct {
		field string
		to    *int
	}{{"Uid", &c.UID}, {"Gid", &c.GID}} {
		fields := strings.Fields(status[id.field])
		if len(fields) != 4 { // real, effective, saved, of file systems
			return Credentials{}, bad(id.field, "four numbers")
		}
		n, err := strconv.ParseUint(fields[3], 10, 32)
		if err != nil {
			return Credentials{}, bad(id.field, "four numbers")
		}
		*id.to = int(n)
	}
	for field := range strings.FieldsSeq(status["Groups"]) {
		n, err := strconv.ParseUint(field, 10, 32)
		if err != nil {
			return Credentials{}, bad("Groups", "a list of numbers")
		}
		c.Groups = append(c.Groups, int(n))
	}
	if c.Capabilities, err = strconv.ParseUint(status["CapEff"], 16, 64); err != nil {
		return Credentials{}, bad("CapEff", "a hexadecimal number")
	}
	return c, nil
}
