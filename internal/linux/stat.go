package linux

import (
	"io/fs"
	"strconv"
	"strings"
	"time"
)

// CPUTime has the times of all CPUs of the host since its start, summed.
type CPUTime struct {
	CPUs int           // that are online
	Busy time.Duration // for programs and the kernel, and taken by the hypervisor
	Idle time.Duration // also while disks are waited for
}

// ReadCPUTime reads /proc/stat. It describes the host, also in a container.
func ReadCPUTime(fsys fs.FS) (CPUTime, error) { return read(fsys, "proc/stat", ParseCPUTime) }

// userTick is the unit of times that the kernel shows to programs (USER_HZ), on all
// architectures that this module is for.
const userTick = 10 * time.Millisecond

// ParseCPUTime parses /proc/stat.
func ParseCPUTime(text string) (CPUTime, error) {
	var t CPUTime
	found := false
	number := 0
	for line := range strings.Lines(text) {
		number++
		name, values, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		digits, cpu := strings.CutPrefix(name, "cpu")
		if !cpu {
			continue
		}
		if digits != "" {
			t.CPUs++
			continue
		}
		// user nice system idle iowait irq softirq steal; guests are in user and nice.
		for i, field := range strings.Fields(values) {
			ticks, err := strconv.ParseInt(field, 10, 64)
			if err != nil || ticks < 0 || ticks > int64(1<<62/userTick) {
				return CPUTime{}, &SyntaxError{Line: number, Text: line, Want: `"cpu" and numbers`}
			}
			switch d := time.Duration(ticks) * userTick; i {
			case 3, 4:
				found = true
				t.Idle += d
			case 0, 1, 2, 5, 6, 7:
				t.Busy += d
			}
		}
	}
	if !found {
		return CPUTime{}, &SyntaxError{Line: number, Want: `a line "cpu"`}
	}
	return t, nil
}
