//go:build !linux || android || !(amd64 || arm64)

package verify

import (
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

func mapMemory(int) (unsafe.Pointer, func() error, error) { return nil, nil, cudart.ErrUnsupported }
