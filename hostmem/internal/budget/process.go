package budget

import (
	"errors"
	"io/fs"
	"os"
	"sync"

	"github.com/gopinned/pinned/internal/linux"
)

// Process returns the budget of this process. All packages of the module share it, because
// pinned memory is the host's.
var Process = sync.OnceValue(func() *Budget {
	return New(func(pinnedFiles int) (linux.Headroom, error) { return ReadHost(os.DirFS("/"), pinnedFiles) })
})

// ReadHost returns what the host, or the control group that binds tighter, has
// available. A control group that cannot be read counts as no limit.
func ReadHost(files fs.FS, pinnedFiles int) (linux.Headroom, error) {
	info, err := linux.ReadMeminfo(files)
	if err != nil {
		return linux.Headroom{}, err
	}
	headroom, ok := info.Headroom(pinnedFiles)
	if !ok {
		return linux.Headroom{}, errors.New("/proc/meminfo has no MemTotal or no MemAvailable")
	}
	groups, _ := linux.ReadCgroupMemory(files)
	if group, ok := linux.Tightest(groups, pinnedFiles); ok && group.Headroom(pinnedFiles).Available < headroom.Available {
		headroom = group.Headroom(pinnedFiles)
	}
	return headroom, nil
}
