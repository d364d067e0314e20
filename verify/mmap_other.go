//go:build !linux || android || !(amd64 || arm64)

package verify

import (
	"errors"
	"os"
)

func mapMemory(int) ([]byte, func() error, error) { return nil, nil, errors.ErrUnsupported }

func memoryFile(int) (*os.File, error) { return nil, errors.ErrUnsupported }
