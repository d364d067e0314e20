//go:build !linux || android || !(amd64 || arm64)

package verify

import (
	"os"

	"github.com/gopinned/pinned/cudart"
)

func mapMemory(int) ([]byte, func() error, error) { return nil, nil, cudart.ErrUnsupported }

func memoryFile(int) (*os.File, error) { return nil, cudart.ErrUnsupported }
