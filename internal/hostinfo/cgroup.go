package hostinfo

import (
	"path"
	"slices"
	"strconv"
	"strings"
)

// Cgroup is what the process's control groups leave it of the host.
type Cgroup struct {
	// Version is 2, 1, or 0 where no memory controller was found.
	Version int `json:"version,omitempty"`
	// Path is the folder of the level that binds, the one with the least
	// memory left.
	Path string `json:"path,omitempty"`
	// MemoryLimit is memory.max (version 2) or memory.limit_in_bytes (1) at
	// that level.
	MemoryLimit Limit `json:"memory_limit_bytes"`
	// MemoryUsed is what is charged to that level, its file cache included.
	MemoryUsed Limit `json:"memory_used_bytes"`
	// FileCache is the part of MemoryUsed that the kernel would drop first.
	FileCache int `json:"file_cache_bytes,omitempty"`
	// Headroom is MemoryLimit less (MemoryUsed less FileCache): what may
	// still be pinned before the kernel kills.
	Headroom Limit `json:"headroom_bytes"`
	// CPUQuota is in CPUs: 2.5 is two and a half. 0 is none, or unknown.
	CPUQuota float64 `json:"cpu_quota,omitempty"`
}

// membership is one line of /proc/self/cgroup.
type membership struct {
	controllers []string // none for version 2
	path        string
}

// mount is one control group file system in /proc/self/mountinfo.
type mount struct {
	version int
	root    string // the folder of the hierarchy that is mounted
	point   string // where, without the leading slash
	options []string
}

func readCgroup(f files) Cgroup {
	groups := parseMemberships(f.text("proc/self/cgroup"))
	mounts := parseCgroupMounts(f.text("proc/self/mountinfo"))
	var g Cgroup
	// A hybrid host has version 2 mounted with no controllers and keeps
	// memory in version 1, so version 1 is asked first.
	if dirs := hierarchy(f, groups, mounts, "memory"); len(dirs) > 0 {
		g = tightest(f, dirs, memoryV1)
	}
	if dirs := hierarchy(f, groups, mounts, ""); g.Version == 0 && len(dirs) > 0 {
		g = tightest(f, dirs, memoryV2)
	}
	g.CPUQuota = smallestQuota(
		quotas(f, hierarchy(f, groups, mounts, "cpu"), quotaV1),
		quotas(f, hierarchy(f, groups, mounts, ""), quotaV2),
	)
	return g
}

// parseMemberships reads /proc/self/cgroup: "4:memory:/a/b", "0::/a/b".
func parseMemberships(text string) []membership {
	var out []membership
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(parts) != 3 || !strings.HasPrefix(parts[2], "/") {
			continue
		}
		m := membership{path: path.Clean(parts[2])}
		if parts[1] != "" {
			m.controllers = strings.Split(parts[1], ",")
		}
		out = append(out, m)
	}
	return out
}

// parseCgroupMounts reads /proc/self/mountinfo:
// "36 32 0:33 /root /point rw,nosuid shared:9 - cgroup cgroup rw,memory".
func parseCgroupMounts(text string) []mount {
	var out []mount
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		if !ok {
			continue
		}
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 5 || len(r) < 3 || !path.IsAbs(l[4]) {
			continue
		}
		m := mount{root: path.Clean(unescape(l[3])), point: strings.TrimPrefix(path.Clean(unescape(l[4])), "/")}
		switch r[0] {
		case "cgroup":
			m.version, m.options = 1, strings.Split(r[2], ",")
		case "cgroup2":
			m.version = 2
		default:
			continue
		}
		out = append(out, m)
	}
	return out
}

// unescape undoes mountinfo's octal escapes of space, tab, newline and
// backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// hierarchy lists the folders that bind the process for one controller (""
// is version 2), from its own group up to the mounted root.
func hierarchy(f files, groups []membership, mounts []mount, controller string) []string {
	group, ok := memberOf(groups, controller)
	if !ok {
		return nil
	}
	for _, m := range mounts {
		if !m.serves(controller) || m.point == "" {
			continue
		}
		var dirs []string
		for p := m.below(group); ; p = path.Dir(p) {
			if dir := path.Join(m.point, p); f.exists(dir) {
				dirs = append(dirs, dir)
			}
			if p == "/" {
				break
			}
		}
		return dirs
	}
	return nil
}

// below is the group's path as seen under the mount. Inside a container
// without a namespace of its own the group's path is the host's; what is
// mounted is then the group itself, and its root says so.
func (m mount) below(group string) string {
	if m.root == "/" {
		return group
	}
	if rest, ok := strings.CutPrefix(group, m.root); ok && (rest == "" || rest[0] == '/') {
		return path.Clean("/" + rest)
	}
	return "/"
}

func (m mount) serves(controller string) bool {
	if controller == "" {
		return m.version == 2
	}
	return m.version == 1 && slices.Contains(m.options, controller)
}

func memberOf(groups []membership, controller string) (string, bool) {
	for _, g := range groups {
		if controller == "" && len(g.controllers) == 0 || controller != "" && slices.Contains(g.controllers, controller) {
			return g.path, true
		}
	}
	return "", false
}

// tightest reads every level and keeps the one with the least headroom; with
// no limit anywhere, the process's own. It is unknown (Version 0) where no
// level could be read.
func tightest(f files, dirs []string, read func(files, string) Cgroup) Cgroup {
	var best Cgroup
	for _, dir := range dirs {
		g := read(f, dir)
		if !g.MemoryLimit.Known {
			continue
		}
		g.Path = "/" + dir
		g.Headroom = g.headroom()
		n, finite := g.Headroom.Finite()
		bestN, bestFinite := best.Headroom.Finite()
		if best.Version == 0 || finite && (!bestFinite || n < bestN) {
			best = g
		}
	}
	return best
}

func (g Cgroup) headroom() Limit {
	limit, finite := g.MemoryLimit.Finite()
	if !finite {
		return g.MemoryLimit
	}
	used, ok := g.MemoryUsed.Finite()
	if !ok {
		return Limit{}
	}
	return limitOf(max(0, limit-max(0, used-g.FileCache)))
}

func memoryV2(f files, dir string) Cgroup {
	g := Cgroup{
		Version:     2,
		MemoryLimit: parseLimit(f.line(dir + "/memory.max")),
		MemoryUsed:  parseLimit(f.line(dir + "/memory.current")),
	}
	// "file" would count tmpfs and shared memory, which cannot be dropped.
	stat := parseStat(f.text(dir + "/memory.stat"))
	g.FileCache = stat["inactive_file"] + stat["active_file"]
	if g.MemoryUsed.Known && !g.MemoryLimit.Known {
		g.MemoryLimit = unlimited() // the root has no memory.max
	}
	return g
}

func memoryV1(f files, dir string) Cgroup {
	stat := parseStat(f.text(dir + "/memory.stat"))
	return Cgroup{
		Version:     1,
		MemoryLimit: parseLimit(f.line(dir + "/memory.limit_in_bytes")),
		MemoryUsed:  parseLimit(f.line(dir + "/memory.usage_in_bytes")),
		FileCache:   stat["total_inactive_file"] + stat["total_active_file"],
	}
}

// parseStat reads "name number" lines; negative and odd numbers are left out.
func parseStat(text string) map[string]int {
	out := map[string]int{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		if n, err := strconv.ParseInt(value, 10, 62); err == nil && n >= 0 {
			out[name] = int(n)
		}
	}
	return out
}

// quotaV2 reads cpu.max: "250000 100000", or "max 100000".
func quotaV2(f files, dir string) float64 {
	fields := strings.Fields(f.line(dir + "/cpu.max"))
	if len(fields) != 2 {
		return 0
	}
	return quota(fields[0], fields[1])
}

// quotaV1 reads cpu.cfs_quota_us (-1 is none) and cpu.cfs_period_us.
func quotaV1(f files, dir string) float64 {
	return quota(f.line(dir+"/cpu.cfs_quota_us"), f.line(dir+"/cpu.cfs_period_us"))
}

func quota(quotaText, periodText string) float64 {
	q, err := strconv.ParseUint(quotaText, 10, 62)
	if err != nil {
		return 0
	}
	p, err := strconv.ParseUint(periodText, 10, 62)
	if err != nil || p == 0 {
		return 0
	}
	return float64(q) / float64(p)
}

func quotas(f files, dirs []string, read func(files, string) float64) float64 {
	var all []float64
	for _, dir := range dirs {
		all = append(all, read(f, dir))
	}
	return smallestQuota(all...)
}

// smallestQuota is the least of those that are set.
func smallestQuota(all ...float64) float64 {
	var least float64
	for _, q := range all {
		if q > 0 && (least == 0 || q < least) {
			least = q
		}
	}
	return least
}
