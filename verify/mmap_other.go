//go:build !linux || android || !(amd64 || arm64)

package verify

import (
	"errors"
	"os"
)

func memoryFile(int) (*os.File, error) { return nil, errors.ErrUnsupported }
