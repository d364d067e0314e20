//go:build linux && !android && (amd64 || arm64)

package dlpack

import (
	"fmt"
	"sync"

	"github.com/ebitengine/purego"
)

// supported returns why the platform has no DLPack tensors, or nil.
func supported() error { return nil }

// deleter returns the C function that is the deleter of all exported tensors. There is one
// for all, because purego has 2000 functions a process and never frees one.
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

// callDeleter calls a deleter, of this package or of another library. 0 is none.
func callDeleter(fn, self uintptr) {
	if fn != 0 {
		purego.SyscallN(fn, self)
	}
}

// deleted is called by C, on any thread. The release function runs on a goroutine, because
// the thread may hold locks of the consumer, such as Python's.
func deleted(address uintptr) {
	exports.mu.Lock()
	defer exports.mu.Unlock()
	e, ok := exports.live[address]
	if !ok {
		return // called twice
	}
	delete(exports.live, address)
	exports.free = append(exports.free, e.cell)
	if e.release != nil {
		go e.release()
	}
}
