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
		inEntry = true
		entry := &fstest.MapFile{Mode: 0o444}
		body = entry
		if path, target, ok := strings.Cut(name, linkMark); ok {
			name, body = path, nil
			entry.Mode, entry.Data = fs.ModeSymlink|0o777, []byte(target)
		} else if m := device.FindStringSubmatch(name); m != nil {
			name, body = m[1], nil
			entry.Mode = fs.ModeDevice | fs.ModeCharDevice | 0o666
			if m[2] != "" {
				mode, _ := strconv.ParseUint(m[2], 8, 9)
				uid, errUID := strconv.Atoi(m[3])
				gid, errGID := strconv.Atoi(m[4])
				if errUID != nil || errGID != nil {
					return nil, fmt.Errorf("line %d: no owner: %s:%s", number, m[3], m[4])
				}
				entry.Mode = fs.ModeDevice | fs.ModeCharDevice | fs.FileMode(mode)
				owner := linux.Owner{UID: uid, GID: gid}
				entry.Sys = owner
				if major, err := strconv.Atoi(m[5]); err == nil && major > 0 {
					entry.Sys = linux.Device{Owner: owner, Major: major}
				}
			}
		}
		switch target := string(entry.Data); {
		case len(host) == MaxEntries:
			return nil, fmt.Errorf("line %d: more than %d entries", number, MaxEntries)
		case len(name) > MaxPath || len(target) > MaxPath:
			return nil, fmt.Errorf("line %d: a path of %d bytes: longer than %d", number, max(len(name), len(target)), MaxPath)
		case strings.Count(name, "/") >= maxParts || strings.Count(target, "/") >= maxParts:
			return nil, fmt.Errorf("line %d: a path of more than %d parts", number, maxParts)
		}
		if !fs.ValidPath(name) || name == "." {
			return nil, fmt.Errorf("line %d: %q is not a path below the root directory", number, name)
		}
		if _, twice := host[name]; twice {
			return nil, fmt.Errorf("line %d: %s comes twice", number, name)
		}
		host[name] = entry
	}
	if len(host) == 0 {
		return nil, fmt.Errorf("no entry")
	}
	return host, nil
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
