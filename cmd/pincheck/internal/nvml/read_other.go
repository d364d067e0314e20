//go:build !linux || android || !(amd64 || arm64)

package nvml

import (
	"errors"
	"fmt"
)

// Read returns an error that wraps errors.ErrUnsupported.
func Read(string, func(string, *Report)) (*Report, error) {
	return nil, fmt.Errorf("nvml: read: %w", errors.ErrUnsupported)
}
