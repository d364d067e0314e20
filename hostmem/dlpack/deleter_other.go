//go:build !(linux && !android && (amd64 || arm64))

package dlpack

import (
	"errors"
	"fmt"
)

// supported returns why the platform has no DLPack tensors, or nil.
func supported() error {
	return fmt.Errorf("DLPack tensors are for Linux on amd64 and arm64: %w", errors.ErrUnsupported)
}

func deleter() (entry uintptr, err error) { return 0, supported() }

// callDeleter is never called, because no tensor is imported or exported.
func callDeleter(_, _ uintptr) {}
