package linux

import (
	"fmt"

	"github.com/gopinned/pinned/internal/units"
)

// Headroom is the number of bytes that can still be pinned before something gives way: the
// host has none left, or a control group reaches its limit.
type Headroom struct {
	Available int    // bytes free, or used by page cache that can be reclaimed
	Total     int    // bytes in all: the host's memory, or the group's limit
	Source    string // "/proc/meminfo MemAvailable", "/sys/fs/cgroup/job memory.max"; empty without a limit
}

// String returns the headroom with its source: "3.12 GiB of 8 GiB
// (/proc/meminfo MemAvailable)".
func (h Headroom) String() string {
	return fmt.Sprintf("%s of %s (%s)", units.Bytes(h.Available), units.Bytes(h.Total), h.Source)
}

// Headroom returns the memory that the host has left. pinnedFile is the number of bytes of page
// cache that the caller has pinned: MemAvailable counts them as reclaimable. ok is false where the
// file lacks MemTotal or MemAvailable, as on kernels before 3.14.
func (m Meminfo) Headroom(pinnedFile int) (h Headroom, ok bool) {
	available, hasAvailable := m["MemAvailable"]
	total, hasTotal := m["MemTotal"]
	return Headroom{
		Available: max(0, available-min(pinnedFile, m.FileCache())),
		Total:     total,
		Source:    "/proc/meminfo MemAvailable",
	}, hasAvailable && hasTotal
}
