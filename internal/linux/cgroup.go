package linux

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A Cgroup is a control group as this process sees it.
type Cgroup struct {
	Version int    // 1 or 2
	Dir     string // its directory, as a path below the root: "sys/fs/cgroup/job"
}

// A CgroupMember is a line of /proc/PID/cgroup: a control group that the process is
// a member of.
type CgroupMember struct {
	Controllers []string // empty for version 2
	Path        string   // in its hierarchy, as the process's cgroup namespace shows it
}

// ReadCgroupMembers reads the control groups that this process is a member of.
func ReadCgroupMembers(fsys fs.FS) ([]CgroupMember, error) {
	return readCgroupMembers(fsys, self)
}

// self is the name of this process in /proc.
const self = "self"

func readCgroupMembers(fsys fs.FS, process string) ([]CgroupMember, error) {
	return read(fsys, path.Join("proc", process, "cgroup"), ParseCgroupMembers)
}

// ParseCgroupMembers parses /proc/PID/cgroup: "4:memory:/a/b", and "0::/a/b" for
// version 2.
func ParseCgroupMembers(text string) ([]CgroupMember, error) {
	return parseLines(text, `"hierarchy:controllers:/path"`, func(line string) (m CgroupMember, ok bool) {
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 || !path.IsAbs(fields[2]) {
			return m, false
		}
		m.Path = fields[2]
		if fields[1] != "" {
			m.Controllers = strings.Split(fields[1], ",")
		}
		return m, true
	})
}

// ReadCgroups lists the control groups that may bind this process through a
// controller such as "memory" or "cpu": its own group first, then those around it,
// as far up as is mounted. A host may have hierarchies of both versions mounted, of
// which one only has the controller; the groups of version 1 come first.
func ReadCgroups(fsys fs.FS, controller string) ([]Cgroup, error) {
	return readCgroups(fsys, self, controller)
}

func readCgroups(fsys fs.FS, process, controller string) ([]Cgroup, error) {
	members, err := readCgroupMembers(fsys, process)
	if err != nil {
		return nil, err
	}
	mounts, err := ReadMounts(fsys)
	if err != nil {
		return nil, err
	}
	var groups []Cgroup
	for _, version := range []int{1, 2} {
		for _, m := range members {
			if version == 1 && !slices.Contains(m.Controllers, controller) || version == 2 && len(m.Controllers) > 0 {
				continue
			}
			for _, dir := range levels(hierarchy(mounts, version, controller), m.Path) {
				groups = append(groups, Cgroup{Version: version, Dir: dir})
			}
		}
	}
	return groups, nil
}

// hierarchy returns the mounts of version 2, or of version 1 with the controller.
func hierarchy(mounts []Mount, version int, controller string) (found []Mount) {
	for _, m := range mounts {
		if version == 2 && m.Type == "cgroup2" || version == 1 && m.Type == "cgroup" && m.HasOption(controller) {
			found = append(found, m)
		}
	}
	return found
}

// levels lists the directories of a group and of those around it, in the first
// mount that shows it.
//
// In a container the group may lie outside of all that is mounted: its path then is
// the host's and the mount's root is not, or the other way around. What is mounted
// is the container's own group in that case.
func levels(mounts []Mount, group string) (dirs []string) {
	if len(mounts) == 0 {
		return nil
	}
	point, below := mounts[0].Point, "/"
	for _, m := range mounts {
		if rest, ok := cutDir(group, m.Root); ok {
			point, below = m.Point, rest
			break
		}
	}
	for {
		if dir := strings.TrimPrefix(path.Join(point, below), "/"); fs.ValidPath(dir) {
			dirs = append(dirs, dir)
		}
		if below == "/" {
			return dirs
		}
		below = path.Dir(below)
	}
}

// cutDir returns name as it is seen from dir, where it is within dir. Both may
// start with "/..", above the root of a cgroup namespace.
func cutDir(name, dir string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(name+"/", strings.TrimSuffix(dir, "/")+"/")
	if !ok || strings.HasPrefix(rest, "../") {
		return "", false
	}
	return path.Clean("/" + rest), true
}

// CPUQuota reads how many CPUs' worth of time the group may use: 2.5 is two and a
// half, 0 is no quota. A group without the controller is an error that wraps
// fs.ErrNotExist.
func (c Cgroup) CPUQuota(fsys fs.FS) (float64, error) {
	if c.Version == 2 {
		return read(fsys, c.Dir+"/cpu.max", parseCPUMax)
	}
	quota, err := ReadInt(fsys, c.Dir+"/cpu.cfs_quota_us")
	if err != nil || quota < 0 {
		return 0, err
	}
	period, err := read(fsys, c.Dir+"/cpu.cfs_period_us", parsePeriod)
	if err != nil {
		return 0, err
	}
	return float64(quota) / float64(period), nil
}

// parseCPUMax parses cpu.max, the quota and the period in microseconds: "250000
// 100000", or "max 100000".
func parseCPUMax(text string) (float64, error) {
	quotaText, periodText, _ := strings.Cut(strings.TrimSpace(text), " ")
	period, err := parsePeriod(periodText)
	quota, errQuota := strconv.ParseUint(quotaText, 10, 62)
	if err != nil || errQuota != nil && quotaText != "max" {
		return 0, &SyntaxError{Line: 1, Text: strings.TrimSpace(text), Want: `a quota and a period, such as "250000 100000"`}
	}
	return float64(quota) / float64(period), nil
}

func parsePeriod(text string) (int, error) {
	n, err := parseInt(text)
	if err == nil && n <= 0 {
		err = &SyntaxError{Line: 1, Text: strings.TrimSpace(text), Want: "a period in microseconds"}
	}
	return n, err
}
