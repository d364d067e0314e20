package budget

import (
	"os"
	"sync"

	"github.com/gopinned/pinned/hostmem/internal/pages"
)

// Process returns the budget of this process. Pinned memory is the host's, so
// all that this module pins shares one.
var Process = sync.OnceValue(func() *Budget { return New(ReadHost) })

// ReadHost reads the kernel's figures: of the host or of the process's cgroup,
// whichever has less available.
func ReadHost(pinnedFiles int) (Reading, error) {
	spare, err := pages.ReadSpare(os.DirFS("/"))
	least := spare.Least()
	return Reading{Available: max(0, least.Available-pinnedFiles), Total: least.Total, Source: least.Source}, err
}
