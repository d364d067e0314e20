//go:build !linux || android || !(amd64 || arm64)

package kernellog

import "errors"

// Read returns errors.ErrUnsupported.
func Read() (string, error) { return "", errors.ErrUnsupported }
