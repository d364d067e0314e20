package pages

import (
	"math"
	"os"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	meminfo = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   40960000 kB\nBuffers: 1 kB\n"

	v2Mount     = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
	v1Mount     = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
	hybridMount = v1Mount + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)

func TestReadSpare(t *testing.T) {
	t.Parallel()
	host := Room{Total: 65536000 << 10, Available: 40960000 << 10, Source: "/proc/meminfo MemAvailable"}
	for _, tc := range []struct {
		name   string
		files  fstest.MapFS
		cgroup Room
		least  Room
	}{
		{name: "no cgroups", files: fstest.MapFS{}, least: host},
		{name: "version 2, no limit", least: host, files: fstest.MapFS{
			"proc/self/cgroup":                                     file("0::/user.slice/session-1.scope\n"),
			"proc/self/mountinfo":                                  file(v2Mount),
			"sys/fs/cgroup/user.slice/memory.max":                  file("max\n"),
			"sys/fs/cgroup/user.slice/memory.high":                 file("max\n"),
			"sys/fs/cgroup/user.slice/memory.current":              file("123456\n"),
			"sys/fs/cgroup/user.slice/session-1.scope/memory.max":  file("max\n"),
			"sys/fs/cgroup/user.slice/session-1.scope/memory.stat": file("anon 1\n"),
		}},
		{name: "version 2, the parent is tighter", files: fstest.MapFS{
			"proc/self/cgroup":                      file("0::/job/task\n"),
			"proc/self/mountinfo":                   file(v2Mount),
			"sys/fs/cgroup/job/memory.max":          file("8000000000\n"),
			"sys/fs/cgroup/job/memory.current":      file("7000000000\n"),
			"sys/fs/cgroup/job/memory.stat":         file("anon 4000000000\nfile 3000000000\ninactive_anon 5\ninactive_file 2000000000\nactive_file 500000000\n"),
			"sys/fs/cgroup/job/task/memory.max":     file("6000000000\n"),
			"sys/fs/cgroup/job/task/memory.current": file("1000000000\n"),
			"sys/fs/cgroup/job/task/memory.stat":    file("inactive_file 0\n"),
		}, cgroup: Room{8000000000, 3500000000, "/sys/fs/cgroup/job memory.max"},
			least: Room{8000000000, 3500000000, "/sys/fs/cgroup/job memory.max"}},
		{name: "version 2, throttled before the limit", files: fstest.MapFS{
			"proc/self/cgroup":                 file("0::/job\n"),
			"proc/self/mountinfo":              file(v2Mount),
			"sys/fs/cgroup/job/memory.max":     file("8000000000\n"),
			"sys/fs/cgroup/job/memory.high":    file("2000000000\n"),
			"sys/fs/cgroup/job/memory.current": file("2500000000\n"),
		}, cgroup: Room{2000000000, 0, "/sys/fs/cgroup/job memory.high"},
			least: Room{2000000000, 0, "/sys/fs/cgroup/job memory.high"}},
		{name: "version 2, in a container with its own namespace", files: fstest.MapFS{
			"proc/self/cgroup":             file("0::/\n"),
			"proc/self/mountinfo":          file("600 590 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"),
			"sys/fs/cgroup/memory.max":     file("4000000000\n"),
			"sys/fs/cgroup/memory.current": file("1500000000\n"),
			"sys/fs/cgroup/memory.stat":    file("inactive_file 400000000\nactive_file 100000000\n"),
		}, cgroup: Room{4000000000, 3000000000, "/sys/fs/cgroup memory.max"},
			least: Room{4000000000, 3000000000, "/sys/fs/cgroup memory.max"}},
		{name: "version 2, a group outside of what is mounted", files: fstest.MapFS{
			"proc/self/cgroup":             file("0::/../../other\n"),
			"proc/self/mountinfo":          file("600 590 0:26 /../.. /sys/fs/cgroup ro - cgroup2 cgroup rw\n"),
			"sys/fs/cgroup/memory.max":     file("4000000000\n"),
			"sys/fs/cgroup/memory.current": file("1000000000\n"),
		}, cgroup: Room{4000000000, 3000000000, "/sys/fs/cgroup memory.max"},
			least: Room{4000000000, 3000000000, "/sys/fs/cgroup memory.max"}},
		{name: "version 1", files: fstest.MapFS{
			"proc/self/cgroup":                                    file("11:cpu,cpuacct:/job\n4:memory:/job/task\n0::/\n"),
			"proc/self/mountinfo":                                 file(hybridMount),
			"sys/fs/cgroup/memory/memory.limit_in_bytes":          file("9223372036854771712\n"),
			"sys/fs/cgroup/memory/memory.usage_in_bytes":          file("1\n"),
			"sys/fs/cgroup/memory/job/memory.limit_in_bytes":      file("5000000000\n"),
			"sys/fs/cgroup/memory/job/memory.usage_in_bytes":      file("3000000000\n"),
			"sys/fs/cgroup/memory/job/memory.stat":                file("inactive_file 7\ntotal_inactive_file 600000000\ntotal_active_file 400000000\n"),
			"sys/fs/cgroup/memory/job/task/memory.limit_in_bytes": file("9223372036854771712\n"),
			"sys/fs/cgroup/memory/job/task/memory.usage_in_bytes": file("9\n"),
		}, cgroup: Room{5000000000, 3000000000, "/sys/fs/cgroup/memory/job memory.limit_in_bytes"},
			least: Room{5000000000, 3000000000, "/sys/fs/cgroup/memory/job memory.limit_in_bytes"}},
		{name: "version 1, in a container that sees its group as the root", files: fstest.MapFS{
			"proc/self/cgroup":                           file("4:memory:/docker/0123\n"),
			"proc/self/mountinfo":                        file("35 31 0:32 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": file("100000000000\n"),
			"sys/fs/cgroup/memory/memory.usage_in_bytes": file("1000000000\n"),
		}, cgroup: Room{100000000000, 99000000000, "/sys/fs/cgroup/memory memory.limit_in_bytes"}, least: host},
		{name: "a mount point with a blank", files: fstest.MapFS{
			"proc/self/cgroup":         file("0::/\n"),
			"proc/self/mountinfo":      file(`30 23 0:26 / /my\040groups rw - cgroup2 none rw` + "\n"),
			"my groups/memory.max":     file("3\n"),
			"my groups/memory.current": file("1\n"),
			"my groups/memory.stat":    file("inactive_file 99\n"),
		}, cgroup: Room{3, 3, "/my groups memory.max"}, least: Room{3, 3, "/my groups memory.max"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.files["proc/meminfo"] = file(meminfo)
			got, err := ReadSpare(tc.files)
			require.NoError(t, err)
			assert.Equal(t, host, got.Host)
			assert.Equal(t, tc.cgroup, got.Cgroup)
			assert.Equal(t, tc.least, got.Least())
		})
	}
}

func TestReadSpareSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	_, err := ReadSpare(fstest.MapFS{})
	assert.ErrorContains(t, err, "/proc/meminfo: MemTotal: number missing")
	_, err = ReadSpare(fstest.MapFS{"proc/meminfo": file("MemTotal: 5 kB\n")})
	assert.ErrorIs(t, err, errMissing)
	assert.ErrorContains(t, err, "MemAvailable")
	_, err = ReadSpare(fstest.MapFS{"proc/meminfo": file("MemTotal: lots kB\n")})
	assert.ErrorContains(t, err, `MemTotal: "lots kB" is no size`)
}

func TestRoomsReadWell(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "3.1 of 8.0 GiB (/job memory.max)", Room{8 << 30, 3_330_000_000, "/job memory.max"}.String())
}

func TestThisHostCanSpareSomething(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/meminfo"); err != nil {
		t.Skipf("no /proc here: %v", err)
	}
	s, err := ReadSpare(os.DirFS("/"))
	require.NoError(t, err)
	assert.Positive(t, s.Host.Available)
	assert.GreaterOrEqual(t, s.Host.Total, s.Host.Available)
	assert.Positive(t, s.Least().Available)
}

func FuzzReadSpare(f *testing.F) {
	f.Add(meminfo, "0::/a/b\n", v2Mount, "5000", "100", "inactive_file 5\n")
	f.Add(meminfo, "4:memory:/a\n", hybridMount, "9223372036854771712", "x", "total_active_file -1")
	f.Add("MemTotal: 99999999999999999 kB", "0::/../..", "1 2 0:1 /.. / rw - cgroup2 x rw", "", "", "")
	f.Fuzz(func(t *testing.T, meminfo, cgroup, mounts, limit, usage, stat string) {
		files := fstest.MapFS{
			"proc/meminfo": file(meminfo), "proc/self/cgroup": file(cgroup), "proc/self/mountinfo": file(mounts),
			"sys/fs/cgroup/a/memory.max": file(limit), "sys/fs/cgroup/a/memory.current": file(usage), "sys/fs/cgroup/a/memory.stat": file(stat),
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": file(limit), "sys/fs/cgroup/memory/a/memory.usage_in_bytes": file(usage), "sys/fs/cgroup/memory/a/memory.stat": file(stat),
		}
		s, err := ReadSpare(files)
		if err != nil {
			return
		}
		assert.GreaterOrEqual(t, s.Host.Total, 0)
		assert.GreaterOrEqual(t, s.Cgroup.Available, 0)
		assert.LessOrEqual(t, s.Cgroup.Available, s.Cgroup.Total)
		assert.Less(t, s.Cgroup.Total, math.MaxInt)
	})
}
