package verify

import (
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// availableHost is the host memory in bytes that can be had without swapping
// and without passing the limit of the cgroup that a container sees as its
// root, 0 when the system (root is its file system) does not tell.
func availableHost(root fs.FS) int {
	available := math.MaxInt
	if n, ok := field(root, "proc/meminfo", "MemAvailable:"); ok {
		available = n * kib
	}
	for _, group := range []struct{ folder, limit, used, cache string }{
		{"sys/fs/cgroup/", "memory.max", "memory.current", "file"},
		{"sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"},
	} {
		limit, limited := field(root, group.folder+group.limit, "")
		used, ok := field(root, group.folder+group.used, "")
		if !limited || !ok {
			continue
		}
		cache, _ := field(root, group.folder+"memory.stat", group.cache) // is given up first
		available = min(available, max(limit-(used-cache), 1))
	}
	if available == math.MaxInt {
		return 0
	}
	return available
}

// field reads the number behind a line's first word in a file, or the file's
// only word when key is empty.
func field(root fs.FS, file, key string) (int, bool) {
	text, err := fs.ReadFile(root, file)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if key != "" {
			if len(words) < 2 || words[0] != key {
				continue
			}
			words = words[1:]
		}
		if len(words) > 0 {
			n, err := strconv.Atoi(words[0])
			return n, err == nil
		}
	}
	return 0, false
}
