//go:build !linux || android || !(amd64 || arm64)

package pages

import (
	"errors"
	"os"
	"unsafe"
)

// Where there is no Linux, mapping fails and so nothing else is ever called.
func realCalls() Calls {
	return Calls{
		Map:     func(int, int) (unsafe.Pointer, error) { return nil, errors.ErrUnsupported },
		MapFile: func(*os.File, int64, int) (unsafe.Pointer, error) { return nil, errors.ErrUnsupported },
	}
}
