//go:build !linux || android || !(amd64 || arm64)

package pages

import (
	"errors"
	"os"
	"unsafe"
)

// Without Linux mapping fails, so that nothing else is ever called.
func realCalls() Calls {
	return Calls{
		Map:        func(int, int) (unsafe.Pointer, error) { return nil, errors.ErrUnsupported },
		MapFile:    func(*os.File, int64, int, bool) (unsafe.Pointer, error) { return nil, errors.ErrUnsupported },
		FileSystem: func(string) (FileSystem, error) { return FileSystem{}, errors.ErrUnsupported },
	}
}

// MemlockLimit returns RLIMIT_MEMLOCK, which is looked up on Linux only.
func MemlockLimit() (limit int, ok bool) { return 0, false }
