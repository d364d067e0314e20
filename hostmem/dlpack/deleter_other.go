//go:build !(linux && !android && (amd64 || arm64))

package dlpack

import (
	"errors"
	"fmt"
)

func deleter() (entry uintptr, err error) {
	return 0, fmt.Errorf("DLPack tensors are for Linux on amd64 and arm64: %w", errors.ErrUnsupported)
}

// callDeleter is never called, as no tensor is imported or exported.
func callDeleter(_, _ uintptr) {}
