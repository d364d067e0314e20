// Package hosttext stores the files of a host as text, for archives of pincheck capture and for tests.
//
// A captured host is a list of entries. Text before the first is a comment.
//
//	-- proc/sys/kernel/osrelease --
//	6.8.0-45-generic
//	-- dev/nvidia0 (device) --
//	-- dev/nvidia1 (device 0660 0:44) --
//	-- dev/nvidia2 (device 0660 0:44 195) --
//	-- sys/bus/pci/devices/0000:01:00.0 -> ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0 --
package hosttext

import (
	"bytes"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing/fstest"

	"github.com/gopinned/pinned/internal/linux"
)

const (
	headerPrefix = "-- "
	closing      = " --"
	linkMark     = " -> "
)

// device matches "dev/nvidia0 (device)", and with a mode and an owner "dev/nvidia0 (device
// 0660 0:44)", and with its major number, too, "(device 0660 0:44 195)". Without these it is open to everyone.
var device = regexp.MustCompile(`^(.*) \(device(?: 0([0-7]{3}) (\d+):(\d+)(?: (\d{1,6}))?)?\)$`)

// The limits of a captured host, which may be a stranger's.
const (
	MaxEntries = 5000
	MaxPath    = 1024 // bytes of a path, and of the target of a link
	maxParts   = 64   // of a path: real ones have 15
)

// Parse reads a captured host. It stops where a limit is exceeded.
func Parse(text string) (fstest.MapFS, error) {
	host := fstest.MapFS{}
	var body *fstest.MapFile // of the entry being read; nil for those without one
	inEntry := false
	number := 0
	for line := range strings.Lines(text) {
		number++
		name, isHeader := header(line)
		if !isHeader {
			switch {
			case body != nil:
				body.Data = append(body.Data, line...)
			case inEntry && strings.TrimSpace(line) != "":
				return nil, fmt.Errorf("line %d: text below a device or a link", number)
			}
			continue
		}
		name, entry, err := parseHeader(name)
		if err == nil {
			err = checkEntry(host, name, string(entry.Data))
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		host[name], inEntry, body = entry, true, nil
		if entry.Mode.IsRegular() {
			body = entry
		}
	}
	if len(host) == 0 {
		return nil, fmt.Errorf("no entry")
	}
	return host, nil
}

// parseHeader returns the entry that a header begins, with its path.
func parseHeader(header string) (name string, entry *fstest.MapFile, err error) {
	if name, target, ok := strings.Cut(header, linkMark); ok {
		return name, &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte(target)}, nil
	}
	m := device.FindStringSubmatch(header)
	if m == nil {
		return header, &fstest.MapFile{Mode: 0o444}, nil
	}
	entry = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666}
	if m[2] == "" {
		return m[1], entry, nil
	}
	mode, _ := strconv.ParseUint(m[2], 8, 9)
	uid, errUID := strconv.Atoi(m[3])
	gid, errGID := strconv.Atoi(m[4])
	if errUID != nil || errGID != nil {
		return "", nil, fmt.Errorf("no owner: %s:%s", m[3], m[4])
	}
	entry.Mode = fs.ModeDevice | fs.ModeCharDevice | fs.FileMode(mode)
	owner := linux.Owner{UID: uid, GID: gid}
	entry.Sys = owner
	if major, err := strconv.Atoi(m[5]); err == nil && major > 0 {
		entry.Sys = linux.Device{Owner: owner, Major: major}
	}
	return m[1], entry, nil
}

// checkEntry checks the path of a host's next entry, and the target of a link.
func checkEntry(host fstest.MapFS, name, target string) error {
	switch {
	case len(host) == MaxEntries:
		return fmt.Errorf("more than %d entries", MaxEntries)
	case max(len(name), len(target)) > MaxPath:
		return fmt.Errorf("a path of %d bytes: longer than %d", max(len(name), len(target)), MaxPath)
	case max(strings.Count(name, "/"), strings.Count(target, "/")) >= maxParts:
		return fmt.Errorf("a path of more than %d parts", maxParts)
	case !fs.ValidPath(name) || name == ".":
		return fmt.Errorf("%q is not a path below the root directory", name)
	case host[name] != nil:
		return fmt.Errorf("%s comes twice", name)
	}
	return nil
}

func header(line string) (string, bool) {
	line = strings.TrimRight(line, "\n")
	if len(line) <= len(headerPrefix)+len(closing) || !strings.HasPrefix(line, headerPrefix) || !strings.HasSuffix(line, closing) {
		return "", false
	}
	return line[len(headerPrefix) : len(line)-len(closing)], true
}

// Format writes a host as Parse reads it, its entries in order of their
// names.
func Format(comment string, host fstest.MapFS) string {
	names := make([]string, 0, len(host))
	for name := range host {
		names = append(names, name)
	}
	slices.Sort(names)
	var b bytes.Buffer
	for line := range strings.Lines(comment) {
		b.WriteString(strings.TrimRight(line, "\n") + "\n")
	}
	for _, name := range names {
		entry := host[name]
		switch {
		case entry.Mode&fs.ModeSymlink != 0:
			b.WriteString(headerPrefix + name + linkMark + string(entry.Data) + closing + "\n")
		case entry.Mode&fs.ModeDevice != 0:
			mark := " (device)"
			switch device := entry.Sys.(type) {
			case linux.Owner:
				mark = fmt.Sprintf(" (device %04o %d:%d)", entry.Mode.Perm(), device.UID, device.GID)
			case linux.Device:
				mark = fmt.Sprintf(" (device %04o %d:%d %d)", entry.Mode.Perm(), device.UID, device.GID, device.Major)
			}
			b.WriteString(headerPrefix + name + mark + closing + "\n")
		default:
			b.WriteString(headerPrefix + name + closing + "\n")
			b.Write(entry.Data)
			if n := len(entry.Data); n > 0 && entry.Data[n-1] != '\n' {
				b.WriteByte('\n')
			}
		}
	}
	return b.String()
}
