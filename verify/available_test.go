package verify

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
)

func TestAvailableHost(t *testing.T) {
	t.Parallel()
	meminfo := "MemTotal:       131876992 kB\nMemFree:        1000 kB\nMemAvailable:   120000000 kB\n"
	for name, tt := range map[string]struct {
		files map[string]string
		want  int
	}{
		"nothing told":     {nil, 0},
		"a host":           {map[string]string{"proc/meminfo": meminfo}, 120000000 * kib},
		"an old kernel":    {map[string]string{"proc/meminfo": "MemTotal: 5 kB\n"}, 0},
		"cgroup 2":         {map[string]string{"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": "4294967296\n", "sys/fs/cgroup/memory.current": "3221225472\n", "sys/fs/cgroup/memory.stat": "anon 1\nfile 1073741824\n"}, 2 * gib},
		"cgroup 2 no max":  {map[string]string{"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1\n"}, 120000000 * kib},
		"cgroup 2, full":   {map[string]string{"sys/fs/cgroup/memory.max": "4096\n", "sys/fs/cgroup/memory.current": "4097\n"}, 1},
		"cgroup 1":         {map[string]string{"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "600000\n", "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_cache 100000\n"}, 500000},
		"cgroup 1 no max":  {map[string]string{"proc/meminfo": meminfo, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "600000\n"}, 120000000 * kib},
		"something broken": {map[string]string{"proc/meminfo": "MemAvailable: much\n"}, 0},
	} {
		root := fstest.MapFS{}
		for path, text := range tt.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		assert.Equal(t, tt.want, availableHost(root), name)
	}
}
