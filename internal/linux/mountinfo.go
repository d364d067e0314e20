package linux

import (
	"io/fs"
	"path"
	"slices"
	"strings"
)

// A Mount is a line of /proc/PID/mountinfo: where a file system, or a part of one,
// can be seen.
type Mount struct {
	Device  string   // "98:0", major and minor number of the file system's device
	Root    string   // the directory of the file system that is mounted
	Point   string   // the directory where it is mounted
	Type    string   // "ext4", "cgroup2"
	Options []string // of the file system, such as "rw" and a control group's controllers
}

// ReadMounts reads the mounts that this process sees.
func ReadMounts(fsys fs.FS) ([]Mount, error) {
	return read(fsys, "proc/self/mountinfo", ParseMounts)
}

// ParseMounts parses /proc/PID/mountinfo:
// "36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/sda rw,errors=continue".
func ParseMounts(text string) ([]Mount, error) {
	return parseLines(text, "a mount, as proc(5) describes it", func(line string) (Mount, bool) {
		before, after, ok := strings.Cut(line, " - ")
		// The source may be empty, so that two spaces follow each other.
		mount, filesystem := strings.Split(before, " "), strings.Split(after, " ")
		if !ok || len(mount) < 6 || len(filesystem) < 3 || !path.IsAbs(mount[4]) {
			return Mount{}, false
		}
		return Mount{
			Device:  mount[2],
			Root:    unescape(mount[3]),
			Point:   unescape(mount[4]),
			Type:    filesystem[0],
			Options: strings.Split(filesystem[len(filesystem)-1], ","),
		}, true
	})
}

// HasOption reports whether the file system was mounted with the option.
func (m Mount) HasOption(option string) bool { return slices.Contains(m.Options, option) }

// unescape undoes the kernel's octal escapes, such as \040 for a space.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && isOctal(s[i+1]) && s[i+1] < '4' && isOctal(s[i+2]) && isOctal(s[i+3]) {
			b.WriteByte((s[i+1]-'0')<<6 | (s[i+2]-'0')<<3 | (s[i+3] - '0'))
			i += 3
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func isOctal(c byte) bool { return '0' <= c && c <= '7' }
