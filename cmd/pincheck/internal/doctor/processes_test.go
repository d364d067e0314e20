package doctor

import (
	"fmt"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The limit of a process is that of the outermost group with one.
func TestLimitsOfProcesses(t *testing.T) {
	t.Parallel()
	const gib = 1 << 30
	host := fstest.MapFS{
		"proc/meminfo": {Data: []byte("MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n")},
	}
	file := func(name, text string, args ...any) {
		host[name] = &fstest.MapFile{Data: []byte(fmt.Sprintf(text, args...))}
	}
	file("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	file("sys/fs/cgroup/cgroup.controllers", "memory\n")
	for dir, limit := range map[string]string{
		"a": "max", "a/pod": fmt.Sprint(40 * gib), "a/pod/one": fmt.Sprint(30 * gib), "b": fmt.Sprint(50 * gib), "c": fmt.Sprint(64 * gib), "d": "max",
	} {
		file("sys/fs/cgroup/"+dir+"/memory.max", "%s\n", limit)
		file("sys/fs/cgroup/"+dir+"/memory.current", "4096\n")
		file("sys/fs/cgroup/"+dir+"/memory.high", "max\n")
	}
	for pid, group := range map[int]string{11: "/a/pod/one", 12: "/b", 13: "/c", 14: "/d", 15: "", 16: "/elsewhere"} {
		file(fmt.Sprintf("proc/%d/maps", pid), "7e1000000000-7e1000400000 r-xp 00000000 00:01 7 /usr/lib/libcuda.so.1\n")
		file(fmt.Sprintf("proc/%d/status", pid), "Name:\tvllm\n")
		if group != "" {
			file(fmt.Sprintf("proc/%d/cgroup", pid), "0::%s\n", group)
		}
	}
	all := Processes(host)
	require.Len(t, all, 6)
	want := map[int]Process{11: {Cgroup: "/sys/fs/cgroup/a/pod", MemoryLimit: 40 * gib}, 12: {Cgroup: "/sys/fs/cgroup/b", MemoryLimit: 50 * gib}}
	for _, p := range all {
		assert.Equal(t, want[p.PID].Cgroup, p.Cgroup, p.PID)
		assert.Equal(t, want[p.PID].MemoryLimit, p.MemoryLimit, p.PID)
	}

	// They exceed the host's memory together.
	f := well(t)
	f.Host.Memory.Total, f.Processes = 64*gib, all
	_, found := Evaluate(relink(f))
	require.Equal(t, []string{"limits_exceed_memory"}, ids(found))
	assert.Contains(t, found[0].Summary, "2 control groups")
	assert.Contains(t, found[0].Summary, "90 GiB together, and the host has 64 GiB")
	assert.Contains(t, found[0].Evidence[2], "4 programs without a memory limit")
}
