//go:build linux && !android && (amd64 || arm64)

package dlpack

import (
	"fmt"
	"sync"

	"github.com/ebitengine/purego"
)

// deleter returns the C function that is the deleter of all exported tensors. There is one,
// because purego never frees any, and has 2000 for the process.
var deleter = sync.OnceValues(func() (entry uintptr, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("make the deleter: %v", r)
		}
	}()
	return purego.NewCallback(func(self uintptr) uintptr {
		deleted(self)
		return 0
	}), nil
})

// callDeleter calls a deleter, which may be another library's, or 0 for none.
func callDeleter(fn, self uintptr) {
	if fn != 0 {
		purego.SyscallN(fn, self)
	}
}
