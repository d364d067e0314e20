package linux_test

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/internal/linux"
)

func TestParseCgroupMembers(t *testing.T) {
	t.Parallel()
	got, err := linux.ParseCgroupMembers("11:cpu,cpuacct:/job\n4:memory:/a:b c\n1:name=systemd:/\n0::/user.slice/session-1.scope\n")
	require.NoError(t, err)
	assert.Equal(t, []linux.CgroupMember{
		{Controllers: []string{"cpu", "cpuacct"}, Path: "/job"},
		{Controllers: []string{"memory"}, Path: "/a:b c"},
		{Controllers: []string{"name=systemd"}, Path: "/"},
		{Path: "/user.slice/session-1.scope"},
	}, got)
	for _, text := range []string{"0::/\n\n", "0::/\nmemory\n", "0::/\n0:/\n", "0::/\n0::job\n"} {
		_, err := linux.ParseCgroupMembers(text)
		assert.ErrorContains(t, err, "line 2: ", "%q", text)
	}
}

const (
	mountV2     = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
	mountV1     = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
	mountHybrid = mountV1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)

func TestReadCgroups(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name             string
		members, mounts  string
		controller, want string
	}{
		{"version 2", "0::/job/task\n", mountV2, "memory", "2 sys/fs/cgroup/job/task, 2 sys/fs/cgroup/job, 2 sys/fs/cgroup"},
		{"version 2, the root", "0::/\n", mountV2, "cpu", "2 sys/fs/cgroup"},
		{"version 1", "11:cpu,cpuacct:/job\n4:memory:/a\n", mountV1, "memory", "1 sys/fs/cgroup/memory/a, 1 sys/fs/cgroup/memory"},
		{"version 1, mounted together", "11:cpu,cpuacct:/job\n4:memory:/a\n", mountV1, "cpu", "1 sys/fs/cgroup/cpu,cpuacct/job, 1 sys/fs/cgroup/cpu,cpuacct"},
		{"both", "0::/b\n4:memory:/a\n", mountHybrid, "memory", "1 sys/fs/cgroup/memory/a, 1 sys/fs/cgroup/memory, 2 sys/fs/cgroup/unified/b, 2 sys/fs/cgroup/unified"},
		{"no such controller", "4:memory:/a\n", mountV1, "pids", ""},
		{"not mounted", "0::/a\n4:memory:/a\n", "1 0 0:1 / / rw - ext4 x rw\n", "memory", ""},
		{"a container that sees its group as the root", "4:memory:/docker/0123\n", "35 31 0:32 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n", "memory", "1 sys/fs/cgroup/memory"},
		{"a group within it", "4:memory:/docker/0123/x\n", "35 31 0:32 /docker/0123 /m ro - cgroup cgroup rw,memory\n", "memory", "1 m/x, 1 m"},
		{"a group that begins like the mount", "4:memory:/docker/01234\n", "35 31 0:32 /docker/0123 /m ro - cgroup cgroup rw,memory\n", "memory", "1 m"},
		{"a namespace that hides the path alone", "0::/\n", "1 0 0:26 /kubepods.slice/pod1/ctr /c ro - cgroup2 cgroup rw\n", "memory", "2 c"},
		{"a group beside the namespace's root", "0::/../other\n", "1 0 0:26 / /c ro - cgroup2 cgroup rw\n", "memory", "2 c"},
		{"a mount above the namespace's root", "0::/../../other\n", "1 0 0:26 /../.. /c ro - cgroup2 cgroup rw\n", "memory", "2 c/other, 2 c"},
		{"the host's hierarchy is mounted too", "0::/\n", "1 0 0:26 /../.. /host/cgroup ro - cgroup2 cgroup rw\n2 0 0:26 / /c ro - cgroup2 cgroup rw\n", "memory", "2 c"},
		{"a mount point with a space", "0::/a\n", `30 23 0:26 / /my\040groups rw - cgroup2 none rw` + "\n", "memory", "2 my groups/a, 2 my groups"},
		{"a mount at the root", "0::/a\n", "30 23 0:26 / / rw - cgroup2 none rw\n", "memory", "2 a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			groups, err := linux.ReadCgroups(host(map[string]string{"proc/self/cgroup": tc.members, "proc/self/mountinfo": tc.mounts}), tc.controller)
			require.NoError(t, err)
			var got []string
			for _, g := range groups {
				got = append(got, string(rune('0'+g.Version))+" "+g.Dir)
			}
			assert.Equal(t, tc.want, strings.Join(got, ", "))
		})
	}
	_, err := linux.ReadCgroups(host(map[string]string{"proc/self/cgroup": "0::/\n"}), "memory")
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "/proc/self/mountinfo")
}

func FuzzReadCgroups(f *testing.F) {
	f.Add("0::/a/b\n", mountV2)
	f.Add("4:memory:/a\n", mountHybrid)
	f.Add("0::/../..\n", "1 2 0:1 /.. / rw - cgroup2 x rw")
	f.Fuzz(func(t *testing.T, members, mounts string) {
		groups, err := linux.ReadCgroups(host(map[string]string{"proc/self/cgroup": members, "proc/self/mountinfo": mounts}), "memory")
		if err != nil {
			return
		}
		for _, g := range groups {
			require.True(t, fs.ValidPath(g.Dir), "%q", g.Dir)
			require.Contains(t, []int{1, 2}, g.Version)
		}
	})
}

func TestCPUQuota(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		version int
		files   map[string]string
		want    float64
		err     string
	}{
		{2, map[string]string{"c/cpu.max": "250000 100000\n"}, 2.5, ""},
		{2, map[string]string{"c/cpu.max": "max 100000\n"}, 0, ""},
		{2, map[string]string{"c/cpu.max": "250000\n"}, 0, "/c/cpu.max:1: "},
		{2, map[string]string{"c/cpu.max": "250000 0\n"}, 0, "/c/cpu.max:1: "},
		{2, map[string]string{"c/cpu.max": "-1 100000\n"}, 0, "/c/cpu.max:1: "},
		{2, map[string]string{}, 0, "/c/cpu.max: file does not exist"},
		{1, map[string]string{"c/cpu.cfs_quota_us": "50000\n", "c/cpu.cfs_period_us": "100000\n"}, 0.5, ""},
		{1, map[string]string{"c/cpu.cfs_quota_us": "-1\n", "c/cpu.cfs_period_us": "100000\n"}, 0, ""},
		{1, map[string]string{"c/cpu.cfs_quota_us": "50000\n", "c/cpu.cfs_period_us": "0\n"}, 0, "/c/cpu.cfs_period_us:1: "},
		{1, map[string]string{"c/cpu.cfs_quota_us": "50000\n"}, 0, "/c/cpu.cfs_period_us: file does not exist"},
	} {
		got, err := linux.Cgroup{Version: tc.version, Dir: "c"}.CPUQuota(host(tc.files))
		if tc.err == "" {
			require.NoError(t, err, "%v", tc.files)
		} else {
			require.ErrorContains(t, err, tc.err, "%v", tc.files)
		}
		assert.InDelta(t, tc.want, got, 0, "%v", tc.files)
	}
}
