//go:build !linux || android || !(amd64 || arm64)

package verify

import (
	"os"
	"unsafe"

	"github.com/gopinned/pinned/cudart"
)

func mapMemory(int) (unsafe.Pointer, func() error, error) { return nil, nil, cudart.ErrUnsupported }

func memoryFile(int) (*os.File, error) { return nil, cudart.ErrUnsupported }
