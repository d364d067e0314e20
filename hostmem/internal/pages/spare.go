package pages

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
)

// Room is what one authority lets the process use.
type Room struct {
	Total     int // bytes in all: the host's memory, or a cgroup's limit
	Available int // bytes still to be had: free, or cached from files
	// Source names the numbers: "/proc/meminfo MemAvailable",
	// "/sys/fs/cgroup/job memory.max".
	Source string
}

// String is "3.1 of 8.0 GiB (/proc/meminfo MemAvailable)".
func (r Room) String() string {
	const gib = 1 << 30
	return fmt.Sprintf("%.1f of %.1f GiB (%s)", float64(r.Available)/gib, float64(r.Total)/gib, r.Source)
}

// Spare is what host and cgroup can spare for memory that cannot be swapped.
type Spare struct {
	// Host is the machine's memory. Some virtual machines are given memory only as
	// they use it: there Total grows later, and Available understates.
	Host Room
	// Cgroup is the tightest limit on the way from the process's cgroup up; its
	// Source is empty where no limit was found.
	Cgroup Room
}

// Least is the tighter of the two.
func (s Spare) Least() Room {
	if s.Cgroup.Source != "" && s.Cgroup.Available < s.Host.Available {
		return s.Cgroup
	}
	return s.Host
}

// ReadSpare reads /proc and the cgroup file systems, version 1 and 2, below
// files, which is os.DirFS("/") outside tests. The error tells what of the host's
// numbers is missing; an unreadable cgroup counts as no limit, for there is
// nothing to compare with.
func ReadSpare(files fs.FS) (Spare, error) {
	total, available, err := parseMeminfo(readFile(files, "proc/meminfo"))
	if err != nil {
		return Spare{}, fmt.Errorf("pages: memory to spare: /proc/meminfo: %w", err)
	}
	s := Spare{Host: Room{Total: total, Available: available, Source: "/proc/meminfo MemAvailable"}}
	mounts := parseMounts(readFile(files, "proc/self/mountinfo"))
	for _, member := range parseMembership(readFile(files, "proc/self/cgroup")) {
		for _, m := range mounts {
			if m.v2 != member.v2 {
				continue
			}
			for _, folder := range m.ways(files, member.path) {
				s.tighten(readRooms(files, folder, m.v2))
			}
		}
	}
	return s, nil
}

func (s *Spare) tighten(rooms []Room) {
	for _, r := range rooms {
		if s.Cgroup.Source == "" || r.Available < s.Cgroup.Available {
			s.Cgroup = r
		}
	}
}

var errMissing = errors.New("number missing")

// parseMeminfo takes MemTotal and MemAvailable, in bytes.
func parseMeminfo(text string) (total, available int, err error) {
	find := func(key string) (int, error) {
		for line := range strings.Lines(text) {
			value, ok := strings.CutPrefix(line, key+":")
			if !ok {
				continue
			}
			kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			if err != nil || kib < 0 || kib > math.MaxInt>>10 {
				return 0, fmt.Errorf("%s: %q is no size", key, strings.TrimSpace(value))
			}
			return kib << 10, nil
		}
		return 0, fmt.Errorf("%s: %w", key, errMissing)
	}
	if total, err = find("MemTotal"); err != nil {
		return 0, 0, err
	}
	available, err = find("MemAvailable")
	return total, available, err
}

// membership is a line of /proc/self/cgroup that governs memory.
type membership struct {
	v2   bool
	path string
}

// parseMembership reads "0::/user.slice" (version 2) and "4:memory:/job" (1).
func parseMembership(text string) []membership {
	var list []membership
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		v2 := fields[0] == "0" && fields[1] == ""
		if v2 || hasWord(fields[1], "memory") {
			list = append(list, membership{v2: v2, path: fields[2]})
		}
	}
	return list
}

func hasWord(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// mount is a cgroup file system: the group root is to be seen at point.
type mount struct {
	v2          bool
	root, point string
}

// parseMounts reads the cgroup mounts that know memory from /proc/self/mountinfo:
// "35 31 0:32 /root /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory".
func parseMounts(text string) []mount {
	var list []mount
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		before, after := strings.Fields(left), strings.Fields(right)
		if !ok || len(before) < 5 || len(after) < 3 {
			continue
		}
		m := mount{v2: after[0] == "cgroup2", root: unescape(before[3]), point: unescape(before[4])}
		if m.v2 || after[0] == "cgroup" && hasWord(after[2], "memory") {
			list = append(list, m)
		}
	}
	return list
}

// unescape undoes mountinfo's octal escapes of blanks and backslashes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// ways lists the folders from the group's own up to the mount point. Inside a
// container the group may lie outside of what is mounted; then the mount point is
// the nearest to be seen.
func (m mount) ways(files fs.FS, group string) []string {
	below := strings.TrimPrefix(path.Clean("/"+group), "/")
	if root := strings.Trim(path.Clean("/"+m.root), "/"); root != "" {
		if rest, ok := strings.CutPrefix(below+"/", root+"/"); ok {
			below = strings.TrimSuffix(rest, "/")
		}
	}
	point := strings.TrimPrefix(path.Clean("/"+m.point), "/")
	if point == "" {
		return nil
	}
	folder := path.Join(point, below)
	if _, err := fs.Stat(files, folder); err != nil {
		folder = point
	}
	var list []string
	for ; len(folder) > len(point); folder = path.Dir(folder) {
		list = append(list, folder)
	}
	return append(list, point)
}

// noLimit is what version 1 says for none, less the rounding to pages.
const noLimit = math.MaxInt64 >> 16 << 16

// readRooms reads the limits of one group, none for a group without.
func readRooms(files fs.FS, folder string, v2 bool) []Room {
	used, limits, cached := "memory.usage_in_bytes", []string{"memory.limit_in_bytes"}, []string{"total_inactive_file", "total_active_file"}
	if v2 {
		// Above memory.high a group is throttled until it has given back, and
		// pinned memory cannot be given back.
		used, limits, cached = "memory.current", []string{"memory.max", "memory.high"}, []string{"inactive_file", "active_file"}
	}
	current, err := strconv.Atoi(strings.TrimSpace(readFile(files, path.Join(folder, used))))
	if err != nil {
		return nil
	}
	var cache int
	for _, key := range cached {
		cache += statistic(readFile(files, path.Join(folder, "memory.stat")), key)
	}
	held := max(0, current-min(cache, current))
	var rooms []Room
	for _, name := range limits {
		limit, err := strconv.Atoi(strings.TrimSpace(readFile(files, path.Join(folder, name))))
		if err != nil || limit < 0 || limit >= noLimit {
			continue // "max", or not there
		}
		rooms = append(rooms, Room{Total: limit, Available: max(0, limit-held), Source: "/" + folder + " " + name})
	}
	return rooms
}

// statistic finds "key 123" in memory.stat.
func statistic(text, key string) int {
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != key {
			continue
		}
		if n, err := strconv.Atoi(value); err == nil && n > 0 {
			return n
		}
	}
	return 0
}
