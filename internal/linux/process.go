package linux

import (
	"fmt"
	"io/fs"
	"strings"
)

// ProcessStatus is the fields of /proc/PID/status by name, such as "VmRSS" and
// "1668 kB". Which there are depends on the kernel, and on the process: kernel threads
// and processes that have ended have no sizes.
type ProcessStatus map[string]string

// ReadProcessStatus reads /proc/PID/status, which any user may. The error wraps
// fs.ErrNotExist if there is no such process.
func ReadProcessStatus(fsys fs.FS, pid int) (ProcessStatus, error) {
	return read(fsys, fmt.Sprintf("proc/%d/status", pid), ParseProcessStatus)
}

// ParseProcessStatus parses /proc/PID/status.
func ParseProcessStatus(text string) (ProcessStatus, error) {
	return parseFields[ProcessStatus](text, `"Name: value"`, func(line string) (name, value string, ok bool) {
		name, value, ok = strings.Cut(line, ":")
		return name, strings.TrimSpace(value), ok
	})
}

// Size returns a field in bytes, and whether the process has it.
func (s ProcessStatus) Size(field string) (bytes int, ok bool) {
	digits, ok := strings.CutSuffix(s[field], " kB")
	if !ok {
		return 0, false
	}
	return parseSize(digits, 1<<10)
}

// Ended reports whether the process has ended, and only its parent keeps it in the
// list (a zombie).
func (s ProcessStatus) Ended() bool {
	state := s["State"]
	return strings.HasPrefix(state, "Z") || strings.HasPrefix(state, "X")
}

// ReadProcessEnviron reads the environment that a process was started with
// (/proc/PID/environ), which needs the permission that ReadProcessSMaps does.
func ReadProcessEnviron(fsys fs.FS, pid int) ([]string, error) {
	return read(fsys, fmt.Sprintf("proc/%d/environ", pid), func(text string) ([]string, error) {
		return strings.FieldsFunc(text, func(r rune) bool { return r == 0 }), nil
	})
}
