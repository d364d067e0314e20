package linux_test

import (
	"errors"
	"io/fs"
	"os"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

// Another process has groups of its own, below the same mounts.
func TestReadProcessCgroupMemory(t *testing.T) {
	t.Parallel()
	fsys := host(map[string]string{
		"proc/self/cgroup":                   "0::/\n",
		"proc/7/cgroup":                      "0::/a/b\n",
		"proc/self/mountinfo":                "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"sys/fs/cgroup/a/memory.current":     "2\n",
		"sys/fs/cgroup/a/memory.max":         "20\n",
		"sys/fs/cgroup/a/b/memory.current":   "1\n",
		"sys/fs/cgroup/a/b/memory.max":       "10\n",
		"sys/fs/cgroup/other/memory.max":     "5\n",
		"sys/fs/cgroup/cgroup.controllers":   "memory\n",
		"sys/fs/cgroup/a/cgroup.controllers": "memory\n",
	})
	groups, err := linux.ReadProcessCgroupMemory(fsys, 7)
	require.NoError(t, err)
	require.Len(t, groups, 2)
	assert.Equal(t, "sys/fs/cgroup/a/b", groups[0].Dir)
	assert.Equal(t, [2]int{10, 20}, [2]int{groups[0].Max, groups[1].Max})
	groups, err = linux.ReadCgroupMemory(fsys)
	require.NoError(t, err)
	assert.Empty(t, groups)
	_, err = linux.ReadProcessCgroupMemory(fsys, 8)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestReadCgroupMemory(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		host string
		want []linux.CgroupMemory
	}{
		{"cgroup-v2-high", []linux.CgroupMemory{
			{Cgroup: linux.Cgroup{Version: 2, Dir: "sys/fs/cgroup/kubepods.slice/pod1/ctr"}, Current: 40 * mib, Max: 100 * mib, High: 60 * mib, ActiveFile: 2 * mib, InactiveFile: 8 * mib},
			{Cgroup: linux.Cgroup{Version: 2, Dir: "sys/fs/cgroup/kubepods.slice/pod1"}, Current: 50 * mib, Max: 200 * mib, High: linux.NoLimit, ActiveFile: 2 * mib, InactiveFile: 8 * mib},
			{Cgroup: linux.Cgroup{Version: 2, Dir: "sys/fs/cgroup/kubepods.slice"}, Current: 700 * mib, Max: linux.NoLimit, High: linux.NoLimit},
		}},
		{"container-cgroup-v1", []linux.CgroupMemory{
			{Cgroup: linux.Cgroup{Version: 1, Dir: "sys/fs/cgroup/memory"}, Current: 1879048192, Max: 2 * gib, High: linux.NoLimit, ActiveFile: 256 * mib, InactiveFile: gib},
		}},
		// The root of version 2 has no account, and this is the only group.
		{"h200-vm", nil},
	} {
		got, err := linux.ReadCgroupMemory(captured(t, tc.host))
		require.NoError(t, err, tc.host)
		assert.Equal(t, tc.want, got, tc.host)
	}
}

// Beyond memory.high the kernel throttles the group until it has reclaimed, and
// pinned memory cannot be reclaimed.
func TestMemoryHighLimits(t *testing.T) {
	t.Parallel()
	groups, err := linux.ReadCgroupMemory(captured(t, "cgroup-v2-high"))
	require.NoError(t, err)
	g, ok := linux.Tightest(groups, 0)
	require.True(t, ok)
	limit, file := g.Limit()
	assert.Equal(t, 60*mib, limit)
	assert.Equal(t, "memory.high", file)
	assert.Equal(t, linux.Headroom{
		Available: 30 * mib, Total: 60 * mib, Source: "/sys/fs/cgroup/kubepods.slice/pod1/ctr memory.high",
	}, g.Headroom(0), "60 MiB, less 40 in use, of which 10 are page cache")
	g.High = linux.NoLimit
	assert.Equal(t, 70*mib, g.Headroom(0).Available, "without it")
}

func TestTheTightestOfNestedGroups(t *testing.T) {
	t.Parallel()
	groups, err := linux.ReadCgroupMemory(captured(t, "cgroup-v2-nested"))
	require.NoError(t, err)
	require.Len(t, groups, 3)
	g, ok := linux.Tightest(groups, 0)
	require.True(t, ok)
	assert.Equal(t, linux.Headroom{
		Available: gib + gib/2, Total: 8 * gib, Source: "/sys/fs/cgroup/slurm/job_7 memory.max",
	}, g.Headroom(0), "the step has 5 GiB left, the job around it less")

	_, ok = linux.Tightest(nil, 0)
	assert.False(t, ok)
	g, ok = linux.Tightest(groups[2:], 0)
	require.True(t, ok)
	assert.Equal(t, linux.Headroom{Available: linux.NoLimit, Total: linux.NoLimit}, g.Headroom(0))
	_, file := g.Limit()
	assert.Empty(t, file)
	g, _ = linux.Tightest([]linux.CgroupMemory{groups[2], groups[2]}, 0)
	assert.Equal(t, groups[2], g)
	own := linux.CgroupMemory{Cgroup: linux.Cgroup{Dir: "own"}, Max: linux.NoLimit, High: linux.NoLimit}
	g, _ = linux.Tightest([]linux.CgroupMemory{own, groups[2]}, 0)
	assert.Equal(t, own, g, "without a limit it is the process's own")
}

// Version 1 writes a number for no limit, which depends on the page size.
func TestUnlimitedGroupsOfVersion1(t *testing.T) {
	t.Parallel()
	groups, err := linux.ReadCgroupMemory(captured(t, "no-gpu-cgroup-v1"))
	require.NoError(t, err)
	require.Len(t, groups, 3)
	for _, g := range groups {
		assert.Equal(t, 1, g.Version)
		limit, file := g.Limit()
		assert.Equal(t, linux.NoLimit, limit, g.Dir)
		assert.Empty(t, file)
	}
	for text, want := range map[string]int{
		"9223372036854771712\n":  linux.NoLimit, // 4 KiB pages
		"9223372036854710272\n":  linux.NoLimit, // 64 KiB pages
		"9223372036854775807\n":  linux.NoLimit, // Linux before 3.19
		"18446744073709551615\n": linux.NoLimit,
		"68719476736\n":          64 * gib,
		"0\n":                    0,
	} {
		g, err := linux.Cgroup{Version: 1, Dir: "c"}.Memory(host(map[string]string{"c/memory.limit_in_bytes": text, "c/memory.usage_in_bytes": "5\n"}))
		require.NoError(t, err)
		assert.Equal(t, want, g.Max, text)
	}
}

// Pages of the page cache that are pinned are on the kernel's lists of what it can
// reclaim, and are not reclaimable.
func TestPinnedFilePagesAreNotAvailable(t *testing.T) {
	t.Parallel()
	groups, err := linux.ReadCgroupMemory(captured(t, "cgroup-v2-pinned-file"))
	require.NoError(t, err)
	require.Len(t, groups, 1)
	for _, tc := range []struct{ pinned, cache, available int }{
		{0, 12 * gib, 15 * gib},
		{5 * gib, 7 * gib, 10 * gib},
		{12 * gib, 0, 3 * gib},
		{100 * gib, 0, 3 * gib}, // pages that other groups were charged for
	} {
		assert.Equal(t, tc.cache, groups[0].FileCache(tc.pinned), "%d", tc.pinned)
		assert.Equal(t, tc.available, groups[0].Headroom(tc.pinned).Available, "%d", tc.pinned)
	}

	// Pinned pages can make another group the tightest one.
	inner := linux.CgroupMemory{Cgroup: linux.Cgroup{Dir: "inner"}, Current: 6 * gib, Max: 8 * gib, High: linux.NoLimit, ActiveFile: 5 * gib}
	outer := linux.CgroupMemory{Cgroup: linux.Cgroup{Dir: "outer"}, Current: 6 * gib, Max: 9 * gib, High: linux.NoLimit, ActiveFile: 3 * gib}
	nested := []linux.CgroupMemory{inner, outer}
	g, _ := linux.Tightest(nested, 0)
	assert.Equal(t, outer, g)
	g, _ = linux.Tightest(nested, 5*gib)
	assert.Equal(t, inner, g)
}

func TestCgroupMemoryBounds(t *testing.T) {
	t.Parallel()
	m := linux.CgroupMemory{Current: 3, Max: 10, High: linux.NoLimit, ActiveFile: linux.NoLimit, InactiveFile: linux.NoLimit}
	assert.Equal(t, 3, m.FileCache(0), "the counters are read one after the other, and may exceed the whole")
	assert.Equal(t, 10, m.Headroom(0).Available)
	m = linux.CgroupMemory{Current: 11, Max: 10, High: linux.NoLimit}
	assert.Zero(t, m.Headroom(0).Available, "never negative")
}

func TestGroupsWithoutAnAccountAreLeftOut(t *testing.T) {
	t.Parallel()
	files := map[string]string{
		"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": mountV2,
		"sys/fs/cgroup/a/memory.current": "5\n", "sys/fs/cgroup/a/memory.max": "max\n",
		"sys/fs/cgroup/a/b/cgroup.procs": "1\n", "sys/fs/cgroup/memory.stat": "active_file 1\n",
	}
	groups, err := linux.ReadCgroupMemory(host(files))
	require.NoError(t, err)
	require.Len(t, groups, 1)
	assert.Equal(t, "sys/fs/cgroup/a", groups[0].Dir)
	assert.Equal(t, linux.NoLimit, groups[0].High, "memory.high is missing")
	_, err = linux.Cgroup{Version: 2, Dir: "sys/fs/cgroup/a/b"}.Memory(host(files))
	require.ErrorIs(t, err, fs.ErrNotExist)

	files["sys/fs/cgroup/a/b/memory.current"] = "3\n"
	groups, err = linux.ReadCgroupMemory(forbid{host(files), "sys/fs/cgroup/a/b/memory.max"})
	require.NoError(t, err, "nor are those that this process may not read")
	require.Len(t, groups, 1)
	files["sys/fs/cgroup/a/b/memory.max"] = "much\n"
	_, err = linux.ReadCgroupMemory(host(files))
	require.ErrorContains(t, err, `/sys/fs/cgroup/a/b/memory.max:1: "much" is not a number of bytes`)
}

// forbid is a host of which one file may not be opened.
type forbid struct {
	fstest.MapFS
	name string
}

func (f forbid) Open(name string) (fs.File, error) {
	if name == f.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return f.MapFS.Open(name)
}

func (f forbid) ReadFile(name string) ([]byte, error) {
	if name == f.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return f.MapFS.ReadFile(name)
}

func TestCgroupMemoryOfThisHost(t *testing.T) {
	t.Parallel()
	groups, err := linux.ReadCgroupMemory(os.DirFS("/"))
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("no control groups here: %v", err)
	}
	require.NoError(t, err)
	for _, g := range groups {
		assert.GreaterOrEqual(t, g.Headroom(0).Available, 0)
		if limit, _ := g.Limit(); limit != linux.NoLimit {
			assert.Less(t, limit, 1<<50, "%s: a missing limit was taken for one", g.Dir)
		}
	}
}

func FuzzCgroupMemory(f *testing.F) {
	f.Add("5000\n", "100\n", "max\n", "inactive_file 5\n", 0)
	f.Add("9223372036854771712\n", "x", "1", "total_active_file 18446744073709551615\n", 7)
	f.Fuzz(func(t *testing.T, limit, current, high, stat string, pinned int) {
		fsys := host(map[string]string{
			"c/memory.max": limit, "c/memory.limit_in_bytes": limit, "c/memory.current": current, "c/memory.usage_in_bytes": current,
			"c/memory.high": high, "c/memory.stat": stat,
		})
		pinned &= linux.NoLimit
		for _, version := range []int{1, 2} {
			m, err := linux.Cgroup{Version: version, Dir: "c"}.Memory(fsys)
			if err != nil {
				require.Zero(t, m)
				continue
			}
			h := m.Headroom(pinned)
			require.True(t, h.Available >= 0 && h.Available <= h.Total, "%+v: %+v", m, h)
			require.LessOrEqual(t, h.Available, m.Headroom(0).Available, "%+v", m)
			require.LessOrEqual(t, m.FileCache(pinned), m.Current)
			require.Equal(t, h.Total == linux.NoLimit, h.Source == "")
		}
	})
}
